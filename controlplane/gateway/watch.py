"""What each running request waits for, since when, and how long it may; ends those beyond it, and
those that an operator cancels.

Every wait has a bound of its own where it is made. This is the second line: it finds what hangs
all the same, names it, and ends it by the scheduling policy.
"""

from collections import Counter
from collections.abc import Iterable
from time import monotonic
from typing import Any

import msgspec
import structlog

from controlplane.core.lifecycle import ENDS, State
from controlplane.core.watching import Bounds, Place, Wait, is_stuck, judge
from controlplane.gateway.answers import AnswerError, CancelledByOperatorError
from controlplane.gateway.relay import Relay
from controlplane.gateway.running import Context, Running

log = structlog.get_logger(__name__)

MAX_LISTED = 1000
SCAN_SECONDS = 1.0
FORCE_SECONDS = 5.0
"""After it was told to end, a request that still has not is closed from outside."""


class Watch:
    """`scan` now and then; `listing` and `cancel` for operators."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._next_scan = 0.0
        self._cancelled: dict[str, float] = {}  # running ones that were told to end, and when

    def scan(self, now: float) -> None:
        """Log and count requests that have become stuck; end them where the policy says so."""
        if now < self._next_scan:
            return
        self._next_scan = now + SCAN_SECONDS
        self._force_cancelled(now)
        stuck = 0
        for run in list(self._context.running.values()):
            bounds = run.plan.policies.scheduling.bounds
            if now - run.outcome.received_at > bounds.shortest:
                stuck += self._look_at(run, now)
        self._context.stats.stuck_now = stuck

    def _look_at(self, run: Running, now: float) -> bool:
        """Whether it is stuck."""
        wait = waits_for(run)
        if wait is None or not is_stuck(wait, now):
            return False
        if run.stuck_since is None or run.stuck_in is not wait.state:
            self._found(run, wait, now)
        elif run.cause is not None and now - run.stuck_since > FORCE_SECONDS:
            self._force(run, wait.what)
        return True

    def _force_cancelled(self, now: float) -> None:
        for request_id, told_at in list(self._cancelled.items()):
            run = self._context.running.get(request_id)
            if run is None:
                del self._cancelled[request_id]
            elif now - told_at > FORCE_SECONDS:
                self._force(run, "its end, as an operator asked")

    def _force(self, run: Running, waits_for: str) -> None:
        log.error("request_forced", request=run.asked.request_id, waits_for=waits_for)
        run.asked.request.connection.abort()
        run.ensure_ended()
        self._context.running.pop(run.asked.request_id, None)

    def cancel(self, request_id: str, actor: str, now: float) -> dict[str, Any] | None:
        """Tell it to end; its row as it was. None: it does not run here, or ends already."""
        run = self._context.running.get(request_id)
        if run is None or run.cause is not None or run.life.state in ENDS:
            return None
        row = _row(run, now)
        log.warning(
            "request_cancelled", request=request_id, actor=actor, waits_for=row["waits_for"]
        )
        message = f"request {request_id} was ended by an operator ({actor or 'unnamed'})"
        run.interrupt(CancelledByOperatorError(message, request_id))
        self._cancelled[request_id] = now
        return row

    def _found(self, run: Running, wait: Wait, now: float) -> None:
        run.stuck_since, run.stuck_in = now, wait.state
        stats, seconds = self._context.stats, now - wait.since
        stats.stuck[wait.state] = stats.stuck.get(wait.state, 0) + 1
        ends = run.plan.policies.scheduling.bounds.ends
        log.warning(
            "request_stuck", request=run.asked.request_id, state=wait.state.value,
            waits_for=wait.what, worker=wait.worker, seconds=round(seconds, 1), ends=ends,
        )  # fmt: skip
        if not ends:
            return
        message = (
            f"request {run.asked.request_id} was ended: it waited {seconds:.1f} s for {wait.what},"
            f" the limit for requests that are {wait.state.value} is {wait.bound:g} s"
        )
        error = AnswerError(504, message, "stuck", leg=wait.leg, worker=wait.worker)
        if wait.leg:
            run.decision.failed_leg = wait.leg
        run.interrupt(error)

    def by_state(self) -> dict[str, int]:
        """Running requests by their state."""
        counts = Counter(run.life.state.value for run in self._context.running.values())
        return {state.value: counts[state.value] for state in State if state not in ENDS}

    def listing(self, now: float) -> list[dict[str, Any]]:
        """Running requests, each with what it waits for: stuck ones, then the oldest."""
        runs = list(self._context.running.values())
        if len(runs) > MAX_LISTED:
            runs.sort(key=lambda run: run.stuck_since is None)
            del runs[MAX_LISTED:]
        return [_row(run, now) for run in runs]


def waits_for(run: Running) -> Wait | None:
    """None once it has ended."""
    life, outcome = run.life, run.outcome
    if life.state in ENDS:
        return None
    relay = run.asked.request.connection.relay
    stream = relay if isinstance(relay, Relay) else None
    place = Place(
        state=life.state,
        model=run.asked.model,
        slot_worker=life.slot_worker,
        prefill_worker=life.prefill_worker,
        received_at=outcome.received_at,
        planned_at=outcome.planned_at,
        slot_asked_at=outcome.slot_asked_at,
        slot_at=outcome.slot_held_at,
        prefill_sent_at=outcome.prefill_sent_at,
        prefill_done_at=outcome.prefill_done_at,
        decode_sent_at=outcome.decode_sent_at,
        is_stream=run.asked.body.stream,
        last_piece_at=stream.reply.last_byte_at if stream is not None else None,
        is_decoding=life.is_decoding,
        waits_for_slot=run.context.cluster.waits_for_slot(run.asked.request_id),
        client_stalls=run.asked.request.connection.write_paused_since is not None,
    )
    return judge(place, run.plan.policies.scheduling.bounds)


def _row(run: Running, now: float) -> dict[str, Any]:
    wait = waits_for(run)
    decision = run.decision
    return {
        "request_id": run.asked.request_id,
        "client_request_id": decision.client_request_id,
        "tenant": run.asked.tenant,
        "model": run.asked.model,
        "state": run.life.state.value,
        "age_seconds": round(now - run.outcome.received_at, 3),
        "waits_for": "" if wait is None else wait.what,
        "worker": "" if wait is None else wait.worker,
        "wait_seconds": None if wait is None else round(now - wait.since, 3),
        "bound_seconds": None if wait is None else wait.bound,
        "at_bound": _at_bound(run, wait),
        "stuck": run.stuck_since is not None,
        "prompt_tokens": run.asked.num_tokens,
        "prefill_worker": decision.prefill_worker,
        "decode_worker": decision.decode_worker,
        "retries": decision.retries,
    }


def _at_bound(run: Running, wait: Wait | None) -> str:
    """What the policy does with it there; empty where no policy bounds the wait."""
    if wait is None or wait.bound is None:
        return ""
    return "end" if run.plan.policies.scheduling.bounds.ends else "report"


def listing_body(
    watch: Watch, gateway_id: str, workers: Iterable[dict[str, Any]], num_running: int
) -> bytes:
    """JSON of `GET /debug/requests`. `num_running` counts those that are not listed too."""
    body = {
        "gateway": gateway_id,
        "running": num_running,
        "requests": watch.listing(monotonic()),
        "workers": list(workers),
    }
    return msgspec.json.encode(body)


__all__ = ["Bounds", "Watch", "listing_body", "waits_for"]
