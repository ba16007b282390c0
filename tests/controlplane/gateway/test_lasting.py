"""What a gateway cannot do without goes on after an error of ours, which is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_process import AgentProcess

from controlplane.gateway import lasting as lasting_module
from controlplane.gateway.lasting import lasting, regularly


async def test_a_loop_that_fails_begins_again(
    monkeypatch: pytest.MonkeyPatch, eventually: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lasting_module, "PAUSE_SECONDS", 0.01)
    calls: list[float] = []

    def step(now: float) -> None:
        calls.append(now)
        if len(calls) < 3:
            raise TypeError("odd")

    task = asyncio.create_task(lasting("house", lambda: regularly(0.01, step)))
    await eventually(lambda: len(calls) >= 6, "steps after the errors")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert capsys.readouterr().out.count("loop_failed") == 2


async def test_a_loop_that_returns_is_over() -> None:
    async def once() -> None:
        return

    await asyncio.wait_for(lasting("once", once), 5)


async def test_an_error_in_one_duty_leaves_the_others_and_itself_alive(
    rig: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """The records' sweep failed once: nothing was learned, nobody stuck was seen any more."""
    monkeypatch.setattr(lasting_module, "PAUSE_SECONDS", 0.01)
    await rig.start()
    sweep, failed = rig.gateway.records.sweep, []

    def odd(now: float) -> None:
        if not failed:
            failed.append(now)
            raise TypeError("odd")
        sweep(now)

    for task in rig.gateway._tasks:
        task.cancel()
    monkeypatch.setattr(rig.gateway.records, "sweep", odd)
    rig.gateway._keep_house()
    await eventually(lambda: failed, "the sweep fails")
    assert (await rig.complete(prompt="hello there", max_tokens=2)).status_code == 200
    learned = lambda: any(  # noqa: E731
        state.prefill_times.num_samples for state in rig.gateway.cluster.workers.values()
    )
    await eventually(learned, "learning goes on")
    await eventually(lambda: not rig.gateway.records._due, "and so does the sweep")


async def test_workers_that_report_to_no_agent_teach_by_their_answers(
    rig: Any, agent: AgentProcess, eventually: Any
) -> None:
    """Their node's agent is followed, but nothing of their legs comes from there."""
    await rig.start()
    await rig.follow(agent)
    workers = rig.gateway.cluster.workers.values()

    async def three_taught() -> bool:
        """Again: a leg whose beginning was heard late is no scale to begin with."""
        assert (await rig.complete(prompt="hello there", max_tokens=2)).status_code == 200
        await asyncio.sleep(0.5)
        taught = sum(state.prefill_times.num_samples for state in workers)
        assert taught <= rig.gateway.stats.requests  # none of them twice
        return taught >= 3

    await eventually(three_taught, "answers teach")


async def test_a_view_that_cannot_be_applied_is_told_and_the_next_one_is(
    rig: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    await rig.start()
    follower = rig.gateway._follower
    apply, odd = follower._apply, []

    def once(view: Any) -> None:
        if not odd:
            odd.append(view)
            raise OverflowError("too large")
        apply(view)

    monkeypatch.setattr(follower, "_apply", once)
    await rig.publish(policies=[rig.policy("slo", mode="off")])
    assert odd
    assert rig.gateway.cluster.policies("tiny").slo.mode == "off"
