"""What breaks, and that it ends in bounded time with a cause, and works again afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rdma_nodes import KIB, SECRET, Driver, Node, Nodes, op_of

from workers.core.transfer_types import Cause
from workers.transfer.base import PeerAddress
from workers.transfer.rdma.control import Mailbox
from workers.transfer.rdma.port import Scratch
from workers.transfer.rdma.queue_pair import ClosedError
from workers.transfer.rdma.send_queue import OP_WRITE, Buffer, SendQueue
from workers.transfer.rdma.server import RdmaServer
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.transport import RdmaEndpoint

BLOCK = 64 * KIB
SUPPORT = Path(__file__).parents[4] / "support"


def endpoint_of(drive: Driver) -> RdmaEndpoint:
    assert isinstance(drive.endpoint, RdmaEndpoint)
    return drive.endpoint


def works(puller: Node, holder: Node | PeerAddress) -> None:
    drive = Driver(puller.connect(holder)).open()
    (ended,) = drive.move([op_of(0, BLOCK, local=40)]).values()
    assert ended.cause is None


def assert_down(drive: Driver, cause: Cause, text: str) -> None:
    assert drive.down is not None
    assert drive.down.cause is cause
    assert text in drive.down.text
    assert endpoint_of(drive).rails == ()


def test_wrong_key(pair: tuple[Node, Node]) -> None:
    puller, holder = pair
    holder.fill(range(64), BLOCK)
    drive = Driver(puller.connect(holder)).open()
    endpoint_of(drive)._rails[0].rkey ^= 0x5A5A
    before = time.monotonic()
    ended = drive.move([op_of(slot, BLOCK) for slot in range(64)])
    assert time.monotonic() - before < 5
    assert_down(drive, Cause.CONNECTION, "REM_ACCESS_ERR")
    assert all(completion.cause is not None for completion in ended.values())
    assert puller.rdma.queue_pairs == 0
    works(puller, holder)


def test_peers_memory_is_deregistered_under_way(nodes: Nodes) -> None:
    puller, holder = nodes.pair()
    holder.fill(range(64), BLOCK)
    drive = Driver(puller.connect(holder)).open()
    drive.move([op_of(0, BLOCK)])
    holder.rdma.ports[0]._objects.pop().close()
    drive.move([op_of(1, BLOCK)])
    assert_down(drive, Cause.CONNECTION, "not registered by that key any more")


def test_unequal_mtu_is_settled_and_said(nodes: Nodes) -> None:
    puller = nodes.make("puller")
    holder = nodes.make("holder", serve=True, settings=RdmaSettings(devices=("rxe0",), mtu=1024))
    holder.fill(range(8), BLOCK)
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move([op_of(slot, BLOCK) for slot in range(8)])
    assert all(completion.cause is None for completion in ended.values())
    (note,) = endpoint_of(drive).notes
    assert "active MTU is 4096 at puller and 1024 at holder: 1024 is used" in note


@pytest.mark.parametrize("size", [BLOCK, 512], ids=["large", "small"])
def test_unequal_mtu_unsettled_breaks_large_messages_only(nodes: Nodes, size: int) -> None:
    """Why it is settled: with small transfers alone nobody would notice."""
    node = nodes.make("n")
    port, region = node.rdma.ports[0], node.rdma.regions[0]
    pairs = [port.queue_pair(port.queues, remote_read=True, remote_write=True) for _ in range(2)]
    for mine, theirs, mtu in ((0, 1, 4096), (1, 0, 1024)):
        pairs[mine].connect(pairs[theirs].address(7), psn=7, mtu=mtu, reads=4)
    statuses = write_once(node, pairs, size, region.rkey)
    assert statuses == ([9] if size > 1024 else [0])
    for made in pairs:
        made.close()


def write_once(node: Node, pairs: list, size: int, rkey: int) -> list[int]:  # type: ignore[type-arg]
    region = node.rdma.regions[0]
    queue: SendQueue[int] = SendQueue(16, 2, pairs[0])
    queue.stage(
        1,
        OP_WRITE,
        (Buffer(region.address, size, region.lkey),),
        remote=region.address + 2 * BLOCK,
        rkey=rkey,
    )
    assert queue.submit() == []
    return statuses_of(pairs[0], 1)


def statuses_of(queue_pair: object, count: int, seconds: float = 10) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += [done.status for done in queue_pair.poll()]  # type: ignore[attr-defined]
    return found


class TestReceiverNotReady:
    """Messages without a receive posted; both kinds of queue pairs have the same retries."""

    def send(self, nodes: Nodes, late_by: float | None) -> tuple[list[int], float, int]:
        node = nodes.make("n")
        port = node.rdma.ports[0]
        pairs = [
            port.queue_pair(port.queues, remote_read=True, remote_write=False) for _ in range(2)
        ]
        for mine, theirs in ((0, 1), (1, 0)):
            pairs[mine].connect(pairs[theirs].address(7), psn=7, mtu=4096, reads=4)
        scratch = Scratch(2 * Mailbox.num_bytes())
        lkey = scratch.register(port)
        boxes = []
        for index, made in enumerate(pairs):
            queue = SendQueue(64, 2, made)
            boxes.append((queue, Mailbox(made, queue, scratch, lkey, index * Mailbox.num_bytes())))
        before = node.rdma.stats()[0].receiver_not_ready_total
        boxes[0][1].put(b"hello")
        boxes[0][1].pump()
        started = time.monotonic()
        boxes[0][0].submit()
        if late_by is not None:
            time.sleep(late_by)
            boxes[1][1].post_receives(port.verbs.wr)
        statuses = statuses_of(pairs[0], 1)
        seconds = time.monotonic() - started
        if late_by is not None:
            (done,) = pairs[1].poll()
            assert boxes[1][1].receive(done) == b"hello"
        waits = node.rdma.stats()[0].receiver_not_ready_total - before
        for made in pairs:
            made.close()
        for _, box in boxes:
            box.close()
        scratch.close()
        return statuses, seconds, waits

    def test_c19_a_receiver_late_by_50_ms_is_waited_for_and_counted(self, nodes: Nodes) -> None:
        statuses, _, waits = self.send(nodes, 0.05)
        assert statuses == [0]
        assert waits > 0

    def test_c19_a_transfer_whose_holder_posts_its_buffers_late_succeeds(
        self, pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A range asks the holder for a checksum: that message finds no receive at first."""
        puller, holder = pair
        data = holder.fill([0], BLOCK)
        post = Mailbox.post_receives
        timers: list[threading.Timer] = []

        def late(mailbox: Mailbox, wr: object) -> None:
            if not threading.current_thread().name.startswith("rdma-serve"):
                post(mailbox, wr)
                return
            timers.append(threading.Timer(0.05, post, (mailbox, wr)))
            timers[-1].start()

        monkeypatch.setattr(Mailbox, "post_receives", late)
        drive = Driver(puller.connect(holder)).open()
        (ended,) = drive.move([op_of(0, BLOCK, offset=8, size=1000)]).values()
        assert ended.cause is None
        assert puller.memory.range(0, 8, 1000) == data[0][8:1008]
        assert len(timers) == 1
        assert puller.rdma.stats()[0].receiver_not_ready_total > 0
        timers[0].join()

    def test_one_that_never_comes_is_given_up(self, nodes: Nodes) -> None:
        statuses, seconds, _ = self.send(nodes, None)
        assert statuses == [13]
        assert seconds < 3


