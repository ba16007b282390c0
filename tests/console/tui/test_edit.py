"""The SLO policy from draft to effect: validation, preflight, conflict, refusal."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.client_http import UnreachableError


async def open_draft(console: Any) -> None:
    await console.press("7")
    await console.until("slo/default")
    await console.press("G", "E")
    await console.until("slo/default   draft on r41")


async def set_ttft(console: Any, text: str) -> None:
    await console.press("g", "j", "enter")
    await console.until("max_ttft_ms = ")
    await console.press("ctrl+u")
    await console.type(text)
    await console.press("enter")


async def to_panel(console: Any, text: str = "1") -> None:
    await open_draft(console)
    await set_ttft(console, text)
    await console.press("S")
    await console.until("PUT slo/default, on top of r41")
    console.clock.ahead += 1


async def test_a_draft_is_put_with_if_match_and_a_reason(world: Any, open_console: Any) -> None:
    async with open_console(world) as console:
        await to_panel(console)
        shown = await console.until("max_ttft_ms  2000  ->  1", "(4 fields unchanged)")
        assert "more than half of such" in shown
        assert "acts on the next request" in shown
        assert console.source.puts == []
        await console.press("tab", "tab")
        await console.type("try it y")
        await console.press("enter", "shift+tab", "y")
        await console.until("slo/default r42 is active; 1 gateway acts on it.", "r42")
        kind, scope, body, if_match = console.source.puts[0]
        assert (kind, scope, if_match, body.reason) == ("slo", "default", 41, "try it y")
        assert body.spec["max_ttft_ms"] == 1.0
        assert body.spec["mode"] == "enforce"


@pytest.mark.parametrize("keys", [("escape",), ("enter",), ("ctrl+c",)])
async def test_cancel_is_in_focus_and_keeps_the_draft(
    keys: Any, world: Any, open_console: Any
) -> None:
    async with open_console(world) as console:
        await to_panel(console)
        await console.press(*keys)
        await console.until("draft on r41", "max_ttft_ms  2000  ->  1")
        assert console.source.puts == []


async def test_tab_enter_agrees(world: Any, open_console: Any) -> None:
    async with open_console(world) as console:
        await to_panel(console)
        await console.press("tab", "enter")
        await console.until("r42 is active")


async def test_a_key_held_down_does_not_agree(world: Any, open_console: Any) -> None:
    async with open_console(world) as console:
        await to_panel(console)
        console.app.page.ask(console.app.page.change, console.clock())
        await console.press("y")
        assert console.source.puts == []


async def test_an_error_stands_on_its_line_and_nothing_can_be_put(
    world: Any, open_console: Any
) -> None:
    async with open_console(world) as console:
        await open_draft(console)
        await set_ttft(console, "0")
        await console.until("must be 1 to 600,000", "Put is not possible while a field is wrong.")
        await console.press("S")
        await console.until("max_ttft_ms = 0: must be 1 to 600,000.")
        assert console.app.page.noun == "draft"
        await console.press("g", "enter", "tab", "enter")
        await console.until("mode", "off")
        assert console.app.page.draft.values["mode"] == "off"


async def test_nothing_changed_is_said(world: Any, open_console: Any) -> None:
    async with open_console(world) as console:
        await open_draft(console)
        await console.press("S")
        await console.until("Nothing differs from r41: there is nothing to put.")


async def test_412_says_who_was_first_and_keeps_the_draft(
    world: Any, open_console: Any, problem: Any
) -> None:
    async with open_console(world) as console:
        await to_panel(console)
        old = world.policies[0]
        newer = old.model_copy(
            update={"revision": 42, "author": "ben", "spec": {**old.spec, "max_tbt_ms": 80.0}}
        )
        world.policies[0] = newer
        console.source.refuse = problem(412, "stale")
        await console.press("y")
        await console.until("slo/default r42 was taken by ben at", "Your draft is kept")
        await console.press("c")
        await console.until("COMPARED WITH r42", "max_tbt_ms")
        await console.press("E")
        await console.until("draft on r42", "max_ttft_ms  2000  ->  1")
        console.source.refuse = None
        await console.press("S")
        await console.until("on top of r42")
        console.clock.ahead += 1
        await console.press("y")
        await console.until("slo/default r43 is active")
        assert console.source.puts[0][2].spec["max_tbt_ms"] == 80.0


async def test_someone_elses_revision_while_editing_is_seen(world: Any, open_console: Any) -> None:
    async with open_console(world) as console:
        await open_draft(console)
        await set_ttft(console, "5")
        newer = world.policies[0].model_copy(update={"revision": 42, "author": "ben"})
        console.source.emit("policy", newer.model_dump(mode="json"))
        await console.until("r42 was taken by ben")
        await console.press("S")
        assert console.app.page.noun == "draft"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "needs the operator's token"),
        (403, "needs the operator's token"),
        (422, "Nothing was done: no"),
    ],
)
async def test_a_refusal_keeps_the_draft(
    status: int, words: str, world: Any, open_console: Any, problem: Any
) -> None:
    async with open_console(world, size=(120, 30)) as console:
        await to_panel(console)
        console.source.refuse = problem(status)
        await console.press("y")
        await console.until(words, "draft on r41")


async def test_no_answer_leaves_the_outcome_open(world: Any, open_console: Any) -> None:
    async with open_console(world, size=(120, 30)) as console:
        await to_panel(console)
        console.source.refuse = UnreachableError("http://x", TimeoutError())
        await console.press("y")
        await console.until("whether the policy was taken is unknown")


async def test_history_of_a_policy(world: Any, open_console: Any) -> None:
    async with open_console(world, size=(120, 30)) as console:
        await console.press("7", "G", "enter")
        await console.until("Policies > slo/default", "REVISION", "r41  --", "tighter")


async def test_a_revision_is_told_in_full_below_the_history(world: Any, open_console: Any) -> None:
    reason = "the batch tenant moved to its own cluster last night, so there is room again"
    world.policies[0] = world.policy("slo", 42, world.policies[0].spec | {"mode": "observe"}, reason=reason)  # fmt: skip
    async with open_console(world, start="policy/slo/default") as console:
        await console.until("r42", "active")
        shown = " ".join((await console.until("last night")).split())
        assert reason in shown, "the column beside it cuts it off"


async def test_a_long_policy_leaves_room_for_its_history(world: Any, open_console: Any) -> None:
    async with open_console(world, start="policy/scheduling/default") as console:
        shown = await console.until("more fields: E lists them", "REVISION", "r9")
        assert "balancing_threshold" in shown
    async with open_console(world, start="policy/scheduling/default", can_act=False) as console:
        await console.until("more fields: a taller window lists them", "r9")


async def test_crumbs_of_a_draft_and_of_its_panel_say_each_part_once(
    world: Any, open_console: Any
) -> None:
    async with open_console(world, start="policies", size=(120, 40)) as console:
        await open_draft(console)
        assert console.line("draft").strip().startswith("Policies > slo/default > draft")
        await set_ttft(console, "1900")
        await console.press("S")
        await console.until("Policies > slo/default > draft > put", "PUT slo/default")
