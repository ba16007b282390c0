"""Leg 2: the decode worker of the held slot; before the first byte another one may be tried."""

import asyncio
from time import monotonic
from typing import Any

from controlplane.core.handshake import decode_params as foreign_params
from controlplane.core.lifecycle import DecodeRetried, DecodeStarted, SlotTaken
from controlplane.core.routing import order_decode
from controlplane.gateway.admission import Forecast
from controlplane.gateway.answers import CancelledByOperatorError, error_event
from controlplane.gateway.bodies import KvParams, decode_leg, ours
from controlplane.gateway.cluster import WorkerState
from controlplane.gateway.encodings import is_undone
from controlplane.gateway.learning import take_decode
from controlplane.gateway.legs import (
    LegError,
    PrefillReply,
    check_answer,
    leg_head,
    passed_headers,
    unreachable_answer,
)
from controlplane.gateway.relay import Relay
from controlplane.gateway.results import (
    MIN_GAPS,
    count_slo,
    read_first_byte,
    read_reply,
    read_stream,
)
from controlplane.gateway.running import Running
from controlplane.gateway.upstream import Reply, UpstreamError

_DECODE_STARTED, _DECODE_RETRIED = DecodeStarted(), DecodeRetried()


async def decode(run: Running, prefilled: PrefillReply) -> None:
    """Answers the client. Raises `AnswerError` when no decode worker could, `ClientFault`."""
    num_blocks = _blocks(run, prefilled)
    tried: set[str] = set()
    worker = run.context.cluster.workers.get(run.life.slot_worker)
    if worker is None or not run.may_send(worker):
        _move(run, {run.life.slot_worker})  # else the one that it was given is tried all the same
    while True:
        name = run.life.slot_worker
        staged, run.staged = run.staged, None  # an engine that has the leg frees it, come what may
        try:
            await _try(run, name, num_blocks, prefilled)
        except LegError as error:
            if error.unreachable:
                run.staged = staged
            tried.add(name)
            run.leg_failed("decode", name, error)
            if len(tried) > run.context.settings.limits.max_retries or not _move(run, tried):
                raise unreachable_answer("decode", name, run.asked, error) from error
            run.context.stats.retries_decode += 1
        else:
            return


