"""Every screen at three sizes, against golden text; and its states."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from console.tui.caps import Caps

GOLDEN = Path(__file__).parent / "golden"
SIZES = ((80, 24), (120, 40), (200, 60))
SCREENS = (
    "overview", "topology", "cache", "cache/evictions", "cache/tiers", "cache/tenants",
    "cache/what_if", "cache/pins", "transfers", "pair/node-02/node-09", "doctor", "requests", "policies", "jobs", "audit",
)  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("screen", SCREENS)
async def test_golden(
    screen: str,
    size: tuple[int, int],
    world: Any,
    open_console: Any,
    request: pytest.FixtureRequest,
) -> None:
    """A deliberate change: delete the file, run, look at the new one, commit it."""
    async with open_console(world, size=size, start=screen) as console:
        if screen.startswith("cache"):
            await console.until("policy decay")
        if screen == "cache/pins":
            await console.until("system-prompt")
        if screen == "transfers":
            await console.until("ALARM")
        if screen in ("pair/node-02/node-09", "doctor"):
            await console.until("Run 3 by ana" if screen == "doctor" else "since its agent started")
        shown = await console.until("hit 58.1 %") + "\n"
    path = GOLDEN / f"{screen.replace('/', '_')}-{size[0]}x{size[1]}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
        pytest.fail(f"{path.name} was not there: look at the one just written")
    assert shown == path.read_text(encoding="utf-8")
    assert all(len(line) <= size[0] for line in shown.splitlines())


class TestStates:
    async def test_empty_screens_say_why_and_what_to_do(
        self, empty_world: Any, open_console: Any
    ) -> None:
        async with open_console(empty_world) as console:
            shown = await console.until("The cluster is not complete yet")
            assert "done     control plane answers" in shown
            assert "waiting  a node has joined" in shown
            for key, words in (
                ("2", "No nodes have joined"), ("3", "nothing is cached"),
                ("4", "No KV has travelled in this window."), ("6", "No requests yet."),
                ("7", "No policies are known"),
            ):  # fmt: skip
                await console.press(key)
                await console.until(words)

    async def test_not_connected_says_so_and_recovers(self, world: Any, open_console: Any) -> None:
        async with open_console(world, down=True) as console:
            shown = await console.until("CONNECTING", "No answer from the control plane")
            assert "connection refused" in shown
            console.source.down = False
            await console.until("LIVE", "412")

    async def test_e05_stale_marks_the_header_and_keeps_the_values(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world) as console:
            console.clock.ahead += 14
            shown = await console.until("STALE")
            assert "412" in shown
            assert "LIVE" not in shown
            console.source.tick()
            await console.until("LIVE")

    async def test_e05_a_cut_stream_is_said_at_once_on_every_screen(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world) as console:
            console.source.down = True
            console.source.queue.put_nowait(None)
            console.clock.ahead += 3
            said = "No answer since 14:07:30. Gateways go on without it. Ctrl-r tries now"
            for key in "12346780":
                await console.press(key)
                shown = await console.until("STALE 3.0 s", said)
                assert "hit 58.1 %" in shown
                assert "LIVE" not in shown
            console.source.down = False
            console.source.tick()
            await console.until("LIVE", gone="No answer")

    async def test_one_node_lost(self, world: Any, open_console: Any) -> None:
        world.nodes[4] = world.node(
            5, state="lost", heartbeat_age_seconds=38.0, last_heartbeat_at=world.at - timedelta(seconds=38)
        )  # fmt: skip
        async with open_console(world, start="topology") as console:
            await console.until("lost 3", "node-06")
            assert "ready" in console.line("node-06")
            assert "-- / 16" in console.line("node-05")

    async def test_emulated_stands_beside_the_cluster(self, world: Any, open_console: Any) -> None:
        world.workers[0] = world.worker("p1", "node-01", "prefill", engine="emulated")
        async with open_console(world) as console:
            await console.until("prod-eu1 EMULATED")

    async def test_held_moment(self, world: Any, open_console: Any) -> None:
        async with open_console(world) as console:
            await console.press("p")
            console.source.tick(requests_per_minute=999.0)
            shown = await console.until("AT 14:07:3")
            assert "412" in shown
            assert "999" not in shown
            await console.press("equals_sign")
            await console.until("LIVE", "999")


class TestSmallest:
    """60x15: what is wrong is seen without scrolling, and what is cut says so."""

    SIZE = (60, 15)

    async def test_what_needs_attention_is_seen(self, world: Any, open_console: Any) -> None:
        async with open_console(world, size=self.SIZE) as console:
            shown = await console.until("NEEDS ATTENTION", "rejected %", "decode ")
            assert ">CRIT" in shown
            await console.press("enter")
            await console.until("Overview > ", gone="NEEDS ATTENTION")

    async def test_the_doctors_first_finding_is_seen(self, world: Any, open_console: Any) -> None:
        async with open_console(world, size=self.SIZE, start="doctor") as console:
            await console.until("Run 3 by ana", ">FAIL")

    async def test_no_line_ends_without_saying_so(self, world: Any, open_console: Any) -> None:
        async with open_console(world, size=self.SIZE, start="transfers") as console:
            await console.until("strong = slow")
            legend = console.line("strong = slow")
            assert len(legend) == 60
            assert legend.endswith("~")

    async def test_every_screen_and_view_draws(self, world: Any, open_console: Any) -> None:
        async with open_console(world, size=self.SIZE) as console:
            for key in "12346780":
                await console.press(key)
                for _ in range(len(console.app.page.views) or 1):
                    shown = await console.until("LIVE", "? help")
                    assert all(len(line) <= 60 for line in shown.splitlines())
                    await console.press("right_square_bracket")


class TestTerminals:
    @pytest.mark.parametrize("depth", ["truecolor", "256", "16", "none"])
    async def test_e22_every_depth_draws_every_screen(
        self, depth: Any, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, caps=Caps(depth), size=(100, 30)) as console:
            for key in "123467":
                await console.press(key)
            await console.press("3")
            await console.until("strong = low", "node-01 p1")

    async def test_without_colour_glyphs_carry_the_level(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="cache", size=(80, 30)) as console:
            await console.until(">=95", "/ no data")
            assert "@@@@" in console.line("node-12 d8!")
            assert "::::" in console.line("node-02 p2")

    async def test_half_blocks_when_rows_do_not_fit(self, world: Any, open_console: Any) -> None:
        world.nodes = [world.node(number) for number in range(1, 31)]
        async with open_console(world, start="cache", caps=Caps("truecolor")) as console:
            await console.until("▀")

    async def test_ascii_only(self, world: Any, open_console: Any) -> None:
        async with open_console(
            world, caps=Caps("none", ascii_only=True), size=(120, 40)
        ) as console:
            for key in "123467":
                await console.press(key)
                await console.until("prod-eu1")
                assert console.text().isascii()

    async def test_ascii_only_whatever_somebody_wrote(self, world: Any, open_console: Any) -> None:
        said = "w\u00e4rmer \U0001f680 \u65e5\u672c"
        world.policies[0] = world.policies[0].model_copy(update={"reason": said})
        caps = Caps("none", ascii_only=True)
        async with open_console(world, caps=caps, start="policies") as console:
            await console.until("w?rmer ?? ????")
            assert console.text().isascii()

    async def test_e24_too_small_and_back(self, world: Any, open_console: Any) -> None:
        async with open_console(world) as console:
            for size in ((60, 15), (59, 15), (20, 5), (1, 1), (80, 24)):
                await console.pilot.resize_terminal(*size)
                await console.pilot.pause()
                console.app.redraw()
            await console.until("SERVICE", "NEEDS ATTENTION")
            await console.pilot.resize_terminal(52, 12)
            await console.until("window 52x12, needs 60x15")
            await console.pilot.resize_terminal(80, 24)
            await console.until("SERVICE", "412")

    async def test_a_long_name_does_not_push_the_alarms_out(
        self, world: Any, open_console: Any
    ) -> None:
        world.overview = world.overview.model_copy(update={"cluster": "production-europe-west-1"})
        async with open_console(world, size=(60, 15)) as console:
            await console.until("1 CRIT 2 warn", "product")

    async def test_e21_wide_names_keep_columns_in_line(self, world: Any, open_console: Any) -> None:
        names = ("節点一", "zwölf-🚀", "e\u0301clair", "a\x1b[31mred")
        world.nodes = [world.node(i, id=name) for i, name in enumerate(names)]
        world.workers = [world.worker(f"w{i}", name, "decode") for i, name in enumerate(names)]
        async with open_console(world, start="topology") as console:
            await console.until("節点一", "ready")
            strips = console.app.screen._compositor.render_strips()
            assert {strip.cell_length for strip in strips} == {80}
            assert "\x1b" not in console.text()
