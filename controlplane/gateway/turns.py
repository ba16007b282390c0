"""A request's turn at its prefill worker. Uncontended it is taken without an await."""

from math import inf
from time import monotonic

from controlplane.core.dispatch_queue import Offer
from controlplane.core.fairness import QueuedLeg
from controlplane.core.routing import Priced
from controlplane.gateway.answers import AnswerError
from controlplane.gateway.dispatch import Turn
from controlplane.gateway.running import Running

MIN_WAIT_SECONDS = 0.001
GRACE = 1.05
"""Of the SLO's bound: who has waited for its turn is served though it will be this little late."""


def enter(run: Running) -> Offer:
    """At the plan's first prefill worker. GO as well where no leg 1 will be sent."""
    plan = run.plan
    if not plan.prefill or run.unsplit:
        return Offer.GO
    first = plan.prefill[0]
    if plan.free_decode and plan.free_decode[0].worker_id == first.option.worker_id:
        return Offer.GO  # one worker does both in one leg
    return run.context.cluster.dispatch.enter(first.option.worker_id, leg_of(run, first))


async def wait(run: Running, offer: Offer) -> None:
    """After `enter` said WAIT or FULL: wait there, or at the next candidates if the worker goes.

    Raises `AnswerError` where the wait is too long or every queue is full. Afterwards the plan
    starts with the worker whose turn the request holds, and decode is chosen anew.
    """
    plan, dispatch = run.plan, run.context.cluster.dispatch
    tries = 1 + run.context.settings.limits.max_retries
    for index, priced in enumerate(plan.prefill[:tries]):
        if index:
            offer = dispatch.enter(priced.option.worker_id, leg_of(run, priced))
        if offer is not Offer.FULL and await _granted(run, offer, priced):
            plan.prefill = plan.prefill[index:]
            break
    else:
        if offer is Offer.FULL:
            raise _turned_away(run, "queue_full")
        plan.prefill = []  # all of them left
    run.context.scheduler.choose_decode(plan, run.asked.model, run.asked.num_tokens)


def again(run: Running, priced: Priced) -> None:
    """At another worker than the one waited for. The request has its decode slot already, and those
    who have the turns there may wait for just that: it goes at once. So at most another worker's
    window comes on top of this one's."""
    dispatch = run.context.cluster.dispatch
    dispatch.leave(run.asked.request_id)
    dispatch.start(priced.option.worker_id, leg_of(run, priced))


async def _granted(run: Running, offer: Offer, priced: Priced) -> bool:
    """False: the worker takes no more."""
    if offer is Offer.GO:
        return True
    request_id, plan, cluster = run.asked.request_id, run.plan, run.context.cluster
    turn = await cluster.dispatch.wait(request_id, _patience(run))
    now = run.outcome.turn_at = monotonic()
    waited = run.decision.dispatch_wait_seconds = now - run.outcome.planned_at
    if turn in (Turn.GRANTED, Turn.TIMED_OUT):
        cluster.desk.waited(run.asked.model, plan.standing.rank, plan.turn_seconds, waited, now)
    if turn is Turn.SHED:
        raise _turned_away(run, "queue_full")
    if turn is Turn.TIMED_OUT or (turn is Turn.GRANTED and _is_late(run, priced, now)):
        raise _turned_away(run, "deadline")
    return turn is Turn.GRANTED


def _is_late(run: Running, priced: Priced, now: float) -> bool:
    """Whether the SLO would be missed from this turn on, and not just so. Its prediction is the one
    to learn from."""
    plan, cluster = run.plan, run.context.cluster
    worker = cluster.workers.get(priced.option.worker_id)
    running = 0.0 if worker is None else worker.prefill_queue.wait_seconds(now)
    plan.rest_seconds = running + plan.after_queue_seconds
    slo = plan.policies.slo
    if slo.mode != "enforce" or plan.admission.probe:
        return False
    rest = cluster.desk.rest_seconds(slo, run.asked.model, plan.rest_seconds, now)
    return now - run.outcome.received_at + rest > GRACE * slo.max_ttft_seconds


def leg_of(run: Running, priced: Priced) -> QueuedLeg:
    """The request's leg 1 at this worker, as its queue sees it."""
    plan = run.plan
    standing = plan.standing
    total = run.decision.prompt_tokens or 0
    used = min(priced.used_prefix_tokens, total)
    return QueuedLeg(
        run.asked.request_id,
        total - used,
        priced.transfer_seconds + priced.prefill_seconds,
        standing.rank,
        used > 0 and used >= plan.policies.admission.hit_min_share * total,
        standing.tenant,
    )


def seconds_left(run: Running) -> float:
    """That a request may still wait: without end, or where the SLO is enforced, until it could not
    be kept any more. A probe is to show what the wait comes to."""
    plan = run.plan
    slo = plan.policies.slo
    if slo.mode != "enforce" or plan.admission.probe:
        return inf
    now, rest = monotonic(), plan.predicted_handover_seconds or 0.0
    if plan.prefill:
        rest += plan.prefill[0].transfer_seconds + plan.prefill[0].prefill_seconds
    rest = run.context.cluster.desk.rest_seconds(slo, run.asked.model, rest, now)
    left = GRACE * slo.max_ttft_seconds - (now - run.outcome.received_at) - rest
    return max(MIN_WAIT_SECONDS, left)


def no_slot_in_time(run: Running) -> AnswerError:
    """429: no decode slot came free before the SLO's deadline."""
    waited = monotonic() - run.outcome.planned_at
    message = f"no decode slot in time to keep the SLO: waited {waited:.2f} s"
    error = AnswerError(429, message, "slo_ttft", retry_after=_retry_after(run, waited))
    run.shed(error, "deadline")
    return error


def _patience(run: Running) -> float:
    """Seconds that the wait for a turn may take."""
    return min(run.plan.policies.admission.max_wait_seconds, seconds_left(run))


def _turned_away(run: Running, gate: str) -> AnswerError:
    """429 where the SLO is why, 503 where it is the queue's own bounds."""
    plan = run.plan
    waited = monotonic() - run.outcome.planned_at
    first = plan.prefill[0].option.worker_id if plan.prefill else ""
    waiting = run.context.cluster.dispatch.waiting(first)
    seconds = _retry_after(run, waited)
    if gate == "queue_full":
        message = f"the queue before prefill is full: {waiting} requests wait for {first}"
        error = AnswerError(429, message, "queue_full", retry_after=seconds)
    elif plan.policies.slo.mode == "enforce" and not plan.admission.probe:
        message = f"no turn at {first} in time to keep the SLO: waited {waited:.2f} s"
        error = AnswerError(429, message, "slo_ttft", retry_after=seconds)
    else:
        message = f"no turn at {first} within {waited:.2f} s (max_wait_s), {waiting} requests wait"
        return AnswerError(503, message, "no_prefill_turn", retry_after=seconds)
    run.shed(error, "queue_full" if gate == "queue_full" else "deadline")
    return error


def _retry_after(run: Running, waited: float) -> int:
    """The queue takes about as long as it took now."""
    return max(1, min(run.plan.policies.slo.retry_after_max_seconds, round(waited)))