def _blocks(run: Running, prefilled: PrefillReply) -> int:
    """Blocks that decode may load. A reply to several prompts speaks of the first only."""
    blocks = prefilled.num_blocks or 0
    prompts = run.asked.prompts
    if blocks and prompts is not None and len(prompts) > 1:
        worker = run.context.cluster.workers.get(run.decision.prefill_worker)
        size = None if worker is None else worker.block_tokens
        if size:
            return max(blocks, *(len(tokens) // size for tokens in prompts))
    return blocks


def _move(run: Running, tried: set[str]) -> bool:
    """Take a slot of another decode worker, if one is free."""
    options = run.context.scheduler.decode_options(run.asked.model, monotonic())
    free = order_decode([option for option in options if option.worker_id not in tried])
    if not free:
        return False
    worker_id = free[0].worker_id
    if run.life.is_decoding:
        run.step(_DECODE_RETRIED)
    run.context.cluster.slots.take(run.asked.request_id, worker_id)
    run.step(SlotTaken(worker_id))
    run.decision.decode_worker = worker_id
    return True


async def _try(run: Running, worker_id: str, num_blocks: int, prefilled: PrefillReply) -> None:
    asked, context = run.asked, run.context
    cluster = context.cluster
    worker = cluster.workers.get(worker_id)
    if worker is None:
        raise LegError("has left the cluster", 503, unreachable=True)
    row = worker.row
    if row.model != asked.model:
        raise LegError(f"serves model {row.model} now", 503, unreachable=False)
    body = decode_leg(asked.body, _params(run, worker, num_blocks, prefilled), asked.salt)
    head = leg_head(asked.request_id, "d", asked.request.headers)
    run.step(_DECODE_STARTED)
    if row.engine == "emulated":
        run.decision.emulated = True
    context.stats.worker(row.id).requests += 1
    now = run.outcome.decode_sent_at = monotonic()
    if not cluster.health.is_sound:
        cluster.health.started(row.id, now)
    if run.record is not None and context.agents.follows(row.node_id):
        run.record.expected.add("decode")
        run.record.has_agent = True
    path = asked.request.path
    if asked.body.stream:
        await _stream(run, worker, path, head, body, prefilled)
    else:
        seconds = context.settings.timeouts.whole_reply
        reply, answer = await context.sender.exchange(worker, path, head, body, seconds)
        check_answer(answer)
        if not cluster.health.is_sound:
            cluster.health.served(row.id)
        _answer_whole(run, worker, reply, answer, prefilled)


def _params(
    run: Running, worker: WorkerState, num_blocks: int, prefilled: PrefillReply
) -> KvParams | None:
    """With the prefill worker's node, where decode runs on another one."""
    cluster, holder = run.context.cluster, None
    if worker.row.handshake != "perilune":
        bootstrap = run.context.bootstraps.get(run.decision.prefill_worker)
        name, transfer_id = worker.row.handshake, run.asked.request_id
        return foreign_params(name, transfer_id, prefilled.params, bootstrap)
    prefill = cluster.workers.get(run.decision.prefill_worker)
    if prefill is not None and prefill.row.node_id != worker.row.node_id:
        holder = cluster.paths.holders.get(prefill.row.node_id)
    return ours(run.asked.params("decode", num_blocks, holder))


def _details(run: Running, prefilled: PrefillReply) -> dict[str, Any] | None:
    """Of the prompt's tokens: what leg 1 said of its prefix hits, or else its connector."""
    if prefilled.cached_tokens is not None:
        return prefilled.details
    hits = run.decision.hit_tokens
    return None if hits is None else {"cached_tokens": hits}


# --- a whole answer ---


def _answer_whole(
    run: Running, worker: WorkerState, reply: Reply, body: bytes, prefilled: PrefillReply
) -> None:
    decision, asked, headers = run.decision, run.asked, reply.headers
    encoding = headers.get(b"content-encoding")
    if encoding is not None and not is_undone(encoding):  # nobody here can read it
        decision.status = "finished_stop"
    else:
        body = read_reply(decision, body, _details(run, prefilled))
    kind = headers.get(b"content-type", b"application/json")
    ours = asked.client_headers(passed_headers(reply))
    asked.request.connection.respond(200, body, kind, ours)
    worker.decode_times.observe_service(monotonic() - run.outcome.slot_at)
    decision.http_status = 200
    run.finish()


# --- a stream ---


async def _stream(
    run: Running,
    worker: WorkerState,
    path: bytes,
    head: bytes,
    body: bytes,
    prefilled: PrefillReply,
) -> None:
    reply, first = await run.context.sender.decode_stream(worker, path, head, body)
    asked, client = run.asked, run.asked.request.connection
    run.context.cluster.health.served(worker.row.id)
    kind = reply.headers.get(b"content-type", b"text/event-stream; charset=utf-8")
    start = client.start(200, kind, asked.client_headers(passed_headers(reply)))
    relay = client.relay = Relay(client, reply, start, _details(run, prefilled))
    relay.has_done_mark = not asked.body.passed
    take = relay.sink_of(reply.headers.get(b"content-encoding", b""))
    splice = relay.splice if client.takes_chunks and take == relay.take else None
    run.decision.http_status = 200
    try:
        take(first)
        await reply.relay(take, run.context.settings.timeouts.idle, splice)
    except UpstreamError as error:
        _broken(run, worker, relay, str(error))
        return
    except asyncio.CancelledError:
        reply.abort()
        if relay.finished:  # the client had everything and hung up
            _streamed(run, worker, relay)
        elif isinstance(run.cause, CancelledByOperatorError):
            _cancelled(run, relay, run.cause)
        elif run.cause is not None:
            _broken(run, worker, relay, str(run.cause))
        raise
    if not relay.is_done:
        _broken(run, worker, relay, "the stream ended without [DONE]")
        return
    relay.end()
    _streamed(run, worker, relay)


def _streamed(run: Running, worker: WorkerState, relay: Relay) -> None:
    decision, outcome = run.decision, run.outcome
    gaps = relay.ordered_gaps()
    read_stream(decision, outcome, relay, gaps, run.context.stats)
    times = worker.decode_times
    times.observe_handover(relay.first_at - outcome.decode_sent_at)
    times.observe_service(monotonic() - outcome.slot_at)
    if len(gaps) >= MIN_GAPS:
        take_decode(run, worker, sum(gaps) / len(gaps))
    plan, slo = run.plan, run.plan.policies.slo
    count_slo(slo, decision, run.context.stats)
    desk = run.context.cluster.desk
    turned = (outcome.turn_at or outcome.planned_at) - outcome.received_at
    forecast = Forecast(plan.rest_seconds, plan.predicted_tbt_seconds)
    desk.ended(slo, decision, turned, forecast, monotonic())
    run.finish()


def _cancelled(run: Running, relay: Relay, cause: CancelledByOperatorError) -> None:
    about = {"request_id": run.asked.request_id}
    relay.fail(error_event(cause.status, cause.message, cause.code, about))
    read_first_byte(run.decision, run.outcome, relay)
    run.cancelled(cause)


def _broken(run: Running, worker: WorkerState, relay: Relay, cause: str) -> None:
    """A cut after the first byte: said in the stream, never a silent clean end (A28)."""
    name, request_id = worker.row.id, run.asked.request_id
    message = f"the decode leg of request {request_id} broke off on worker {name}: {cause}"
    about = {"request_id": request_id, "leg": "decode", "worker": name}
    relay.fail(error_event(502, message, "decode_leg_failed", about))
    unreachable = "connection" in cause or "hangs" in cause
    run.leg_failed("decode", name, LegError(cause, 502, unreachable=unreachable))
    read_first_byte(run.decision, run.outcome, relay)
    run.decision.retries -= 1  # this one is not tried again
    run.broke(message)
