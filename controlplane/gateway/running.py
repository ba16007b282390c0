"""A running request: what it asks, holds and has shown. Every way out goes through `step`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Literal, get_args

from controlplane.core.admission import Gate
from controlplane.core.hedging import Hedges
from controlplane.core.lifecycle import (
    ENDS,
    ClientLeft,
    CloseRecord,
    Command,
    EndPrefillLoad,
    Event,
    Failed,
    Finished,
    FreeSlot,
    Lifecycle,
    Rejected,
    ReleasePins,
    SlotTaken,
    State,
)
from controlplane.gateway.admission import shed_verdict
from controlplane.gateway.agents import Agents
from controlplane.gateway.answers import AnswerError, CancelledByOperatorError
from controlplane.gateway.asked import Asked
from controlplane.gateway.bodies import KvParams
from controlplane.gateway.bootstraps import Bootstraps
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.legs import ClientFault, LegError, LegSender
from controlplane.gateway.outcome import Outcome
from controlplane.gateway.records import Joining, Records
from controlplane.gateway.results import new_decision
from controlplane.gateway.scheduling import NOTHING_HELD, Plan, Scheduler
from controlplane.gateway.settings import Settings
from controlplane.gateway.spreading import Spreader
from controlplane.gateway.staged import StagedReleases
from controlplane.gateway.stats import Stats
from controlplane.gateway.telling import Telling
from controlplane.gateway.worker_state import WorkerState

_REJECTED, _FINISHED, _FAILED, _CLIENT_LEFT = Rejected(), Finished(), Failed(), ClientLeft()

_COMPLETE = ("finished_stop", "finished_length")


@dataclass(slots=True)
class Context:
    """What all requests share."""

    settings: Settings
    cluster: Cluster
    scheduler: Scheduler
    stats: Stats
    records: Records
    sender: LegSender
    agents: Agents
    bootstraps: Bootstraps
    staged: StagedReleases
    spreader: Spreader
    running: "dict[str, Running]" = field(default_factory=dict)  # by request id, oldest first
    hedges: Hedges = field(default_factory=Hedges)


class Running:
    """Planned when it is made. `step` once more at the end releases what is held."""

    __slots__ = (
        "asked", "cause", "context", "decision", "failed_worker", "life", "outcome", "plan",
        "prefetching", "record", "service_seconds", "staged", "stuck_in", "stuck_since", "telling", "unsplit",
    )  # fmt: skip

    def __init__(self, context: Context, asked: Asked) -> None:
        self.context = context
        self.asked = asked
        self.unsplit = asked.body.unsplit
        self.life = Lifecycle()
        self.outcome = Outcome(asked.request.received_at)
        self.cause: AnswerError | ClientFault | None = None  # of an `interrupt`
        self.failed_worker = ""  # of the last leg that failed
        self.prefetching = ""  # the node that was told to fetch ahead for leg 2
        self.stuck_in: State | None = None
        self.stuck_since: float | None = None
        self.service_seconds = 0.0  # of the prefill leg, without its wait behind others
        self.staged: KvParams | None = None  # at a foreign prefill worker, until decode takes it
        now = monotonic()
        self.plan: Plan = context.scheduler.plan(
            asked.model, asked.prompts, asked.salt, now, asked.standing, asked.max_output_tokens,
            asked.text,
        )  # fmt: skip
        plan, outcome = self.plan, self.outcome
        outcome.planned_at = monotonic()
        self.decision = new_decision(asked, plan, context.settings.gateway_id)
        free = plan.free_decode
        first = free[0].worker_id if free else ""
        self.telling = Telling(plan, outcome, plan.prefill, plan.decode, first)
        self.record: Joining | None = None
        if plan.admission.admitted:
            self.record = context.records.begin(
                self.decision, plan.policies.recording, self.telling
            )
            if asked.trace is not None:
                self.record.trace = asked.trace

    def may_send(self, worker: WorkerState) -> bool:
        """As of now: it was planned with a while ago, and may drain, fail or serve another model."""
        row, cluster = worker.row, self.context.cluster
        if row.model != self.asked.model:
            self.context.stats.model_mismatch += 1
            return False
        if row.state != "ready":
            return False
        return cluster.health.is_sound or not cluster.health.is_paused(row.id, monotonic())

    # --- ends ---

    def reject(self, error: AnswerError) -> None:
        """Admission said no, with `error` for the client."""
        self.step(_REJECTED)
        self.context.stats.rejected += 1
        decision, admission = self.decision, self.plan.admission
        decision.status, decision.http_status = "rejected", error.status
        decision.error, decision.retry_after_seconds = admission.reason, error.retry_after
        self.plan.held = NOTHING_HELD
        self.context.records.once(decision, self.telling)

    def shed(self, error: AnswerError, gate: Gate) -> None:
        """Admitted, and turned away while it waited for its turn at prefill."""
        error.request_id = self.asked.request_id
        stats, plan, decision = self.context.stats, self.plan, self.decision
        stats.rejected += 1
        stats.shed += 1
        decision.status, decision.http_status = "rejected", error.status
        decision.error, decision.retry_after_seconds = error.message, error.retry_after
        predicted = plan.predicted_ttft_seconds or 0.0
        decision.admission = shed_verdict(gate, predicted, plan.policies.slo)
        self.step(_REJECTED)

    def finish(self) -> None:
        """The answer is complete; `decision.status` says how."""
        output_tokens = self.decision.output_tokens
        if output_tokens is not None:
            self.context.stats.output_tokens += output_tokens
            self.context.cluster.generated(self.asked.model, output_tokens)
        self.leg_served("decode")
        self.step(_FINISHED)

    def fail(self, error: AnswerError) -> None:
        """Nothing of an answer has gone out; the client gets `error`. Nothing after the end."""
        error.request_id = self.asked.request_id
        if self.life.state in ENDS:
            return
        self.context.stats.failed += 1
        decision = self.decision
        if decision.failed_leg and not error.leg:
            error.leg, error.worker = decision.failed_leg, self.failed_worker
        decision.status, decision.http_status = "failed", error.status
        decision.error = error.message
        self.step(_FAILED)

    def broke(self, message: str) -> None:
        """The answer broke off after its first byte; the client has been told."""
        self.decision.error, self.decision.status = message, "failed"
        self.context.stats.failed += 1
        self.step(_FAILED)

    def refused_by_engine(self, fault: ClientFault) -> None:
        """A 4xx of the engine: unchanged to the client, no failure of a worker (I7)."""
        decision = self.decision
        is_second = self.life.is_decoding and fault.worker_id == decision.decode_worker
        answer = fault.said(self.asked.request_id, "decode" if is_second else "prefill")
        self.context.stats.client_errors += 1
        self._no_verdict()
        decision.status, decision.http_status = "failed", answer.status
        decision.error = answer.body[:300].decode(errors="replace")
        client = self.asked.request.connection
        headers = self.asked.client_headers(answer.headers)
        client.respond(answer.status, answer.body, answer.content_type, headers)
        self.step(_FAILED)

    def client_left(self) -> None:
        """The client has closed its connection. Nothing after the end."""
        if self.life.state not in ENDS:
            self.context.stats.cancelled += 1
            self.decision.status = "cancelled"
            self._no_verdict()
        self.step(_CLIENT_LEFT)

    def cancelled(self, error: CancelledByOperatorError) -> None:
        """An operator ended it. Nothing after the end."""
        if self.life.state in ENDS:
            return
        self.context.stats.cancelled += 1
        decision = self.decision
        decision.status, decision.error = "cancelled", error.message
        decision.http_status = decision.http_status or error.status
        self._no_verdict()
        self.step(_CLIENT_LEFT)

    def _no_verdict(self) -> None:
        """Ended by its client's or an operator's doing: it has shown nothing of its workers."""
        health = self.context.cluster.health
        health.no_verdict(self.decision.prefill_worker)
        health.no_verdict(self.decision.decode_worker)

    def interrupt(self, cause: AnswerError | ClientFault) -> None:
        """End it from outside its own task; `cause` is what its client is told."""
        if self.cause is None and self.life.state not in ENDS:
            self.cause = cause
            self.asked.request.connection.cancel()

    def ensure_ended(self) -> None:
        """Cleans up after a bug."""
        if self.life.state not in ENDS:
            self.step(_FAILED)

    def leg_failed(self, leg: Literal["prefill", "decode"], name: str, error: LegError) -> None:
        """Counted against the worker; the record says which leg."""
        self.context.stats.worker(name).failures += 1
        if error.was_sent or error.refused:
            outcome = self.outcome
            sent_at = outcome.prefill_sent_at if leg == "prefill" else outcome.decode_sent_at
            self.context.cluster.leg_failed(
                name, leg, hash(self.asked.request.body), unreachable=error.unreachable,
                answered=error.answered, refused=error.refused, error=str(error),
                sent_at=sent_at,
            )  # fmt: skip
        self.failed_worker = name
        self.decision.failed_leg = leg
        self.decision.retries += 1
        self.decision.error = f"{leg} leg on {name}: {error}"

    def leg_served(self, leg: Literal["prefill", "decode"]) -> None:
        """To its end."""
        self.context.cluster.health.leg_served(self.asked.request.body, leg)

    # --- lifecycle ---

    def step(self, event: Event) -> None:
        """The one door to the state machine."""
        for command in self.life.handle(event):
            _PERFORM[type(command)](self, command)

    def hold_slot(self, worker_id: str) -> None:
        """A decode slot of this worker is its now."""
        self.step(SlotTaken(worker_id))
        self.decision.decode_worker = worker_id
        self.outcome.slot_held_at = monotonic()

    def _end_prefill_load(self, command: EndPrefillLoad) -> None:
        cluster, request_id = self.context.cluster, self.asked.request_id
        hedge = self.decision.hedge
        is_hedge = hedge is not None and hedge.worker_id == command.worker_id
        if not is_hedge:
            self._not_expected()
        worker = cluster.workers.get(command.worker_id)
        if worker is not None and request_id in worker.prefill_queue:
            self.service_seconds = worker.prefill_queue.end(request_id, monotonic())
        cluster.dispatch.leave(self.hedge_turn if is_hedge else request_id)

    @property
    def hedge_turn(self) -> str:
        """The name under which a second leg 1 has its turn: the request's own is the first one's."""
        return f"{self.asked.request_id}/hedge"

    def _free_slot(self, _: FreeSlot) -> None:
        self.context.cluster.free_slot(self.asked.request_id)

    def _release_pins(self, _: ReleasePins) -> None:
        context = self.context
        again = self.decision.status not in _COMPLETE  # a leg may still be ending
        if self.prefetching and again:
            context.spreader.needless(self.prefetching, self.asked.request_id)
        context.agents.release(self.asked.request_id, again=again)
        if self.staged is not None:
            taker = context.cluster.workers.get(self.decision.decode_worker)
            context.staged.release(taker, self.asked, self.staged)

    def _close(self, _: CloseRecord) -> None:
        self._not_expected()
        self.context.cluster.dispatch.leave(self.asked.request_id)
        if self.record is not None:
            self._close_record(self.record)

    def _not_expected(self) -> None:
        if self.plan.held.keys:
            self.context.cluster.expected.end(self.asked.request_id)

    def _record_prompt(self) -> None:
        held, prompts = self.plan.held, self.asked.prompts
        if prompts is not None:
            self.context.records.sampler.add_prompt(
                self.decision, self.plan.policies.recording, held.namespace, held.block_tokens,
                held.keys, prompts[0],
            )  # fmt: skip
        self.plan.held = NOTHING_HELD  # what is left of the plan waits for the next report

    def _close_record(self, record: Joining) -> None:
        decision, outcome = self.decision, self.outcome
        now = monotonic()
        decision.e2e_seconds = now - outcome.received_at
        if outcome.slot_at:
            self.context.stats.queue.observe(outcome.slot_at - outcome.planned_at)
        self.telling.service_seconds = self.service_seconds
        if self.plan.held.keys:
            self._record_prompt()
        if decision.status not in _COMPLETE:
            record.expects_prefill = record.expects_decode = False
        self.context.records.end(record, now)


_PERFORM: Final[Mapping[type, Callable[[Running, Any], None]]] = {
    EndPrefillLoad: Running._end_prefill_load,
    FreeSlot: Running._free_slot,
    ReleasePins: Running._release_pins,
    CloseRecord: Running._close,
}
assert set(_PERFORM) == set(get_args(Command)), "a command that nobody performs"
