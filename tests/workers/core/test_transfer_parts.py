"""Pacing, choice, statistics and handshake of transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from workers.core.errors import ProtocolError, RefusedError
from workers.core.transfer_choice import PRIORS, CostModel
from workers.core.transfer_handshake import (
    Initiator,
    Responder,
    SlabFacts,
    StaleIncarnationError,
    check_facts,
    fingerprint,
)
from workers.core.transfer_link import Link, LinkState
from workers.core.transfer_pacing import (
    Breaker,
    BreakerState,
    RetryBudget,
    TokenBucket,
    backoff_seconds,
)
from workers.core.transfer_state import Transfers
from workers.core.transfer_stats import RECENT_SECONDS, SLOWEST, TransferLedger
from workers.core.transfer_types import (
    Cause,
    Completed,
    Completion,
    Direction,
    Finish,
    LinkId,
    Opened,
    Piece,
    Post,
    Priority,
    Submitted,
    Timing,
    TransferLimits,
    TransferRequest,
    TransferResult,
    TransferState,
)

SECRET, OTHER = b"a" * 32, b"b" * 32
FACTS = SlabFacts(8192, 64, 10, {b"n" * 32: 8000})


class TestTiming:
    def test_what_waits_inside_of_its_transport_is_not_on_the_wire(self) -> None:
        link = LinkId("b", "shm")
        pieces = tuple(Piece(i, 1, i, 2, i.to_bytes(16, "little"), 4096) for i in range(2))
        machine = Transfers(TransferLimits(), lambda: 0.5)
        machine.handle(Submitted(TransferRequest("t", "b", pieces, 100.0), "shm"), 50.0)
        (post,) = machine.handle(Opened(link, 1024, 7), 50.0)
        assert isinstance(post, Post)
        first, second = (op.id for op in post.ops)
        machine.handle(Completed(link, [Completion(first, None, 5, 0.05, 0.25)]), 51.0)
        out = machine.handle(Completed(link, [Completion(second, None, 5, 0.05, 0.125)]), 51.125)
        (timing,) = (command.result.timing for command in out if isinstance(command, Finish))
        assert timing.queue_wait == pytest.approx(0.75)
        assert timing.verify == pytest.approx(0.1)
        assert timing.wire == pytest.approx(0.375 - 0.1)


class TestLink:
    def test_an_error_that_is_over_explains_no_later_failure(self) -> None:
        link = Link(LinkId("b", "tcp"), TransferLimits(), RetryBudget(1, 0.1), Breaker(3, 0.1, 1.0))
        link.last_error, link.failed_at = "the cable was out", 50.0
        assert link.error_since(60.0) == "the cable was out", "it is down still"
        link.state = LinkState.UP
        assert link.error_since(40.0) == "the cable was out", "a transfer that met it"
        assert link.error_since(60.0) == ""


class TestTokenBucket:
    def test_off_by_default(self) -> None:
        bucket = TokenBucket()
        bucket.take(1 << 40)
        assert bucket.ready(0.0)

    def test_the_rate_holds_over_time_whatever_the_sizes(self) -> None:
        bucket, now, sent = TokenBucket(), 10.0, 0
        bucket.set_rate(1000.0, now)
        while now < 20.0:
            if bucket.ready(now):
                size = 10 + sent % 700
                bucket.take(size)
                sent += size
            else:
                now = bucket.ready_at(now)
        assert sent == pytest.approx(10_000, rel=0.08)


class TestRetryBudget:
    def test_floor_and_share(self) -> None:
        budget = RetryBudget(floor_bytes=100, share=0.1)
        assert budget.spend(100, now=0.0)
        assert not budget.spend(1, now=0.0)
        budget.arrived(500)
        assert budget.spend(50, now=0.0)
        assert not budget.spend(1, now=0.0)
        assert (budget.spent_bytes, budget.exhausted) == (150, 2)

    def test_the_floor_comes_back(self) -> None:
        budget = RetryBudget(floor_bytes=600, share=0.1)
        assert budget.spend(600, now=0.0)
        assert budget.spend(300, now=31.0)


class TestBreaker:
    def test_opens_once_alarms_once_and_tries_again(self) -> None:
        breaker = Breaker(threshold=3, base_seconds=0.05, cap_seconds=8.0)
        alarms = [breaker.failed(0.0, 0.5) for _ in range(3)]
        assert alarms == [False, False, True]
        assert breaker.state is BreakerState.OPEN
        assert not breaker.allows(0.5)
        assert breaker.allows(1.0)
        assert breaker.state is BreakerState.HALF_OPEN
        assert not breaker.failed(1.0, 0.5), "it is alarmed already"
        assert not breaker.allows(1.5)
        for _ in range(20):
            breaker.failed(2.0, 1.0)
        assert breaker.retry_at <= 2.0 + 8.0
        assert breaker.succeeded()
        assert not breaker.succeeded()
        assert breaker.allows(2.0)

    def test_backoff_doubles_up_to_its_cap(self) -> None:
        pauses = [backoff_seconds(n, 0.1, 1.0, 1.0) for n in range(1, 7)]
        assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
        assert backoff_seconds(1, 0.1, 1.0, 0.0) == pytest.approx(0.05)


class TestChoice:
    def test_priors_follow_the_rule_of_thumb(self) -> None:
        model = CostModel()
        for name, low, high in (("tcp", 200e-6, 400e-6), ("rdma", 20e-6, 50e-6)):
            assert low <= model.cost(LinkId("b", name), 0.0).seconds(10**6) <= high
        assert model.choose("b", 10**6, ["tcp", "rdma"], 0.0) == "rdma"
        assert model.choose("b", 1, [], 0.0) is None

    def test_what_is_measured_counts_and_fades(self) -> None:
        model = CostModel()
        link = LinkId("b", "rdma")
        for _ in range(50):
            model.observe(link, 10**7, 1.0, now=0.0)
        assert model.cost(link, 0.0).bytes_per_second == pytest.approx(1e7, rel=0.05)
        assert model.choose("b", 10**7, ["tcp", "rdma"], 0.0) == "tcp"
        assert model.choose("b", 10**7, ["tcp", "rdma"], 86_400.0) == "rdma", "tried again"

    def test_small_transfers_tell_of_latency(self) -> None:
        model = CostModel()
        link = LinkId("b", "tcp")
        for _ in range(50):
            model.observe(link, 1000, 0.01, now=0.0)
        cost = model.cost(link, 0.0)
        assert cost.latency_seconds == pytest.approx(0.01, rel=0.05)
        assert cost.bytes_per_second == PRIORS["tcp"].bytes_per_second

    def test_failures_put_a_path_last_for_a_while(self) -> None:
        model = CostModel()
        model.failed(LinkId("b", "rdma"), now=0.0)
        assert model.choose("b", 10**6, ["tcp", "rdma"], 1.0) == "tcp"
        assert model.choose("b", 10**6, ["tcp", "rdma"], 3600.0) == "rdma"


class TestLedger:
    def result(self, seconds: float, peer: str = "b", **changes: object) -> TransferResult:
        values: dict[str, object] = {
            "transfer_id": f"t{seconds}", "link": LinkId(peer, "tcp"),
            "state": TransferState.COMPLETED, "num_pieces": 4, "num_bytes": 400,
            "missing": {}, "timing": Timing(wire=seconds),
        }  # fmt: skip
        return TransferResult(**(values | changes))  # type: ignore[arg-type]

    def test_counts_by_pair(self) -> None:
        ledger = TransferLedger("a")
        ledger.record(self.result(0.1), 1.0)
        ledger.record(self.result(0.1, missing={2: Cause.STALE}, num_bytes=300), 2.0)
        ledger.record(self.result(0.1, direction=Direction.PUSH), 3.0)
        pull, push = sorted(ledger.report({}), key=lambda pair: pair.destination)
        assert (pull.source, pull.destination) == ("b", "a")
        assert (push.source, push.destination) == ("a", "b")
        assert (pull.transfers_total, pull.pieces_total, pull.bytes_total) == (2, 7, 700)
        assert pull.missing_by_cause == {"stale": 1}

    def test_everything_is_bounded(self) -> None:
        ledger = TransferLedger("a", max_pairs=3)
        for number in range(50):
            ledger.record(self.result(number / 10, peer=f"p{number % 5}"), float(number))
        assert len(ledger.report({})) == 3
        assert all(len(pair.slowest) <= SLOWEST for pair in ledger.report({}))

    def test_the_slowest_are_of_late(self) -> None:
        ledger = TransferLedger("a")
        ledger.record(self.result(9.0), 0.0)
        for number in range(10):
            ledger.record(self.result(number / 10), RECENT_SECONDS + 1.0 + number)
        (pair,) = ledger.report({("b", "a", "tcp", Priority.FIRST_TOKEN, Direction.PULL): 2})
        assert pair.slowest[0].timing.total == pytest.approx(0.9)
        assert len(pair.slowest) == SLOWEST
        assert pair.in_flight == 2


@dataclass
class Hands:
    """Both ends of a handshake."""

    initiator: Initiator
    responder: Responder

    def shake(self) -> None:
        document: bytes | None = self.initiator.start()
        while document is not None:
            document = self.initiator.receive(self.responder.receive(document))


@pytest.fixture
def hands() -> Callable[..., Hands]:
    def make(
        secret: bytes = SECRET, facts: SlabFacts = FACTS, wanted: int = 0, protocol: int = 1
    ) -> Hands:
        initiator = Initiator(secret, "a", facts, b"1" * 32, wanted)
        initiator._greeting = type(initiator._greeting)(
            "a", b"1" * 32, fingerprint(secret), protocol
        )
        return Hands(initiator, Responder(SECRET, "b", 7, FACTS, b"2" * 32, depth=9))

    return make


class TestHandshake:
    def test_both_know_each_other_after_it(self, hands: Callable[..., Hands]) -> None:
        both = hands(wanted=7)
        both.shake()
        assert both.responder.done
        assert (both.responder.peer, both.initiator.peer) == ("a", "b")
        assert both.initiator.incarnation == 7
        assert both.initiator.accepted is not None
        assert both.initiator.accepted.depth == 9

    def test_secrets_differ(self, hands: Callable[..., Hands]) -> None:
        with pytest.raises(RefusedError) as refused:
            hands(secret=OTHER).shake()
        assert refused.value.code == "secret"
        assert fingerprint(SECRET) in str(refused.value)
        assert fingerprint(OTHER) in str(refused.value)

    def test_a_fingerprint_is_no_proof(self, hands: Callable[..., Hands]) -> None:
        both = hands(secret=OTHER)
        both.initiator._greeting = type(both.initiator._greeting)(
            "a", b"1" * 32, fingerprint(SECRET)
        )
        with pytest.raises(RefusedError, match="did not prove"):
            both.shake()

    def test_a_responder_without_the_secret_is_not_told_anything(
        self, hands: Callable[..., Hands]
    ) -> None:
        both = hands()
        both.responder._secret = OTHER
        both.initiator._greeting = type(both.initiator._greeting)(
            "a", b"1" * 32, fingerprint(OTHER)
        )
        with pytest.raises(RefusedError):
            both.shake()
        assert not both.responder.done

    def test_protocols_differ(self, hands: Callable[..., Hands]) -> None:
        with pytest.raises(RefusedError, match="transfer protocol 1, a 2") as refused:
            hands(protocol=2).shake()
        assert refused.value.code == "transfer_protocol"

    def test_another_incarnation(self, hands: Callable[..., Hands]) -> None:
        with pytest.raises(StaleIncarnationError) as refused:
            hands(wanted=6).shake()
        assert refused.value.actual == 7

    def test_out_of_order(self, hands: Callable[..., Hands]) -> None:
        both = hands()
        both.responder.receive(both.initiator.start())
        with pytest.raises(ProtocolError):
            both.responder.receive(both.initiator.start())
        with pytest.raises(ProtocolError):
            both.initiator.receive(b"\xc1")

    @pytest.mark.parametrize(
        ("theirs", "code"),
        [
            (SlabFacts(4096, 64, 10), "slab_layout"),
            (SlabFacts(8192, 128, 10), "slab_layout"),
            (SlabFacts(0, 64, 0), "geometry_unknown"),
            (SlabFacts(8192, 64, 10, hash_vector=b"x"), "hash_vector"),
            (SlabFacts(8192, 64, 10, {b"n" * 32: 7000}), "geometry"),
            (SlabFacts(8192, 64, 10, {b"m" * 32: 8000}), "namespace"),
        ],
    )
    def test_facts_that_differ(self, theirs: SlabFacts, code: str) -> None:
        refused = check_facts(FACTS, theirs, "a", "b")
        assert refused is not None
        assert refused.code == code

    @pytest.mark.parametrize(
        "theirs", [FACTS, SlabFacts(8192, 64, 99), SlabFacts(8192, 64, 9, dict(FACTS.namespaces))]
    )
    def test_facts_that_agree(self, theirs: SlabFacts) -> None:
        assert check_facts(FACTS, theirs, "a", "b") is None
