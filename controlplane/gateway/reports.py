"""Reports to the control plane: decisions, every 250 ms when there are some, and statistics."""

import asyncio
import os
from collections.abc import Callable
from math import ceil
from time import monotonic
from urllib.parse import quote

import msgspec
import structlog

from controlplane.gateway.api_client import ApiClient
from controlplane.gateway.records import MAX_PER_REPORT, Records
from controlplane.gateway.upstream import UpstreamError
from controlplane.gateway.wire import Decision, GatewayStats, Report

log = structlog.get_logger(__name__)

NEWS_SECONDS = 0.25
QUIET_SECONDS = 1.0
STATISTICS_SECONDS = 0.5
"""How old those of a report may be, since with many workers they take a while to put together. The
control plane's buckets are of a second: each is to have news."""
LONGEST_PAUSE_SECONDS = 5.0
TIMEOUT_SECONDS = 5.0
AT_ONCE = 4
"""Records told between two breaths: some 0.05 ms. More where very many wait: each breath is long while the
machine is busy, and records would come faster than they are told."""
MOST_BREATHS = 64
"""For all that wait."""
BREATH_SECONDS = 0.001
FULL_BYTES = 96 * 1024
"""A report of so many gets no more records: it is written at once, and larger blocks of memory come fresh
from the system each time, page by page."""
MANY = 4 * MAX_PER_REPORT
"""Records that wait: from there on reports grow with them, up to five times, for the control plane takes its time
for each; it refuses more than 4 MiB."""
_OF_THE_SENDER = frozenset({401, 403, 404, 407, 408, 409, 429})
"""Refusals that say nothing of the records: once the gateway is accepted again, they are."""
MAX_REASON_CHARS = 200
_encode = msgspec.json.Encoder().encode


class _Problem(msgspec.Struct):
    detail: str = ""
    way_out: str = ""


class Reporter:
    """`run` until cancelled, then `flush` once."""

    def __init__(
        self,
        client: ApiClient,
        gateway_id: str,
        url: str,
        records: Records,
        revision: Callable[[], int],
        stats: Callable[[], GatewayStats],
    ) -> None:
        self._client = client
        self._path = f"/api/v1/gateways/{quote(gateway_id)}/report"
        self._url = url
        self._records = records
        self._revision = revision
        self._stats = stats
        self._was_full = False
        self.refused = ""  # why, while reports are
        self._latest: GatewayStats | None = None
        self._latest_at = 0.0
        self._news = asyncio.Event()
        records.on_news = self._news.set

    async def run(self) -> None:
        failures = 0
        while True:
            failures = 0 if await self.flush() else failures + 1
            if failures:
                await asyncio.sleep(
                    min(NEWS_SECONDS * 2 ** min(failures, 10), LONGEST_PAUSE_SECONDS)
                )
                continue
            await self._wait()

    async def _wait(self) -> None:
        """A quarter of a second, unless another report is full already; then until there is news, a
        second in all."""
        left = self._records.num_buffered
        if left >= MAX_PER_REPORT or (left and self._was_full):
            return
        await asyncio.sleep(NEWS_SECONDS)
        if self._records.num_buffered:
            return
        self._news.clear()
        try:
            async with asyncio.timeout(QUIET_SECONDS - NEWS_SECONDS):
                await self._news.wait()
        except TimeoutError:
            return

    async def flush(self, *, last: bool = False) -> bool:
        """Send one report; what did not arrive is kept for the next one. The `last` ones have the
        statistics as they are now."""
        decisions: list[Decision] = []
        ended: list[Decision] = []
        try:
            at_once = MAX_PER_REPORT if last else AT_ONCE  # after the last request nobody waits
            encoded = await self._encoded(decisions, ended, at_once)
            status, body = await self._send(encoded, self._statistics(may_be_old=not last))
        except UpstreamError as error:
            self._records.put_back(decisions)
            log.debug("report_failed", error=str(error))
            return False
        except BaseException:
            self._records.put_back(decisions)
            raise
        if status >= 500:
            self._records.put_back(decisions)
            return False
        if status >= 300:
            self._was_refused(status, body)
        else:
            self.refused = ""
        if status in _OF_THE_SENDER:
            self._records.put_back(decisions)
        else:  # if it is refused as it is, sending it again would not help
            self._records.arrived(ended)
        return status < 300

    def _was_refused(self, status: int, body: bytes) -> None:
        """Told once where the records are kept: it is tried again every few seconds."""
        try:
            problem = msgspec.json.decode(body, type=_Problem)
        except (msgspec.DecodeError, UnicodeDecodeError):
            problem = _Problem(body[:MAX_REASON_CHARS].decode(errors="replace"))
        before, self.refused = self.refused, f"{status} {problem.detail[:MAX_REASON_CHARS]}".strip()
        if status not in _OF_THE_SENDER or self.refused != before:
            log.warning(
                "report_refused", status=status, reason=problem.detail, way_out=problem.way_out,
                records="kept" if status in _OF_THE_SENDER else "dropped",
            )  # fmt: skip

    async def _encoded(
        self, decisions: list[Decision], ended: list[Decision], at_once: int
    ) -> list[bytes]:
        """All there are for one report, which go into `decisions` too, and into `ended` what is told
        of as ended: the others may end before the report is there. Requests run in between, and
        so do workers on this machine: to put a second's records into words takes longer than a first
        token may wait."""
        waiting = self._records.announce()
        scale = max(1.0, waiting / MANY)
        most, full = min(waiting, int(scale * MAX_PER_REPORT)), scale * FULL_BYTES
        at_once = max(at_once, ceil(waiting / MOST_BREATHS))
        encoded: list[bytes] = []
        size = 0
        while len(decisions) < most and size < full and (one := self._records.take()):
            decisions.append(one)
            if one.status != "running":
                ended.append(one)
            if (told := _encoded_one(one)) is not None:
                encoded.append(told)
                size += len(told)
            if not len(decisions) % at_once:
                await asyncio.sleep(BREATH_SECONDS)
        self._was_full = size >= full
        return encoded

    def _statistics(self, *, may_be_old: bool) -> GatewayStats:
        now, known = monotonic(), self._latest
        if known is None or not may_be_old or now - self._latest_at >= STATISTICS_SECONDS:
            known, self._latest_at = self._stats(), now
            self._latest = known
        return known

    async def _send(self, encoded: list[bytes], stats: GatewayStats) -> tuple[int, bytes]:
        start = _encode(Report(self._url, os.getpid(), self._revision(), stats))
        await asyncio.sleep(BREATH_SECONDS)
        body = _with_decisions(start, encoded)
        return await self._client.call("POST", self._path, body, seconds=TIMEOUT_SECONDS)


def _with_decisions(report: bytes, encoded: list[bytes]) -> list[bytes]:
    """Pieces of the report, whose own list is empty and stands last, with these in it."""
    assert report.endswith(b"[]}")
    pieces = [report[:-2]]
    for one in encoded:
        pieces += (one, b",")
    if encoded:
        pieces.pop()
    return [*pieces, b"]}"]


def _encoded_one(decision: Decision) -> bytes | None:
    """None: one of no use must not keep all the others back."""
    try:
        return _encode(decision)
    except Exception:
        log.exception("record_left_out", request=decision.request_id)
        return None
