"""Agents and clients that are killed or stopped at a bad moment: a miss at most, never a wrong byte."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from workers.core.errors import AgentUnavailableError
from workers.core.messages import StoredSlot
from workers.core.stats_messages import NamespaceSpec
from workers.pool.arena import checksum_of

MakeTenant = Callable[..., Any]
LEASE_SECONDS = 0.6


@pytest.fixture
def agent(make_agent: Callable[..., Any]) -> Any:
    return make_agent("--lease-seconds", str(LEASE_SECONDS)).start()


def restart(agent: Any, *workers: Any) -> None:
    agent.kill(signal.SIGKILL)
    agent.spawn()
    for worker in workers:
        agent.connect(worker.client)
        worker.attach()


def test_slots_being_written_when_the_agent_died_rest_for_a_lease(
    make_agent: Callable[..., Any], make_tenant: MakeTenant
) -> None:
    # Long enough for all up to the late writer on a busy machine.
    agent = make_agent("--lease-seconds", "5").start()
    worker = make_tenant(agent)
    done, half = worker.chain("done"), worker.chain("half")
    worker.store(done)
    reply = worker.client.prepare_store("transfer:half", worker.namespace, b"", half)
    old_slab = worker.slab
    restart(agent, worker)
    assert "slab_adopted blocks=8 lost=0 quarantined_slots=8" in agent.log
    assert worker.held(done) == 8
    assert worker.held(half) == 0
    given = worker.client.prepare_store(
        "transfer:new", worker.namespace, b"", worker.chain("n", 40)
    )
    taken = {ref.slot for ref in given.slots if ref is not None}
    assert not taken & {ref.slot for ref in reply.slots}, "a late writer may still be at it"
    for ref, key in zip(reply.slots, half, strict=True):  # and it is
        old_slab.write_block(ref.slot, ref.generation, key, worker.payload(key))
    stored = [StoredSlot(r.slot, r.generation, 1) for r in reply.slots]
    assert worker.client.complete_store("transfer:half", stored) == 0
    assert worker.load(done) == [worker.payload(key) for key in done]
    worker.client.release("transfer:new")
    worker.eventually(lambda: worker.store(worker.chain("again", 48)) >= 0 and _holds_all(worker))


def _holds_all(worker: Any) -> bool:
    """No slot rests any more: a chain as long as the pool fits."""
    return bool(worker.held(worker.chain("again", 48)) == 48)


def test_torn_and_rewritten_slots_are_not_adopted(agent: Any, make_tenant: MakeTenant) -> None:
    worker = make_tenant(agent)
    keys = worker.chain("a")
    worker.store(keys)
    refs = worker.client.prepare_load("load:w:1", worker.namespace, keys)
    worker.slab.payload(refs[5].slot)[777] ^= 1
    worker.slab.begin_write(refs[6].slot)
    restart(agent, worker)
    assert worker.held(keys) == 5, "and what follows a lost block is lost with it"
    assert worker.load(keys) == [worker.payload(key) for key in keys[:5]]
    assert worker.client.stats().used_blocks == 5


def test_killed_again_and_again_it_keeps_what_is_intact(
    agent: Any, make_tenant: MakeTenant
) -> None:
    worker = make_tenant(agent)
    chains = [worker.chain(f"c{i}", 4) for i in range(3)]
    for number, keys in enumerate(chains):
        worker.store(keys, tenant="someone")
        restart(agent, worker)
        for known in chains[: number + 1]:
            assert worker.load(known) == [worker.payload(key) for key in known]
    stats = worker.client.stats()
    assert stats.used_blocks == 12
    tenants = {g.name: g.used_blocks for g in stats.groups if g.kind == "tenant"}
    assert tenants["someone"] == 12


def test_another_geometry_after_a_kill_begins_anew(
    agent: Any, make_tenant: MakeTenant, spec: NamespaceSpec
) -> None:
    worker = make_tenant(agent)
    worker.store(worker.chain("a"))
    agent.kill(signal.SIGKILL)
    agent.spawn()
    other = msgspec.structs.replace(spec, page_bytes=(8192, 8192))
    client = agent.worker("q1", other)
    stats = client.stats()
    assert (stats.block_bytes, stats.used_blocks) == (32_768, 0)
    assert client.lookup(worker.namespace, worker.chain("a")).num_held == 0


def test_stopped_writer_that_wakes_after_its_lease_spoils_nothing(
    agent: Any, make_tenant: MakeTenant
) -> None:
    late, other = make_tenant(agent, "p1"), make_tenant(agent, "p2")
    keys = late.chain("late", 48)
    reply = late.client.prepare_store("transfer:late", late.namespace, b"", keys)
    late.eventually(lambda: other.client.stats().pending_blocks == 0)  # its lease ended
    mine = [other.chain(f"mine{i}") for i in range(6)]
    for chain in mine:
        assert other.store(chain) == 8
    for ref, key in zip(reply.slots, keys, strict=True):
        late.slab.write_block(ref.slot, ref.generation, key, late.payload(key))
    stored = [
        StoredSlot(r.slot, r.generation, checksum_of(late.payload(k)))
        for r, k in zip(reply.slots, keys, strict=True)
    ]
    assert late.client.complete_store("transfer:late", stored) == 0
    assert other.held(keys) == 0
    for chain in mine:
        data = other.load(chain)
        assert all(found in {None, other.payload(k)} for found, k in zip(data, chain, strict=True))


def test_agent_stopped_for_over_every_lease_forgets_pins_and_serves_on(
    agent: Any, make_tenant: MakeTenant
) -> None:
    worker = make_tenant(agent)
    keys = worker.chain("a")
    worker.store(keys)
    worker.client.prepare_load("load:w:held", worker.namespace, keys)
    agent.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        impatient = agent.client("worker", "w3", worker.spec)
        impatient._timeout = 0.3
        with pytest.raises(AgentUnavailableError):
            impatient.lookup(worker.namespace, keys)
        assert time.monotonic() - began < 10
        time.sleep(LEASE_SECONDS + 0.3)
    finally:
        agent.process.send_signal(signal.SIGCONT)
    worker.eventually(lambda: worker.client.stats().pinned_blocks == 0)
    assert worker.load(keys) == [worker.payload(key) for key in keys]


def test_clean_end_leaves_neither_slab_nor_journal(agent: Any, make_tenant: MakeTenant) -> None:
    worker = make_tenant(agent)
    worker.store(worker.chain("a"))
    journal = Path(f"{agent.slab_path}.journal")
    assert journal.exists()
    agent.kill(signal.SIGTERM)
    assert not journal.exists()
    assert not agent.slab_path.exists()
