"""Keys: no collision, no dead key, no acting key for a viewer."""

from __future__ import annotations

from typing import Any

import pytest

from console.tui import keys
from console.tui.pages import catalog

PAGES = sorted(catalog.PAGES)


@pytest.mark.parametrize("noun", PAGES)
def test_no_two_bindings_of_a_screen_collide(noun: str) -> None:
    page = catalog.make(noun)
    assert page is not None
    assert keys.merged(page.keys)


def test_a_collision_is_refused() -> None:
    with pytest.raises(keys.KeyCollisionError, match="q: quit and other"):
        keys.merged([keys.Key("q", "q", "other", "", "show")])


def test_upper_case_acts_and_lower_case_looks() -> None:
    with pytest.raises(keys.KeyCollisionError, match="lower case looks"):
        keys.merged([keys.Key("x", "x", "drain", "", "act", acts=True)])
    with pytest.raises(keys.KeyCollisionError, match="lower case looks"):
        keys.merged([keys.Key("D", "D", "look", "", "show")])


async def test_every_footer_key_is_in_the_help(world: Any, open_console: Any) -> None:
    async with open_console(world, start="policies", size=(120, 60)) as console:
        footer = console.text().splitlines()[-1]
        assert "E edit" in footer
        await console.press("question_mark")
        shown = await console.until("quit")
        assert "edit: opens a draft" in shown
        assert "Enter" in shown
        await console.press("escape")
        await console.until("KIND/SCOPE")


async def test_an_acting_key_says_to_a_viewer_what_it_needs(world: Any, open_console: Any) -> None:
    async with open_console(world, can_act=False, start="policies") as console:
        await console.until("slo/default")
        await console.press("E")
        await console.until("E edit needs the operator's token ($PERILUNE_TOKEN); you are viewer.")
        assert not console.source.puts


async def test_an_acting_key_says_that_a_moment_is_held(world: Any, open_console: Any) -> None:
    async with open_console(world, start="policies") as console:
        await console.press("p", "E")
        await console.until("E edit acts on now, and this moment is held: = goes back.")
        await console.press("equals_sign", "E")
        await console.until("draft on r")


async def test_a_viewer_has_no_acting_key(world: Any, open_console: Any) -> None:
    async with open_console(world, can_act=False, start="policies") as console:
        shown = await console.until("viewer", "slo/default")
        assert "E edit" not in shown
        await console.press("E")
        assert console.app.page.noun == "policies"
        assert not [key for key in console.app.key_table().values() if key.acts]
        await console.press("colon")
        await console.type("edit")
        await console.until(":edit")
        assert "edit slo" not in console.text()


async def test_a_held_moment_has_no_acting_key(world: Any, open_console: Any) -> None:
    async with open_console(world, start="policies") as console:
        await console.press("p")
        await console.until("AT ", "= live", gone="E edit")
        await console.press("E")
        assert console.app.page.noun == "policies"


async def test_a_screen_of_later_says_so(world: Any, open_console: Any) -> None:
    async with open_console(world) as console:
        assert "KV wait screen" not in console.text()
        await console.press("5")
        await console.until("5 is kept for KV wait: not available in this version.")
        await console.press("question_mark")
        await console.until("quit")
        assert "5   " not in console.text()


async def test_keys_of_a_burst_act_in_order(world: Any, open_console: Any) -> None:
    """A slow link delivers many keys at once: what one opens gets the next ones."""
    async with open_console(world) as console:
        await console.pilot.press(
            "7", "slash", "x", "y", "backspace", "backspace", "s", "l", "o", "enter"
        )
        await console.until("/slo 1 of 3")


async def test_escape_closes_the_filter_then_one_crumb_and_never_quits(
    world: Any, open_console: Any
) -> None:
    async with open_console(world) as console:
        await console.press("6", "enter")
        await console.until("Requests > ", "DECISION")
        await console.press("escape")
        await console.until("Requests > live")
        await console.press("slash")
        await console.type("acme")
        await console.press("enter")
        await console.until("/acme 30 of 30")
        await console.press("escape")
        await console.until("TENANT" if console.app.size.width > 100 else "REQUEST", gone="/acme")
        await console.press("escape", "escape", "escape")
        assert console.app.is_running


async def test_palette_goes_by_name_alias_and_filter(world: Any, open_console: Any) -> None:
    async with open_console(world) as console:
        await console.press("colon")
        await console.type("audit")
        await console.press("enter")
        await console.until("ACTOR", "Audit")
        await console.press("colon")
        await console.type("rq /tenant=nobody")
        await console.press("enter")
        await console.until("No row matches /tenant=nobody. 30 in all")
        await console.press("colon")
        await console.type("node-05")
        await console.press("enter")
        await console.until("node node-05", "write queue")
        await console.press("colon")
        await console.type("zzz")
        await console.press("enter")
        await console.until('":zzz" names nothing here.')


async def test_a_bad_filter_leaves_the_table_alone(world: Any, open_console: Any) -> None:
    async with open_console(world, start="requests") as console:
        await console.press("slash")
        await console.type("ttft>2x")
        shown = await console.until("expected a time such as 2s or 800ms, at character 6.")
        assert "0000001d" in shown
        await console.press("escape")
        await console.until("Enter open", gone="character 6")


async def test_views_walk_round(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache") as console:
        await console.until("Cache > hit rate")
        await console.press("right_square_bracket")
        await console.until("Cache > evictions", "capacity")
        await console.press("right_square_bracket")
        await console.until("Cache > tiers", "DEVICE FREE")
        await console.press("left_square_bracket", "left_square_bracket")
        await console.until("Cache > hit rate")


async def test_cells_are_walked_and_read_out(world: Any, open_console: Any) -> None:
    async with open_console(world, start="transfers") as console:
        await console.until("Transfers > nodes")
        await console.press("right_square_bracket")
        await console.until("Transfers > workers", "p3 -> d5  P50 2.56 s  P95 2.84 s  27 transfers")
        await console.press("k", "k", "h", "h", "h", "h")
        await console.until("p1 -> d1  P50 36 ms")
        await console.press("j", "j", "l", "l", "l", "l", "v")
        await console.until("bytes moved per second")
        await console.press("v", "v", "s")
        await console.until("ROW", "WHAT")
        await console.press("s", "enter")
        await console.until("Transfers > p3 -> d5", "p95        2.84 s!", "HANDOVER", "4.22 s")
        await console.press("enter")
        await console.until("/prefill=p3 decode=d5 30 of 30")
