"""KV that a foreign prefill worker has staged for a decode leg that will not come.

Connectors like nixl free it when the decode side has read it, else at a timer of their own. So where
no decode worker has taken it, one is sent a request of its own with what leg 1 said: a prompt of one
token, which reads one block, and whose KV no cache keeps, whatever the blocks hold by then.
"""

import asyncio
from typing import Any, Final

import msgspec
import structlog

from controlplane.core.handshake import owes_release
from controlplane.gateway.asked import Asked
from controlplane.gateway.bodies import KvParams
from controlplane.gateway.legs import (
    ClientFault,
    LegError,
    LegRequest,
    LegSender,
    PrefillReply,
    leg_head,
    prefill_reply,
    request_of,
)
from controlplane.gateway.stats import Stats
from controlplane.gateway.worker_state import WorkerState

log = structlog.get_logger(__name__)

AT_ONCE: Final = 64
"""Beyond it the prefill worker's own timer frees the KV; counted."""
SECONDS: Final = 30.0
_PATH: Final = b"/v1/completions"
_encode: Final = msgspec.json.Encoder().encode


class StagedReleases:
    """Never blocks a request. `close` ends what is under way."""

    def __init__(self, sender: LegSender, stats: Stats) -> None:
        self._sender = sender
        self._stats = stats
        self._tasks: set[asyncio.Task[Any]] = set()

    def release(self, worker: WorkerState | None, asked: Asked, params: KvParams) -> None:
        """Have a decode worker take what `params` name."""
        known = worker is not None and owes_release(worker.row.handshake)
        if worker is None or not known or len(self._tasks) >= AT_ONCE:
            self._stats.staged_left += 1
            return
        body = _encode({
            "model": asked.body.fields.get("model", asked.model),
            "prompt": [1], "max_tokens": 1, "kv_transfer_params": params,
        })  # fmt: skip
        leg = self._leg(worker, asked.request_id, body)
        task = asyncio.get_running_loop().create_task(leg)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def outlives(self, leg: "asyncio.Task[PrefillReply]") -> bool:
        """Let a leg 1 run to its end, or its own bound, though its request is over: a decode engine
        waits for it. False: too many do."""
        if len(self._tasks) >= AT_ONCE:
            self._stats.staged_left += 1
            return False
        self._tasks.add(leg)
        leg.add_done_callback(self._ended)
        return True

    def _ended(self, leg: "asyncio.Task[PrefillReply]") -> None:
        self._tasks.discard(leg)
        if leg.cancelled() or leg.exception() is not None:
            self._stats.staged_left += 1
        else:
            self._stats.staged_released += 1

    async def _leg(self, worker: WorkerState, request_id: str, body: bytes) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                head = leg_head(request_id, "d", {})
                leg = LegRequest(worker, request_of(worker, _PATH, head, body))
                _, answer = await self._sender.exchange(leg, SECONDS)
                prefill_reply(answer, foreign=False)
        except (LegError, ClientFault, TimeoutError) as error:
            self._stats.staged_left += 1
            log.warning("staged_kv_left", worker=worker.row.id, request=request_id,
                        error=str(error), effect="the prefill worker's own timer frees it")  # fmt: skip
        else:
            self._stats.staged_released += 1

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
