"""No piece is lost, none comes twice, bytes add up, and everything ends: whatever happens."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.core.transfer_integrity import check_integrity
from workers.core.transfer_state import Transfers
from workers.core.transfer_types import (
    Alarm,
    Arrived,
    CancelOps,
    CancelRequested,
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

BLOCK = 1000
LIMITS = TransferLimits(
    window_bytes=4 * BLOCK,
    window_ops=5,
    refill_bytes=BLOCK,
    max_transfers=6,
    max_links=2,
    retry_floor_bytes=8 * BLOCK,
    idle_seconds=5.0,
)
PEERS = ("a", "b", "c")
CAUSES = [None, None, None, Cause.STALE, Cause.CORRUPT, Cause.CONNECTION, Cause.BOUNDS]


class Machine(RuleBasedStateMachine):
    """Plays the shell: endpoints with ops that nobody has answered yet."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.transfers = Transfers(LIMITS, random.Random(1).random)
        self.requests: dict[str, TransferRequest] = {}
        self.results: dict[str, TransferResult] = {}
        self.endpoints: dict[LinkId, dict[int, Op]] = {}
        self.opening: set[LinkId] = set()
        self.cancelled: set[int] = set()
        self.posted: set[int] = set()
        self.sealed: set[tuple[str, int]] = set()
        self.alarms: dict[LinkId, bool] = {}
        self.take: int | None = None
        self.seal_ok = True
        self.owner: dict[int, str] = {}

    # --- the shell --------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        commands = list(self.transfers.handle(event, self.now))
        while commands:
            answer = self.perform(commands.pop(0))
            if answer is not None:
                commands += self.transfers.handle(answer, self.now)

    def perform(self, command: Command) -> Event | None:
        match command:
            case Open(link):
                assert link not in {*self.endpoints, *self.opening}
                self.opening.add(link)
            case Close(link):
                self.opening.discard(link)
                self.endpoints.pop(link, None)
            case Post(link, ops):
                return self.post(link, ops)
            case CancelOps(link, op_ids):
                self.cancelled |= set(op_ids) & set(self.endpoints.get(link, {}))
            case Seal():
                key = (command.transfer_id, command.piece.local_slot)
                if command.verified or self.seal_ok:
                    assert key not in self.sealed, "a block was sealed twice"
                    self.sealed.add(key)
                if not command.verified:
                    return Sealed(*key, self.seal_ok)
            case Finish(result):
                self.finish(result)
            case Alarm(link, raised):
                assert self.alarms.get(link, False) != raised, "the same alarm twice"
                self.alarms[link] = raised
            case Arrived():
                pass
        return None

    def post(self, link: LinkId, ops: list[Op]) -> Posted:
        endpoint = self.endpoints.get(link)
        taken = len(ops) if self.take is None else min(self.take, len(ops))
        if endpoint is None:
            taken = 0
        for op in ops[:taken]:
            assert endpoint is not None
            assert op.id not in self.posted, "an op was posted twice"
            self.posted.add(op.id)
            endpoint[op.id] = op
        return Posted(link, [op.id for op in ops], taken)

    def finish(self, result: TransferResult) -> None:
        name = result.transfer_id
        assert name not in self.results, "it ended twice"
        self.results[name] = result
        request = self.requests[name]
        there = sum(p.num_bytes for i, p in enumerate(request.pieces) if i not in result.missing)
        assert result.num_bytes == there, "bytes are not accounted for"
        assert (result.state == "completed") == (not result.missing)
        slots = {piece.local_slot for piece in request.pieces}
        for endpoint in self.endpoints.values():
            for op in endpoint.values():
                assert op.piece.local_slot not in slots, "something still writes into its slots"

    # --- what happens -----------------------------------------------------------------------

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        number = len(self.requests)
        direction = data.draw(st.sampled_from([Direction.PULL, Direction.PULL, Direction.PUSH]))
        pieces: list[Piece] = []
        for index in range(data.draw(st.integers(1, 6))):
            slot = number * 100 + index
            key = slot.to_bytes(16, "little")
            whole = direction is Direction.PUSH or data.draw(st.booleans())
            cuts = [0, BLOCK] if whole else [0, 300, 700, data.draw(st.sampled_from([900, BLOCK]))]
            pieces += [
                Piece(slot, 1, slot, 2, key, BLOCK, start, end - start)
                for start, end in pairwise(cuts)
            ]
        request = TransferRequest(
            transfer_id=f"t{number}",
            peer=data.draw(st.sampled_from(PEERS)),
            pieces=tuple(pieces),
            deadline=self.now + data.draw(st.sampled_from([-1.0, 0.3, 3.0, 30.0])),
            priority=data.draw(st.sampled_from(list(Priority))),
            direction=direction,
            incarnation=data.draw(st.sampled_from([0, 0, 5, 6])),
            piece_bytes=0 if direction is Direction.PUSH else data.draw(st.sampled_from([0, 400])),
        )
        self.requests[request.transfer_id] = request
        self.feed(Submitted(request, "memory"))

    @precondition(lambda self: self.opening)
    @rule(data=st.data(), depth=st.sampled_from([1, 3, 100]), incarnation=st.sampled_from([5, 6]))
    def opened(self, data: st.DataObject, depth: int, incarnation: int) -> None:
        link = data.draw(st.sampled_from(sorted(self.opening)))
        self.opening.discard(link)
        self.endpoints[link] = {}
        self.feed(Opened(link, depth, incarnation))

    @precondition(lambda self: any(self.endpoints.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from(sorted(k for k, ops in self.endpoints.items() if ops)))
        ops = self.endpoints[link]
        chosen = data.draw(st.lists(st.sampled_from(sorted(ops)), min_size=1, unique=True))
        completions = []
        for op_id in chosen:
            cause = data.draw(st.sampled_from(CAUSES))
            if op_id in self.cancelled and data.draw(st.booleans()):
                cause = Cause.CANCELLED
            completions.append(Completion(op_id, cause, checksum=7))
            del ops[op_id]
        self.feed(Completed(link, completions))

    @precondition(lambda self: self.endpoints or self.opening)
    @rule(
        data=st.data(),
        cause=st.sampled_from([Cause.CONNECTION, Cause.REFUSED, Cause.INCARNATION]),
    )
    def down(self, data: st.DataObject, cause: Cause) -> None:
        link = data.draw(st.sampled_from(sorted({*self.endpoints, *self.opening})))
        self.endpoints.pop(link, None)
        self.opening.discard(link)
        self.feed(Down(link, cause, "it broke", 6))

    @precondition(lambda self: self.transfers.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.feed(CancelRequested(data.draw(st.sampled_from(sorted(self.transfers.jobs)))))

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 2.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Ticked())

    @rule(take=st.sampled_from([None, None, 0, 1, 2]), seal_ok=st.booleans())
    def change_manners(self, take: int | None, seal_ok: bool) -> None:
        self.take, self.seal_ok = take, seal_ok

    @precondition(lambda self: self.transfers.links)
    @rule(data=st.data(), rate=st.sampled_from([0.0, 2000.0]))
    def cap_or_progress(self, data: st.DataObject, rate: float) -> None:
        link = data.draw(st.sampled_from(sorted(self.transfers.links)))
        self.feed(CapSet(link, rate))
        self.feed(Progressed(link))

    @invariant()
    def holds(self) -> None:
        check_integrity(self.transfers)

    def teardown(self) -> None:
        """With nobody answering, all ends by itself, and only by the times that it asked for."""
        for _ in range(10_000):
            if not self.transfers.jobs:
                break
            wake = self.transfers.next_wake(self.now)
            assert wake is not None, "something is under way, and waits for nothing"
            self.now = max(self.now, wake) + 1e-6
            self.feed(Ticked())
        assert set(self.results) == set(self.requests), "a transfer never ended"
        for name, result in self.results.items():
            spare = LIMITS.cancel_seconds + LIMITS.stall_seconds + LIMITS.connect_seconds
            assert result.timing.total < 30.0 + spare + 20.0, f"{name} took too long"


TestTransferMachine = Machine.TestCase
TestTransferMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