def test_retries_end(nodes: Nodes) -> None:
    """A queue pair that nobody has."""
    node = nodes.make("n")
    port, region = node.rdma.ports[0], node.rdma.regions[0]
    lone = port.queue_pair(port.queues, remote_read=False, remote_write=False)
    address = lone.address(7)
    nobody = type(address)(address.gid, address.lid, address.qp_num + 999, 7)
    lone.connect(nobody, psn=7, mtu=4096, reads=4)
    started = time.monotonic()
    assert write_once(node, [lone], 64, region.rkey) == [12]
    assert time.monotonic() - started < 5
    lone.close()


def test_the_peers_process_is_killed_under_way(nodes: Nodes) -> None:
    puller = nodes.make("puller")
    process, address = start_holder()
    try:
        drive = Driver(puller.connect(address)).open()
        ops = [op_of(slot % 64, BLOCK, local=slot * 7 % 64) for slot in range(512)]
        left = list(ops)
        while len(drive.completions) < 100:
            del left[: drive.endpoint.post(left)]
            drive.poll()
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        drive.until(lambda: drive.down is not None)
        assert time.monotonic() - started < 5
        assert drive.down is not None
        assert drive.down.cause in (Cause.CONNECTION, Cause.TIMEOUT)
        assert all(c.cause is None for c in drive.completions.values())
        assert puller.rdma.queue_pairs == 0
    finally:
        process.kill()
        process.communicate()
    holder = nodes.make("holder", serve=True)
    holder.fill(range(64), BLOCK)
    works(puller, holder)


