"""Leg 2: the decode worker of the held slot; before the first byte another one may be tried."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

from msgspec import structs

from controlplane.core.handshake import at_once, pairs
from controlplane.core.handshake import decode_params as foreign_params
from controlplane.core.lifecycle import DecodeRetried, DecodeStarted
from controlplane.core.routing import DecodeOption, order_decode
from controlplane.gateway.admission import Forecast
from controlplane.gateway.answers import AnswerError, CancelledByOperatorError, error_event
from controlplane.gateway.bodies import KvParams, decode_leg, ours
from controlplane.gateway.encodings import is_undone
from controlplane.gateway.events import DONE_MARKS, past_comments
from controlplane.gateway.learning import take_decode, take_handover
from controlplane.gateway.legs import (
    ClientFault,
    LegError,
    LegRequest,
    PrefillReply,
    check_answer,
    is_no_stream,
    leg_error,
    leg_head,
    passed_headers,
    request_of,
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
from controlplane.gateway.worker_state import WorkerState

_DECODE_STARTED, _DECODE_RETRIED = DecodeStarted(), DecodeRetried()


async def decode(run: Running, prefilled: PrefillReply) -> None:
    """Answers the client. Raises `AnswerError` when no decode worker could, `ClientFault`."""
    num_blocks = _blocks(run, prefilled)
    tried: list[str] = []
    await leave_unfit(run)
    while True:
        name = run.life.slot_worker
        staged = run.staged
        if prefilled.params is not None and _takes_over(run, name):
            run.staged = None  # an engine that has the leg frees it, also when its client leaves
        try:
            await _try(run, name, num_blocks, prefilled)
        except ClientFault:
            run.staged = staged
            raise
        except LegError as error:
            if error.was_sent and run.staged is None:
                # It may have been taken, and its blocks be another prompt's by now.
                prefilled = structs.replace(prefilled, params=None)
            run.staged = staged
            await try_elsewhere(run, error, tried)
        else:
            return


async def leave_unfit(run: Running) -> None:
    """Where the worker whose slot is held takes nothing now: to another. While none is free, one
    that drains is tried all the same; where it is gone or has failed, another is waited for if
    there are any."""
    cluster, model, name = run.context.cluster, run.asked.model, run.life.slot_worker
    worker = cluster.workers.get(name)
    if (worker is not None and run.may_send(worker)) or _move(run, (name,)):
        return
    if worker is None or worker.row.model != model:
        if cluster.has_ready(model, "decode"):
            await _wait_elsewhere(run, "has left")
    elif worker.row.state == "ready" and _others(run, (name,)):
        await _wait_elsewhere(run, "has failed")


def _others(run: Running, tried: Sequence[str]) -> bool:
    """Whether others serve, though none may have a free slot."""
    serving = run.context.cluster.serving(run.asked.model, "decode", monotonic())
    return any(state.row.id not in tried for state in serving)


async def _wait_elsewhere(run: Running, why: str) -> None:
    """Gives the slot back. Raises `AnswerError` that says `why` its worker does not serve."""
    cluster, request_id, plan = run.context.cluster, run.asked.request_id, run.plan
    name, seconds = run.life.slot_worker, run.context.settings.timeouts.slot
    cluster.free_slot(request_id)
    run.outcome.slot_asked_at = monotonic()
    worker_id = await cluster.wait_for_slot(
        request_id, run.asked.model, seconds, plan.kv_tokens, plan.standing.rank
    )
    if worker_id is None:
        message = (
            f"worker {name}, where request {request_id} was to be decoded, {why}, and no other"
            f" decode slot of {run.asked.model} came free within {seconds:g} s"
        )
        raise AnswerError(503, message, "no_slot", retry_after=5)
    _settle(run, worker_id)


async def try_elsewhere(run: Running, error: LegError, tried: list[str]) -> None:
    """Leg 2 failed where its slot is held: count that, and take another worker's slot, or wait for
    one while all are taken. Raises `AnswerError` where there is none, or enough have been `tried`."""
    name = run.life.slot_worker
    tried.append(name)
    run.leg_failed("decode", name, error)
    if len(tried) > run.context.settings.limits.max_retries or not _others(run, tried):
        raise unreachable_answer("decode", name, run.asked, error) from error
    if not _move(run, tried):
        if run.life.is_decoding:
            run.step(_DECODE_RETRIED)
        await _wait_elsewhere(run, f"failed ({error})")
    run.context.stats.retries_decode += 1


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


def _move(run: Running, tried: Sequence[str]) -> bool:
    """Take a slot of another decode worker, if one is free."""
    options = run.context.scheduler.decode_options(run.asked.model, monotonic())
    free = order_decode([option for option in options if option.worker_id not in tried])
    if run.context.cluster.mixed:
        free = _fitting(run, free) or free  # else it computes the prompt
    if not free:
        return False
    worker_id = free[0].worker_id
    if run.life.is_decoding:
        run.step(_DECODE_RETRIED)
    run.context.cluster.slots.take(run.asked.request_id, worker_id)
    _settle(run, worker_id)
    return True


def _settle(run: Running, worker_id: str) -> None:
    """A slot of another worker is held."""
    run.hold_slot(worker_id)
    worker = run.context.cluster.workers.get(worker_id)
    if worker is not None and run.prefetching not in ("", worker.row.node_id):
        run.context.spreader.needless(run.prefetching, run.asked.request_id)
        run.prefetching = ""


def _fitting(run: Running, options: list[DecodeOption]) -> list[DecodeOption]:
    """Those that can take what leg 1 has handed over."""
    workers = run.context.cluster.workers
    prefill = workers.get(run.decision.prefill_worker)
    if prefill is None:
        return options
    first = prefill.row.handshake
    return [one for one in options if pairs(first, workers[one.worker_id].row.handshake)]


def _takes_over(run: Running, worker_id: str) -> bool:
    workers = run.context.cluster.workers
    prefill, decode = workers.get(run.decision.prefill_worker), workers.get(worker_id)
    if prefill is None or decode is None:
        return True
    return pairs(prefill.row.handshake, decode.row.handshake)


async def _try(run: Running, worker_id: str, num_blocks: int, prefilled: PrefillReply) -> None:
    worker = taker(run, worker_id)
    asked, context = run.asked, run.context
    leg = leg_of(run, worker, _params(run, worker, num_blocks, prefilled))
    with leg.send_now(wants_piece=asked.body.stream):
        begin(run, worker)
    if asked.body.stream:
        reply, first = await context.sender.decode_stream(leg, is_split=not asked.body.passed)
        await relay_stream(run, worker, reply, first, _details(run, prefilled))
    else:
        reply, answer = await context.sender.exchange(leg, context.settings.timeouts.whole_reply)
        check_answer(reply, answer, is_object=not asked.body.passed)
        answer_whole(run, worker, reply, answer, _details(run, prefilled))


def taker(run: Running, worker_id: str) -> WorkerState:
    """The worker of leg 2, as it is now. Raises `LegError`."""
    worker = run.context.cluster.workers.get(worker_id)
    if worker is None:
        raise LegError("has left the cluster", 503, unreachable=True, was_sent=False)
    if worker.row.model != run.asked.model:
        message = f"serves model {worker.row.model} now"
        raise LegError(message, 503, unreachable=False, was_sent=False)
    return worker


def leg_of(run: Running, worker: WorkerState, kv: KvParams | None) -> LegRequest:
    """Leg 2 for this worker."""
    asked = run.asked
    body = decode_leg(asked.body, kv, asked.salt)
    head = leg_head(asked.request_id, "d", asked.request.headers)
    return LegRequest(worker, request_of(worker, asked.request.path, head, body))


def begin(run: Running, worker: WorkerState) -> None:
    """Leg 2 goes out, or has just gone."""
    context, row = run.context, worker.row
    run.step(_DECODE_STARTED)
    if row.engine == "emulated":
        run.decision.emulated = True
    context.stats.worker(row.id).requests += 1
    now = run.outcome.decode_sent_at = monotonic()
    if not context.cluster.health.is_sound:
        context.cluster.health.started(row.id, now)
    if run.record is not None and context.agents.follows(row.node_id):
        run.record.expects_decode = True
        run.record.has_agent = True


def _params(
    run: Running, worker: WorkerState, num_blocks: int, prefilled: PrefillReply
) -> KvParams | None:
    """With the prefill worker's node, where decode runs on another one."""
    cluster, holder = run.context.cluster, None
    if worker.row.handshake != "perilune":
        name = worker.row.handshake
        if at_once(name):
            return None  # leg 1 is over: nobody would meet it
        return foreign_params(name, run.asked.request_id, prefilled.params, None)
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


