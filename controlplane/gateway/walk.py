"""One request's walk: plan, slot, leg 1, leg 2, record. Every way out releases what it held."""

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from controlplane.core.lifecycle import (
    ENDS,
    ClientLeft,
    CloseRecord,
    Command,
    DecodeRetried,
    DecodeStarted,
    EndPrefillLoad,
    Event,
    Failed,
    Finished,
    FreeSlot,
    Lifecycle,
    PrefillEnded,
    PrefillStarted,
    Rejected,
    ReleasePins,
    SlotTaken,
    State,
)
from controlplane.core.routing import Priced, order_decode
from controlplane.gateway.agents import Agents
from controlplane.gateway.answers import AnswerError, error_event
from controlplane.gateway.asked import Asked
from controlplane.gateway.bodies import LegParams, decode_leg, prefill_leg
from controlplane.gateway.cluster import Cluster, WorkerState
from controlplane.gateway.legs import (
    ClientFault,
    LegError,
    LegSender,
    PrefillReply,
    WorkerAnswer,
    leg_head,
    passed_headers,
    unreachable_answer,
)
from controlplane.gateway.outcome import Outcome
from controlplane.gateway.records import Records
from controlplane.gateway.relay import Relay
from controlplane.gateway.results import (
    MIN_GAPS,
    count_slo,
    new_decision,
    read_first_byte,
    read_reply,
    read_stream,
)
from controlplane.gateway.scheduling import Plan, Scheduler
from controlplane.gateway.settings import Settings
from controlplane.gateway.stats import Stats
from controlplane.gateway.upstream import UpstreamError

_REJECTED, _PREFILL_ENDED, _DECODE_STARTED = Rejected(), PrefillEnded(), DecodeStarted()
_DECODE_RETRIED, _FINISHED, _FAILED, _CLIENT_LEFT = (
    DecodeRetried(), Finished(), Failed(), ClientLeft(),
)  # fmt: skip
_NO_PREFILL = PrefillReply(0, None, None)


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


