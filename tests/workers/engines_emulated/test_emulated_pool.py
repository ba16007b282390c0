"""The emulated engine as a client of a real agent: tiers, tenants, hints."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from workers.client import AgentClient
from workers.core.errors import RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import LookupReply
from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.pool import AgentPool, emulated_namespace
from workers.engines.emulated.worker import EngineConfig, PoolUse, Transfer, Worker, WorkerSpec

CONFIG = EngineConfig("m", prefill_ms_per_token=0.0, decode_ms=0)
TOKENS = list(range(64 * 6 + 5))
SALT = "tenant-a"


@pytest.fixture
def tiered(make_agent: Callable[..., Any], tmp_path: Path) -> Any:
    """An agent with few slots in memory and an SSD tier."""
    slab_bytes = 256 * 4096
    options = ("--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", str(64 << 20))
    return make_agent(*options, slab_bytes=slab_bytes).start()


@pytest.fixture
async def fleet(tiered: Any) -> AsyncIterator[Fleet]:
    specs = [WorkerSpec("p1", "prefill", 0), WorkerSpec("d1", "decode", 0)]
    made = Fleet(specs, CONFIG, str(tiered.socket))
    await made.start()
    yield made
    await made.stop()


def worker(fleet: Fleet, worker_id: str) -> Worker:
    return fleet.apis[worker_id].worker


def leg(name: str, number: int = 1, **more: Any) -> Transfer:
    return Transfer(f"t{number}", name, **more)


def keys(salt: str | None = SALT) -> tuple[bytes, list[bytes]]:
    """Namespace and chain of `TOKENS`."""
    namespace = namespace_digest(emulated_namespace(CONFIG, "emulated"))
    return namespace, list(block_hashes(root_hash(namespace, salt, None), TOKENS, 64))


def lookup(client: AgentClient, salt: str | None = SALT) -> LookupReply:
    return client.lookup(*keys(salt))


async def store(fleet: Fleet, client: AgentClient, tokens: list[int], salt: str, n: int) -> None:
    await worker(fleet, "p1").prefill(tokens, salt, leg("prefill", n))
    client.release(f"transfer:t{n}")


async def demote(fleet: Fleet, client: AgentClient) -> None:
    """Other prompts, no faster than the disk writes, until this one is on SSD only."""
    deadline = time.monotonic() + 60.0
    for number in itertools.count(100):
        found = lookup(client)
        if found == LookupReply(0, 0, 6):
            return
        assert time.monotonic() < deadline, (found, client.stats())
        if found.num_held + found.num_on_disk < 6:
            worker(fleet, "p1").device.clear()
            await store(fleet, client, TOKENS, SALT, number + 100_000)
        client.hint(*keys(), "over")  # the first to go
        await store(fleet, client, list(range(64 * 8)), f"other{number}", number)
        written = -1
        while written != (now := ssd_writes(client)):
            written = now
            time.sleep(0.01)


def ssd_writes(client: AgentClient) -> int:
    return sum(tier.written_blocks_total for tier in client.stats().tiers if tier.tier == "ssd")


async def test_tenant_and_promotion(fleet: Fleet, tiered: Any) -> None:
    client = tiered.client("cli", "test")
    await store(fleet, client, TOKENS, SALT, 1)
    assert lookup(client).num_held == 6
    assert lookup(client, None).num_held == 0
    groups = {group.name for group in client.stats().groups if group.kind == "tenant"}
    assert SALT in groups
    await demote(fleet, client)
    decode = worker(fleet, "d1")
    slow = replace(decode.config, prefill_ms_per_token=1000.0)
    decode.pool._costs = slow.cost_model  # type: ignore[union-attr]  # to compute is slow here
    done = await decode.prefill(TOKENS, SALT, leg("decode", 2, num_blocks=6))
    assert done.cached_tokens == 6 * 64
    assert decode.counters.promoted_blocks == 6
    assert client.stats().num_owners == 0


async def test_what_is_quicker_to_compute_is_not_waited_for(fleet: Fleet, tiered: Any) -> None:
    client = tiered.client("cli", "test")
    await store(fleet, client, TOKENS, SALT, 1)
    await demote(fleet, client)
    decode = worker(fleet, "d1")
    assert CONFIG.prefill_ms_per_token == 0
    done = await decode.prefill(TOKENS, SALT, leg("decode", 2, num_blocks=6))
    assert done.cached_tokens == 0
    assert decode.counters.promoted_blocks == 0


@pytest.mark.parametrize("session", ["continue", "over"])
async def test_hints_are_sent_by_leg_two(fleet: Fleet, tiered: Any, session: str) -> None:
    client = tiered.client("cli", "test")
    sent: list[str] = []
    for api in fleet.apis.values():
        pool = api.worker.pool
        assert pool is not None
        original = pool.hint

        async def hint(tokens: list[int], salt: str, said: str, original: Any = original) -> None:
            sent.append(said)
            await original(tokens, salt, said)

        pool.hint = hint  # type: ignore[method-assign]
    await worker(fleet, "p1").prefill(TOKENS, SALT, leg("prefill", session=session))
    await worker(fleet, "d1").prefill(TOKENS, SALT, leg("decode", num_blocks=6, session=session))
    assert sent == [session]
    assert lookup(client).num_held == 6  # it is worth less or more, and here all the same


async def test_one_prompt_in_many_requests_is_predicted_to_hit(fleet: Fleet, tiered: Any) -> None:
    """However close they come, and each once for all its lookups and legs."""
    client = tiered.client("cli", "test")
    for number in range(60):
        await store(fleet, client, TOKENS, SALT, number)
        await worker(fleet, "d1").prefill(TOKENS, SALT, leg("decode", number, num_blocks=6))
    [now] = [point for point in client.stats().whatif if point.capacity_factor == 1.0]
    assert now.hit_rate is not None
    assert now.hit_rate > 0.9


async def test_an_agent_that_is_away_is_told_once_and_so_is_its_return(tiered: Any) -> None:
    """Not by each of a thousand requests: nothing else could be read in the log."""
    tiered.kill()
    pool = AgentPool(f"unix:{tiered.socket}", WorkerSpec("p1", "prefill", 0), CONFIG, "emulated")
    try:
        for _ in range(2):
            with structlog.testing.capture_logs() as logs:
                for _ in range(20):
                    assert await pool.store(PoolUse(), TOKENS, SALT, leg("prefill")) == 0
            assert [one["event"] for one in logs] == ["pool_unavailable"]
            assert str(tiered.socket) in logs[0]["error"]
            tiered.start()
            deadline = time.monotonic() + 20.0
            with structlog.testing.capture_logs() as logs:
                while not logs:
                    assert time.monotonic() < deadline
                    await pool.hint(TOKENS, SALT, "continue")
                    await asyncio.sleep(0.02)
                assert await pool.store(PoolUse(), TOKENS, SALT, leg("prefill")) == 6
            (back,) = logs
            assert (back["event"], back["worker"]) == ("pool_available", "p1")
            assert back["missed"] >= 20
            tiered.kill()
    finally:
        await pool.close()


async def test_what_an_agent_refuses_is_no_outage(fleet: Fleet, monkeypatch: Any) -> None:
    pool = worker(fleet, "p1").pool
    assert isinstance(pool, AgentPool)

    async def refuse() -> None:
        raise RefusedError("quota", "no room")

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            await pool._quietly(refuse)
            await pool.hint(TOKENS, SALT, "continue")
    assert [one["event"] for one in logs] == ["pool_unavailable"] * 2
