"""An agent passes gateways' load on to the other gateways of its node, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess

from workers.client import AsyncAgentClient, make_hello
from workers.core.errors import RefusedError
from workers.core.gateway_messages import (
    MAX_LEGS,
    MAX_SAMPLES,
    ComingBlocks,
    DecodeSample,
    GatewayShare,
    PrefillSample,
    TellShare,
    WorkerShare,
    fault_of,
)
from workers.core.messages import Done, Refused

PATIENCE_SECONDS = 20.0


class Gateway:
    """One that follows an agent; `told` by name of the other, the last of each."""

    def __init__(self, address: str, name: str, *, shares: bool = True) -> None:
        self.refusals: list[Refused] = []
        self.client = AsyncAgentClient(
            address, make_hello("gateway", name), shares=shares, on_refused=self.refusals.append
        )
        self.told: dict[str, GatewayShare] = {}
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        stream: Any = self.client.subscribe()
        async with aclosing(stream) as messages:
            async for message in messages:
                if isinstance(message, GatewayShare):
                    self.told[message.gateway.partition("#")[0]] = message

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path)
    process.start()
    yield process
    process.close()


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not check():
            await asyncio.sleep(0.01)


async def test_load_reaches_the_others_and_ends_with_its_gateway(agent: AgentProcess) -> None:
    address = f"unix:{agent.socket}"
    a, auditor = Gateway(address, "a"), Gateway(address, "auditor", shares=False)
    await until(lambda: a.client.subscribed and auditor.client.subscribed)
    assert not a.told  # alone: nothing is to be told
    b = Gateway(address, "b")
    await until(lambda: "b" in a.told and "a" in b.told)
    share = WorkerShare("p1", legs=2, seconds=1.5, waiting=[(0, 3, 2.5)])
    samples = [PrefillSample("p1", 100, 20, 0.1)], [DecodeSample("d1", 2, 0.01, 300)]
    coming = [ComingBlocks("r1", b"k" * 32)]
    assert a.client.tell(TellShare([share], *samples, coming, ["r0"]))
    await until(lambda: b.told["a"].shares)
    assert (b.told["a"].coming, b.told["a"].ended) == (coming, ["r0"])
    assert b.told["a"].shares == [share]
    assert (b.told["a"].prefills, b.told["a"].decodes) == samples
    late = Gateway(address, "late")
    await until(lambda: "a" in late.told)
    assert late.told["a"].shares == [share]
    assert not late.told["a"].prefills  # what was learned is told once
    await a.stop()
    await until(lambda: b.told["a"].gone and late.told["a"].gone)
    assert not auditor.told
    for gateway in (b, late, auditor):
        await gateway.stop()


async def test_who_did_not_subscribe_is_refused(agent: AgentProcess) -> None:
    client = AsyncAgentClient(f"unix:{agent.socket}", make_hello("gateway", "a"))
    with pytest.raises(RefusedError, match="Subscribe with `shares` first"):
        await client.call(TellShare([]), Done)
    assert not client.tell(TellShare([]))  # there is no stream
    await client.close()


async def test_a_refusal_reaches_who_told(agent: AgentProcess) -> None:
    a = Gateway(f"unix:{agent.socket}", "a")
    await until(lambda: a.client.subscribed)
    assert a.client.tell(TellShare([WorkerShare("p1", legs=1)]))
    assert a.client.tell(TellShare([WorkerShare("p1", seconds=-1.0)]))
    await until(lambda: a.refusals)
    assert [(one.code, "seconds = -1.0" in one.message) for one in a.refusals] == [("share", True)]
    await a.stop()


def test_messages_have_bounds() -> None:
    assert fault_of(TellShare([WorkerShare("p1")])) == ""
    many = [PrefillSample("p1", 1, 1, 1.0)] * (MAX_SAMPLES + 1)
    assert "samples" in fault_of(TellShare([], many))
    assert "classes" in fault_of(TellShare([WorkerShare("p1", waiting=[(0, 1, 1.0)] * 17)]))
    assert "workers" in fault_of(TellShare([WorkerShare(str(i)) for i in range(1025)]))
    assert "block keys" in fault_of(TellShare([], coming=[ComingBlocks("r", b"k" * 17)]))
    assert "legs" in fault_of(TellShare([], ended=["r"] * (MAX_LEGS + 1)))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, 1e10])
def test_what_is_no_load_or_measurement_is_not_passed_on(odd: float) -> None:
    """Each gateway would place and predict by it."""
    assert "p1: seconds" in fault_of(TellShare([WorkerShare("p1", seconds=odd)]))
    assert "p1: ended_age" in fault_of(TellShare([WorkerShare("p1", ended_age=odd)]))
    assert "p1: waiting" in fault_of(TellShare([WorkerShare("p1", waiting=[(0, 1, odd)])]))
    assert "p1: slots" in fault_of(TellShare([WorkerShare("p1", slots=-1)]))
    assert "p1: kv_tokens" in fault_of(TellShare([WorkerShare("p1", kv_tokens=2**60)]))
    assert "measurement" in fault_of(TellShare([], [PrefillSample("p1", 10, 0, odd)]))
    assert "measurement" in fault_of(TellShare([], [PrefillSample("p1", -10, 0, 1.0)]))
    assert "measurement" in fault_of(TellShare([], [], [DecodeSample("p1", 1, odd, 5)]))


def test_news_that_have_not_gone_out_are_kept_with_the_next() -> None:
    """A slow reader misses no leg; of loads the last one is enough."""
    old = GatewayShare("a", [WorkerShare("p1", legs=1)], ended=["r0"])
    new = GatewayShare("a", [WorkerShare("p1", legs=2)], coming=[ComingBlocks("r1", b"k" * 16)])
    both = new.after(old)
    assert (both.shares, both.coming, both.ended) == (new.shares, new.coming, ["r0"])
    many = GatewayShare("a", ended=[str(i) for i in range(MAX_LEGS)])
    assert len(many.after(both).ended) == MAX_LEGS
    assert not GatewayShare("a", gone=True).after(both).ended
