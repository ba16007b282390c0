from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.agent.cache_policy import CachePolicy
from workers.agent.events import Subscriber
from workers.agent.node import MAX_COMMANDS, Node
from workers.agent.session import Session
from workers.agent.settings import AgentSettings, parse_tcp
from workers.client import make_hello
from workers.core.clock import ManualClock
from workers.core.errors import ConfigError
from workers.core.framing import FrameBuffer, decode_reply
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.ids import OwnerId
from workers.core.messages import (
    CompleteStore,
    DesiredWorkers,
    Done,
    GetStats,
    Hello,
    LegReport,
    Lookup,
    LookupReply,
    PinPrefix,
    PreparedLoad,
    PreparedStore,
    PrepareLoad,
    PrepareStore,
    Refused,
    Release,
    Renew,
    ReportCorrupt,
    ReportWorkers,
    StoredSlot,
    Subscribe,
    Welcome,
    WorkerCommand,
)
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef
from workers.core.stats_messages import NamespaceSpec, PoolStats, WorkerStatus

MakeSpec = Callable[..., NamespaceSpec]


class Bench:
    """A node without sockets."""

    def __init__(self, spec: NamespaceSpec) -> None:
        self.clock = ManualClock()
        settings = AgentSettings("n1", Path("/nowhere/a.sock"), "slab", 1 << 20, 64)
        self.node = Node(settings, "/dev/shm/slab", self.clock, lambda: 42)
        self.spec = spec
        self.namespace = namespace_digest(spec)
        root = root_hash(self.namespace, None, None)
        self.chain: list[bytes] = [*block_hashes(root, range(640), 64)]
        self.sent: list[object] = []
        self._frames = FrameBuffer()
        self._connections = 0

    def greet(self, hello: Hello) -> Welcome | Refused:
        self._connections += 1
        return self.node.welcome(self._connections, hello, self._subscriber)

    def session(self, role: str = "worker", client_id: str = "p1") -> Session:
        spec = self.spec if role == "worker" else None
        reply = self.greet(make_hello(role, client_id, namespace=spec))  # type: ignore[arg-type]
        assert isinstance(reply, Welcome)
        return self.node.sessions[self._connections]

    def store(self, session: Session, num_blocks: int, owner: str = "transfer:1") -> None:
        body = PrepareStore(owner, self.namespace, b"", self.chain[:num_blocks])
        reply = self.node.handle(session, body)
        assert isinstance(reply, PreparedStore)
        stored = [StoredSlot(ref.slot, ref.generation, 1) for ref in reply.slots if ref]
        self.node.handle(session, CompleteStore(owner, stored))

    def _subscriber(self) -> Subscriber:
        return Subscriber(self.node.log, self.node.readable_runs, self._write)

    def _write(self, frame: bytes) -> None:
        self.sent += [decode_reply(document).body for document in self._frames.feed(frame)]


@pytest.fixture
def bench(spec: NamespaceSpec) -> Bench:
    return Bench(spec)


