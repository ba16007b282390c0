"""Engine ids of mooncake producers, read from the bootstrap server that each of them runs.

`GET http://host:port/query` answers `{dp rank: {"engine_id": ..., "worker_addr": ...}}`. A producer
that was started again has another engine id, so they are read again every few seconds.
"""

import asyncio
from typing import Final

import msgspec
import structlog

from controlplane.core.handshake import Bootstrap
from controlplane.gateway.api_client import ApiClient
from controlplane.gateway.lasting import lasting
from controlplane.gateway.upstream import UpstreamError
from controlplane.gateway.wire import View, ViewWorker

log = structlog.get_logger(__name__)

AGAIN_SECONDS: Final = 5.0
QUERY_SECONDS: Final = 2.0
AT_ONCE: Final = 16
MAX_SLOW: Final = 6
"""The server is a thread of the engine's own process, and slow while that computes: what it said
last holds for so many readings without an answer. A wrong id only makes a leg 2 fail."""


class _Entry(msgspec.Struct):
    engine_id: str


_decode = msgspec.json.Decoder(dict[int, _Entry], strict=False).decode


class Bootstraps:
    """`get` never waits. `close` ends the reading."""

    def __init__(self) -> None:
        self._rows: dict[str, ViewWorker] = {}
        self._known: dict[str, Bootstrap] = {}
        self._clients: dict[str, ApiClient] = {}
        self._silent: set[str] = set()  # said once
        self._slow: dict[str, int] = {}  # readings without an answer in time, one after another
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def get(self, worker_id: str) -> Bootstrap | None:
        """None for other workers, and for one whose server has not answered."""
        return self._known.get(worker_id)

    def follow_view(self, view: View) -> None:
        """The view's producers, and no others."""
        self._rows = {row.id: row for row in view.workers if row.bootstrap}
        for gone in self._known.keys() - self._rows.keys():
            del self._known[gone]
        self._silent &= self._rows.keys()
        self._slow = {name: count for name, count in self._slow.items() if name in self._rows}
        addresses = {row.bootstrap for row in self._rows.values()}
        for gone in self._clients.keys() - addresses:
            self._clients.pop(gone).close()
        if self._rows and self._task is None:
            self._task = asyncio.get_running_loop().create_task(lasting("bootstraps", self._run))
        self._news.set()

    def ask_again(self) -> None:
        """A leg failed: a producer may have another engine id now."""
        self._news.set()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            await asyncio.gather(*(self._read(row) for row in list(self._rows.values())))
            await asyncio.sleep(QUERY_SECONDS / 4)  # however often it is asked
            try:
                async with asyncio.timeout(AGAIN_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _read(self, row: ViewWorker) -> None:
        if row.engine_id:
            self._known[row.id] = Bootstrap(row.bootstrap, row.engine_id)
            return
        try:
            async with self._limit:
                entries = await self._query(row.bootstrap)
        except (UpstreamError, msgspec.DecodeError, ValueError) as error:
            self._unread(row, error)
            return
        self._slow.pop(row.id, None)
        if row.id in self._rows and entries:
            self._silent.discard(row.id)
            self._known[row.id] = Bootstrap(row.bootstrap, entries[min(entries)].engine_id)

    def _unread(self, row: ViewWorker, error: Exception) -> None:
        if isinstance(error, UpstreamError) and error.kind == "timeout" and row.id in self._known:
            slow = self._slow[row.id] = self._slow.get(row.id, 0) + 1
            if slow < MAX_SLOW:
                return
        self._known.pop(row.id, None)
        if row.id not in self._silent:
            self._silent.add(row.id)
            effect = "its prompts are computed by decode workers"
            log.warning("bootstrap_silent", worker=row.id, address=row.bootstrap,
                        error=str(error), effect=effect)  # fmt: skip

    async def _query(self, address: str) -> dict[int, _Entry]:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = ApiClient(address, "")
        status, body = await client.call("GET", "/query", seconds=QUERY_SECONDS)
        if status != 200:
            raise ValueError(f"answered {status}")
        return _decode(body)
