"""What the agent takes for one use of a prompt, from which it predicts hits at other capacities."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.agent.events import Subscriber
from workers.agent.node import Node
from workers.agent.pool_requests import MAX_OBSERVED, PoolRequests
from workers.agent.session import Session
from workers.agent.settings import AgentSettings
from workers.client import make_hello
from workers.core.clock import ManualClock
from workers.core.hashing import block_hashes, namespace_digest
from workers.core.ids import load_owner, request_of
from workers.core.messages import KvRole, Lookup, Welcome
from workers.core.stats_messages import NamespaceSpec

CHAIN = [bytes(key) for key in block_hashes(b"root", range(10), 1)]


class Bench:
    """A node without sockets; `uses` counts what the prediction has seen of `CHAIN`'s blocks."""

    def __init__(self, spec: NamespaceSpec) -> None:
        self.clock = ManualClock()
        settings = AgentSettings("n1", Path("/nowhere/a.sock"), "slab", 16 << 20, 64)
        self.node = Node(settings, "/dev/shm/slab", self.clock, lambda: 42)
        self.spec = spec
        self.prefill = self.worker("p1", "kv_producer")
        self.decode = self.worker("d1", "kv_consumer")
        self.both = self.worker("b1", "kv_both")

    def worker(self, worker_id: str, kv_role: KvRole) -> Session:
        hello = make_hello("worker", worker_id, namespace=self.spec, kv_role=kv_role)
        number = len(self.node.sessions) + 1
        reply = self.node.welcome(number, hello, self._subscriber)
        assert isinstance(reply, Welcome)
        return self.node.sessions[number]

    def ask(self, session: Session, request: str, keys: list[bytes] = CHAIN) -> None:
        self.node.handle(session, Lookup(namespace_digest(self.spec), keys, request))

    @property
    def uses(self) -> float:
        assert self.node.pool is not None
        return self.node.pool.whatif._uses_due / len(CHAIN)

    def _subscriber(self) -> Subscriber:
        raise AssertionError("nobody subscribes here")


@pytest.fixture
def bench(spec: NamespaceSpec) -> Bench:
    return Bench(spec)


def test_identical_prompts_of_different_requests_count_each_however_close(bench: Bench) -> None:
    for number in range(50):
        bench.ask(bench.prefill, f"t{number}")
    assert bench.uses == 50


def test_lookups_of_one_request_count_once_however_far_apart(bench: Bench) -> None:
    for _ in range(5):
        bench.ask(bench.prefill, "t1")
        bench.clock.advance(60.0)
    bench.ask(bench.prefill, "t1", CHAIN[:4])
    assert bench.uses == 1


def test_legs_of_one_request_count_once(bench: Bench) -> None:
    first = request_of(load_owner("p1", "cmpl-1", "t1"))
    second = request_of(load_owner("b1", "cmpl-2", "t1"))
    for session, request in ((bench.prefill, first), (bench.decode, second), (bench.both, second)):
        bench.ask(session, request)
    assert bench.uses == 1
    bench.ask(bench.both, request_of(load_owner("b1", "cmpl-3")))
    bench.ask(bench.both, request_of(load_owner("b1", "cmpl-4")))
    assert bench.uses == 3, "past the gateway, each is a request of its own"


def test_what_no_request_stands_behind_is_not_counted(bench: Bench) -> None:
    bench.ask(bench.prefill, "")
    bench.ask(bench.prefill, "t1", [])
    bench.ask(bench.decode, "t2")
    assert bench.uses == 0


def test_what_is_remembered_of_requests_is_bounded(bench: Bench) -> None:
    requests = PoolRequests(bench.node)
    handle = requests.handlers()[Lookup]
    for number in range(MAX_OBSERVED + 100):
        handle(bench.prefill, Lookup(b"n", CHAIN[:1], f"{number}-" + "x" * 10_000))
    assert len(requests._observed) == MAX_OBSERVED
    assert max(map(len, requests._observed)) <= 256


def test_one_prompt_repeated_every_second_is_predicted_to_hit(bench: Bench) -> None:
    for number in range(100):
        bench.ask(bench.prefill, f"t{number}")
        bench.clock.advance(1.0)
    assert bench.node.pool is not None
    rate = bench.node.pool.whatif.hit_rate(bench.node.pool.slots.num_slots)
    assert rate is not None
    assert rate > 0.95
