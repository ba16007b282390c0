"""The engine over real and faulty transports: results, faults, what it shows of itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from workers.core.transfer_types import (
    Cause,
    Direction,
    LinkId,
    Piece,
    Priority,
    TransferLimits,
    TransferRequest,
    TransferResult,
)
from workers.transfer.base import PeerAddress
from workers.transfer.engine import MAX_PEERS, TransferEngine
from workers.transfer.memory import Faults

BLOCK = 256 * 1024 - 64
SECONDS = 30.0
Rig = Any

HOLDER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from workers.core.transfer_handshake import SlabFacts
from workers.pool.arena import Slab
from workers.transfer.base import SlotMemory
from workers.transfer.tcp_server import TcpServer
slab = Slab.attach(sys.argv[1], 256 * 1024)
memory = SlotMemory(slab, SlabFacts(256 * 1024, 64, 24), int(sys.argv[2].split(":")[0]))
server = TcpServer(memory, "holder", b"s" * 32, port=int(sys.argv[2].split(":")[1]))
print(server.address[1], flush=True)
sys.stdin.read()
"""


class Node:
    """A reader's engine, and what belongs to it."""

    def __init__(self, rig: Rig, **options: Any) -> None:
        self.rig = rig
        self.engine = TransferEngine("reader", rig.reader, [rig.transport()], **options)
        self.peer: PeerAddress = rig.serve()
        self.engine.set_peer(self.peer)
        self._number = 0

    @property
    def faults(self) -> Faults:
        faults: Faults = self.rig.fabric.nodes["holder"].faults
        return faults

    def request(self, *indices: int, **changes: Any) -> TransferRequest:
        self._number += 1
        pieces = tuple(
            Piece(i, 3, i, 9, i.to_bytes(16, "little"), BLOCK) for i in indices
        )  # fmt: skip
        values = {
            "transfer_id": f"t{self._number}", "peer": "holder", "pieces": pieces,
            "deadline": time.monotonic() + SECONDS, "incarnation": 77,
        }  # fmt: skip
        return TransferRequest(**(values | changes))

    def run(self, *indices: int, **changes: Any) -> TransferResult:
        return self.engine.run(self.request(*indices, **changes))


@pytest.fixture
def make_node(make_rig: Callable[[str], Rig]) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str = "memory", **options: Any) -> Node:
        made.append(Node(make_rig(name), **options))
        return made[-1]

    yield make
    for node in made:
        node.engine.close()


