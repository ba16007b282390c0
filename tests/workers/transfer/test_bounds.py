"""A bad link costs bounded bytes, a long one little time; and what is set anew acts at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workers.core.transfer_types import (
    CapRule,
    LinkId,
    Piece,
    TransferLimits,
    TransferRequest,
    TransferResult,
)
from workers.transfer.base import PeerAddress
from workers.transfer.engine import TransferEngine
from workers.transfer.tcp import TcpTransport

BLOCK = 256 * 1024 - 64
SECONDS = 30.0
Rig = Any


class Reader:
    """An engine that pulls blocks of the rig's holder."""

    def __init__(self, rig: Rig, limits: TransferLimits) -> None:
        self.rig = rig
        self.transport = rig.transport()
        self.engine = TransferEngine("reader", rig.reader, [self.transport], limits=limits)
        peer: PeerAddress = rig.serve()
        self.engine.set_peer(peer)
        self._number = 0

    def run(self, num_blocks: int) -> TransferResult:
        self._number += 1
        pieces = tuple(
            Piece(i, 3, i, 9, i.to_bytes(16, "little"), BLOCK) for i in range(num_blocks)
        )
        deadline = time.monotonic() + SECONDS
        return self.engine.run(TransferRequest(f"t{self._number}", "holder", pieces, deadline))


@pytest.fixture
def make_reader(make_rig: Callable[[str], Rig]) -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(name: str, **limits: Any) -> Reader:
        made.append(Reader(make_rig(name), TransferLimits(**limits)))
        return made[-1]

    yield make
    for reader in made:
        reader.engine.close()


@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_r25_what_is_sent_again_stays_under_its_cap_however_bad_the_link(
    make_reader: Callable[..., Reader], delay: float
) -> None:
    floor, share = 4 * BLOCK, 0.1
    reader = make_reader(
        "memory", retry_floor_bytes=floor, retry_share=share, backoff_seconds=0.001,
        max_op_backoff_seconds=0.002, max_attempts=50,
    )  # fmt: skip
    blocks = reader.rig.fill(*range(20))
    node = reader.rig.fabric.nodes["holder"]
    node.faults.corrupt, node.faults.delay_seconds = 0.5, delay
    began = time.monotonic()
    asked = arrived = 0
    for _ in range(8):
        for index in range(20):
            reader.rig.reader.slab.begin_write(index)
        result = reader.run(20)
        asked, arrived = asked + 20, arrived + 20 - len(result.missing)
        for index, data in blocks.items():
            held = reader.rig.reader.slab.read_block(index, 9, index.to_bytes(16, "little"))
            assert held == (None if index in result.missing else data)
    regained = floor * (time.monotonic() - began) / 60
    resent = (len(node.posted) - asked) * BLOCK
    (link,) = reader.engine.stats().links
    assert resent == link.resent_bytes_total
    assert 0 < resent <= floor + share * arrived * BLOCK + regained
    assert link.retries_refused_total > 0, "the cap was felt"


def test_a_delay_of_20_ms_is_paid_once_not_for_each_block(
    make_reader: Callable[..., Reader],
) -> None:
    reader = make_reader("memory")
    reader.rig.fill(*range(20))
    reader.rig.fabric.nodes["holder"].faults.delay_seconds = 0.02
    wires = [reader.run(20).timing.wire for _ in range(5)]
    assert min(wires) < 0.5 * 20 * 0.02


def test_parallelism_grows_while_the_link_is_open(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader("tcp")
    reader.rig.fill(*range(20))
    transport = reader.transport
    assert isinstance(transport, TcpTransport)
    transport.parallelism = 1
    assert not reader.run(20).missing
    (server,) = reader.rig.servers
    assert server.num_connections == 1
    transport.parallelism = 3
    deadline = time.monotonic() + SECONDS
    while server.num_connections < 3:
        assert not reader.run(20).missing
        assert time.monotonic() < deadline
    transport.parallelism = 1
    assert not reader.run(20).missing, "the others are left alone"


def test_r23_a_cap_by_share_is_of_what_the_link_has_shown(
    make_reader: Callable[..., Reader],
) -> None:
    reader = make_reader("tcp")
    reader.rig.fill(*range(20))
    reader.engine.configure(TransferLimits(), CapRule(share=0.4), {})
    assert not reader.run(20).missing
    (link,) = reader.engine.stats().links
    assert link.best_bytes_per_second is not None
    assert link.cap_bytes_per_second == pytest.approx(0.4 * link.best_bytes_per_second, rel=0.03)
    for _ in range(5):  # held back by it, it shows no less
        assert not reader.run(20).missing
    (after,) = reader.engine.stats().links
    assert after.cap_bytes_per_second >= 0.97 * link.cap_bytes_per_second
    reader.engine.set_cap(LinkId("holder", "tcp"), 123e6)
    reader.run(1)
    assert reader.engine.stats().links[0].cap_bytes_per_second == 123e6, "set for this link alone"
