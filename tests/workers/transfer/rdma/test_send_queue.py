"""The counted send queue, over a device that can be told to take less."""

from __future__ import annotations

import ctypes

import pytest

from workers.transfer.rdma.send_queue import (
    CHAIN,
    INLINE,
    OP_READ,
    OP_SEND,
    SGE,
    SIGNALED,
    WR,
    WR_BYTES,
    Buffer,
    SendQueue,
)

KIB = 1024


class FakeDevice:
    """Reads chains out of memory as a device does, and completes what is signalled."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.taken: list[tuple[int, ...]] = []  # wr_id, num_sge, opcode, flags, remote, rkey
        self.buffers: list[list[tuple[int, ...]]] = []
        self.deepest = 0

    def post(self, chain: int, count: int) -> int:
        number = 0
        while chain and number < self.room:
            request = ctypes.string_at(chain, WR_BYTES)
            wr_id, following, sges, num_sge, opcode, flags, _, remote, rkey = WR.unpack_from(
                request
            )
            raw = ctypes.string_at(sges, num_sge * SGE.size) if num_sge else b""
            self.buffers.append(list(SGE.iter_unpack(raw)))
            self.taken.append((wr_id, num_sge, opcode, flags, remote, rkey))
            chain, number = following, number + 1
        assert number == min(count, self.room)
        self.room -= number
        return number

    def signalled(self) -> list[int]:
        return [entry[0] for entry in self.taken if entry[3] & SIGNALED]


def read(queue: SendQueue[int], token: int, size: int = 4 * KIB) -> None:
    queue.stage(token, OP_READ, (Buffer(1000 + token, size, 7),), remote=50 + token, rkey=9)


def test_a_chain_is_what_was_staged() -> None:
    device = FakeDevice()
    queue: SendQueue[int] = SendQueue(64, 2, device)
    read(queue, 1)
    queue.stage(2, OP_SEND, (Buffer(11, 22, 0), Buffer(33, 44, 5)), flags=INLINE)
    assert queue.submit() == []
    assert device.taken == [(1, 1, OP_READ, 0, 51, 9), (2, 2, OP_SEND, INLINE | SIGNALED, 0, 0)]
    assert device.buffers == [[(1001, 4096, 7)], [(11, 22, 0), (33, 44, 5)]]
    assert queue.complete(2, ok=True) == ([1, 2], None)
    assert (queue.outstanding, queue.outstanding_bytes) == (0, 0)


def test_signals_come_often_enough() -> None:
    device = FakeDevice()
    queue: SendQueue[int] = SendQueue(256, 2, device)
    for token in range(40):
        read(queue, token)
    queue.submit()
    assert device.signalled() == [CHAIN, 2 * CHAIN, 40]
    for token in range(3):
        read(queue, token, size=1 << 20)
    queue.submit()
    assert device.signalled()[3:] == [41, 42, 43], "large ones each"


def test_slots_are_counted_until_their_completion_is_read() -> None:
    device = FakeDevice()
    queue: SendQueue[int] = SendQueue(8, 1, device)
    for token in range(queue.room):
        read(queue, token)
    queue.submit()
    assert queue.room == 0
    assert queue.complete(3, ok=True) == ([0, 1, 2], None)
    assert queue.room == 3


def test_c13_100000_requests_through_a_queue_of_256() -> None:
    device = FakeDevice()
    queue: SendQueue[int] = SendQueue(256, 1, device)
    size = len(queue._memory)
    done: list[int] = []
    token = 0
    while len(done) < 100_000:
        while queue.room and token < 100_000:
            read(queue, token)
            token += 1
        assert queue.submit() == []
        assert queue.outstanding <= 255
        done += queue.complete(device.taken[-1][0], ok=True)[0]
        device.taken.clear()
        device.buffers.clear()
    assert done == list(range(100_000))
    assert len(queue._memory) == size, "no memory beyond the ring"


def test_c15_a_post_cut_short_is_resumed_where_it_stopped() -> None:
    device = FakeDevice(room=5)
    queue: SendQueue[str] = SendQueue(64, 1, device)
    for name in "abcdefgh":
        queue.stage(name, OP_READ, (Buffer(ord(name), 1, 0),))
    assert queue.submit() == ["f", "g", "h"]
    assert queue.outstanding == 5
    assert not queue.settle("marker"), "no room for the marker either"
    device.room = 100
    assert queue.settle("marker"), "now the five will be heard of"
    for name in "fgh":
        queue.stage(name, OP_READ, (Buffer(ord(name), 1, 0),))
    assert queue.submit() == []
    posted = [chr(buffers[0][0]) for buffers in device.buffers if buffers]
    assert posted == list("abcdefgh"), "none twice, none left out"
    ids = [entry[0] for entry in device.taken]
    assert ids == list(range(1, 10))
    done, failed = queue.complete(9, ok=True)
    assert done == [*"abcde", "marker", *"fgh"]
    assert failed is None


def test_nothing_is_owed_when_the_last_one_taken_was_signalled() -> None:
    device = FakeDevice(room=CHAIN)
    queue: SendQueue[int] = SendQueue(64, 1, device)
    for token in range(20):
        read(queue, token)
    assert queue.submit() == [16, 17, 18, 19]
    assert queue.settle(-1)
    assert len(device.taken) == CHAIN


def test_requests_before_a_failed_one_are_done() -> None:
    queue: SendQueue[int] = SendQueue(64, 1, FakeDevice())
    for token in range(10):
        read(queue, token)
    queue.submit()
    assert queue.complete(4, ok=False) == ([0, 1, 2], 3)
    assert queue.complete(5, ok=False) == ([], 4)
    assert queue.complete(4, ok=True) == ([], None), "told twice"
    assert queue.drop() == [5, 6, 7, 8, 9]
    assert (queue.outstanding, queue.outstanding_bytes, queue.room) == (0, 0, 63)


@pytest.mark.parametrize("slots", [2, 3, 7, 64])
def test_the_ring_wraps(slots: int) -> None:
    device = FakeDevice()
    queue: SendQueue[int] = SendQueue(slots, 1, device)
    for token in range(200):
        read(queue, token)
        assert queue.submit() == []
        assert device.buffers[-1] == [(1000 + token, 4096, 7)]
        if not queue.room:
            queue.complete(device.taken[-1][0], ok=True)
    assert len(device.taken) == 200
