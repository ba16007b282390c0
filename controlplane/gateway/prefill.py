"""Leg 1: prefill workers in the plan's order; where none can serve, decode computes the prompt."""

from time import monotonic

from controlplane.core.handshake import is_handoff_missing, owes_release
from controlplane.core.handshake import prefill_params as foreign_params
from controlplane.core.lifecycle import PrefillEnded, PrefillStarted
from controlplane.core.routing import Priced
from controlplane.gateway import turns
from controlplane.gateway.bodies import Holder, KvParams, ours, prefill_leg
from controlplane.gateway.cluster import WorkerState
from controlplane.gateway.learning import expect, take_prefill
from controlplane.gateway.legs import LegError, PrefillReply, leg_head, prefill_reply
from controlplane.gateway.running import Running

TRIAL_COST_SECONDS = 1.0
TRIAL_PATIENCE_SECONDS = 10.0
_PREFILL_ENDED = PrefillEnded()
_NO_PREFILL = PrefillReply(0, None, None)


async def prefill(run: Running) -> PrefillReply:
    """What leg 1 said; without blocks where decode is to compute the prompt."""
    if run.unsplit:
        return _NO_PREFILL
    tries = 1 + run.context.settings.limits.max_retries
    order, cluster = run.plan.prefill, run.context.cluster
    if not cluster.health.is_sound and cluster.health.has_ejected:
        order = _trial_first(run, order)
    for priced in order[:tries]:
        worker = cluster.workers.get(priced.option.worker_id)
        if worker is None or not run.may_send(worker):
            continue
        if worker.row.id == run.life.slot_worker:
            cluster.dispatch.leave(run.asked.request_id)
            return _NO_PREFILL  # one worker does both in one leg
        reply = await _try(run, worker, priced)
        if reply is not None:
            return reply
    return _on_decode_side(run)


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
    asked, context, row = run.asked, run.context, worker.row
    cluster, request_id = context.cluster, asked.request_id
    if not cluster.dispatch.holds(request_id, row.id) and not await turns.again(run, priced):
        return None
    body = prefill_leg(asked.body, _params(run, worker, priced), asked.salt)
    head = leg_head(request_id, "p", asked.request.headers)
    now = monotonic()
    service = priced.prefill_seconds + priced.transfer_seconds
    worker.prefill_queue.start(request_id, service, run.decision.prompt_tokens or 0, now)
    if asked.text is not None:
        cluster.texts.learn(asked.text, worker.cache_owner)
    if run.plan.held.keys:
        expect(run, row.node_id)
        context.spreader.dispatched(
            run.plan, request_id, asked.pool_tenant, worker, run.life.slot_worker
        )
    run.step(PrefillStarted(row.id))
    if not cluster.health.is_sound:
        cluster.health.started(row.id, now)
    run.decision.prefill_worker = row.id
    if row.engine == "emulated":
        run.decision.emulated = True
    context.stats.worker(row.id).requests += 1
    run.outcome.prefill_sent_at = now
    try:
        seconds = context.settings.timeouts.prefill
        _, answer = await context.sender.exchange(worker, asked.request.path, head, body, seconds)
        reply = prefill_reply(answer, foreign=row.handshake == "nixl")
    except LegError as error:
        run.step(_PREFILL_ENDED)
        run.leg_failed("prefill", worker.row.id, error)
        context.stats.retries_prefill += 1
        return None
    run.outcome.prefill_done_at = monotonic()
    run.step(_PREFILL_ENDED)
    if not cluster.health.is_sound:
        cluster.health.served(row.id)
    _served(run, worker, priced, reply)
    return reply


def _params(run: Running, worker: WorkerState, priced: Priced) -> KvParams | None:
    """With the node to pull from, where that was priced in, and decode's, to push to."""
    if worker.row.handshake != "perilune":
        return foreign_params(worker.row.handshake, run.asked.request_id)
    source, num_blocks, holder = run.plan.source, None, None
    if priced.transfer_seconds and source is not None:
        holder = run.context.cluster.paths.holders.get(source.node_id)
        num_blocks = run.plan.held_blocks.get(source.node_id)
    return ours(run.asked.params("prefill", num_blocks, holder, _target(run, worker)))


def _target(run: Running, worker: WorkerState) -> Holder | None:
    """The node of the decode worker whose slot is held, where that is another one."""
    cluster = run.context.cluster
    decode = cluster.workers.get(run.life.slot_worker)
    if decode is None or decode.row.node_id == worker.row.node_id:
        return None
    if decode.row.handshake != "perilune":
        return None
    return cluster.paths.holders.get(decode.row.node_id)


def _served(run: Running, worker: WorkerState, priced: Priced, reply: PrefillReply) -> None:
    """Compare token counts, and let the worker's prediction learn."""
    decision, stats = run.decision, run.context.stats
    decision.engine_prompt_tokens = reply.prompt_tokens
    if owes_release(worker.row.handshake):
        run.staged = reply.params
    if reply.num_blocks is None and is_handoff_missing(worker.row.handshake, reply.params):
        stats.handoff_missing += 1
    ours, theirs = decision.prompt_tokens, reply.prompt_tokens
    if ours is not None and theirs is not None and ours != theirs:
        stats.tokenizer_mismatch += 1
    seconds = run.service_seconds
    total = theirs or ours
    if run.record is not None and run.context.agents.follows(worker.row.node_id):
        run.record.expect_prefill(worker.row.id, lambda leg: take_prefill(
            run, worker, priced, leg.computed_tokens,
            leg.device_hit_tokens + leg.pool_hit_tokens, seconds,
        ))  # fmt: skip
    elif total is not None:
        cached = min(reply.cached_tokens or 0, total)
        if reply.cached_tokens is not None:
            decision.hit_tokens = cached
        take_prefill(run, worker, priced, total - cached, cached, seconds)


def _on_decode_side(run: Running) -> PrefillReply:
    """No prefill worker could serve: decode loads what its node holds, computes the rest."""
    run.context.cluster.dispatch.leave(run.asked.request_id)
    run.context.stats.decode_side_prefills += 1
    run.outcome.decode_side = True
    worker = run.context.cluster.workers.get(run.life.slot_worker)
    held = 0 if worker is None else run.plan.held_blocks.get(worker.row.node_id, 0)
    return PrefillReply(held, None, None)
