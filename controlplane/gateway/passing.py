"""Requests that any one worker of the model answers whole: sent on, answered as it answers."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from time import monotonic

import msgspec

from controlplane.gateway.answers import AnswerError
from controlplane.gateway.client_connection import Request
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.legs import ClientFault, LegError, LegSender, WorkerAnswer, leg_head
from controlplane.gateway.records import Records
from controlplane.gateway.wire import Decision, Phase
from controlplane.gateway.worker_state import WorkerState

MAX_BUSY = 256
"""Of these at one worker, from this gateway."""


class Passed(msgspec.Struct):
    """One such request, as it goes out."""

    request: Request
    request_id: str
    model: str
    path: bytes
    content_type: bytes
    body: bytes
    tenant: str


def _decision(passed: Passed, gateway_id: str) -> Decision:
    own_id = passed.request.headers.get(b"x-request-id", b"")
    age = monotonic() - passed.request.received_at
    decision = Decision(
        passed.request_id, datetime.now(UTC) - timedelta(seconds=age), gateway_id, "running",
        own_id[:200].decode("latin-1"), tenant=passed.tenant, model=passed.model, api="other",
    )  # fmt: skip
    decision.route = passed.path.decode("latin-1")
    decision.request_bytes = len(passed.body)
    return decision


def _tell(decision: Decision, passed: Passed, answer: WorkerAnswer, sent_at: float) -> None:
    """The worker has answered, be it that it refuses."""
    decision.http_status, decision.reply_bytes = answer.status, len(answer.body)
    received_at, now = passed.request.received_at, monotonic()
    decision.phases = [
        Phase("admitted", None, sent_at - received_at, 0.0),
        Phase("reply", None, now - sent_at, sent_at - received_at),
    ]
    if answer.status < 400:
        decision.status = "finished_stop"
    else:
        decision.status = "failed"
        decision.error = answer.body[:300].decode(errors="replace")


class Passing:
    """`run` answers the client, or raises `AnswerError`. Each has its decision record."""

    def __init__(
        self,
        cluster: Cluster,
        sender: LegSender,
        records: Records,
        gateway_id: str,
        max_retries: int,
    ) -> None:
        self._cluster = cluster
        self._sender = sender
        self._records = records
        self._gateway_id = gateway_id
        self._max_retries = max_retries
        self.busy: Counter[str] = Counter()

    async def run(self, passed: Passed) -> None:
        decision = _decision(passed, self._gateway_id)
        policies = self._cluster.policies(passed.model)
        decision.policy_revisions = policies.revisions
        entry = self._records.begin(decision, policies.recording)
        try:
            await self._serve(passed, decision)
        except AnswerError as error:
            decision.status, decision.http_status = "failed", error.status
            decision.error = error.message
            raise
        except asyncio.CancelledError:
            decision.status = "cancelled"
            raise
        finally:
            if decision.status == "running":  # a bug of ours, which the server answers
                decision.status = "failed"
            now = monotonic()
            decision.e2e_seconds = now - passed.request.received_at
            self._records.end(entry, now)

    async def _serve(self, passed: Passed, decision: Decision) -> None:
        tried: set[str] = set()
        while True:
            worker = self._choose(passed.model, tried)
            decision.decode_worker, sent_at = worker.row.id, monotonic()
            decision.emulated |= worker.row.engine == "emulated"
            try:
                answer = await self._ask(worker, passed)
            except LegError as error:
                decision.retries += 1
                decision.error = f"on {worker.row.id}: {error}"
                tried.add(worker.row.id)
                if len(tried) > self._max_retries or not self._others(passed.model, tried):
                    name = worker.row.id
                    message = f"request {passed.request_id} failed on worker {name}: {error}"
                    raise AnswerError(
                        error.status, message, "worker_failed", request_id=passed.request_id,
                        worker=name,
                    ) from error  # fmt: skip
            else:
                _tell(decision, passed, answer, sent_at)
                self._answer(passed, answer)
                return

    async def _ask(self, worker: WorkerState, passed: Passed) -> WorkerAnswer:
        name, health, sent_at = worker.row.id, self._cluster.health, monotonic()
        head = leg_head(passed.request_id, "d", passed.request.headers)
        self._cluster.stats.worker(name).requests += 1
        self.busy[name] += 1
        health.started(name, sent_at)
        try:
            answer = await self._sender.whole(
                worker, passed.path, head, passed.body, passed.content_type
            )
        except LegError as error:
            self._cluster.stats.worker(name).failures += 1
            self._cluster.leg_failed(
                name, "whole", hash(passed.body), unreachable=error.unreachable,
                answered=error.answered, refused=error.refused, error=str(error),
                sent_at=sent_at,
            )  # fmt: skip
            raise
        except ClientFault as fault:
            health.served(name)
            return fault.said(passed.request_id)
        except asyncio.CancelledError:
            health.no_verdict(name)
            raise
        else:
            health.served(name)
            health.leg_served(passed.body, "whole")
            return answer
        finally:
            self.busy[name] -= 1
            if not self.busy[name]:
                del self.busy[name]

    def _answer(self, passed: Passed, answer: WorkerAnswer) -> None:
        ours = passed.request_id.encode()
        headers = b"x-request-id: %b\r\nx-perilune-request-id: %b\r\n" % (ours, ours)
        client = passed.request.connection
        client.respond(answer.status, answer.body, answer.content_type, headers + answer.headers)

    def _others(self, model: str, tried: set[str]) -> list[WorkerState]:
        now = monotonic()
        both = [
            *self._cluster.serving(model, "prefill", now),
            *self._cluster.serving(model, "decode", now),
        ]
        return [state for state in both if state.row.id not in tried]

    def _choose(self, model: str, tried: set[str]) -> WorkerState:
        """The one with least to do."""
        found = self._others(model, tried)
        if not found:
            why = self._cluster.why_nobody(model, "prefill", "decode")
            message = f"no worker of model {model} takes requests: {why}"
            raise AnswerError(503, message, "no_worker", retry_after=1)
        best = min(found, key=self._load)
        if self.busy[best.row.id] >= MAX_BUSY:
            message = f"all workers of model {model} are busy ({MAX_BUSY} requests each)"
            raise AnswerError(503, message, "busy", retry_after=1)
        return best

    def _load(self, state: WorkerState) -> tuple[int, str]:
        name = state.row.id
        running = self._cluster.slots.running(name) + len(state.prefill_queue)
        return self.busy[name] + running, name
