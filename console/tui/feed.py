"""Keeps a `ConsoleState` up: reads it by REST, then follows the event stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from console import calls
from console.tui.context import Source
from console.viewmodel.cache import EVICTION_REASONS
from console.viewmodel.doctor import is_running
from console.viewmodel.ledger import WINDOW_SECONDS as LEDGER_WINDOW_SECONDS
from console.viewmodel.state import (
    ConsoleState,
    LedgerReport,
    OpenedRequest,
    PairTransfers,
    Part,
)
from controlplane.client_http import ClientError, StreamState, UnreachableError
from controlplane.decisions.schemas import Decision
from controlplane.doctor import calls as doctor_calls
from controlplane.events.schemas import Event
from controlplane.gateways import calls as running_calls
from controlplane.ledger import calls as ledger_calls
from controlplane.transfers import calls as transfer_calls

CLUSTER_METRICS = (
    "requests,rejected,ttft_p95_seconds,tbt_p95_seconds,queue_p95_seconds,prompt_tokens,hit_tokens,"
    "kv_wait_seconds,decode_seconds,slo_met,slo_missed"
)
NODE_METRICS = ",".join(
    ("prompt_tokens", "hit_tokens", *(metric for metric, _ in EVICTION_REASONS))
)
POOL_SECONDS = 2.0
PINS_SECONDS = 5.0
MAX_JOBS = 100
MATRIX_SECONDS = 5.0
DOCTOR_SECONDS = 1.0
DOCTOR_IDLE_TURNS = 30
"""A report that does not grow is read again after so many turns of `DOCTOR_SECONDS`."""
DOCTOR_EAGER_TURNS = 10
"""After somebody asked for a run, until its report shows."""
PAIR = "pair:"
REQUEST = "request:"
REQUESTS_SECONDS = 2.0
LEDGER_ROWS = 200
NOT_FOUND = 404
ROWS_SECONDS = 2.0
SERIES_SECONDS = 10.0
REFUSED_PAUSE_SECONDS = 10.0
LOAD_RETRY_SECONDS = 1.0
SNAPSHOT_ROWS = 200


class EventSource(Source, Protocol):
    """A source that also streams events."""

    def events(
        self,
        last_event_id: str | None = None,
        on_state: Callable[[StreamState], None] | None = None,
    ) -> AsyncIterator[Event]: ...


class Feed:
    """Owner of the connection. `run` ends only when it is cancelled.

    `on_change(parts)` is called in the same loop, after the state has taken something.
    """

    def __init__(
        self,
        source: EventSource,
        state: ConsoleState,
        clock: Callable[[], float],
        on_change: Callable[[frozenset[Part]], None],
    ) -> None:
        self.source = source
        self.state = state
        self.problem = ""
        self.retry_at: float | None = None
        self.connected = False
        self._clock = clock
        self._on_change = on_change
        self._wants: frozenset[str] = frozenset()
        self._wanted = {
            name: asyncio.Event() for name in ("pool", "doctor", "transfers", "requests")
        }
        self._doctor_skipped = 0
        self._doctor_eager = 0
        self._reload = asyncio.Event()
        self._again = asyncio.Event()

    def reconnect(self) -> None:
        """Drop the stream and connect at once."""
        self._again.set()

    def want(self, parts: frozenset[str]) -> None:
        """What the screen in front needs besides what every screen does: `pool`, `pins`, `doctor`,
        `alarms`, `pair:n1>n2`, `running`, `ledger`, `request:ID`."""
        if parts - self._wants:
            self._doctor_skipped = DOCTOR_IDLE_TURNS
            for event in self._wanted.values():
                event.set()
        self._wants = parts

    def hurry(self, what: str) -> None:
        """Read one of `pool`, `doctor`, `transfers`, `requests` now."""
        self._wanted[what].set()

    def follow_doctor(self) -> None:
        """A run has been asked for: read its report until it ends."""
        self._doctor_eager = DOCTOR_EAGER_TURNS
        self._wanted["doctor"].set()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._load_when_asked())
            group.create_task(self._poll(self._read_matrix, MATRIX_SECONDS))
            group.create_task(self._poll(self._read_rows, ROWS_SECONDS))
            group.create_task(self._poll(self._read_recent_series, SERIES_SECONDS))
            wanted = self._wanted
            group.create_task(self._poll(self._read_pool, POOL_SECONDS, wanted["pool"]))
            group.create_task(self._poll(self._read_pins, PINS_SECONDS))
            group.create_task(self._poll(self._read_doctor, DOCTOR_SECONDS, wanted["doctor"]))
            group.create_task(self._poll(self._read_transfers, MATRIX_SECONDS, wanted["transfers"]))
            group.create_task(self._poll(self._read_requests, REQUESTS_SECONDS, wanted["requests"]))

    async def _follow(self) -> None:
        last_event_id: str | None = None
        while True:
            self._again.clear()
            stream = asyncio.create_task(self._stream(last_event_id))
            again = asyncio.create_task(self._again.wait())
            try:
                await asyncio.wait({stream, again}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stream.cancel()
                again.cancel()
                results = await asyncio.gather(stream, again, return_exceptions=True)
            refused = results[0]
            if isinstance(refused, ClientError):
                self._lost(str(refused), REFUSED_PAUSE_SECONDS)
                await self._pause(REFUSED_PAUSE_SECONDS)
            elif isinstance(refused, Exception):
                raise refused

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._again.wait()
        except TimeoutError:
            return

    async def _stream(self, last_event_id: str | None) -> None:
        async for event in self.source.events(last_event_id, self._stream_state):
            parts = self.state.apply(event, self._clock())
            if event.type == "audit" and event.data.get("verb") == "doctor.run":
                self.follow_doctor()
            if "reset" in parts:
                self._reload.set()
            elif parts:
                self._on_change(parts)

    def _stream_state(self, stream: StreamState) -> None:
        if stream.connected:
            self.connected, self.problem, self.retry_at = True, "", None
            self._reload.set()
            self._on_change(frozenset())
        else:
            self._lost(stream.error, stream.retry_in_seconds)

    def _lost(self, reason: str, retry_in: float | None) -> None:
        self.connected = False
        self.problem = (
            f"No answer from the control plane at {self.source.url}: {reason}. "
            "Traffic is not affected: gateways use the policies they have."
        )
        self.retry_at = None if retry_in is None else self._clock() + retry_in
        self._on_change(frozenset())

    async def _load_when_asked(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                await self._load()
            except ClientError as error:
                if isinstance(error, UnreachableError):
                    # One slow answer may fail while the stream stays up: nobody else asks again.
                    await asyncio.sleep(LOAD_RETRY_SECONDS)
                    self._reload.set()
                    continue
                self._lost(str(error), None)

    async def _load(self) -> None:
        """Each answer is taken as it comes: a slow one does not hold the others back."""
        source, state, clock = self.source, self.state, self._clock
        state.load(clock(), overview=await source.overview())
        self._on_change(frozenset({"overview"}))
        state.load(clock(), nodes=await source.nodes())
        state.load(clock(), workers=await source.workers())
        state.load(clock(), policies=await source.policies())
        self._on_change(frozenset({"nodes", "workers", "policies"}))
        state.load(clock(), decisions=(await source.decisions(limit=SNAPSHOT_ROWS)).items)
        state.load(clock(), audit=(await source.audit(limit=SNAPSHOT_ROWS)).items)
        await self._read_series(900.0)
        await self._read_matrix()
        state.load(clock(), gateways=await source.gateways())
        self._on_change(frozenset({"decisions", "audit", "history", "matrix", "gateways"}))
        for read in (self._read_jobs, self._read_pool):
            try:
                await read()
            except UnreachableError:
                raise
            except ClientError:
                continue  # an older control plane has no such thing: its screens say so

    async def _poll(
        self,
        read: Callable[[], Awaitable[None]],
        seconds: float,
        hurry: asyncio.Event | None = None,
    ) -> None:
        while True:
            await _sleep(seconds, hurry)
            if not self.connected:
                continue
            try:
                await read()
            except ClientError:
                continue  # the stream's own state says that the control plane is away

    async def _read_matrix(self) -> None:
        self.state.load(self._clock(), matrix=await self.source.matrix())
        self._on_change(frozenset({"matrix"}))

    async def _read_pool(self) -> None:
        """Only while a screen shows it: it is long where tenants are many."""
        if "pool" in self._wants:
            report = await self.source.send(calls.pool())
            self.state.load(self._clock(), pool=report)
            self._on_change(frozenset({"pool"}))
        if "pins" in self._wants and self.state.snapshot().pins is None:
            await self._read_pins()

    async def _read_pins(self) -> None:
        """The nodes are asked for these."""
        if "pins" in self._wants:
            pins = await self.source.send(calls.pins())
            self.state.load(self._clock(), pins=pins)
            self._on_change(frozenset({"pool"}))

    async def _read_doctor(self) -> None:
        """Each second while a run is under way, else seldom: a report is long where pairs are many."""
        if "doctor" not in self._wants:
            return
        eager = is_running(self.state.doctor) or self._doctor_eager > 0
        if not eager and self._doctor_skipped < DOCTOR_IDLE_TURNS:
            self._doctor_skipped += 1
            return
        self._doctor_skipped, self._doctor_eager = 0, max(0, self._doctor_eager - 1)
        report = await self.source.send(doctor_calls.last())
        self.state.load(self._clock(), doctor=report)
        self._on_change(frozenset({"doctor"}))

    async def _read_transfers(self) -> None:
        """Alarms of all paths, or the report on the pair that is shown."""
        if "alarms" in self._wants:
            call = transfer_calls.nodes(limit=0, links=False)
            alarms = await self.source.send(call)
            self.state.load(self._clock(), alarms=alarms)
        for name in [part.removeprefix(PAIR) for part in self._wants if part.startswith(PAIR)]:
            source, _, target = name.partition(">")
            found = await self.source.send(transfer_calls.nodes(source, target))
            self.state.load(self._clock(), pair=PairTransfers(source, target, found))
        self._on_change(frozenset({"matrix"}))

    async def _read_requests(self) -> None:
        """The gateways are asked for what runs, the ledger for who was turned away, and the request
        that a screen shows for its record, where it is none of the last ones."""
        if "running" in self._wants:
            found = await self.source.send(running_calls.running())
            self.state.load(self._clock(), running=found)
            self._on_change(frozenset({"running"}))
        if "ledger" in self._wants:
            page = await self.source.send(ledger_calls.ledger(limit=LEDGER_ROWS))
            summary = await self.source.send(ledger_calls.summary(LEDGER_WINDOW_SECONDS))
            self.state.load(self._clock(), ledger=LedgerReport(page, summary))
            self._on_change(frozenset({"ledger"}))
        for name in [
            part.removeprefix(REQUEST) for part in self._wants if part.startswith(REQUEST)
        ]:
            known = self.state.snapshot().decision(name)
            if known is None or known.status == "running":
                opened = OpenedRequest(name, await self._read_request(name))
                self.state.load(self._clock(), opened=opened)
                self._on_change(frozenset({"decisions"}))

    async def _read_request(self, request_id: str) -> Decision | None:
        """None where there is no record of it."""
        try:
            return await self.source.decision(request_id)
        except UnreachableError:
            raise
        except ClientError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _read_jobs(self) -> None:
        """Later changes come as events."""
        found = await self.source.send(calls.jobs(MAX_JOBS))
        self.state.load(self._clock(), jobs=found.items)
        self._on_change(frozenset({"jobs"}))

    async def _read_rows(self) -> None:
        """Rows whose events come only on changes would seem to age."""
        self.state.load(self._clock(), nodes=await self.source.nodes())
        self.state.load(self._clock(), workers=await self.source.workers())
        self._on_change(frozenset({"nodes", "workers"}))

    async def _read_recent_series(self) -> None:
        """Closed buckets as the server merged them, percentiles included."""
        await self._read_series(60.0)

    async def _read_series(self, window: float) -> None:
        source, state = self.source, self.state
        state.load(
            self._clock(), series=await source.series(CLUSTER_METRICS, "cluster", window, 10)
        )
        state.load(self._clock(), series=await source.series(NODE_METRICS, "node:*", window, 10))


async def _sleep(seconds: float, hurry: asyncio.Event | None) -> None:
    if hurry is None:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await hurry.wait()
    except TimeoutError:
        return
    finally:
        hurry.clear()