class TestHandshake:
    def test_slots_are_cut_by_the_first_worker(self, bench: Bench) -> None:
        before = bench.greet(make_hello("gateway", "g1"))
        after = bench.greet(make_hello("worker", "p1", namespace=bench.spec))
        assert isinstance(before, Welcome)
        assert isinstance(after, Welcome)
        assert (before.slot_bytes, before.num_slots, before.namespace) == (0, 0, b"")
        assert after.slot_bytes == 16384 + 4096
        assert after.num_slots == (1 << 20) // after.slot_bytes
        assert after.namespace == bench.namespace

    def test_b26_other_hash_vector_is_refused_with_both_values(self, bench: Bench) -> None:
        mine = make_hello("gateway", "g1")
        reply = bench.greet(Hello("gateway", "g1", b"\x01\x02"))
        assert isinstance(reply, Refused)
        assert reply.code == "hash_vector"
        assert "0102" in reply.message
        assert mine.hash_vector.hex() in reply.message

    def test_other_protocol_is_refused_with_both_values(self, bench: Bench) -> None:
        reply = bench.greet(Hello("gateway", "g1", make_hello("cli", "c").hash_vector, protocol=7))
        assert isinstance(reply, Refused)
        assert reply.code == "protocol_version"
        assert "protocol 7" in reply.message

    @pytest.mark.parametrize(
        ("changes", "code", "values"),
        [
            ({"block_tokens": 48}, "block_alignment", ("48", "32")),
            ({"engine_block_tokens": 0}, "block_alignment", ("64", "0")),
            ({"block_tokens": 128}, "block_tokens", ("128", "64")),
            ({"page_bytes": (0, 4096)}, "geometry", ("[0, 4096]",)),
            ({"page_bytes": ()}, "geometry", ("[]",)),
            ({"page_bytes": (1 << 20,)}, "slab_too_small", ("1048576", "2101248")),
        ],
    )
    def test_b29_blocks_that_would_never_hit_are_refused(
        self,
        bench: Bench,
        spec_with: MakeSpec,
        changes: dict[str, object],
        code: str,
        values: tuple[str, ...],
    ) -> None:
        reply = bench.greet(make_hello("worker", "p1", namespace=spec_with(**changes)))
        assert isinstance(reply, Refused)
        assert reply.code == code
        assert all(value in reply.message for value in values)
        assert bench.node.pool is None
        assert not bench.node.sessions

    def test_other_geometry_is_refused_with_both_values(
        self, bench: Bench, spec_with: MakeSpec
    ) -> None:
        bench.session()
        reply = bench.greet(
            make_hello("worker", "p2", namespace=spec_with(page_bytes=(4096, 8192)))
        )
        assert isinstance(reply, Refused)
        assert reply.code == "geometry"
        assert "24576" in reply.message
        assert "16384" in reply.message

    def test_same_geometry_of_another_model_is_served(
        self, bench: Bench, spec_with: MakeSpec
    ) -> None:
        worker = bench.session()
        bench.store(worker, 3)
        other = spec_with(weights_version="2")
        assert isinstance(bench.greet(make_hello("worker", "p2", namespace=other)), Welcome)
        body = Lookup(namespace_digest(other), bench.chain)
        assert bench.node.handle(worker, body) == LookupReply(0)
        infos = bench.node.stats().namespaces
        assert [info.workers for info in infos] == [["p1"], ["p2"]]

    def test_namespaces_are_bounded(self, bench: Bench, spec_with: MakeSpec) -> None:
        codes = [
            reply.code
            for i in range(258)
            if isinstance(
                reply := bench.greet(
                    make_hello("worker", "p", namespace=spec_with(model_id=f"m{i}"))
                ),
                Refused,
            )
        ]
        assert codes == ["too_many_namespaces"] * 2

    def test_hello_comes_once(self, bench: Bench) -> None:
        reply = bench.node.handle(bench.session(), make_hello("worker", "p1"))
        assert isinstance(reply, Refused)
        assert reply.code == "hello_twice"


