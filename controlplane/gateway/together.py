"""Both legs at once, for connectors that meet by the transfer id (`at_once` in core/handshake.py).

    leg 1 --> prefill: answers, or fails --+
                                           +-- until leg 2 has shown something, the failure of one leg
    leg 2 --> decode: the first piece -----+   ends the other, and both go out again, elsewhere

From leg 2's first piece on the prompt's KV has been handed over: leg 1 is over, whatever becomes of
it, and what it still says is for the record alone.

A decode engine that has asked for KV holds its blocks for it, and a sender of the producer's waits,
until leg 1 has ended by itself or at a timer of minutes, even when both requests are aborted. So leg
1 is cut off only where leg 2 has not gone out; else it runs to its end, for nobody.
"""

import asyncio
import re
from time import monotonic
from typing import Any

from controlplane.core.handshake import Bootstrap, decode_params, pairs, prefill_params
from controlplane.core.lifecycle import ENDS, DecodeRetried
from controlplane.core.routing import Priced
from controlplane.gateway import first_leg, turns
from controlplane.gateway.decode import (
    answer_whole,
    begin,
    leave_unfit,
    leg_of,
    relay_stream,
    taker,
    try_elsewhere,
)
from controlplane.gateway.legs import (
    ClientFault,
    LegError,
    LegRequest,
    PrefillReply,
    check_answer,
    prefill_reply,
)
from controlplane.gateway.relay import Relay
from controlplane.gateway.running import Running
from controlplane.gateway.upstream import Reply
from controlplane.gateway.worker_state import WorkerState

USAGE_SECONDS = 1.0
"""How long a whole answer waits for leg 1's, for what that says of the prompt's tokens."""
WORDS_SECONDS = 1.0
"""How long leg 1's refusal waits for leg 2's."""
_DECODE_RETRIED = DecodeRetried()
_NOT_PARSED = re.compile(rb'"message": ?"\d+ validation error')
"""vLLM's answer to a body that its connector has never seen; to what it refuses later on, the
connector asks for the KV to have it freed."""


async def together(run: Running, worker: WorkerState, priced: Priced, tried: list[str]) -> bool:
    """Whether the client has its answer; if not, another prefill worker may serve.

    `tried`: decode workers that have failed. Raises `AnswerError` when no decode worker is left,
    `ClientFault` for what an engine refuses.
    """
    bootstraps, name = run.context.bootstraps, worker.row.id
    await leave_unfit(run)
    while True:
        bootstrap = bootstraps.get(name)
        if bootstrap is None:  # what leg 1 computed, nobody could ask for
            return False
        decode = run.context.cluster.workers.get(run.life.slot_worker)
        if decode is not None and not pairs(worker.row.handshake, decode.row.handshake):
            return False
        if run.context.cluster.workers.get(name) is not worker:
            return False
        if not run.context.cluster.dispatch.holds(run.asked.request_id, name):
            turns.again(run, priced)
        pair = _Pair(run, worker, priced, bootstrap)
        try:
            await pair.serve()
        except _PrefillError:
            bootstraps.ask_again()  # it may have another engine id now
            return False
        except LegError as error:
            bootstraps.ask_again()
            await try_elsewhere(run, error, tried)
        else:
            return True


class _PrefillError(Exception):
    """Leg 1 failed before leg 2 had shown anything."""


