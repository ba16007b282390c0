"""In flight, rejections and worker health: walked by keys; a stuck request is cancelled."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.gateways.running_schemas import RequestCancel, RunningList
from controlplane.stats.schemas import Attention

SIZES = [(80, 24), (120, 40), (200, 60)]


class TestInFlight:
    @pytest.mark.parametrize("size", SIZES)
    async def test_the_stuck_one_stands_first_at_every_size(
        self, world: Any, open_console: Any, size: tuple[int, int]
    ) -> None:
        async with open_console(world, start="in-flight", size=size) as console:
            shown = await console.until(
                "Requests > in flight", "1 stuck: 00000001 waits 5 min 40 s"
            )
            assert shown.index("stuck: prefilling") < shown.index("504")
            assert "~ gw-2 (lost) has not answered since 14:06:46" in shown
            row = console.line("stuck: prefilling")
            assert "5 min 40 s!" in row
            assert "p3: prefill leg" in row

    async def test_views_are_walked_and_each_has_its_filter(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="requests", size=(120, 40)) as console:
            await console.until("Requests > live")
            await console.press("right_square_bracket")
            await console.until("Requests > in flight", "5 in flight at 2 gateways", "K cancel")
            await console.press("slash")
            await console.type("stuck=yes")
            await console.press("enter")
            await console.until("/stuck=yes 1 of 4")
            await console.press("right_square_bracket")
            await console.until("Requests > rejections", "1,204 rejected", gone="/stuck=yes")

    async def test_a_stuck_request_is_cancelled_after_it_was_said_what_happens(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="in-flight", size=(120, 40)) as console:
            await console.until("stuck: prefilling")
            await console.press("K")
            await console.until(
                "Requests > in flight > cancel",
                "CANCEL request 00000001",
                "503 cancelled_by_operator",
            )
            console.clock.ahead += 1
            await console.press("tab", "tab")
            await console.type("hangs")
            await console.press("enter", "y")
            await console.until("Cancelled request 00000001, which was prefilling")
            (call,) = console.source.sent
            assert call.path == "/api/v1/requests/00000001cafe4711/cancel"
            assert call.body == RequestCancel(gateway="gw-1", reason="hangs")
            assert console.app.page.noun == "requests"

    async def test_a_refusal_is_said_where_one_came_from(
        self, world: Any, open_console: Any, problem: Any
    ) -> None:
        async with open_console(world, start="in-flight", size=(120, 40)) as console:
            await console.until("stuck: prefilling")
            console.source.refuse = problem(409, "It does not run any more.")
            await console.press("K")
            await console.until("CANCEL request")
            console.clock.ahead += 1
            await console.press("y")
            await console.until("Nothing was done:", "does not run any more")

    async def test_a_viewer_has_no_cancel(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="in-flight", can_act=False) as console:
            await console.until("stuck: prefilling", gone="K cancel")
            await console.press("K")
            assert console.app.page.noun == "requests"

    async def test_nothing_in_flight_and_no_gateway_differ(
        self, world: Any, open_console: Any
    ) -> None:
        world.running = RunningList(items=[])
        async with open_console(world, start="in-flight") as console:
            await console.until("No gateway has joined: nothing can be in flight.")

    async def test_the_cursor_stays_with_its_request(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="in-flight", size=(120, 40)) as console:
            await console.until("stuck: prefilling")
            await console.press("j")
            items = list(reversed(world.running.items))
            found = world.running.model_copy(update={"items": items})
            console.app.state.load(console.clock(), running=found)
            await console.until("stuck: prefilling")
            assert console.app.page.selected().key == "gw-1/00000002cafe4711"


class TestRejections:
    @pytest.mark.parametrize("size", SIZES)
    async def test_how_many_were_wrong_is_the_first_line(
        self, world: Any, open_console: Any, size: tuple[int, int]
    ) -> None:
        async with open_console(world, start="rejections", size=size) as console:
            shown = await console.until(
                "Requests > rejections", "1,204 rejected", "12.1 % of 58 pr"
            )
            assert shown.index("12.1 %") < shown.index("PREDICTED")
            assert "2.31 s!" in shown
            assert "likely no" in shown

    async def test_the_palette_leads_there(self, world: Any, open_console: Any) -> None:
        async with open_console(world) as console:
            await console.press("colon")
            await console.type("rejections")
            await console.press("enter")
            await console.until("Requests > rejections", "1,204 rejected")
            await console.press("colon")
            await console.type("stuck")
            await console.press("enter")
            await console.until("Requests > in flight")


class TestHealth:
    @pytest.mark.parametrize("size", SIZES)
    async def test_who_is_left_out_stands_first(
        self, world: Any, open_console: Any, size: tuple[int, int]
    ) -> None:
        async with open_console(world, start="topology/health", size=size) as console:
            shown = await console.until("Topology > health", "left out after failures: d5 at gw-1")
            assert "~ gw-2 is stale: its last report is 14 s old" in shown
            assert "ejected, trial in 4.2 s" in shown
            assert "10 of 20" in shown
            await console.press("enter")
            await console.until("worker d5", "AS GATEWAYS MEET IT")

    async def test_its_filter_is_its_own(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="topology/health", size=(120, 40)) as console:
            await console.until("Topology > health")
            await console.press("slash")
            await console.type("state=ejected")
            await console.press("enter")
            await console.until("/state=ejected 1 of 5")
            await console.press("left_square_bracket")
            await console.until("Topology > pairings", gone="/state=ejected")


class TestOpened:
    """A request that is none of the last ones, as those of the ledger mostly are."""

    OLD = "0ddba11e0ddba11e"

    async def test_it_is_read_by_its_id(self, world: Any, open_console: Any) -> None:
        async with open_console(world, size=(120, 40)) as console:
            console.source.older = [world.decision(99, request_id=self.OLD, tenant="from-before")]
            await console.press("colon")
            await console.type(f"request {self.OLD}")
            await console.press("enter")
            await console.until("Requests > 0ddba11e", "from-before", "OUTCOME")

    async def test_without_a_record_it_says_why_and_the_way_on(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="request/nowhere") as console:
            await console.until("There is no record of request nowhere", "Esc goes back.")

    async def test_the_pane_beside_the_ledger_reads_it_too(
        self, world: Any, open_console: Any
    ) -> None:
        world.decisions = world.decisions[10:]
        async with open_console(world, start="rejections", size=(200, 60)) as console:
            first = world.ledger.items[0].request_id
            console.source.older = [world.decision(99, request_id=first, tenant="from-before")]
            await console.until("Requests > rejections", "from-before", "OUTCOME")


class TestFooter:
    async def test_nothing_to_cancel_is_not_offered(self, world: Any, open_console: Any) -> None:
        world.running = RunningList(items=[])
        async with open_console(world, start="in-flight") as console:
            await console.until("No gateway has joined", "[ ] view", gone="K cancel")

    async def test_the_button_that_does_nothing_does_not_say_cancel(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="in-flight", size=(120, 40)) as console:
            await console.until("stuck: prefilling")
            await console.press("K")
            await console.until(
                "[ Let it run ]", "End 00000001", "Esc lets it run", gone="[ Cancel ]"
            )
            console.clock.ahead += 1
            await console.press("enter")
            await console.until("stuck: prefilling", gone="Let it run")
            assert not console.source.sent


async def test_candidates_keep_every_term_at_80_columns(world: Any, open_console: Any) -> None:
    request_id = world.decisions[-1].request_id
    async with open_console(world, start=f"request/{request_id}") as console:
        await console.until("DECISION")
        lines = "\n".join("".join(span.text for span in line) for line in console.app.page._lines)
        for part in ("OWN PREFIX", "T_TRANSFER", "54 ms", "NODE node-03", "slower:"):
            assert part in lines, part
        assert "~" not in lines


async def test_slow_ones_are_found_from_the_overview_whatever_view_was_shown_last(
    world: Any, open_console: Any
) -> None:
    slow = Attention(severity="warn", text="TTFT P95 3.91 s over SLO 2.00 s", opens="requests/slow")
    away = Attention(severity="warn", text="9.0 % of requests rejected", opens="rejections")
    world.overview = world.overview.model_copy(update={"attention": [away, slow]})
    world.decisions[0] = world.decision(0, ttft_seconds=0.2)
    async with open_console(world) as console:
        await console.press("enter")
        await console.until("Requests > rejections", "slo r41")
        await console.press("escape", "j", "enter")
        num = len(world.decisions)
        await console.until("Requests > live", f"/ttft>2000ms {num - 1} of {num}")
        await console.press("escape", "escape")
        await console.until("NEEDS ATTENTION")