class TestRequests:
    def test_before_any_worker_everything_is_a_miss(self, bench: Bench) -> None:
        gateway = bench.session("gateway", "g1")
        keys = bench.chain
        ask = bench.node.handle
        assert ask(gateway, Lookup(bench.namespace, keys)) == LookupReply(0)
        assert ask(gateway, PrepareLoad("o", bench.namespace, keys)) == PreparedLoad([])
        assert ask(gateway, PinPrefix("o", bench.namespace, keys)) == Done(0)
        assert ask(gateway, Release("o")) == ask(gateway, Renew(["o"])) == Done(0)
        assert ask(gateway, CompleteStore("o", [StoredSlot(0, 1, 1)])) == Done(0)
        assert ask(gateway, ReportCorrupt(bench.namespace, keys[0], 0, 1, "io")) == Done(0)
        assert bench.node.expire() == 0

    def test_store_into_an_unknown_namespace_is_refused(self, bench: Bench) -> None:
        worker = bench.session()
        reply = bench.node.handle(worker, PrepareStore("o", b"x" * 32, b"", [b"k" * 16]))
        assert isinstance(reply, Refused)
        assert reply.code == "unknown_namespace"

    def test_subscribers_hear_of_what_others_store(self, bench: Bench) -> None:
        gateway, worker = bench.session("gateway", "g1"), bench.session()
        bench.node.handle(gateway, Subscribe())
        bench.store(worker, 4)
        assert [type(message).__name__ for message in bench.sent] == ["Snapshot", "EventBatch"]

    def test_lease_is_told_of_too(self, bench: Bench) -> None:
        bench.node.host.limits.lease_seconds = 5
        worker = bench.session()
        bench.store(worker, 4)
        bench.clock.advance(4)
        assert bench.node.expire() == 0
        bench.node.handle(worker, Renew(["transfer:1"]))
        bench.clock.advance(4)
        assert bench.node.expire() == 0
        bench.clock.advance(1)
        assert bench.node.expire() == 1
        assert bench.node.stats().pinned_blocks == 0

    def test_a_release_ends_the_pins_of_several_but_not_an_operators(self, bench: Bench) -> None:
        worker, operator = bench.session(), "operator:kept"
        for owner in ("transfer:1", "transfer:2", "transfer:3"):
            bench.store(worker, 4, owner)
        pool = bench.node.pool
        assert pool is not None
        pool.pin_prefix(
            ClientRef(1, "p1"), OwnerId(operator), bench.namespace, bench.chain[:4], 0.0
        )
        reply = bench.node.handle(worker, Release("transfer:1", ["transfer:2", operator, "none"]))
        assert reply == Done(8)
        assert {owner.id for owner in pool.owners.all()} == {"transfer:3", operator}

    def test_leg_reports_reach_subscribers_and_heartbeat(self, bench: Bench) -> None:
        gateway, worker = bench.session("gateway", "g1"), bench.session()
        bench.node.handle(gateway, Subscribe())
        report = LegReport("t", "p1", "kv_producer", 100, device_hit_tokens=10, pool_hit_tokens=30)
        other = LegReport("t", "d1", "kv_consumer", 100, pool_hit_tokens=96)
        for leg in (report, other):
            bench.node.handle(worker, leg)
        assert bench.sent[1:] == [report, other] == list(bench.node.leg_reports)
        stats = bench.node.handle(gateway, GetStats())
        assert isinstance(stats, PoolStats)
        assert (stats.prompt_tokens_total, stats.hit_tokens_total) == (100, 40)
        assert (stats.rss_bytes, stats.capacity_blocks) == (42, 51)


class TestSupervisor:
    def command(self, number: int) -> WorkerCommand:
        return WorkerCommand("p1", "restart", f"c{number}")

    def test_commands_reach_it_once_and_are_acknowledged(self, bench: Bench) -> None:
        supervisor = bench.session("supervisor", "s")
        status = WorkerStatus("p1", "prefill", "m", "http://127.0.0.1:1", "ready")
        bench.node.take_commands([self.command(1)])
        bench.node.take_commands([self.command(1), self.command(2)])
        replies = [bench.node.handle(supervisor, ReportWorkers([status])) for _ in range(2)]
        assert replies == [DesiredWorkers([self.command(1), self.command(2)]), DesiredWorkers([])]
        bench.node.take_commands([self.command(1)])
        assert bench.node.handle(supervisor, ReportWorkers([])) == DesiredWorkers([])
        assert list(bench.node.acknowledged) == ["c1", "c2"]

    def test_commands_are_bounded(self, bench: Bench) -> None:
        bench.node.take_commands([self.command(i) for i in range(2000)])
        reply = bench.node.handle(bench.session("supervisor", "s"), ReportWorkers([]))
        assert isinstance(reply, DesiredWorkers)
        assert len(reply.commands) == MAX_COMMANDS

    def test_workers_may_not_speak_for_it(self, bench: Bench) -> None:
        reply = bench.node.handle(bench.session(), ReportWorkers([]))
        assert isinstance(reply, Refused)
        assert reply.code == "role"


