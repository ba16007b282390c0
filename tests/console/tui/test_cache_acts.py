"""Acting on the cache and on jobs: a panel that names consequences, then one request."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.client_http import UnreachableError


async def at_tenants(console: Any) -> None:
    await console.until("TENANT OR NAMESPACE", ">acme")


async def test_a_purge_needs_the_name_typed(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache/tenants", size=(120, 40)) as console:
        await at_tenants(console)
        await console.press("X")
        shown = await console.until("PURGE tenant acme", "type acme", "cannot be undone")
        assert "88,000 blocks, 2.69 TiB on 12 nodes" in shown
        console.clock.ahead += 1
        await console.press("enter", "y")
        await console.until("Type acme in its field first")
        assert console.source.sent == []
        await console.press("tab", "tab", "tab")  # agree, name ... and around to the name again
        await console.press("shift+tab", "shift+tab")
        await console.type("acme")
        await console.press("enter", "y")
        await console.until("Job 201 purge acme is queued.", "Cache > tenants")
        (call,) = console.source.sent
        assert (call.method, call.path) == ("POST", "/api/v1/cache/purge")
        assert (call.body.tenant, call.body.confirm, call.body.node) == ("acme", "acme", None)


async def test_a_namespace_is_named_by_its_first_digits(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache/tenants") as console:
        await at_tenants(console)
        await console.press("G", "X")
        await console.until("PURGE namespace llama-8b 4f09c1d2e3aa", "type 4f09c1d2e3aa")


async def test_pin_with_a_reason(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache/tenants") as console:
        await at_tenants(console)
        await console.press("j", "P")
        await console.until("PIN tenant default", "kept from eviction for 30 min", "limit 20.0 %")
        console.clock.ahead += 1
        await console.press("tab", "tab")
        await console.type("busy hour")
        await console.press("enter", "y")
        await console.until("Job 201 pin acme is queued")
        (call,) = console.source.sent
        assert call.path == "/api/v1/cache/pin"
        assert (call.body.tenant, call.body.for_seconds, call.body.reason) == ("default", 1800.0, "busy hour")  # fmt: skip


async def test_prefetch_says_when_there_is_nothing_to_fetch(world: Any, open_console: Any) -> None:
    node = world.pool_node("node-01", tiers=[world.tier("node-01", "dram")])
    world.pool = world.pool.model_copy(update={"nodes": [node]})
    async with open_console(world, start="cache/tenants", size=(120, 40)) as console:
        await at_tenants(console)
        await console.press("W")
        await console.until("PREFETCH tenant acme", "no node has an SSD tier")


async def test_unpin_from_the_list_of_pins(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache/pins") as console:
        await console.until("system-prompt")
        await console.press("P")
        await console.until("UNPIN system-prompt", "96 blocks on 2 nodes")
        console.clock.ahead += 1
        await console.press("y")
        await console.until("Job 201 unpin")
        assert console.source.sent[0].body.name == "system-prompt"


async def test_a_node_is_purged_from_its_tier(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache/tiers") as console:
        await console.until("node-01     ssd")
        await console.press("X")
        await console.until("PURGE node node-01", "type node-01")
        await console.press("escape")
        await console.until("Cache > tiers")
        assert console.source.sent == []


@pytest.mark.parametrize(("key", "method"), [("K", "DELETE"), ("Z", "POST")])
async def test_jobs_are_cancelled_and_taken_back(
    key: str, method: str, world: Any, open_console: Any
) -> None:
    async with open_console(world, start="jobs") as console:
        await console.until("620 / 1,000 blocks")
        await console.press(*([] if key == "K" else ["j"]), key)
        await console.until("CANCEL job 118" if key == "K" else "UNDO job 117")
        console.clock.ahead += 1
        await console.press("y")
        await console.until("Job 118 ")
        assert console.source.sent[0].method == method


async def test_what_cannot_be_done_is_said(world: Any, open_console: Any) -> None:
    async with open_console(world, start="jobs") as console:
        await console.until("620 / 1,000 blocks")
        await console.press("Z")
        await console.until("Job 118 is running: K cancels it.")
        await console.press("j", "K")
        await console.until("Job 117 is done: there is nothing to cancel.")


async def test_a_refusal_leads_back_and_says_why(
    world: Any, open_console: Any, problem: Any
) -> None:
    async with open_console(world, start="cache/tenants", size=(120, 40)) as console:
        await at_tenants(console)
        for refusal, words in (
            (
                problem(409, "pins would hold 31 % of node-03"),
                "Nothing was done: pins would hold 31 %",
            ),
            (problem(403), "needs the operator's token"),
            (UnreachableError("http://x", TimeoutError()), "whether the job was taken is unknown"),
        ):
            console.source.refuse = refusal
            await console.press("P")
            await console.until("PIN tenant acme")
            console.clock.ahead += 1
            await console.press("y")
            await console.until(words, "Cache > tenants")


async def test_a_viewer_has_no_acting_key(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache/tenants", can_act=False) as console:
        await at_tenants(console)
        for key in ("X", "P", "W", "E"):
            await console.press(key)
        shown = await console.until("TENANT OR NAMESPACE")
        assert "X purge" not in shown


async def test_the_cache_policy_is_edited_from_here(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache", size=(120, 40)) as console:
        await console.until("policy decay")
        await console.press("E")
        await console.until(
            "cache/default   draft on r17", "decay.half_life_seconds", "1 to 86,400"
        )
        await console.press("j", "enter")
        await console.until("decay.half_life_seconds = ")
        await console.press("ctrl+u")
        await console.type("300")
        await console.press("enter", "S")
        await console.until("PUT cache/default", "decay.half_life_seconds", "->  300")
        console.clock.ahead += 1
        await console.press("y")
        await console.until("cache/default r18 is active")
        spec = console.source.puts[0][2].spec
        assert spec["eviction_params"] == {"half_life_seconds": 300.0}


async def test_progress_of_a_job_comes_as_events(world: Any, open_console: Any) -> None:
    async with open_console(world, start="cache") as console:
        await console.until("jobs running: purge batch 62.0 %")
        job = world.job(118, progress={"done": 900, "total": 1000})
        console.source.emit("job", job.model_dump(mode="json"))
        await console.until("purge batch 90.0 %")
        console.source.emit("job", world.job(118, state="done").model_dump(mode="json"))
        await console.press("8")
        await console.until("118  purge", "done")
        await console.press("enter")
        await console.until("Jobs > 118", "asked tenant")