def answer_whole(
    run: Running,
    worker: WorkerState,
    reply: Reply,
    body: bytes,
    details: dict[str, Any] | None,
) -> None:
    """The client's answer, and its end. `details`: of the prompt's tokens, as leg 1 said. Raises
    `LegError` where it has no choices and must."""
    decision, asked, headers = run.decision, run.asked, reply.headers
    encoding = headers.get(b"content-encoding")
    if encoding is not None and not is_undone(encoding):  # nobody here can read it
        decision.status = "finished_stop"
    else:
        body = read_reply(decision, body, details, has_choices=not asked.body.passed)
    if not run.context.cluster.health.is_sound:
        run.context.cluster.health.served(worker.row.id)
    kind = headers.get(b"content-type", b"application/json")
    ours = asked.client_headers(passed_headers(reply))
    asked.request.connection.respond(200, body, kind, ours)
    worker.decode_times.observe_service(monotonic() - run.outcome.slot_held_at)
    decision.http_status = 200
    run.finish()


# --- a stream ---


async def relay_stream(
    run: Running,
    worker: WorkerState,
    reply: Reply,
    first: bytes,
    details: dict[str, Any] | None,
) -> None:
    """From leg 2's first event to its end, however that comes. Raises `LegError` while nothing has
    been written: another worker may serve. A comment that has been written is part of an answer."""
    if is_no_stream(reply, first, is_split=not run.asked.body.passed):
        answer_whole(run, worker, reply, first, details)
        return
    asked, client = run.asked, run.asked.request.connection
    run.context.cluster.health.served(worker.row.id)
    kind = reply.headers.get(b"content-type", b"text/event-stream; charset=utf-8")
    start = client.start(200, kind, asked.client_headers(passed_headers(reply)))
    relay = client.relay = Relay(client, reply, start, details)
    relay.has_done_mark = not asked.body.passed
    take = relay.sink_of(reply.headers.get(b"content-encoding", b""))
    splice = relay.splice if client.takes_chunks and take == relay.take else None
    run.decision.http_status = 200
    error: LegError | None = None
    try:
        take(first)
        if not first.startswith(b"data:") and take == relay.take:
            await _comments(relay, reply, first, run.context.settings.timeouts.idle)
        await reply.relay(take, run.context.settings.timeouts.idle, splice)
    except UpstreamError as failed:
        error = leg_error(failed)
    except asyncio.CancelledError:
        reply.abort()
        _interrupted(run, worker, relay)
        raise
    if relay.has_said_done or (error is None and relay.is_done):
        relay.end()
        _streamed(run, worker, relay)
        return
    error = error or _cut_short(relay)
    try:
        if not relay.has_begun:
            _withdraw(run)
            raise error
        _broken(run, worker, relay, str(error))
    finally:
        del error  # its traceback holds this