class TestCachePolicy:
    def test_acts_on_the_running_pool(self, bench: Bench) -> None:
        worker = bench.session()
        bench.node.apply_cache_policy(CachePolicy(lease_seconds=2.0, write_queue_blocks=1))
        body = PrepareStore("transfer:1", bench.namespace, b"", bench.chain)
        reply = bench.node.handle(worker, body)
        assert isinstance(reply, PreparedStore)
        assert reply.write_queue == (1, 1)
        bench.clock.advance(2)
        assert bench.node.expire() == 1
        assert bench.node.stats().write_queue_bound == 1

    def test_absurd_values_change_nothing(self, bench: Bench) -> None:
        bench.node.apply_cache_policy(CachePolicy(lease_seconds=-1, write_queue_blocks=0))
        bench.node.apply_cache_policy(CachePolicy())
        assert bench.node.host.limits.lease_seconds == 30
        assert bench.node.host.limits.write_queue_blocks == 500


class TestShrinking:
    def test_no_slot_beyond_what_the_machine_can_back(self, bench: Bench) -> None:
        worker = bench.session()
        bench.store(worker, 2)
        bench.node.shrink_slab(5 * 20480 + 1)
        bench.store(worker, 10)
        assert bench.node.handle(worker, Lookup(bench.namespace, bench.chain)) == LookupReply(5)
        assert bench.node.stats().capacity_blocks == 5
        bench.node.shrink_slab(0)
        assert bench.node.stats().capacity_blocks == 5
        assert bench.node.pool is not None
        check_integrity(bench.node.pool)


class TestSettings:
    @pytest.mark.parametrize(
        "changes",
        [{"block_tokens": 0}, {"slab_bytes": -1}, {"lease_seconds": 0.0}, {"node_id": ""}],
    )
    def test_what_cannot_work_is_named(self, changes: dict[str, object]) -> None:
        values: dict[str, object] = {
            "node_id": "n1",
            "socket": Path("a.sock"),
            "slab_name": "s",
            "slab_bytes": 4096,
            "block_tokens": 64,
        }
        (field,) = changes
        with pytest.raises(ConfigError, match=field):
            AgentSettings(**(values | changes))  # type: ignore[arg-type]

    def test_tcp_addresses(self) -> None:
        assert parse_tcp("127.0.0.1:7710") == ("127.0.0.1", 7710)
        assert parse_tcp("") == ("", 0)
        for bad in ("127.0.0.1", ":1", "a:b", "a:70000"):
            with pytest.raises(ConfigError, match="tcp"):
                parse_tcp(bad)


class TestLegReports:
    """What the control plane would refuse must not wait to be sent to it again and again."""

    def test_nonsense_is_refused_at_the_door(self, bench: Bench) -> None:
        node, session = bench.node, bench.session()
        wrong: list[dict[str, Any]] = [
            {"kv_wait_seconds": float("nan")},
            {"kv_wait_by_layer_seconds": [0.1, float("inf")]},
            {"transfer_id": "t" * 5000},
        ]
        for fields in wrong:
            values = {"transfer_id": "t", "worker_id": "w", "kv_role": "kv_both", **fields}
            reply = node.handle(session, LegReport(**values))
            assert isinstance(reply, Refused)
        assert not node.leg_reports

    def test_nobody_ends_an_operators_pin_by_release(self, bench: Bench) -> None:
        reply = bench.node.handle(bench.session(), Release("operator:kept"))
        assert isinstance(reply, Refused)
