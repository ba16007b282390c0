"""Answers the doctor: what this node is like, and how well it reaches one peer.

A probe pulls scratch blocks of the peer into scratch slots of this node, through the node's own
transfer engine and in its second class: windows, caps and breakers hold for it as for any traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

import msgspec

from workers.agent.session import Session
from workers.agent.settings import AgentSettings
from workers.agent.transfers import NodeTransfers
from workers.client_async import AsyncAgentClient
from workers.client_base import make_hello, parse_address
from workers.core.clock import Clock
from workers.core.doctor_messages import (
    DEFAULT_PROBE_BYTES,
    MAX_PROBE_BYTES,
    EndProbe,
    GetNodeFacts,
    GetProbe,
    NodeFacts,
    PrepareProbe,
    Probe,
    ProbeReport,
    ScratchSlots,
    SpaceName,
    TransportProbe,
)
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.messages import Done, Refused, ReplyBody, SlotRef, Welcome
from workers.core.pool_scratch import end_scratch, take_scratch
from workers.core.pool_state import PoolState
from workers.core.stats_messages import PoolStats
from workers.core.transfer_types import Piece, Priority, TransferRequest, TransferResult
from workers.pool.arena import Slab
from workers.transfer.base import PeerAddress
from workers.transfer.engine import TransferEngine
from workers.transfer.host_facts import address_towards, read_host

CONTROL_SECONDS: Final = 3.0
PROBE_SECONDS: Final = 4.0
"""For one transfer of a probe."""
STOP_SECONDS: Final = 5.0
LEND_SECONDS: Final = 30.0
HOLD_SECONDS: Final = 600.0
"""Own scratch slots come back when their transfers have ended; this is for a probe that is lost."""
SMALL_BYTES: Final = 1024
"""Fits into one packet of any network: where an MTU is wrong on the way, it still passes."""
SMALL_TIMES: Final = 8
LARGE_TIMES: Final = 4
CAPPED_SECONDS: Final = 1.0
"""Of a transfer of a probe, where a cap holds."""
MAX_PROBES: Final = 4
KEEP_REPORTS: Final = 64

_Errors = (AgentUnavailableError, RefusedError, ProtocolError, ValueError)


class DoctoredNode(Protocol):
    """What of the node is needed here."""

    settings: AgentSettings
    clock: Clock
    incarnation: int

    @property
    def pool(self) -> PoolState | None: ...
    def stats(self) -> PoolStats: ...
    def publish(self) -> None:
        """Note what changed in slots."""


@dataclass(slots=True)
class _Lent:
    """Scratch slots of ours that one connection may read."""

    slots: list[SlotRef]
    until: float


@dataclass(slots=True)
class _Run:
    """A probe under way."""

    probe_id: str
    body: Probe
    client: AsyncAgentClient
    transports: list[TransportProbe] = field(default_factory=list)


class Doctor:
    """Handlers of the doctor's messages; `close` ends the probes."""

    def __init__(self, node: DoctoredNode, transfers: NodeTransfers) -> None:
        self._node = node
        self._transfers = transfers
        self._numbers = count(1)
        self._lent: dict[int, _Lent] = {}
        self._reports: OrderedDict[str, ProbeReport] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[type, Callable[[Session, Any], ReplyBody]]:
        return {
            GetNodeFacts: self._facts,
            Probe: self._probe,
            GetProbe: self._report,
            PrepareProbe: self._lend,
            EndProbe: self._take_back,
        }

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- facts ------------------------------------------------------------------------------

    def _facts(self, session: Session, body: GetNodeFacts) -> ReplyBody:
        settings, stats = self._node.settings, self._node.stats()
        moved = self._transfers.stats()
        return NodeFacts(
            node_id=settings.node_id,
            incarnation=self._node.incarnation,
            host=read_host(self._node.clock, self._folders(stats, body.logs)),
            slab_bytes=stats.slab_bytes,
            block_tokens=settings.block_tokens,
            block_bytes=stats.block_bytes,
            has_secret=settings.secret is not None,
            transports=list(settings.transports),
            addresses=self._transfers.addresses,
            endpoint=settings.peer_endpoint,
            transfer_problem=self._transfers.problem,
            namespaces=stats.namespaces,
            links=moved.links,
            alarms=moved.alarms,
            not_ready=moved.not_ready,
            rdma_problem=self._transfers.rdma_problem,
            rdma_ports=moved.ports,
            slots_by_memory_node=self._transfers.slots_by_memory_node,
        )

    def _folders(self, stats: PoolStats, logs: str) -> dict[SpaceName, tuple[str, int]]:
        """Where this node writes, and how much it may still write there."""
        settings = self._node.settings
        slab = self._transfers.slab_path
        found: dict[SpaceName, tuple[str, int]] = {"slab": (slab, 0)}
        if settings.ssd_path is not None:
            ssd = next((tier for tier in stats.tiers if tier.tier == "ssd"), None)
            left = 0 if ssd is None else ssd.capacity_bytes - ssd.used_bytes
            found["ssd"] = (str(settings.ssd_path), left)
        if logs:
            found["logs"] = (logs, 0)
        return found

    # --- lending ----------------------------------------------------------------------------

    def _lend(self, session: Session, body: PrepareProbe) -> ReplyBody:
        """Scratch blocks with content of no meaning, ready to be read."""
        pool, slab, now = self._node.pool, self._transfers.slab, self._node.clock.monotonic()
        if session.hello.role != "agent":
            return Refused("role", f"PrepareProbe from a {session.hello.role}: only agents may.")
        if pool is None or slab is None:
            return Refused(
                "no_slots",
                f"{self._node.settings.node_id} has no slots before its first worker has joined, or "
                "takes no part in transfers. Start a worker there, then try again.",
            )
        self._forget_old(now)
        wanted = max(1, min(body.num_bytes, MAX_PROBE_BYTES) // max(1, pool.block_bytes))
        lent = sum(len(one.slots) for one in self._lent.values())
        slots = take_scratch(pool, wanted, now + LEND_SECONDS, lent)
        if not slots:
            return Refused(
                "no_room",
                f"{self._node.settings.node_id} has no slot to lend: all are pinned or lent already. "
                "Try again in a minute.",
            )
        self._lent[session.connection] = _Lent(slots, now + LEND_SECONDS)
        keys = [_fill(slab, ref, pool.block_bytes) for ref in slots]
        numbers = [(ref.slot, ref.generation) for ref in slots]
        return ScratchSlots(numbers, keys, pool.block_bytes, self._node.clock.wall())

    def _take_back(self, session: Session, body: EndProbe) -> ReplyBody:
        now = self._node.clock.monotonic()
        self._forget_old(now)
        lent, pool = self._lent.pop(session.connection, None), self._node.pool
        if lent is None or pool is None:
            return Done(0)
        end_scratch(pool, lent.slots, now)
        return Done(len(lent.slots))

    def _forget_old(self, now: float) -> None:
        """What was lent too long has come back by itself."""
        for number in [number for number, lent in self._lent.items() if lent.until <= now]:
            del self._lent[number]

    # --- probing ----------------------------------------------------------------------------

    def _probe(self, session: Session, body: Probe) -> ReplyBody:
        """Begin; `GetProbe` tells the rest."""
        node_id, holder = self._node.settings.node_id, body.holder
        if session.hello.role not in {"cli", "supervisor"}:
            return Refused("role", f"Probe from a {session.hello.role}: only operators may.")
        if len(self._tasks) >= MAX_PROBES:
            return Refused("busy", f"{node_id} probes {MAX_PROBES} peers already. Try again then.")
        probe_id = f"probe:{node_id}:{next(self._numbers)}"
        report = ProbeReport(probe_id, "running", holder.node_id, node_id)
        self._keep(report)
        client = AsyncAgentClient(
            holder.endpoint, make_hello("agent", node_id), CONTROL_SECONDS,
            self._transfers.secret, self._node.settings.tls or False,
        )  # fmt: skip
        task = asyncio.get_running_loop().create_task(self._run(_Run(probe_id, body, client)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return report

    def _report(self, session: Session, body: GetProbe) -> ReplyBody:
        found = self._reports.get(body.probe_id)
        if found is None:
            return Refused("unknown_probe", f"{body.probe_id!r}: no such probe is remembered here.")
        return found

    def _keep(self, report: ProbeReport) -> None:
        self._reports[report.probe_id] = report
        while len(self._reports) > KEEP_REPORTS:
            self._reports.popitem(last=False)

    async def _run(self, run: _Run) -> None:
        report = self._reports[run.probe_id]
        changes: dict[str, Any] = {}
        try:
            changes = await self._measure(run)
        except _Errors as error:
            changes = {"error": str(error).removeprefix(f"{run.client.address}: ")}
        finally:
            await run.client.close()
            done = {"state": "done", "transports": run.transports, **changes}
            self._keep(msgspec.structs.replace(report, **done))

    async def _measure(self, run: _Run) -> dict[str, Any]:
        clock, holder = self._node.clock, run.body.holder
        pool, engine = self._node.pool, self._transfers.engine
        if pool is None or engine is None:
            return {"error": "this node has no slots yet, or takes no part in transfers"}
        _, target = parse_address(holder.endpoint)
        host, _, port = target.rpartition(":")
        local = await asyncio.to_thread(address_towards, host, int(port or 0))
        # The handshake comes with the first call: measured is the second one.
        await run.client.call(EndProbe(), Done)
        sent, wall = clock.monotonic(), clock.wall()
        lent = await run.client.call(PrepareProbe(_budget(run.body)), ScratchSlots)
        took = clock.monotonic() - sent
        welcome = run.client.welcome
        assert welcome is not None
        try:
            peer = self._transfers.peer(welcome)
            engine.set_peer(peer)
            for name in run.body.transports or sorted(engine.transports):
                run.transports.append(await self._try(run, name, lent, peer, welcome))
        finally:
            with contextlib.suppress(*_Errors):
                await run.client.call(EndProbe(), Done)
        return {
            "control_seconds": took,
            "clock_offset_seconds": lent.wall_seconds - wall - took / 2,
            "local_address": local,
        }

    async def _try(
        self, run: _Run, name: str, lent: ScratchSlots, peer: PeerAddress, welcome: Welcome
    ) -> TransportProbe:
        """One transport: some small transfers for latency, some of all blocks for bandwidth."""
        pool, engine = self._node.pool, self._transfers.engine
        if name not in peer.addresses:
            return TransportProbe(name, offered=False)
        if pool is None or engine is None or name not in engine.transports:
            return TransportProbe(name, large_error="this node does not have it")
        until = self._node.clock.monotonic() + HOLD_SECONDS
        own = take_scratch(pool, len(lent.slots), until)
        self._node.publish()
        if not own:
            return TransportProbe(name, large_error="no free slot here: all are pinned")
        pieces = [
            Piece(there[0], there[1], ref.slot, ref.generation, key, lent.block_bytes)
            for ref, there, key in zip(own, lent.slots, lent.keys, strict=False)
        ]
        series = _Series(run, engine, name, welcome.incarnation, self._node.clock)
        try:
            found = await series.measure(pieces)
        finally:
            if series.ended:
                end_scratch(pool, own, self._node.clock.monotonic())
        links = engine.stats().links
        window = [link.window_ops for link in links if (link.peer, link.transport) == (peer.node_id, name)]  # fmt: skip
        rails = self._transfers.rails(peer.node_id) if name == "rdma" else []
        return msgspec.structs.replace(found, window_ops=window[0] if window else 0, rails=rails)


class _Series:
    """The transfers of one transport, one after another."""

    def __init__(
        self, run: _Run, engine: TransferEngine, transport: str, incarnation: int, clock: Clock
    ) -> None:
        self._run = run
        self._engine = engine
        self._transport = transport
        self._incarnation = incarnation
        self._clock = clock
        self._numbers = count(1)
        self._last: Future[TransferResult] | None = None

    @property
    def ended(self) -> bool:
        """Nothing writes into our slots any more."""
        return self._last is None or self._last.done()

    async def measure(self, pieces: list[Piece]) -> TransportProbe:
        block = pieces[0].block_length
        small = msgspec.structs.replace(pieces[0], length=min(SMALL_BYTES, block))
        small_seconds, small_error = await self._repeat([small], SMALL_TIMES, 1 << 60)
        large_seconds: list[float] = []
        large_error = small_error  # where nothing small passes, nothing large does
        if not small_error:
            budget = _budget(self._run.body)
            pieces = under_cap(pieces, self._cap())
            large_seconds, large_error = await self._repeat(pieces, LARGE_TIMES, budget)
        return TransportProbe(
            self._transport,
            cap_bytes_per_second=self._cap(),
            small_bytes=small.num_bytes,
            small_seconds=statistics.median(small_seconds) if small_seconds else None,
            small_error=small_error,
            large_bytes=sum(piece.num_bytes for piece in pieces),
            large_seconds=min(large_seconds) if large_seconds else None,
            large_error=large_error,
        )

    def _cap(self) -> float:
        """Bytes a second that the policy grants this link; 0: all."""
        peer = self._run.body.holder.node_id
        for link in self._engine.stats().links:
            if (link.peer, link.transport) == (peer, self._transport):
                return link.cap_bytes_per_second
        return 0.0

    async def _repeat(
        self, pieces: list[Piece], times: int, budget: int
    ) -> tuple[list[float], str]:
        """Seconds of each that went well, until one does not or the budget of bytes is spent.

        Once always: a block may be larger than the budget. The first includes connecting.
        """
        seconds: list[float] = []
        num_bytes = sum(piece.num_bytes for piece in pieces)
        for number in range(times):
            if number and (number + 1) * num_bytes > budget:
                break
            result = await self._transfer(pieces)
            if result.missing:
                cause = next(iter(result.missing.values()))
                return seconds, f"{cause.value}: {result.detail}" if result.detail else cause.value
            seconds.append(result.timing.wire + result.timing.verify)
        return seconds, ""

    async def _transfer(self, pieces: list[Piece]) -> TransferResult:
        request = TransferRequest(
            f"{self._run.probe_id}.{self._transport}.{next(self._numbers)}",
            self._run.body.holder.node_id,
            tuple(pieces),
            self._clock.monotonic() + PROBE_SECONDS,
            Priority.BATCH,
            incarnation=self._incarnation,
        )
        future = self._last = self._engine.submit(request, transport=self._transport)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        finally:
            if not future.done():
                self._engine.cancel(request.transfer_id)
                await asyncio.to_thread(wait, [future], STOP_SECONDS)


def under_cap(pieces: list[Piece], bytes_per_second: float) -> list[Piece]:
    """As many as a capped link passes in a part of `PROBE_SECONDS`; a range of one if need be. Else
    the cap would look like a path that passes nothing large."""
    if not bytes_per_second:
        return pieces
    block = pieces[0].block_length
    room = max(SMALL_BYTES, int(bytes_per_second * CAPPED_SECONDS))
    if room < block:
        return [msgspec.structs.replace(pieces[0], length=room)]
    return pieces[: room // block]


def _budget(body: Probe) -> int:
    return max(1, min(body.max_bytes or DEFAULT_PROBE_BYTES, MAX_PROBE_BYTES))


def _fill(slab: Slab, ref: SlotRef, block_bytes: int) -> bytes:
    """Write a block that no key of a prompt names; its key."""
    key = b"probe" + ref.slot.to_bytes(4, "little") + (ref.generation % 2**56).to_bytes(7, "little")
    pattern = bytes(range(256)) * (block_bytes // 256 + 1)
    slab.write_block(ref.slot, ref.generation, key, memoryview(pattern)[:block_bytes])
    return key
