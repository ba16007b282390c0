"""The engine's decisions, one at a time, with a shell that writes down what it is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from workers.core.transfer_integrity import check_integrity
from workers.core.transfer_state import Transfers
from workers.core.transfer_types import (
    Alarm,
    Arrived,
    CancelOps,
    CancelRequested,
    CapRule,
    CapSet,
    Cause,
    Close,
    Command,
    Completed,
    Completion,
    Direction,
    Down,
    Event,
    Finish,
    LimitsSet,
    LinkId,
    Op,
    Open,
    Opened,
    Piece,
    Post,
    Posted,
    Priority,
    Progressed,
    Seal,
    Sealed,
    Submitted,
    Ticked,
    TransferLimits,
    TransferRequest,
    TransferResult,
)

BLOCK = 1 << 20
LINK = LinkId("b", "tcp")
T = TypeVar("T")


class Shell:
    """Takes `take` ops of a post (None: all) and answers nothing by itself."""

    def __init__(self, **limits: Any) -> None:
        self.now = 50.0
        self.transfers = Transfers(TransferLimits(**limits), random.Random(0).random)
        self.commands: list[Command] = []
        self.flying: dict[int, Op] = {}
        self.posted: list[Op] = []
        self.take: int | None = None
        self.peak = 0

    def feed(self, event: Event) -> list[Command]:
        """Everything that it led to."""
        out: list[Command] = []
        commands = list(self.transfers.handle(event, self.now))
        while commands:
            command = commands.pop(0)
            out.append(command)
            if isinstance(command, Post):
                commands += self.transfers.handle(self._post(command), self.now)
            elif isinstance(command, Close):
                self.flying.clear()
        self.commands += out
        return out

    def _post(self, command: Post) -> Posted:
        taken = len(command.ops) if self.take is None else min(self.take, len(command.ops))
        for op in command.ops[:taken]:
            self.flying[op.id] = op
            self.posted.append(op)
        self.peak = max(self.peak, len(self.flying))
        return Posted(command.link, [op.id for op in command.ops], taken)

    def submit(self, count: int = 1, **changes: Any) -> list[Command]:
        block = changes.pop("block", BLOCK)
        pieces = changes.pop("pieces", None) or tuple(piece(i, block) for i in range(count))
        values = {"transfer_id": "t", "peer": "b", "pieces": pieces, "deadline": self.now + 100}
        return self.feed(Submitted(TransferRequest(**(values | changes)), "tcp"))

    def open(self, depth: int = 1024, incarnation: int = 7) -> list[Command]:
        return self.feed(Opened(LINK, depth, incarnation))

    def complete(self, count: int = 1, cause: Cause | None = None) -> list[Command]:
        """End the oldest ops in flight."""
        ids = list(self.flying)[:count]
        for op_id in ids:
            del self.flying[op_id]
        return self.feed(Completed(LINK, [Completion(op_id, cause, 5) for op_id in ids]))

    def advance(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.feed(Ticked())

    def sleep_until_wake(self) -> list[Command]:
        wake = self.transfers.next_wake(self.now)
        assert wake is not None
        self.now = max(self.now, wake) + 1e-6
        return self.feed(Ticked())

    def all(self, kind: type[T]) -> list[T]:
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def result(self) -> TransferResult:
        (finish,) = self.all(Finish)
        return finish.result


def piece(index: int, block: int = BLOCK, **changes: int) -> Piece:
    return Piece(index, 1, index, 2, index.to_bytes(16, "little"), block, **changes)


@pytest.fixture
def shell() -> Shell:
    return Shell()


@pytest.fixture
def shell_with() -> Callable[..., Shell]:
    return Shell


class TestWhole:
    def test_connects_posts_seals_and_ends(self, shell: Shell) -> None:
        assert shell.submit(3) == [Open(LINK, 0)]
        shell.now += 0.5
        shell.open()
        shell.now += 0.25
        out = shell.complete(3)
        assert [type(command) for command in out] == [Seal, Seal, Seal, Finish]
        assert all(seal.verified and seal.checksum == 5 for seal in shell.all(Seal))
        assert shell.result.state == "completed"
        assert shell.result.num_bytes == 3 * BLOCK
        assert shell.result.timing.setup == pytest.approx(0.5)
        assert shell.result.timing.wire == pytest.approx(0.25)

    def test_a_stale_block_is_missing_at_once_and_the_rest_comes(self, shell: Shell) -> None:
        shell.submit(3)
        shell.open()
        shell.complete(1, Cause.STALE)
        shell.complete(2)
        assert shell.result.missing == {0: Cause.STALE}
        assert shell.result.state == "failed"
        assert shell.result.num_bytes == 2 * BLOCK

    def test_a_push_is_not_sealed_here(self, shell: Shell) -> None:
        shell.submit(1, direction=Direction.PUSH)
        shell.open()
        shell.complete()
        assert shell.all(Seal) == []
        assert shell.result.state == "completed"

    def test_two_transfers_of_one_name_are_refused(self, shell: Shell) -> None:
        shell.submit()
        with pytest.raises(ValueError, match="one of that name"):
            shell.submit()


class TestPacketised:
    def test_a_block_in_parts_is_hashed_before_it_counts(self, shell: Shell) -> None:
        shell.submit(1, piece_bytes=BLOCK // 4)
        shell.open()
        assert [op.length for op in shell.posted] == [BLOCK // 4] * 4
        shell.complete(4)
        (seal,) = shell.all(Seal)
        assert not seal.verified
        assert shell.all(Finish) == []
        shell.feed(Sealed("t", 0, ok=True, verify_seconds=0.5))
        assert shell.result.state == "completed"
        assert shell.result.timing.verify == 0.5

    def test_a_block_that_is_wrong_as_a_whole_comes_again_and_then_is_missing(
        self, shell_with: Callable[..., Shell]
    ) -> None:
        shell = shell_with(max_attempts=2)
        shell.submit(1, piece_bytes=BLOCK // 2)
        shell.open()
        for _ in range(2):
            shell.complete(2)
            shell.feed(Sealed("t", 0, ok=False))
        assert len(shell.posted) == 4
        assert shell.result.missing == {0: Cause.CORRUPT}

    def test_layers_are_told_of_as_they_arrive(self, shell: Shell) -> None:
        layer = BLOCK // 4
        layers = tuple(piece(0, offset=i * layer, length=layer) for i in range(4))
        shell.submit(pieces=layers)
        shell.open()
        shell.complete(2)
        assert [index for told in shell.all(Arrived) for index in told.indices] == [0, 1]
        shell.complete(2)
        shell.feed(Sealed("t", 0, ok=True))
        assert shell.result.num_bytes == BLOCK

    def test_part_of_a_block_is_not_sealed(self, shell: Shell) -> None:
        shell.submit(pieces=(piece(0, offset=0, length=100), piece(0, offset=500, length=100)))
        shell.open()
        shell.complete(2)
        assert shell.all(Seal) == []
        assert shell.result.num_bytes == 200

    def test_half_a_block_serves_nobody(self, shell: Shell) -> None:
        half = BLOCK // 2
        halves = (piece(0, offset=0, length=half), piece(0, offset=half, length=half))
        shell.submit(pieces=halves)
        shell.open()
        shell.complete(1)
        shell.complete(1, Cause.STALE)
        assert shell.result.missing == {0: Cause.STALE, 1: Cause.STALE}
        assert shell.result.num_bytes == 0

    @pytest.mark.parametrize(
        ("pieces", "problem"),
        [
            ((), "no pieces"),
            ((piece(0, offset=10, length=BLOCK),), "no range"),
            ((piece(0), piece(0)), "overlap"),
            ((piece(0, offset=0, length=9), piece(0, offset=8, length=9)), "overlap"),
        ],
    )
    def test_what_makes_no_sense_is_refused_before_a_byte_moves(
        self, shell: Shell, pieces: tuple[Piece, ...], problem: str
    ) -> None:
        request = TransferRequest("t", "b", pieces, shell.now + 9)
        with pytest.raises(ValueError, match=problem):
            shell.feed(Submitted(request, "tcp"))


class TestPriorities:
    def test_the_first_token_goes_first_and_always_finds_room(
        self, shell_with: Callable[..., Shell]
    ) -> None:
        shell = shell_with(window_bytes=8 * BLOCK, refill_bytes=BLOCK)
        shell.submit(20, transfer_id="later", priority=Priority.BATCH)
        shell.open()
        assert len(shell.posted) == 4, "the second class has half of the window"
        shell.submit(4, transfer_id="now")
        assert len(shell.posted) == 8
        assert shell.transfers.jobs["now"].in_flight.keys() == set(list(shell.flying)[4:])

    def test_a_cap_is_kept(self, shell: Shell) -> None:
        shell.submit(50, priority=Priority.FIRST_TOKEN)
        shell.feed(CapSet(LINK, 10 * BLOCK))
        shell.open()
        start = shell.now
        while not shell.all(Finish):
            shell.complete(50)
            if not shell.all(Finish):
                shell.sleep_until_wake()
        assert shell.result.state == "completed"
        assert shell.now - start == pytest.approx(5.0, rel=0.1)


class TestLimits:
    def test_a_smaller_window_leaves_what_flies_and_holds_for_what_comes(
        self, shell_with: Callable[..., Shell]
    ) -> None:
        shell = shell_with(window_bytes=16 * BLOCK, refill_bytes=0)
        shell.submit(40)
        shell.open()
        assert len(shell.flying) == 16
        shell.feed(LimitsSet(TransferLimits(window_bytes=4 * BLOCK, refill_bytes=0)))
        check_integrity(shell.transfers)
        assert len(shell.flying) == 16
        shell.complete(13)
        assert len(shell.flying) == 4
        shell.feed(LimitsSet(TransferLimits(window_bytes=8 * BLOCK, refill_bytes=0)))
        assert len(shell.flying) == 8, "at once"
        while shell.flying:
            shell.complete(8)
            check_integrity(shell.transfers)
        assert shell.result.state == "completed"

    def test_a_rule_caps_links_that_come_later_and_one_of_its_own_goes_before_it(
        self, shell: Shell
    ) -> None:
        shell.feed(LimitsSet(TransferLimits(), CapRule(rate=5.0 * BLOCK)))
        shell.submit(1)
        link = shell.transfers.links[LINK]
        assert link.bucket.rate == 5 * BLOCK
        shell.feed(CapSet(LINK, 2.0 * BLOCK))
        shell.feed(LimitsSet(TransferLimits(), CapRule()))
        assert link.bucket.rate == 2 * BLOCK

    def test_a_share_is_of_the_best_rate_and_pauses_do_not_lower_it(self, shell: Shell) -> None:
        shell.feed(LimitsSet(TransferLimits(), CapRule(share=0.4)))
        shell.submit(20)
        shell.open()
        link = shell.transfers.links[LINK]
        assert not link.bucket.rate, "it has shown nothing yet"
        shell.now += 1.0
        shell.complete(20)
        assert link.best_rate == pytest.approx(20 * BLOCK)
        assert link.bucket.rate == pytest.approx(8 * BLOCK)
        started = shell.now
        shell.submit(40, transfer_id="capped")
        while len(shell.all(Finish)) < 2:
            shell.now += 0.05 * len(shell.flying)  # as quick as it was before
            shell.complete(len(shell.flying))
            if len(shell.all(Finish)) < 2:
                shell.sleep_until_wake()
        assert shell.now - started == pytest.approx(5.0, rel=0.1)
        assert link.bucket.rate == pytest.approx(8 * BLOCK, rel=0.05)


class TestEnds:
    def test_a_deadline_ends_it_when_nothing_is_in_flight_any_more(self, shell: Shell) -> None:
        shell.submit(3, deadline=shell.now + 1)
        shell.open()
        out = shell.advance(1.0)
        assert CancelOps(LINK, list(shell.flying)) in out
        assert shell.all(Finish) == []
        shell.complete(1)
        shell.complete(2, Cause.CANCELLED)
        assert shell.result.missing == {1: Cause.DEADLINE, 2: Cause.DEADLINE}

    def test_what_is_not_given_back_in_time_costs_the_endpoint(self, shell: Shell) -> None:
        shell.submit(2)
        shell.open()
        shell.feed(CancelRequested("t"))
        assert shell.all(Finish) == []
        out = shell.advance(0.6)
        assert Close(LINK) in out
        assert set(shell.result.missing.values()) == {Cause.CANCELLED}

    def test_an_idle_endpoint_is_closed(self, shell: Shell) -> None:
        shell.submit()
        shell.open()
        shell.complete()
        assert Close(LINK) in shell.sleep_until_wake()
        assert shell.transfers.links[LINK].state == "idle"


class TestCases:
    def test_c07_ten_thousand_transfers_to_a_dead_peer_leave_nothing_behind(
        self, shell: Shell
    ) -> None:
        for number in range(10_000):
            shell.submit(transfer_id=f"t{number}", deadline=shell.now + 5)
            if Open(LINK, 0) in shell.commands[-1:]:
                shell.feed(Down(LINK, Cause.CONNECTION, "refused"))
            shell.advance(0.01)
        while shell.transfers.jobs:
            shell.sleep_until_wake()
        assert len(shell.all(Finish)) == 10_000
        assert len(shell.transfers.links) == 1
        opens, closes = len(shell.all(Open)), len(shell.all(Close))
        assert opens < 30, "one try at a time, with pauses that grow"
        assert closes <= opens
        check_integrity(shell.transfers)

    def test_c08_a_peer_that_fails_each_connection_gets_backoff_and_one_alarm(
        self, shell: Shell
    ) -> None:
        gaps, last, number = [], shell.now, 0
        end = shell.now + 600
        while shell.now < end:
            number += 1
            out = shell.submit(transfer_id=f"t{number}", deadline=shell.now + 50)
            if any(isinstance(command, Open) for command in out):
                gaps.append(shell.now - last)
                last = shell.now
                shell.open()
                shell.flying.clear()
                shell.feed(Down(LINK, Cause.CONNECTION, "wrong length"))
            shell.advance(0.1)
        assert [alarm.raised for alarm in shell.all(Alarm)] == [True], "one alarm, no flood"
        assert len(gaps) < 50, "ten minutes, not thousands of attempts"
        assert max(gaps) <= 30.5 + 0.2
        assert len({round(gap, 3) for gap in gaps[-8:]}) > 2, "with jitter"
        shell.advance(31)
        shell.submit(transfer_id="good")
        shell.open()
        shell.complete()
        assert [alarm.raised for alarm in shell.all(Alarm)] == [True, False]

    def test_c13_a_hundred_thousand_pieces_keep_the_queue_and_memory_flat(
        self, shell: Shell
    ) -> None:
        shell.submit(100_000, block=4096)
        shell.open(depth=256)
        while not shell.all(Finish):
            link = shell.transfers.links[LINK]
            assert len(link.flights) <= 256
            assert len(link.delayed) + sum(map(len, link.ready.values())) <= 2
            shell.posted.clear()
            shell.complete(64)
            shell.commands = [c for c in shell.commands if isinstance(c, Finish)]
        assert shell.peak == 256
        assert shell.result.num_bytes == 100_000 * 4096
        assert shell.transfers.links[LINK].small_ops == 100_000, "and it is shown"

    @pytest.mark.parametrize(("depth", "effective"), [(16, 16), (100_000, 256)])
    def test_c14_the_depth_is_what_the_device_gives(
        self, shell: Shell, depth: int, effective: int
    ) -> None:
        shell.submit(1000, block=4096)
        shell.open(depth=depth)
        assert len(shell.flying) == effective
        assert shell.transfers.links[LINK].window_ops == effective

    def test_c15_a_post_that_fails_at_item_k_goes_on_at_k(self, shell: Shell) -> None:
        shell.take = 3
        shell.submit(20)
        shell.open()
        assert [op.piece.local_slot for op in shell.posted] == [0, 1, 2]
        assert shell.advance(0.0) == [], "completions are drained first"
        while not shell.all(Finish):
            shell.complete(3)
        slots = [op.piece.local_slot for op in shell.posted]
        assert slots == list(range(20)), "in order, and none twice"

    def test_c16_what_always_fails_ends_in_a_bound(self, shell: Shell) -> None:
        started = shell.now
        shell.submit(2)
        shell.open()
        while not shell.all(Finish):
            shell.complete(2, Cause.CORRUPT)
            if not shell.all(Finish):
                shell.sleep_until_wake()
        assert shell.result.missing == {0: Cause.CORRUPT, 1: Cause.CORRUPT}
        assert len(shell.posted) == 2 * 4
        assert shell.now - started < 5.0

    def test_c16_a_device_that_takes_nothing_is_given_up(self, shell: Shell) -> None:
        shell.take = 0
        shell.submit(2)
        opens = 0
        while not shell.all(Finish):
            if len(shell.all(Open)) > opens:
                opens += 1
                shell.open()
            else:
                shell.sleep_until_wake()
        assert set(shell.result.missing.values()) == {Cause.PEER_DOWN}
        assert shell.now < 50.0 + 60.0

    def test_c16_a_lossy_link_does_not_become_a_storm(
        self, shell_with: Callable[..., Shell]
    ) -> None:
        shell = shell_with(retry_floor_bytes=16 * BLOCK, retry_share=0.1, max_attempts=100)
        shell.submit(1000)
        shell.open()
        rng = random.Random(3)
        while not shell.all(Finish):
            while shell.flying:
                shell.complete(1, Cause.CORRUPT if rng.random() < 0.5 else None)
            if not shell.all(Finish):
                shell.sleep_until_wake()
        resent = len(shell.posted) - 1000
        assert resent * BLOCK <= 16 * BLOCK + 0.1 * 1000 * BLOCK + 2 * 16 * BLOCK
        assert shell.transfers.links[LINK].budget.exhausted > 0

    def test_c18_a_member_that_stalls_is_cut_off_within_seconds(self, shell: Shell) -> None:
        started = shell.now
        shell.submit(4)
        shell.open()
        while not shell.all(Finish):
            shell.sleep_until_wake()
        assert set(shell.result.missing.values()) == {Cause.PEER_DOWN}
        assert shell.now - started < 8.0
        shell.submit(transfer_id="next")
        assert shell.all(Finish)[-1].result.missing == {0: Cause.PEER_DOWN}, "at once from then on"

    def test_c18_slow_and_steady_is_not_stalled(self, shell: Shell) -> None:
        shell.submit(1)
        shell.open()
        for _ in range(50):
            shell.advance(1.0)
            shell.feed(Progressed(LINK))
        assert shell.all(Close) == []

    def test_c09_the_old_process_description_is_dropped(self, shell: Shell) -> None:
        shell.submit(2, transfer_id="old", incarnation=7)
        shell.open(incarnation=7)
        out = shell.submit(2, transfer_id="new", incarnation=8)
        assert Close(LINK) in out
        assert Open(LINK, 8) in out
        results = {finish.result.transfer_id: finish.result for finish in shell.all(Finish)}
        assert set(results["old"].missing.values()) == {Cause.INCARNATION}
        shell.open(incarnation=8)
        shell.complete(2)
        assert shell.all(Finish)[-1].result.state == "completed"
        shell.submit(transfer_id="late", incarnation=7)
        assert shell.all(Finish)[-1].result.missing == {0: Cause.INCARNATION}