class Walk:
    """One use: `await run()`."""

    __slots__ = (
        "_asked", "_context", "_decision", "_life", "_outcome", "_plan", "_record",
        "_service_seconds",
    )  # fmt: skip

    def __init__(self, context: Context, asked: Asked) -> None:
        self._context = context
        self._asked = asked
        self._life = Lifecycle()
        self._outcome = Outcome(asked.request.received_at)
        self._service_seconds = 0.0
        now = monotonic()
        self._plan: Plan = context.scheduler.plan(asked.model, asked.prompts, asked.salt, now)
        self._outcome.planned_at = monotonic()
        self._decision = new_decision(
            asked, self._plan, context.settings.gateway_id, self._outcome.planned_at
        )
        admitted = self._plan.admission.admitted
        self._record = context.records.begin(self._decision) if admitted else None

    async def run(self) -> None:
        """Answers the client, or raises `AnswerError` for the server to answer."""
        stats = self._context.stats
        stats.in_flight += 1
        try:
            await self._run()
        except AnswerError as error:
            error.request_id = self._asked.request_id
            self._failed(error)
            raise
        except ClientFault as fault:
            self._refused_by_engine(fault.answer)
        except asyncio.CancelledError:
            if self._life.state not in ENDS:
                stats.cancelled += 1
                self._decision.status = "cancelled"
            self._step(_CLIENT_LEFT)
            raise
        finally:
            stats.in_flight -= 1
            if self._life.state not in ENDS:  # a bug: clean up after it
                self._step(_FAILED)

    async def _run(self) -> None:
        self._admit()
        await self._take_slot()
        prefilled = await self._prefill()
        await self._decode(prefilled)

    # --- admission ---

    def _admit(self) -> None:
        admission = self._plan.admission
        if admission.admitted:
            return
        self._step(_REJECTED)
        stats = self._context.stats
        stats.rejected += 1
        seconds = admission.retry_after_seconds
        decision = self._decision
        decision.status, decision.http_status = "rejected", 429
        decision.error, decision.retry_after_seconds = admission.reason, seconds
        self._context.records.once(decision)
        revisions = self._plan.policies.revisions
        named = ", ".join(f"{k} revision {v}" for k, v in revisions.items() if k.startswith("slo/"))
        message = f"rejected: {admission.reason} ({named or 'no slo policy'}); try again later"
        raise AnswerError(429, message, f"slo_{admission.breaks}", retry_after=seconds)

    async def _take_slot(self) -> None:
        plan, asked, cluster = self._plan, self._asked, self._context.cluster
        if plan.free_decode:
            worker_id = plan.free_decode[0].worker_id
            cluster.slots.take(asked.request_id, worker_id)
        elif plan.decode:
            granted = await self._wait_for_slot()
            worker_id = granted
        else:
            raise self._nobody("decode")
        self._step(SlotTaken(worker_id))
        self._outcome.slot_at = monotonic()
        self._decision.decode_worker = worker_id

    async def _wait_for_slot(self) -> str:
        asked, cluster = self._asked, self._context.cluster
        seconds = self._context.settings.timeouts.slot
        worker_id = await cluster.wait_for_slot(asked.request_id, asked.model, seconds)
        if worker_id is None:
            waiting = cluster.slots.num_waiting
            message = (
                f"all decode slots of {asked.model} are taken ({waiting} requests wait,"
                f" at most {cluster.slots.max_waiting}, {seconds:g} s each)"
            )
            raise AnswerError(503, message, "no_slot", retry_after=5)
        return worker_id

    def _nobody(self, role: str) -> AnswerError:
        cluster, model = self._context.cluster, self._asked.model
        now = monotonic()
        why = "none is ready"
        if cluster.has_ready(model, role):
            why = f"paused after failures: {', '.join(cluster.health.paused(now))}"
        message = f"no {role} worker of model {model} takes requests: {why}"
        self._decision.failed_leg = "decode"
        return AnswerError(503, message, f"no_{role}_worker", retry_after=1)

    # --- leg 1 ---

    async def _prefill(self) -> PrefillReply:
        """Tries prefill workers in the plan's order; else decode computes the prompt."""
        if self._asked.body.needs_whole_prompt_on_decode:
            return _NO_PREFILL
        tries = 1 + self._context.settings.limits.max_retries
        for priced in self._plan.prefill[:tries]:
            worker = self._context.cluster.workers.get(priced.option.worker_id)
            if worker is None:
                continue
            if worker.row.id == self._life.slot_worker:
                return _NO_PREFILL  # one worker does both in one leg
            reply = await self._try_prefill(worker, priced)
            if reply is not None:
                return reply
        return self._decode_side_prefill()

    async def _try_prefill(self, worker: WorkerState, priced: Priced) -> PrefillReply | None:
        asked, context = self._asked, self._context
        body = prefill_leg(asked.body, self._prefill_params(priced), asked.salt)
        head = leg_head(asked.request_id, "p", asked.request.headers)
        now = monotonic()
        tokens = asked.num_tokens or 0
        worker.prefill_queue.start(asked.request_id, priced.prefill_seconds, tokens, now)
        self._step(PrefillStarted(worker.row.id))
        self._decision.prefill_worker = worker.row.id
        self._decision.emulated |= worker.row.engine == "emulated"
        context.stats.worker(worker.row.id).requests += 1
        self._outcome.prefill_sent_at = now
        try:
            reply = await context.sender.prefill(worker, asked.request.path, head, body)
        except LegError as error:
            self._step(_PREFILL_ENDED)
            self._leg_failed("prefill", worker.row.id, error)
            context.stats.retries_prefill += 1
            return None
        self._outcome.prefill_done_at = monotonic()
        self._step(_PREFILL_ENDED)
        context.cluster.health.served(worker.row.id)
        self._prefilled(worker, reply)
        return reply

    def _prefill_params(self, priced: Priced) -> LegParams:
        """With the node to pull from, where that was priced in."""
        source, num_blocks, holder = self._plan.source, None, None
        if priced.transfer_seconds and source is not None:
            holder = self._context.cluster.paths.holders.get(source.node_id)
            num_blocks = self._plan.held_blocks.get(source.node_id)
        return self._asked.params("prefill", num_blocks, holder)

    def _prefilled(self, worker: WorkerState, reply: PrefillReply) -> None:
        """Compare token counts, and let the worker's prediction learn."""
        decision, stats = self._decision, self._context.stats
        decision.engine_prompt_tokens = reply.prompt_tokens
        if reply.num_blocks is None:
            stats.handoff_missing += 1
        ours, theirs = decision.prompt_tokens, reply.prompt_tokens
        if ours is not None and theirs is not None and ours != theirs:
            stats.tokenizer_mismatch += 1
        seconds = self._service_seconds
        total = theirs or ours
        if self._record is not None and self._context.agents.follows(worker.row.node_id):
            self._record.expected.add("prefill")
            self._record.has_agent = True
            self._record.on_prefill_leg = lambda leg: worker.prefilled(
                leg.computed_tokens, leg.device_hit_tokens + leg.pool_hit_tokens, seconds
            )
        elif total is not None:
            cached = min(reply.cached_tokens or 0, total)
            if reply.cached_tokens is not None:
                decision.hit_tokens = cached
            worker.prefilled(total - cached, cached, seconds)

    def _decode_side_prefill(self) -> PrefillReply:
        """No prefill worker could serve: decode loads what its node holds, computes the rest."""
        self._context.stats.decode_side_prefills += 1
        self._outcome.decode_side = True
        worker = self._context.cluster.workers.get(self._life.slot_worker)
        held = 0 if worker is None else self._plan.held_blocks.get(worker.row.node_id, 0)
        return PrefillReply(held, None, None)

    # --- leg 2 ---

    async def _decode(self, prefilled: PrefillReply) -> None:
        asked, limits = self._asked, self._context.settings.limits
        num_blocks = self._blocks(prefilled)
        tried: set[str] = set()
        while True:
            name = self._life.slot_worker
            try:
                await self._try_decode(name, num_blocks, prefilled)
            except LegError as error:
                tried.add(name)
                self._leg_failed("decode", name, error)
                if len(tried) > limits.max_retries or not self._move(tried):
                    raise unreachable_answer("decode", name, asked.request_id, error) from error
                self._context.stats.retries_decode += 1
            else:
                return

    def _decode_params(self, num_blocks: int, node_id: str) -> LegParams:
        """With the prefill worker's node, where decode runs on another one."""
        cluster, holder = self._context.cluster, None
        prefill = cluster.workers.get(self._decision.prefill_worker)
        if prefill is not None and prefill.row.node_id != node_id:
            holder = cluster.paths.holders.get(prefill.row.node_id)
        return self._asked.params("decode", num_blocks, holder)

    def _blocks(self, prefilled: PrefillReply) -> int:
        """Blocks that decode may load. A reply to several prompts speaks of the first only."""
        blocks = prefilled.num_blocks or 0
        prompts = self._asked.prompts
        if blocks and prompts is not None and len(prompts) > 1:
            worker = self._context.cluster.workers.get(self._decision.prefill_worker)
            size = None if worker is None else worker.block_tokens
            if size:
                return max(blocks, *(len(tokens) // size for tokens in prompts))
        return blocks

    def _move(self, tried: set[str]) -> bool:
        """Take a slot of another decode worker, if one is free."""
        options = self._context.scheduler.decode_options(self._asked.model, monotonic())
        free = order_decode([option for option in options if option.worker_id not in tried])
        if not free:
            return False
        worker_id = free[0].worker_id
        if self._life.state is State.DECODING:
            self._step(_DECODE_RETRIED)
        self._context.cluster.slots.take(self._asked.request_id, worker_id)
        self._step(SlotTaken(worker_id))
        self._decision.decode_worker = worker_id
        return True

    async def _try_decode(self, worker_id: str, num_blocks: int, prefilled: PrefillReply) -> None:
        asked, context = self._asked, self._context
        worker = context.cluster.workers.get(worker_id)
        if worker is None:
            raise LegError("has left the cluster", 503, unreachable=True)
        params = self._decode_params(num_blocks, worker.row.node_id)
        body = decode_leg(asked.body, params, asked.salt)
        head = leg_head(asked.request_id, "d", asked.request.headers)
        self._step(_DECODE_STARTED)
        self._decision.emulated |= worker.row.engine == "emulated"
        context.stats.worker(worker.row.id).requests += 1
        self._outcome.decode_sent_at = monotonic()
        if self._record is not None and context.agents.follows(worker.row.node_id):
            self._record.expected.add("decode")
            self._record.has_agent = True
        path = asked.request.path
        if asked.body.stream:
            await self._stream(worker, path, head, body, prefilled)
        else:
            answer = await context.sender.decode_whole(worker, path, head, body)
            context.cluster.health.served(worker.row.id)
            self._answer_whole(worker, answer, prefilled)

    def _answer_whole(
        self, worker: WorkerState, answer: WorkerAnswer, prefilled: PrefillReply
    ) -> None:
        body, decision, asked = answer.body, self._decision, self._asked
        if b"content-encoding" in answer.headers:
            decision.status = "finished_stop"
        else:
            body = read_reply(decision, body, self._cached_tokens(prefilled))
        headers = asked.client_headers(answer.headers)
        asked.request.connection.respond(200, body, answer.content_type, headers)
        worker.decode_times.observe_service(monotonic() - self._outcome.slot_at)
        decision.http_status = 200
        self._finish()

    def _cached_tokens(self, prefilled: PrefillReply) -> int | None:
        """The prefill leg's real prefix hits, if it or its connector has said."""
        if prefilled.cached_tokens is not None:
            return prefilled.cached_tokens
        return self._decision.hit_tokens

    async def _stream(
        self, worker: WorkerState, path: bytes, head: bytes, body: bytes, prefilled: PrefillReply
    ) -> None:
        reply, first = await self._context.sender.decode_stream(worker, path, head, body)
        asked, client = self._asked, self._asked.request.connection
        self._context.cluster.health.served(worker.row.id)
        kind = reply.headers.get(b"content-type", b"text/event-stream; charset=utf-8")
        start = client.start(200, kind, asked.client_headers(passed_headers(reply)))
        relay = client.relay = Relay(client, reply, start, self._cached_tokens(prefilled))
        self._decision.http_status = 200
        try:
            relay.take(first)
            splice = relay.splice if client.takes_chunks else None
            await reply.relay(relay.take, self._context.settings.timeouts.idle, splice)
        except UpstreamError as error:
            self._broken(worker, relay, str(error))
            return
        except asyncio.CancelledError:
            reply.abort()
            if relay.finished:  # the client had everything and hung up
                self._streamed(worker, relay)
            raise
        if not relay.is_done:
            self._broken(worker, relay, "the stream ended without [DONE]")
            return
        relay.end()
        self._streamed(worker, relay)

    def _streamed(self, worker: WorkerState, relay: Relay) -> None:
        decision, outcome = self._decision, self._outcome
        read_stream(decision, outcome, relay, self._context.stats)
        times = worker.decode_times
        times.observe_handover(relay.first_at - outcome.decode_sent_at)
        times.observe_service(monotonic() - outcome.slot_at)
        if len(relay.gaps) >= MIN_GAPS:
            running = self._context.cluster.slots.running(worker.row.id)
            worker.decoded(running, sum(relay.gaps) / len(relay.gaps))
        count_slo(self._plan.policies.slo, decision, self._context.stats)
        self._finish()

    def _broken(self, worker: WorkerState, relay: Relay, cause: str) -> None:
        """A cut after the first byte: said in the stream, never a silent clean end (A28)."""
        name, request_id = worker.row.id, self._asked.request_id
        message = f"the decode leg of request {request_id} broke off on worker {name}: {cause}"
        relay.fail(error_event(502, message, "decode_leg_failed"))
        unreachable = "connection" in cause
        self._leg_failed("decode", name, LegError(cause, 502, unreachable=unreachable))
        decision = self._decision
        read_first_byte(decision, self._outcome, relay)
        decision.retries -= 1  # this one is not tried again
        decision.error, decision.status = message, "failed"
        self._context.stats.failed += 1
        self._step(_FAILED)

    # --- ends ---

    def _finish(self) -> None:
        self._context.stats.output_tokens += self._decision.output_tokens or 0
        self._step(_FINISHED)

    def _failed(self, error: AnswerError) -> None:
        decision = self._decision
        if self._life.state in ENDS:
            return
        self._context.stats.failed += 1
        decision.status, decision.http_status = "failed", error.status
        decision.error = error.message
        self._step(_FAILED)

    def _refused_by_engine(self, answer: WorkerAnswer) -> None:
        """A 4xx of the engine: unchanged to the client, no failure of a worker (I7)."""
        decision = self._decision
        self._context.stats.client_errors += 1
        decision.status, decision.http_status = "failed", answer.status
        decision.error = answer.body[:300].decode(errors="replace")
        client = self._asked.request.connection
        headers = self._asked.client_headers(answer.headers)
        client.respond(answer.status, answer.body, answer.content_type, headers)
        self._step(_FAILED)

    def _leg_failed(self, leg: Literal["prefill", "decode"], name: str, error: LegError) -> None:
        """Counted against the worker; the record says which leg."""
        self._context.stats.worker(name).failures += 1
        now = monotonic()
        self._context.cluster.health.failed(name, now, unreachable=error.unreachable)
        self._decision.failed_leg = leg
        self._decision.retries += 1
        self._decision.error = f"{leg} leg on {name}: {error}"

    # --- lifecycle ---

    def _step(self, event: Event) -> None:
        for command in self._life.handle(event):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        context, request_id = self._context, self._asked.request_id
        match command:
            case EndPrefillLoad(worker_id):
                worker = context.cluster.workers.get(worker_id)
                if worker is not None and request_id in worker.prefill_queue:
                    self._service_seconds = worker.prefill_queue.end(request_id, monotonic())
            case FreeSlot():
                context.cluster.free_slot(request_id)
            case ReleasePins():
                context.agents.release(request_id, again=self._decision.status == "cancelled")
            case CloseRecord():
                self._close_record()

    def _close_record(self) -> None:
        if self._record is None:
            return
        decision, outcome = self._decision, self._outcome
        now = monotonic()
        decision.e2e_seconds = now - outcome.received_at
        if outcome.slot_at:
            self._context.stats.queue.observe(outcome.slot_at - outcome.planned_at)
        decision.phases = outcome.phases(self._plan, self._service_seconds)
        if decision.status not in ("finished_stop", "finished_length"):
            self._record.expected.clear()
        self._context.records.end(self._record, now)
