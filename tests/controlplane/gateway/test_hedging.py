"""A second prefill leg beside a late one: one answer, and nothing left of the other leg."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any

import pytest

from workers.engines.emulated.faults import Faults

Eventually = Callable[..., Awaitable[Any]]
HANGS = Faults(hang=True)
FATES = {
    "serves": Faults(delay_seconds=0.25),
    "fails": Faults(status=500, delay_seconds=0.25),
    "dies": Faults(reset=True, delay_seconds=0.25),
    "refuses": Faults(status=422, delay_seconds=0.25),
    "hangs": HANGS,
}


async def start(rig: Any, **spec: Any) -> None:
    """Prefill goes to p1 first. Who is late after 0.1 s is hedged, if nothing else is said."""
    usual = {"hedge_prefill_after_s": 0.1, "hedge_max_share": 1.0, "explore_share": 0.0}
    rig.policies = [rig.policy("scheduling", **(usual | spec))]
    await rig.start()
    for name in ("p1", "p2"):  # unknown times: by id
        assert not rig.gateway.cluster.workers[name].prefill_times.num_samples


def running(rig: Any, name: str) -> int:
    return int(rig.api(name).worker.counters.running)


def legs(rig: Any) -> tuple[int, int]:
    return len(rig.seen("p1")), len(rig.seen("p2"))


async def nothing_runs(rig: Any, eventually: Eventually) -> None:
    names = ("p1", "p2", "d1", "d2")
    await eventually(lambda: not any(running(rig, name) for name in names), "all legs have ended")


async def test_no_second_leg_goes_to_who_has_the_name_of_the_first_ones_worker_now(
    rig: Any, eventually: Eventually
) -> None:
    rig.workers = ("p1:prefill", "p2:prefill", "d1:decode")
    await start(rig, hedge_prefill_after_s=1.0)
    rig.api("p1").faults.set(Faults(delay_seconds=3))
    view = rig.make_view()
    p1, p2, d1 = view["workers"]
    await rig.publish(workers=[p1, d1])
    request = asyncio.create_task(rig.complete(prompt="a b c", max_tokens=2))
    await eventually(lambda: rig.seen("p1"))
    await rig.publish(workers=[p1 | {"url": p2["url"]}, d1])
    assert (await request).status_code == 200
    assert not rig.seen("p2")
    assert (await rig.control_plane.ended()).hedge is None


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_leg_answers_and_the_first_is_cut_off(
    rig: Any, eventually: Eventually, stream: bool
) -> None:
    await start(rig)
    rig.api("p1").faults.set(HANGS)
    if stream:
        assert (await rig.stream(prompt="a b c", max_tokens=2))[-1] == "[DONE]"
    else:
        assert (await rig.complete(prompt="a b c", max_tokens=2)).status_code == 200
    await nothing_runs(rig, eventually)
    decision = await rig.control_plane.ended()
    assert decision.status == "finished_length"
    assert decision.prefill_worker == "p2"
    assert decision.hedge.worker_id == "p2"
    assert decision.hedge.winner == "second"
    assert decision.hedge.sent_after_seconds >= 0.1
    assert decision.retries == 0
    assert legs(rig) == (1, 1)
    assert len(rig.decode_bodies()) == 1
    stats, health = rig.gateway.stats, rig.gateway.cluster.health
    assert [stats.worker(name).failures for name in ("p1", "p2")] == [0, 0]
    assert not health.is_paused("p1", time.monotonic())  # late is not broken
    metrics = (await rig.client.get("/metrics")).text
    assert "perilune_gateway_hedged_prefills_total 1" in metrics
    assert "perilune_gateway_hedges_won_total 1" in metrics


async def test_the_first_leg_may_still_win(rig: Any, eventually: Eventually) -> None:
    await start(rig)
    rig.api("p1").faults.set(Faults(delay_seconds=0.5))
    rig.api("p2").faults.set(HANGS)
    assert (await rig.complete(prompt="a b c")).status_code == 200
    await nothing_runs(rig, eventually)
    decision = await rig.control_plane.ended()
    assert (decision.prefill_worker, decision.hedge.winner) == ("p1", "first")
    assert rig.gateway._context.hedges.won == 0


async def test_without_the_policy_nobody_is_hedged(rig: Any) -> None:
    await start(rig, hedge_prefill_after_s=None)
    rig.api("p1").faults.set(Faults(delay_seconds=0.5))
    assert (await rig.complete(prompt="a b c")).status_code == 200
    assert legs(rig) == (1, 0)
    assert (await rig.control_plane.ended()).hedge is None


async def test_who_answers_in_time_is_not_hedged(rig: Any) -> None:
    await start(rig, hedge_prefill_after_s=15.0)
    assert (await rig.complete(prompt="a b c")).status_code == 200
    assert legs(rig) == (1, 0)


async def test_no_more_than_the_share_is_hedged(rig: Any) -> None:
    await start(rig, hedge_max_share=0.25, hedge_prefill_after_s=0.05)
    rig.api("p1").faults.set(Faults(delay_seconds=0.2))
    rig.api("p2").faults.set(Faults(delay_seconds=0.2))
    for number in range(8):
        assert (await rig.complete(prompt=f"{number} b c")).status_code == 200
    assert rig.gateway._context.hedges.sent == 2


async def test_a_worker_whose_window_is_full_is_left_alone(
    rig: Any, eventually: Eventually
) -> None:
    rig.policies = [rig.policy("admission", window_tokens=1, window_ms=1)]
    spec = {"hedge_prefill_after_s": 0.3, "hedge_max_share": 1.0, "explore_share": 0.0}
    rig.policies.append(rig.policy("scheduling", **spec))
    await rig.start()
    for name in ("p1", "p2"):
        rig.api(name).faults.set(Faults(delay_seconds=1.0))
    asked = [asyncio.create_task(rig.complete(prompt=f"{n} b c")) for n in range(2)]
    await eventually(lambda: legs(rig) == (1, 1), "each has one")
    assert [(await one).status_code for one in asked] == [200, 200]
    assert rig.gateway._context.hedges.sent == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs(
    rig: Any, eventually: Eventually, stream: bool
) -> None:
    await start(rig)
    for name in ("p1", "p2"):
        rig.api(name).faults.set(HANGS)
    asked = asyncio.create_task(rig.complete(prompt="a b c", stream=stream))
    await eventually(lambda: legs(rig) == (1, 1), "both legs are out")
    asked.cancel()
    await nothing_runs(rig, eventually)
    await eventually(lambda: rig.gateway.stats.cancelled == 1)
    await eventually(lambda: rig.gateway.cluster.dispatch.num_held == 0)


async def test_both_fail_and_decode_computes_the_prompt(rig: Any, eventually: Eventually) -> None:
    await start(rig)
    for name in ("p1", "p2"):
        rig.api(name).faults.set(FATES["fails"])
    assert (await rig.complete(prompt="a b c")).status_code == 200
    assert legs(rig) == (1, 1)  # neither is asked again
    stats = rig.gateway.stats
    assert (stats.retries_prefill, stats.decode_side_prefills) == (2, 1)
    assert (await rig.control_plane.ended()).hedge.winner == ""


@pytest.mark.parametrize(("first", "second"), [*product(FATES, FATES)])
async def test_whatever_becomes_of_the_two_legs_the_client_is_answered_and_nothing_is_left(
    rig: Any, eventually: Eventually, first: str, second: str
) -> None:
    """The rig's end checks queues, slots, turns and expectations."""
    if "hangs" in (first, second):
        rig.timeouts = type(rig.timeouts)(prefill=1.5, first_byte=20, idle=20, drain=1)
    await start(rig, hedge_prefill_after_s=0.05)
    rig.api("p1").faults.set(FATES[first])
    rig.api("p2").faults.set(FATES[second])
    reply = await rig.complete(prompt="a b c")
    if "refuses" not in (first, second):  # else by which is first to be there
        assert reply.status_code == 200
    else:
        assert reply.status_code in (200, 422)
    await nothing_runs(rig, eventually)
    assert legs(rig) == (1, 1)
    assert rig.gateway.stats.in_flight == 0