@pytest.fixture
def spawn_holder(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """A holder of a slab in a process of its own: the process and its port."""
    made: list[subprocess.Popen[bytes]] = []
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)

    def spawn(slab: Path, incarnation: int = 77, port: int = 0) -> Any:
        command = [sys.executable, str(script), str(slab), f"{incarnation}:{port}", os.getcwd()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        made.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield spawn
    for process in made:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


class TestOverEachTransport:
    @pytest.mark.parametrize("name", ["memory", "shm", "tcp"])
    @pytest.mark.parametrize("piece_bytes", [0, 50_000])
    def test_blocks_are_readable_where_they_were_wanted(
        self, make_node: Callable[..., Node], name: str, piece_bytes: int
    ) -> None:
        node = make_node(name)
        blocks = node.rig.fill(*range(12))
        result = node.run(*range(12), piece_bytes=piece_bytes)
        assert result.state == "completed"
        assert result.num_bytes == 12 * BLOCK
        for index, data in blocks.items():
            key = index.to_bytes(16, "little")
            assert node.rig.reader.slab.read_block(index, 9, key) == data

    @pytest.mark.parametrize("name", ["memory", "shm", "tcp"])
    def test_what_is_missing_is_named_and_its_slot_has_no_header(
        self, make_node: Callable[..., Node], name: str
    ) -> None:
        node = make_node(name)
        node.rig.fill(1, 3)
        node.rig.reader.slab.write_block(2, 9, (2).to_bytes(16, "little"), b"old")
        result = node.run(1, 2, 3)
        assert result.missing == {1: Cause.STALE}
        assert node.rig.reader.slab.read_header(2) is None
        assert node.rig.reader.slab.read_header(3) is not None

    @pytest.mark.parametrize("name", ["memory", "tcp"])
    def test_a_push_lands(self, make_node: Callable[..., Node], name: str) -> None:
        node = make_node(name)
        data = os.urandom(BLOCK)
        key = (4).to_bytes(16, "little")
        node.rig.reader.slab.write_block(4, 9, key, data)
        node.rig.push.reserve(4, 3, key, BLOCK)
        assert node.run(4, direction=Direction.PUSH).state == "completed"
        assert node.rig.holder.slab.read_block(4, 3, key) == data

    def test_layers_arrive_one_by_one(self, make_node: Callable[..., Node]) -> None:
        node = make_node("tcp")
        data = node.rig.fill(0)[0]
        layer = BLOCK // 4
        key = bytes(16)
        layers = tuple(
            Piece(0, 3, 0, 9, key, BLOCK, i * layer, layer if i < 3 else BLOCK - 3 * layer)
            for i in range(4)
        )
        arrived: list[int] = []
        node.engine.start()
        future = node.engine.submit(node.request(pieces=layers), on_arrived=arrived.extend)
        assert future.result(SECONDS).state == "completed"
        assert sorted(arrived) == [0, 1, 2, 3]
        assert node.rig.reader.slab.read_block(0, 9, key) == data

    async def test_it_serves_an_event_loop(self, make_node: Callable[..., Node]) -> None:
        node = make_node("tcp")
        node.rig.fill(*range(8))
        node.engine.start()
        futures = [node.engine.submit(node.request(index)) for index in range(8)]
        results = await asyncio.gather(*map(asyncio.wrap_future, futures))
        assert {result.state for result in results} == {"completed"}


class TestFaults:
    def test_every_piece_arrives_right_or_is_missing_whatever_happens(
        self, make_node: Callable[..., Node]
    ) -> None:
        limits = TransferLimits(
            stall_seconds=0.1, connect_seconds=0.2, backoff_seconds=0.001,
            max_op_backoff_seconds=0.01, cancel_seconds=0.05, breaker_failures=100,
        )  # fmt: skip
        node = make_node(limits=limits, rng=random.Random(1))
        blocks = node.rig.fill(*range(20))
        rng = random.Random(2)
        failures = 0
        for _ in range(15):
            faults = node.faults
            faults.drop = rng.choice([0.0, 0.0, 0.05])
            faults.corrupt = rng.choice([0.0, 0.3])
            faults.spread_seconds = rng.choice([0.0, 0.01])
            faults.break_after = rng.choice([None, None, 30])
            faults.take = rng.choice([None, 3])
            for index in range(20):
                node.rig.reader.slab.begin_write(index)
            deadline = time.monotonic() + 1.0
            result = node.run(*range(20), piece_bytes=rng.choice([0, 100_000]), deadline=deadline)
            failures += len(result.missing)
            assert time.monotonic() < deadline + SECONDS
            for index, data in blocks.items():
                held = node.rig.reader.slab.read_block(index, 9, index.to_bytes(16, "little"))
                assert held == (None if index in result.missing else data)
        stats = node.engine.stats()
        assert sum(sum(pair.missing_by_cause.values()) for pair in stats.pairs) == failures

    def test_c07_endpoints_are_bounded_for_a_dead_peer(
        self, make_node: Callable[..., Node]
    ) -> None:
        node = make_node(rng=random.Random(1))
        node.faults.refuse_connect = True
        holder = node.rig.fabric.nodes["holder"]
        descriptors = len(os.listdir("/proc/self/fd"))
        causes = {cause for _ in range(2000) for cause in node.run(0).missing.values()}
        assert causes == {Cause.PEER_DOWN}
        assert holder.open_endpoints == 0
        assert holder.connects < 20
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
        assert len(node.engine.stats().alarms) == 1

    def test_c14_the_effective_depth_is_shown(self, make_node: Callable[..., Node]) -> None:
        node = make_node()
        node.faults.depth = 16
        node.rig.fill(0)
        node.run(0)
        (link,) = node.engine.stats().links
        assert link.window_ops == 16

    def test_c15_a_device_that_takes_a_few_gets_each_op_once(
        self, make_node: Callable[..., Node]
    ) -> None:
        node = make_node()
        node.faults.take = 2
        node.rig.fill(*range(20))
        assert node.run(*range(20)).state == "completed"
        posted = node.rig.fabric.nodes["holder"].posted
        assert len(posted) == len(set(posted)) == 20

    def test_c16_corruption_without_end_ends(self, make_node: Callable[..., Node]) -> None:
        node = make_node()
        node.faults.corrupt = 1.0
        node.rig.fill(0)
        result = node.run(0)
        assert result.missing == {0: Cause.CORRUPT}
        assert result.num_retries == 3
        assert node.rig.reader.slab.read_header(0) is None

    def test_a_deadline_holds_against_a_peer_that_does_nothing(
        self, make_node: Callable[..., Node]
    ) -> None:
        node = make_node()
        node.faults.stall = True
        node.rig.fill(0)
        result = node.run(0, deadline=time.monotonic() + 0.2)
        assert result.missing == {0: Cause.DEADLINE}

    def test_cancelled_from_another_thread(self, make_node: Callable[..., Node]) -> None:
        node = make_node()
        node.faults.stall = True
        node.rig.fill(0)
        node.engine.start()
        request = node.request(0)
        future = node.engine.submit(request)
        node.engine.cancel(request.transfer_id)
        assert future.result(SECONDS).missing == {0: Cause.CANCELLED}

    def test_closing_ends_what_is_under_way(self, make_node: Callable[..., Node]) -> None:
        node = make_node()
        node.faults.stall = True
        node.rig.fill(0)
        node.engine.start()
        future: Future[TransferResult] = node.engine.submit(node.request(0))
        node.engine.close()
        assert future.cancelled()


class TestProcesses:
    def test_c18_one_stopped_node_of_four_leaves_the_others_alone(
        self,
        make_node: Callable[..., Node],
        spawn_holder: Callable[..., Any],
    ) -> None:
        node = make_node("tcp")
        node.rig.fill(*range(12))
        slab = node.rig.folder / "holder.slab"
        holders = [spawn_holder(slab) for _ in range(4)]
        for number, (_, port) in enumerate(holders):
            node.engine.set_peer(PeerAddress(f"h{number}", {"tcp": f"127.0.0.1:{port}"}, 77))
        node.engine.start()
        holders[0][0].send_signal(signal.SIGSTOP)

        started = time.monotonic()
        stopped = node.engine.submit(node.request(*range(12), peer="h0"))
        for round_ in range(5):
            others = [
                node.engine.submit(node.request(*range(4 * (peer - 1), 4 * peer), peer=f"h{peer}"))
                for peer in (1, 2, 3)
            ]
            for future in others:
                assert future.result(SECONDS).state == "completed", round_
        result = stopped.result(SECONDS)
        assert set(result.missing.values()) == {Cause.PEER_DOWN}
        assert time.monotonic() - started < 15.0, "cut off within seconds, on a busy machine too"
        at_once = node.engine.submit(node.request(0, peer="h0")).result(SECONDS)
        assert at_once.missing == {0: Cause.PEER_DOWN}

    def test_c09_a_holder_that_restarted_at_its_address_is_another_one(
        self, make_node: Callable[..., Node], spawn_holder: Callable[..., Any]
    ) -> None:
        node = make_node("tcp")
        data = node.rig.fill(1)[1]
        slab = node.rig.folder / "holder.slab"
        process, port = spawn_holder(slab)
        address = {"tcp": f"127.0.0.1:{port}"}
        node.engine.set_peer(PeerAddress("h", address, 77))
        node.engine.start()
        first = node.engine.submit(node.request(1, peer="h")).result(SECONDS)
        assert first.state == "completed"
        process.kill()
        process.wait()
        spawn_holder(slab, 78, port)
        old = node.engine.submit(node.request(1, peer="h")).result(SECONDS)
        assert old.missing == {0: Cause.INCARNATION}
        node.engine.set_peer(PeerAddress("h", address, 78))
        new = node.engine.submit(node.request(1, peer="h", incarnation=78)).result(SECONDS)
        assert new.state == "completed"
        assert node.rig.reader.slab.read_block(1, 9, (1).to_bytes(16, "little")) == data


class TestChoice:
    def test_the_cheapest_common_transport_is_taken_unless_told_otherwise(
        self, make_rig: Callable[[str], Rig]
    ) -> None:
        tcp, shm = make_rig("tcp"), make_rig("shm")
        tcp.fill(0)
        peer = tcp.serve()
        peer = PeerAddress("holder", dict(peer.addresses), 77, peer.facts)
        shm.reader = tcp.reader
        engine = TransferEngine("reader", tcp.reader, [tcp.transport(), shm.transport()])
        engine.set_peer(peer)
        piece = Piece(0, 3, 0, 9, bytes(16), BLOCK)

        def run(name: str, **options: Any) -> str:
            request = TransferRequest(name, "holder", (piece,), time.monotonic() + SECONDS)
            return engine.run(request, **options).link.transport

        try:
            assert run("a") == "shm"
            assert self.marks(engine) == {"shm": (True, False)}
            engine.override("holder", "tcp")
            assert run("b") == "tcp"
            assert self.marks(engine) == {"shm": (False, False), "tcp": (True, True)}
            engine.override("holder", None)
            assert run("c") == "shm"
            assert run("d", transport="tcp") == "tcp"
            with pytest.raises(ValueError, match="this node has shm, tcp"):
                engine.override("holder", "rdma")
        finally:
            engine.close()

    def marks(self, engine: TransferEngine) -> dict[str, tuple[bool, bool]]:
        """By transport: chosen, set by hand."""
        return {link.transport: (link.chosen, link.override) for link in engine.stats().links}

    def test_an_unknown_peer_is_refused_at_once(self, make_node: Callable[..., Node]) -> None:
        node = make_node()
        with pytest.raises(ValueError, match="no address of it is known"):
            node.run(0, peer="nobody")

    def test_names_of_peers_come_and_go(self, make_node: Callable[..., Node]) -> None:
        """Each node that was replaced has left a name behind: that must not shut the door."""
        node = make_node("memory")
        for number in range(MAX_PEERS + 5):
            node.engine.set_peer(PeerAddress(f"old-{number}", {"tcp": "127.0.0.1:1"}))
        node.engine.set_peer(node.peer)
        node.rig.fill(1)
        assert not node.run(1).missing


class TestStats:
    def test_pairs_stages_and_slowest(self, make_node: Callable[..., Node]) -> None:
        node = make_node()
        node.rig.fill(*range(6))
        for _ in range(12):
            node.run(*range(6), priority=Priority.BATCH)
        node.run(0, 7)
        batch, first = node.engine.stats().pairs
        assert (batch.source, batch.destination, batch.transport) == ("holder", "reader", "memory")
        assert (batch.priority, first.priority) == ("batch", "first_token")
        assert batch.transfers_total == 12
        assert batch.pieces_total == 72
        assert batch.bytes_total == 72 * BLOCK
        assert first.missing_by_cause == {"stale": 1}
        assert [stage.stage for stage in batch.seconds] == [
            "queue_wait", "setup", "wire", "verify", "total",
        ]  # fmt: skip
        assert all(sum(stage.counts) == 12 for stage in batch.seconds)
        assert len(batch.slowest) == 8
        totals = [slow.timing.total for slow in batch.slowest]
        assert totals == sorted(totals, reverse=True)

    def test_a_cap_is_set_by_share_of_what_was_measured(
        self, make_node: Callable[..., Node]
    ) -> None:
        node = make_node("tcp")
        node.rig.fill(*range(12))
        node.run(*range(12))
        link = LinkId("holder", "tcp")
        rate = node.engine.set_cap(link)
        assert rate == pytest.approx(
            0.4 * node.engine.costs.cost(link, time.monotonic()).bytes_per_second, rel=0.05
        )
        node.engine.step(0.0)
        assert node.engine.stats().links[0].cap_bytes_per_second == rate
        assert node.run(*range(12)).state == "completed"