def _cut_short(relay: Relay) -> LegError:
    missing = "[DONE]" if relay.has_done_mark else "the end of its compression"
    return LegError(f"the stream ended without {missing}", 502, unreachable=False)


def _interrupted(run: Running, worker: WorkerState, relay: Relay) -> None:
    if not relay.has_begun:  # whoever ended it gives the answer
        _withdraw(run)
    elif relay.finished:  # the client had everything and hung up
        _streamed(run, worker, relay)
    elif isinstance(run.cause, CancelledByOperatorError):
        _cancelled(run, relay, run.cause)
    elif run.cause is not None:
        _broken(run, worker, relay, str(run.cause))


def _withdraw(run: Running) -> None:
    run.asked.request.connection.withdraw()
    run.decision.http_status = None


async def _comments(relay: Relay, reply: Reply, first: bytes, seconds: float) -> None:
    """Passes on what has no data, up to the first event that has: the end may not follow at once."""
    while not past_comments(first) and not reply.complete:
        first = await reply.first_piece(seconds)
        if past_comments(first).startswith(DONE_MARKS):
            reply.abort()
            raise UpstreamError("protocol", "the stream ended without content")
        if first:
            relay.take(first)


def _streamed(run: Running, worker: WorkerState, relay: Relay) -> None:
    error = relay.error_said()
    if error is not None:
        _failed_in_words(run, worker, relay, *error)
        return
    decision, outcome = run.decision, run.outcome
    gaps = relay.ordered_gaps()
    read_stream(decision, outcome, relay, gaps, run.context.stats)
    times = worker.decode_times
    if not outcome.decode_side:
        take_handover(run, worker, relay.first_at - outcome.handover_at)
    times.observe_service(monotonic() - outcome.slot_held_at)
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


def _failed_in_words(
    run: Running, worker: WorkerState, relay: Relay, words: str, code: int | None
) -> None:
    """The engine's own error event has told the client already; a 4xx is no failure of a worker."""
    name = worker.row.id
    if code is not None and 400 <= code < 500:
        run.context.cluster.health.no_verdict(name)
    else:
        error = LegError(f"said {words}", 502, unreachable=False, answered=True)
        run.leg_failed("decode", name, error)
        run.decision.retries -= 1  # this one is not tried again
    read_first_byte(run.decision, run.outcome, relay)
    run.broke(f"the decode leg on worker {name} ended its stream with an error: {words}")


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
