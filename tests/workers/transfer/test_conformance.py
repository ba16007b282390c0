"""What every transport promises (workers/transfer/base.py). A new one joins by a branch in `Rig`."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest

from workers.core.transfer_types import Cause, Direction
from workers.pool.arena import checksum_of

BLOCK = 256 * 1024 - 64
Rig = Any


class TestReads:
    def test_it_opens_and_names_depth_and_incarnation(self, rig: Rig) -> None:
        endpoint = rig.connect(rig.serve(), incarnation=77)
        report = rig.wait(endpoint, lambda seen: seen.opened is not None)
        assert report.opened.depth >= 16
        assert report.opened.incarnation == 77

    def test_a_whole_block_comes_verified(self, rig: Rig, op: Any) -> None:
        data = rig.fill(2)[2]
        done = rig.finish(rig.open(), [op(1, 2)])
        assert done[1].cause is None
        assert done[1].checksum == checksum_of(data)
        assert rig.local(2) == data
        assert rig.reader.slab.read_header(2) is None, "the header is the engine's to write"

    def test_a_range_comes_verified_and_touches_nothing_else(self, rig: Rig, op: Any) -> None:
        data = rig.fill(2)[2]
        done = rig.finish(rig.open(), [op(1, 2, offset=1000, length=5000)])
        assert done[1].cause is None
        assert done[1].checksum == checksum_of(data)
        expected = bytes(1000) + data[1000:6000] + bytes(BLOCK - 6000)
        assert rig.local(2) == expected

    def test_many_ops_end_once_each(self, rig: Rig, op: Any) -> None:
        blocks = rig.fill(*range(8))
        step = BLOCK // 32 + 1
        ops = [
            op(index * 100 + part, index, offset=part * step,
               length=min(step, BLOCK - part * step))
            for index in range(8)
            for part in range(32)
        ]  # fmt: skip
        done = rig.finish(rig.open(), ops)
        assert {completion.cause for completion in done.values()} == {None}
        assert {index: rig.local(index) for index in range(8)} == blocks

    @pytest.mark.parametrize(
        ("changes", "cause"),
        [
            ({"remote_generation": 4}, Cause.STALE),
            ({"remote_slot": 7}, Cause.STALE),  # never written
            ({"remote_slot": 3}, Cause.STALE),  # another key
            ({"remote_slot": 10_000}, Cause.BOUNDS),
            ({"local_slot": 10_000}, Cause.BOUNDS),
            ({"block_length": BLOCK - 1}, Cause.BOUNDS),
            ({"block_length": BLOCK + 10_000}, Cause.BOUNDS),
        ],
    )
    def test_what_is_not_there_is_an_answer_and_no_failure(
        self, rig: Rig, op: Any, changes: dict[str, int], cause: Cause
    ) -> None:
        blocks = rig.fill(2, 3)
        endpoint = rig.open()
        done = rig.finish(endpoint, [op(1, 2, **changes), op(2, 3)])
        assert done[1].cause is cause
        assert done[2].cause is None
        assert rig.local(3) == blocks[3]
        assert rig.local(2) == bytes(BLOCK)

    @pytest.mark.parametrize("part", [{}, {"offset": 64, "length": 4096}])
    def test_a_block_that_rotted_at_the_holder_is_corrupt(
        self, rig: Rig, op: Any, part: dict[str, int]
    ) -> None:
        rig.fill(2)
        rig.holder.slab.payload(2)[BLOCK - 1] ^= 1
        done = rig.finish(rig.open(), [op(1, 2, **part)])
        assert done[1].cause is Cause.CORRUPT

    def test_a_slot_that_is_rewritten_meanwhile_never_passes_for_the_old_block(
        self, rig: Rig, op: Any
    ) -> None:
        data = rig.fill(2)[2]
        endpoint = rig.open()
        stop = threading.Event()
        other = os.urandom(BLOCK)

        def rewrite() -> None:
            while not stop.is_set():
                rig.holder.slab.write_block(2, 4, b"x" * 16, other)
                rig.holder.slab.write_block(2, 3, (2).to_bytes(16, "little"), data)

        thread = threading.Thread(target=rewrite)
        thread.start()
        try:
            for number in range(60):
                done = rig.finish(endpoint, [op(number, 2)])
                cause = done[number].cause
                assert cause in (None, Cause.STALE, Cause.CORRUPT)
                assert cause is not None or rig.local(2) == data
        finally:
            stop.set()
            thread.join()


class TestEnds:
    def test_cancelled_ops_end_once_and_write_no_more(self, rig: Rig, op: Any) -> None:
        rig.fill(*range(20))
        endpoint = rig.open()
        ops = [op(index, index) for index in range(20)]
        taken = endpoint.post(ops)
        assert taken
        endpoint.cancel([op.id for op in ops[:taken]])
        report = rig.wait(endpoint, lambda seen: len(seen.completions) >= taken)
        assert sorted(c.op_id for c in report.completions) == list(range(taken))
        before = [rig.local(index) for index in range(20)]
        assert endpoint.post([op(100, 21)]) == 1  # what was under way is over when this is
        rig.wait(endpoint, lambda seen: bool(seen.completions))
        assert [rig.local(index) for index in range(20)] == before

    def test_the_path_works_on_after_a_cancel(self, rig: Rig, op: Any) -> None:
        blocks = rig.fill(*range(10))
        endpoint = rig.open()
        endpoint.post([op(index, index) for index in range(5)])
        endpoint.cancel([1, 3])
        rig.wait(endpoint, lambda seen: len(seen.completions) >= 5)
        done = rig.finish(endpoint, [op(50 + index, index) for index in range(10)])
        assert {completion.cause for completion in done.values()} == {None}
        assert {index: rig.local(index) for index in range(10)} == blocks

    def test_close_is_final_and_may_be_repeated(self, rig: Rig, op: Any) -> None:
        rig.fill(*range(20))
        endpoint = rig.open()
        endpoint.post([op(index, index) for index in range(20)])
        endpoint.close()
        before = [rig.local(index) for index in range(20)]
        endpoint.close()
        assert endpoint.post([op(50, 1)]) == 0
        report = endpoint.poll(0.0)
        assert not report.completions or report.down is None
        assert [rig.local(index) for index in range(20)] == before

    def test_a_peer_that_vanishes_takes_the_endpoint_down(self, rig: Rig, op: Any) -> None:
        rig.fill(1)
        endpoint = rig.open()
        for server in rig.servers:
            server.close()
        rig.fabric.nodes["holder"].faults.break_after = 0
        (rig.folder / "holder.slab").unlink()
        with contextlib.suppress(OSError):
            endpoint.post([op(1, 1)])
        report = rig.wait(endpoint, lambda seen: seen.down is not None)
        assert report.down.cause in (Cause.CONNECTION, Cause.INCARNATION)
        assert report.completions == []


class TestHandshake:
    def test_another_incarnation_is_not_read(self, rig: Rig) -> None:
        endpoint = rig.connect(rig.serve(), incarnation=78)
        report = rig.wait(endpoint, lambda seen: seen.down is not None)
        assert report.down.cause is Cause.INCARNATION
        assert report.down.incarnation == 77
        assert "77" in report.down.text
        assert "78" in report.down.text
        assert report.opened is None

    def test_another_secret_opens_nothing(self, wired: Rig) -> None:
        rig = wired
        endpoint = rig.connect(rig.serve(), secret=b"t" * 32)
        report = rig.wait(endpoint, lambda seen: seen.down is not None)
        assert report.down.cause is Cause.REFUSED
        assert "transfer-secret" in report.down.text

    @pytest.mark.parametrize(
        ("changes", "values"),
        [
            ({"slot_bytes": 8192}, ("262144", "8192")),
            ({"hash_vector": b"other"}, (b"other".hex(),)),
            ({"slot_format": 2}, ("slot_format is ", "1 at", "2 at")),
            ({"slot_bytes": 0}, ("has no slots until",)),
        ],
    )
    def test_another_layout_is_refused_with_both_values(
        self, rig: Rig, changes: dict[str, object], values: tuple[str, ...]
    ) -> None:
        endpoint = rig.connect(rig.serve(**changes))
        report = rig.wait(endpoint, lambda seen: seen.down is not None)
        assert report.down.cause is Cause.REFUSED
        for value in values:
            assert value in report.down.text

    def test_nobody_at_the_address(self, rig: Rig) -> None:
        peer = rig.serve()
        for server in rig.servers:
            server.close()
        rig.fabric.nodes.clear()
        (rig.folder / "holder.slab").unlink()
        report = rig.wait(rig.connect(peer), lambda seen: seen.down is not None)
        assert report.down.cause is Cause.CONNECTION


class TestPushes:
    @pytest.fixture
    def rig(self, wired: Rig) -> Rig:
        """Shared memory pulls only."""
        return wired

    def test_a_block_lands_in_its_reserved_slot(self, rig: Rig, op: Any) -> None:
        data = os.urandom(BLOCK)
        key = (4).to_bytes(16, "little")
        rig.reader.slab.write_block(4, 9, key, data)
        rig.push.reserve(6, 3, key, BLOCK)
        done = rig.finish(rig.open(), [op(1, 4, Direction.PUSH, remote_slot=6)])
        assert done[1].cause is None
        assert rig.holder.slab.read_block(6, 3, key) == data
        assert rig.landed == [(6, 3, checksum_of(data))]
        again = rig.finish(rig.endpoints[-1], [op(2, 4, Direction.PUSH, remote_slot=6)])
        assert again[2].cause is Cause.REFUSED, "a reservation is good for one block"

    def test_a_slot_that_is_not_reserved_is_left_alone(self, rig: Rig, op: Any) -> None:
        held = rig.fill(6)[6]
        rig.reader.slab.write_block(4, 9, (4).to_bytes(16, "little"), os.urandom(BLOCK))
        rig.push.reserve(7, 3, b"another key 1234", BLOCK)
        ops = [
            op(1, 4, Direction.PUSH, remote_slot=6),
            op(2, 4, Direction.PUSH, remote_slot=7),
            op(3, 4, Direction.PUSH, remote_slot=10_000),
        ]
        done = rig.finish(rig.open(), ops)
        causes = [done[number].cause for number in (1, 2, 3)]
        assert causes[:2] == [Cause.REFUSED, Cause.REFUSED]
        assert causes[2] in (Cause.BOUNDS, Cause.REFUSED)
        assert rig.holder.slab.read_block(6, 3, (6).to_bytes(16, "little")) == held

    def test_a_block_that_is_gone_here_is_not_pushed(self, rig: Rig, op: Any) -> None:
        rig.push.reserve(6, 3, (4).to_bytes(16, "little"), BLOCK)
        done = rig.finish(rig.open(), [op(1, 4, Direction.PUSH, remote_slot=6)])
        assert done[1].cause is Cause.STALE
        assert rig.push.withdraw(6), "nobody writes it"

    def test_bytes_that_do_not_match_their_checksum_do_not_land(self, rig: Rig, op: Any) -> None:
        key = (4).to_bytes(16, "little")
        rig.reader.slab.write_block(4, 9, key, os.urandom(BLOCK))
        rig.reader.slab.payload(4)[10] ^= 1
        rig.push.reserve(6, 3, key, BLOCK)
        done = rig.finish(rig.open(), [op(1, 4, Direction.PUSH, remote_slot=6)])
        assert done[1].cause is Cause.CORRUPT
        assert rig.holder.slab.read_header(6) is None
        assert rig.landed == []
        assert rig.push.withdraw(6)