def start_holder() -> tuple[subprocess.Popen[str], PeerAddress]:
    """A process that holds 64 blocks of 64 KiB."""
    code = f"""
import json, sys, time
sys.path.insert(0, {str(SUPPORT)!r})
from rdma_nodes import Nodes
holder = Nodes().make("holder", serve=True)
holder.fill(range(64), {BLOCK})
print(json.dumps(holder.server.address), flush=True)
time.sleep(100)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[5],
    )
    assert process.stdout is not None
    host, port = json.loads(process.stdout.readline())
    return process, PeerAddress("holder", {"rdma": f"{host}:{port}"})


def test_c09_a_peer_that_started_anew_is_not_read_by_old_keys(nodes: Nodes) -> None:
    puller = nodes.make("puller")
    first = nodes.make("holder", serve=True, incarnation=1)
    first.fill([0], BLOCK)
    old = Driver(puller.connect(first)).open()
    assert old.incarnation == 1
    old.move([op_of(0, BLOCK)])
    assert first.server is not None
    port = first.server.address[1]
    first.server.close()
    second = nodes.make("holder", serve=True, incarnation=2, port=port)
    second.fill([0], BLOCK, generation=2)
    old.until(lambda: old.down is not None)

    stale = Driver(puller.connect(second, 1))
    stale.until(lambda: stale.down is not None)
    assert stale.down is not None
    assert (stale.down.cause, stale.down.incarnation) == (Cause.INCARNATION, 2)
    assert not stale.opened

    anew = Driver(puller.connect(second, 2)).open()
    assert anew.incarnation == 2
    (ended,) = anew.move([op_of(0, BLOCK, generation=2)]).values()
    assert ended.cause is None


def test_c07_nothing_is_left_of_failed_connections(nodes: Nodes) -> None:
    puller, holder = nodes.pair()
    holder.fill([0], BLOCK)
    assert holder.server is not None
    address = holder.address
    for _ in range(30):
        drive = Driver(puller.connect(address)).open()
        endpoint_of(drive)._rails[0].rkey ^= 1
        drive.move([op_of(0, BLOCK)])
        assert drive.down is not None
    assert puller.rdma.queue_pairs == 0
    deadline = time.monotonic() + 10
    while (
        holder.rdma.queue_pairs or holder.server.num_connections
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (holder.rdma.queue_pairs, holder.server.num_connections) == (0, 0)
    holder.server.close()
    for _ in range(200):
        drive = Driver(puller.connect(address))
        drive.until(lambda drive=drive: drive.down is not None)  # type: ignore[misc]
        assert drive.down is not None
        assert drive.down.cause is Cause.CONNECTION
    assert puller.rdma.queue_pairs == 0
    works_again = nodes.make("holder2", serve=True)
    works_again.fill([0], BLOCK)
    works(puller, works_again)


def test_close_stops_writing(pair: tuple[Node, Node]) -> None:
    puller, holder = pair
    holder.fill(range(64), BLOCK)
    drive = Driver(puller.connect(holder)).open()
    assert drive.endpoint.post([op_of(slot, BLOCK) for slot in range(64)]) == 64
    drive.endpoint.close()
    slab = puller.memory.slab
    before = [bytes(slab.payload(slot)) for slot in range(64)]
    time.sleep(0.3)
    assert [bytes(slab.payload(slot)) for slot in range(64)] == before
    drive.endpoint.close()
    assert drive.endpoint.post([op_of(0, BLOCK)]) == 0
    works(puller, holder)


def test_the_server_leaves(pair: tuple[Node, Node]) -> None:
    puller, holder = pair
    holder.fill([0], BLOCK)
    drive = Driver(puller.connect(holder)).open()
    assert holder.server is not None
    holder.server.close()
    drive.until(lambda: drive.down is not None)
    assert_down(drive, Cause.CONNECTION, "closed the connection")


def test_another_secret_is_refused(nodes: Nodes) -> None:
    puller = nodes.make("puller")
    holder = nodes.make("holder")
    holder.server = RdmaServer(holder.rdma, "holder", bytes(reversed(SECRET)))
    drive = Driver(puller.connect(holder))
    drive.until(lambda: drive.down is not None)
    assert drive.down is not None
    assert drive.down.cause is Cause.REFUSED
    assert "cluster secret" in drive.down.text
    assert holder.rdma.queue_pairs == 0, "none is made before the peer has proved itself"


def test_closed_queue_pairs_are_guarded(nodes: Nodes) -> None:
    """pyverbs would end the process."""
    node = nodes.make("n")
    port = node.rdma.ports[0]
    made = port.queue_pair(port.queues, remote_read=False, remote_write=False)
    made.close()
    made.close()
    for call in (made.poll, made.arm, made.fail, made.take_events):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        made.post(0, 1)


def test_c06_locked_memory_is_looked_at_before_registration(nodes: Nodes) -> None:
    code = f"""
import os, resource, sys
sys.path.insert(0, {str(SUPPORT)!r})
from workers.core.errors import ConfigError
from rdma_nodes import Nodes
import workers.transfer.rdma.verbs as verbs
verbs.load()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
os.setuid(65534)
try:
    Nodes().make("n", num_slots=1024)
except ConfigError as error:
    print(error)
"""
    reply = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[5],
    )  # fmt: skip
    assert "pins 68 MiB, the locked-memory limit is 8 MiB" in reply.stdout, (
        reply.stdout + reply.stderr
    )
    assert "ulimit -l unlimited" in reply.stdout