class _Pair:
    """One try of both legs. Whatever happens, `serve` leaves none of them in flight."""

    def __init__(
        self, run: Running, worker: WorkerState, priced: Priced, bootstrap: Bootstrap
    ) -> None:
        self._run = run
        self._worker = worker
        self._priced = priced
        self._bootstrap = bootstrap
        self._prefilled: PrefillReply | None = None
        self._second: asyncio.Task[tuple[Reply, bytes]] | None = None

    async def serve(self) -> None:
        """Answers the client. Raises `_PrefillError`, `LegError` (of leg 2), `ClientFault`."""
        run = self._run
        decode = taker(run, run.life.slot_worker)
        # A transfer id is for one meeting: who asks for one that is over waits in vain.
        number = run.decision.retries
        transfer_id = run.asked.request_id + (f"-{number}" if number else "")
        run.decision.transfer_id = transfer_id
        first, second = self._send(decode, transfer_id)
        try:
            await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
            if self._may_be_of_length(first):
                await self._hear(second)
            if not second.done():
                self._take_first(first)
                await asyncio.wait((second,))
            elif second.exception() is not None and first.done():
                self._take_first(first)  # both failed: the first is why
            reply, piece = second.result()
            self._second = None
            await self._answer(decode, reply, piece, first)
        except LegError:
            first.remove_done_callback(self._late)  # of another try it would say the wrong things
            raise
        finally:
            await self._end(first, second)

    def _send(
        self, decode: WorkerState, transfer_id: str
    ) -> tuple["asyncio.Task[PrefillReply]", "asyncio.Task[tuple[Reply, bytes]]"]:
        run, worker, handshake = self._run, self._worker, self._worker.row.handshake
        asks = prefill_params(handshake, transfer_id)
        takes = decode_params(handshake, transfer_id, None, self._bootstrap)
        to_prefill = first_leg.leg_of(run, worker, asks)
        first_leg.begin(run, worker, self._priced)
        to_decode = leg_of(run, decode, takes)
        begin(run, decode)
        loop = asyncio.get_running_loop()
        first = loop.create_task(self._prefill(to_prefill))
        self._second = loop.create_task(self._decode(to_decode))
        return first, self._second

    async def _prefill(self, leg: LegRequest) -> PrefillReply:
        context = self._run.context
        _, answer = await context.sender.exchange(leg, context.settings.timeouts.prefill)
        return prefill_reply(answer, foreign=False)

    async def _decode(self, leg: LegRequest) -> tuple[Reply, bytes]:
        """Up to the first piece of a stream, or the whole answer."""
        context = self._run.context
        if self._run.asked.body.stream:
            return await context.sender.decode_stream(leg, is_split=not self._run.asked.body.passed)
        reply, answer = await context.sender.exchange(leg, context.settings.timeouts.whole_reply)
        check_answer(reply, answer, is_object=not self._run.asked.body.passed)
        return reply, answer

    def _may_be_of_length(self, first: "asyncio.Task[PrefillReply]") -> bool:
        error = first.exception() if first.done() and not first.cancelled() else None
        return isinstance(error, ClientFault) and first_leg.may_be_of_length(self._run, error)

    async def _hear(self, second: "asyncio.Task[tuple[Reply, bytes]]") -> None:
        """Leg 2 has the client's own numbers. Raises its `ClientFault`."""
        await asyncio.wait((second,), timeout=WORDS_SECONDS)
        if second.done() and isinstance(second.exception(), ClientFault):
            second.result()

    def _take_first(self, first: "asyncio.Task[PrefillReply]") -> None:
        """Leg 1 is over, and leg 2 has shown nothing yet. Raises `_PrefillError`, `ClientFault`."""
        run, worker = self._run, self._worker
        try:
            reply = first.result()
        except LegError as error:
            first_leg.failed(run, worker, error)
            run.step(_DECODE_RETRIED)
            raise _PrefillError from error
        first_leg.served(run, worker, self._priced, reply)
        self._prefilled = reply

    async def _answer(
        self, decode: WorkerState, reply: Reply, piece: bytes, first: "asyncio.Task[PrefillReply]"
    ) -> None:
        run = self._run
        if self._prefilled is None:
            run.outcome.prefill_done_at = monotonic()
            run.step(first_leg.PREFILL_ENDED)
            first.add_done_callback(self._late)
        if run.asked.body.stream:
            await relay_stream(run, decode, reply, piece, self._details())
            return
        if not first.done():
            await asyncio.wait((first,), timeout=USAGE_SECONDS)
        await asyncio.sleep(0)  # `_late` has been called
        answer_whole(run, decode, reply, piece, self._details())

    def _late(self, first: "asyncio.Task[PrefillReply]") -> None:
        """Leg 1 ends while leg 2's answer is on its way."""
        run, worker = self._run, self._worker
        error = None if first.cancelled() else first.exception()
        if first.cancelled() or run.life.state in ENDS:
            return
        if error is None:
            self._prefilled = first.result()
            run.context.cluster.health.served(worker.row.id)
            run.leg_served("prefill")
            first_leg.take(run, worker, self._priced, self._prefilled)
            relay = run.asked.request.connection.relay
            if isinstance(relay, Relay):
                relay.details = self._details()
        elif isinstance(error, LegError):
            run.leg_failed("prefill", worker.row.id, error)
            run.decision.retries -= 1  # nothing is tried again: what it was for is there

    def _details(self) -> dict[str, Any] | None:
        return None if self._prefilled is None else self._prefilled.details

    async def _end(
        self, first: "asyncio.Task[PrefillReply]", second: "asyncio.Task[tuple[Reply, bytes]]"
    ) -> None:
        """Nothing of this try goes on; what was cut off has shown nothing of its worker."""
        run = self._run
        for leg, name in ((first, self._worker.row.id), (second, run.decision.decode_worker)):
            if leg.done():
                continue
            run.context.cluster.health.no_verdict(name)
            if leg is first and _is_awaited(second) and run.context.staged.outlives(first):
                continue
            leg.cancel()
        cut = [leg for leg in (first, second) if leg.done() or leg.cancelling()]
        await asyncio.gather(*cut, return_exceptions=True)
        if self._second is not None and not second.cancelled() and second.exception() is None:
            second.result()[0].abort()
        if run.life.state not in ENDS and run.life.prefill_worker:
            run.step(first_leg.PREFILL_ENDED)


def _is_awaited(second: "asyncio.Task[tuple[Reply, bytes]]") -> bool:
    """Whether leg 2's engine may have asked for what leg 1 computes."""
    if not second.done() or second.cancelled():
        return True
    error = second.exception()
    if isinstance(error, ClientFault):
        return _NOT_PARSED.search(error.answer.body) is None
    return not isinstance(error, LegError) or error.was_sent
