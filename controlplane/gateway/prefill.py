"""Leg 1: prefill workers in the plan's order; where none can serve, decode computes the prompt."""

from time import monotonic

from controlplane.core.handshake import at_once, is_taken_once, pairs
from controlplane.core.routing import Priced
from controlplane.gateway import turns
from controlplane.gateway.first_leg import (
    PREFILL_ENDED,
    begin,
    failed,
    leg_of,
    may_be_of_length,
    params,
    served,
)
from controlplane.gateway.hedging import hedged
from controlplane.gateway.legs import ClientFault, LegError, PrefillReply, prefill_reply
from controlplane.gateway.running import Running
from controlplane.gateway.together import together
from controlplane.gateway.worker_state import WorkerState

TRIAL_COST_SECONDS = 1.0
TRIAL_PATIENCE_SECONDS = 10.0
_NO_PREFILL = PrefillReply(0, None, None)


async def prefill(run: Running) -> PrefillReply | None:
    """What leg 1 said; without blocks where decode is to compute the prompt. None: the legs went out
    together, and the client has its answer."""
    if run.unsplit:
        return _NO_PREFILL
    tries = 1 + run.context.settings.limits.max_retries
    order, cluster = run.plan.prefill, run.context.cluster
    tried: list[str] = []  # decode workers, where both legs go out together
    if not cluster.health.is_sound and cluster.health.has_ejected:
        order = _trial_first(run, order)
    for priced in order[:tries]:
        worker = cluster.workers.get(priced.option.worker_id)
        if worker is None or not _may_take(run, worker):
            continue
        if _is_for_decode_alone(run, worker):
            cluster.dispatch.leave(run.asked.request_id)
            return _NO_PREFILL
        if at_once(worker.row.handshake):
            if await together(run, worker, priced, tried):
                return None
            continue
        reply = await _try(run, worker, priced)
        if reply is not None:
            return reply
    return _on_decode_side(run)


def _may_take(run: Running, worker: WorkerState) -> bool:
    """Whether it may be sent leg 1 now, has had none beside another one's, and the decode worker
    whose slot is held understands what it hands over."""
    hedge = run.decision.hedge
    if not run.may_send(worker) or (hedge is not None and hedge.worker_id == worker.row.id):
        return False
    cluster = run.context.cluster
    if not cluster.mixed:
        return True
    decode = cluster.workers.get(run.life.slot_worker)
    return decode is None or pairs(worker.row.handshake, decode.row.handshake)


def _is_for_decode_alone(run: Running, worker: WorkerState) -> bool:
    """One worker does both in one leg; or leg 1's KV could not be read as often as is needed."""
    row = worker.row
    if row.id == run.life.slot_worker:
        return True
    return is_taken_once(row.handshake) and run.asked.body.num_sequences > 1


def _trial_first(run: Running, order: list[Priced]) -> list[Priced]:
    """A worker that has to show that it serves again gets one leg: placement alone might never
    send it any. Not where that costs much, unless it has waited long."""
    health, now = run.context.cluster.health, monotonic()
    for priced in order[1:]:
        waited = health.overdue(priced.option.worker_id, now)
        dear = priced.ttft_seconds > order[0].ttft_seconds + TRIAL_COST_SECONDS
        if waited is not None and (not dear or waited > TRIAL_PATIENCE_SECONDS):
            return [priced, *(other for other in order if other is not priced)]
    return order


async def _try(run: Running, worker: WorkerState, priced: Priced) -> PrefillReply | None:
    """None: another worker may still serve."""
    context, row = run.context, worker.row
    if not context.cluster.dispatch.holds(run.asked.request_id, row.id):
        turns.again(run, priced)
    leg = leg_of(run, worker, params(run, worker, priced))
    try:
        if run.plan.policies.scheduling.hedge.after_seconds and run.decision.hedge is None:
            begin(run, worker, priced)
            return await hedged(run, leg, priced)
        with leg.send_now():
            begin(run, worker, priced)
        _, answer = await context.sender.exchange(leg, context.settings.timeouts.prefill)
        reply = prefill_reply(answer, foreign=row.handshake == "nixl")
    except LegError as error:
        failed(run, worker, error)
        return None
    except ClientFault as fault:
        if not may_be_of_length(run, fault):
            raise
        return _in_its_own_words(run, worker)
    served(run, worker, priced, reply)
    return reply


def _in_its_own_words(run: Running, worker: WorkerState) -> PrefillReply:
    """Leg 1 was refused, in numbers that its client never sent: decode gets the client's own."""
    run.context.cluster.health.no_verdict(worker.row.id)
    run.step(PREFILL_ENDED)
    run.context.cluster.dispatch.leave(run.asked.request_id)
    run.outcome.decode_side = True
    return _NO_PREFILL


def _on_decode_side(run: Running) -> PrefillReply:
    """No prefill worker could serve: decode loads what its node holds, computes the rest."""
    run.context.cluster.dispatch.leave(run.asked.request_id)
    run.context.stats.decode_side_prefills += 1
    run.outcome.decode_side = True
    worker = run.context.cluster.workers.get(run.life.slot_worker)
    held = 0 if worker is None else run.plan.held_blocks.get(worker.row.node_id, 0)
    return PrefillReply(held, None, None)
