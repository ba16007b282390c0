"""Leg 1 on one worker: what it is told, what is counted, what its answer teaches."""

from time import monotonic
from typing import Final

from controlplane.core.handshake import is_handoff_missing, owes_release, prefill_fields
from controlplane.core.handshake import prefill_params as foreign_params
from controlplane.core.lifecycle import PrefillEnded, PrefillStarted
from controlplane.core.routing import Priced
from controlplane.gateway.bodies import Holder, KvParams, ours, prefill_leg
from controlplane.gateway.learning import expect, prefill_lesson
from controlplane.gateway.legs import (
    ClientFault,
    LegError,
    LegRequest,
    PrefillReply,
    leg_head,
    request_of,
)
from controlplane.gateway.running import Running
from controlplane.gateway.worker_state import WorkerState

PREFILL_ENDED: Final = PrefillEnded()


def leg_of(run: Running, worker: WorkerState, kv: KvParams | None) -> LegRequest:
    """Leg 1 for this worker."""
    asked = run.asked
    body = prefill_leg(asked.body, kv, asked.salt, prefill_fields(worker.row.handshake))
    head = leg_head(asked.request_id, "p", asked.request.headers)
    return LegRequest(worker, request_of(worker, asked.request.path, head, body))


def begin(run: Running, worker: WorkerState, priced: Priced) -> None:
    """Leg 1 goes out, or has just gone."""
    asked, context, row = run.asked, run.context, worker.row
    cluster, request_id = context.cluster, asked.request_id
    now = monotonic()
    service = priced.prefill_seconds + priced.transfer_seconds
    worker.prefill_queue.start(request_id, service, run.decision.prompt_tokens or 0, now)
    if asked.text is not None:
        cluster.texts.learn(asked.text, worker.cache_owner)
    if run.plan.held.keys:
        expect(run, row.node_id)
        told = context.spreader.dispatched(
            run.plan, request_id, asked.pool_tenant, worker, run.life.slot_worker
        )
        run.prefetching = told or run.prefetching
    run.step(PrefillStarted(row.id))
    if not cluster.health.is_sound:
        cluster.health.started(row.id, now)
    run.decision.prefill_worker = row.id
    if row.engine == "emulated":
        run.decision.emulated = True
    context.stats.worker(row.id).requests += 1
    run.outcome.prefill_sent_at = now


def failed(run: Running, worker: WorkerState, error: LegError) -> None:
    """Leg 1 did not serve; another worker may."""
    run.step(PREFILL_ENDED)
    run.leg_failed("prefill", worker.row.id, error)
    run.context.stats.retries_prefill += 1


def served(run: Running, worker: WorkerState, priced: Priced, reply: PrefillReply) -> None:
    """Leg 1 was answered."""
    run.outcome.prefill_done_at = monotonic()
    run.step(PREFILL_ENDED)
    if not run.context.cluster.health.is_sound:
        run.context.cluster.health.served(worker.row.id)
        run.leg_served("prefill")
    take(run, worker, priced, reply)


def may_be_of_length(run: Running, fault: ClientFault) -> bool:
    """Whether leg 1 may have been refused for a length that was not known before it was sent."""
    if fault.answer.status != 400:
        return False
    model = run.context.cluster.models.get(run.asked.model)
    return run.asked.prompts is None or model is None or model.max_model_len is None


def params(run: Running, worker: WorkerState, priced: Priced) -> KvParams | None:
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


def take(run: Running, worker: WorkerState, priced: Priced, reply: PrefillReply) -> None:
    """What leg 1 said: compare token counts, and let the worker's prediction learn."""
    decision, stats = run.decision, run.context.stats
    decision.engine_prompt_tokens = reply.prompt_tokens
    if owes_release(worker.row.handshake):
        run.staged = reply.params
    if reply.num_blocks is None and is_handoff_missing(worker.row.handshake, reply.params):
        stats.handoff_missing += 1
    ours, theirs = decision.prompt_tokens, reply.prompt_tokens
    if ours is not None and theirs is not None and ours != theirs:
        stats.tokenizer_mismatch += 1
    queue, is_new = worker.prefill_queue, not worker.prefill_times.num_samples
    is_unknown = queue.is_vague or (is_new and queue.is_hearsay)  # that is no scale to begin with
    seconds = None if is_unknown else run.service_seconds
    lesson, reported = prefill_lesson(run, worker, priced, reply, seconds), decision.prefill_leg
    total, is_reported = lesson.prompt_tokens, reported and reported.worker_id == worker.row.id
    if reply.cached_tokens is not None and total is not None and not is_reported:
        decision.hit_tokens = min(reply.cached_tokens, total)
    if run.record is not None and run.context.agents.follows(worker.row.node_id):
        run.record.expect_prefill(worker.row.id, lesson.take_report)
    else:
        lesson.take_report(None)
