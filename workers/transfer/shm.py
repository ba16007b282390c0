"""Blocks from another agent's slab on the same host: its file mapped, read-only.

There is no connection, so no handshake either: the slab's file mode (0600) says who may read, and
the facts that the peer published are compared as in a handshake. A slab whose file was unlinked or
replaced belongs to a process that is gone. Pushing is left to tcp: a reservation is the peer's to
give, and on one host pulling costs the same.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Final

import numpy as np
import xxhash

from workers.core.transfer_handshake import check_facts
from workers.core.transfer_types import Cause, Completion, Direction, Op
from workers.core.transfer_verify import Found, Wanted, in_bounds, judge_source
from workers.pool.arena import Slab, checksum_of
from workers.transfer.base import (
    DownBy,
    Endpoint,
    OpenedBy,
    PeerAddress,
    Report,
    SlotMemory,
    Transport,
)

DEPTH: Final = 4096
POLL_BYTES: Final = 4 << 20
_CHUNK_BYTES: Final = 512 * 1024  # copied and hashed while it is in the cache


class ShmTransport(Transport):
    name = "shm"
    pushes = False

    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory

    def connect(self, peer: PeerAddress, incarnation: int) -> Endpoint:
        return ShmEndpoint(self.memory, peer, incarnation)


class ShmEndpoint(Endpoint):
    """Copies in `poll`, a bounded amount each time. numpy's copies release the interpreter."""

    def __init__(self, memory: SlotMemory, peer: PeerAddress, incarnation: int) -> None:
        self._memory = memory
        self._peer = peer
        self._incarnation = incarnation
        self._queue: deque[Op] = deque()
        self._report = Report()
        self._slab: Slab | None = None
        self._file: tuple[str, int, int] | None = None
        self._ended = False
        down = self._map()
        if down is not None:
            self._report.down = down
            self._ended = True
        else:
            self._report.opened = OpenedBy(DEPTH, incarnation or peer.incarnation)

    def post(self, ops: Sequence[Op]) -> int:
        if self._ended:
            return 0
        taken = ops[: max(0, DEPTH - len(self._queue))]
        self._queue.extend(taken)
        return len(taken)

    def cancel(self, op_ids: Sequence[int]) -> None:
        wanted = set(op_ids)
        cancelled = [op for op in self._queue if op.id in wanted]
        if cancelled:
            self._queue = deque(op for op in self._queue if op.id not in wanted)
            self._report.completions += [Completion(op.id, Cause.CANCELLED) for op in cancelled]

    def poll(self, now: float) -> Report:
        report, self._report = self._report, Report()
        if self._ended:
            return report
        if self._queue and self._is_gone():
            report.down = DownBy(Cause.INCARNATION, f"the slab of {self._peer.node_id} is gone")
            self.close()
            return report
        while self._queue and report.moved_bytes < POLL_BYTES:
            op = self._queue.popleft()
            report.completions.append(self._move(op))
            report.moved_bytes += op.length
        return report

    def wake_at(self, now: float) -> float | None:
        report = self._report
        due = self._queue or report.completions or report.down or report.opened
        return now if due else None

    def close(self) -> None:
        self._ended = True
        self._queue.clear()
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()

    # --- copying ----------------------------------------------------------------------------

    def _move(self, op: Op) -> Completion:
        slab, memory, piece = self._slab, self._memory, op.piece
        assert slab is not None
        if op.direction is Direction.PUSH:
            return Completion(op.id, Cause.REFUSED)
        wanted = Wanted(
            piece.remote_slot, piece.remote_generation, piece.key,
            piece.block_length, op.offset, op.length,
        )  # fmt: skip
        local = wanted._replace(slot=piece.local_slot)
        if not (
            in_bounds(wanted, slab.num_slots, slab.slot_bytes - slab.header_bytes)
            and in_bounds(local, memory.num_slots, memory.payload_bytes)
        ):
            return Completion(op.id, Cause.BOUNDS)
        found = _found(slab, piece.remote_slot)
        cause = judge_source(wanted, found)
        if cause is not None or found is None:
            return Completion(op.id, cause)
        return self._copy(slab, op, found)

    def _copy(self, slab: Slab, op: Op, found: Found) -> Completion:
        piece = op.piece
        if not op.whole and checksum_of(slab.payload(piece.remote_slot, found.length)) != (
            found.checksum
        ):
            return Completion(op.id, Cause.CORRUPT)  # a range of a bad block proves nothing
        source = slab.payload(piece.remote_slot, op.offset + op.length)[op.offset :]
        target = self._memory.range(piece.local_slot, op.offset, op.length)
        wanted = found.checksum if op.whole else checksum_of(source)
        digest, seconds = _copy_hashed(target, source)
        if _found(slab, piece.remote_slot) != found:
            return Completion(op.id, Cause.STALE)
        cause = None if digest == wanted else Cause.CORRUPT
        return Completion(op.id, cause, found.checksum, seconds)

    # --- mapping ----------------------------------------------------------------------------

    def _map(self) -> DownBy | None:
        """None: mapped."""
        name, facts = self._peer.node_id, self._peer.facts
        if self._incarnation and self._peer.incarnation not in (0, self._incarnation):
            text = f"{name} is incarnation {self._peer.incarnation}, not {self._incarnation}"
            return DownBy(Cause.INCARNATION, text, self._peer.incarnation)
        if facts is None:
            return DownBy(Cause.REFUSED, f"{name} has not said how its slab is laid out")
        refused = check_facts(self._memory.facts, facts, "this node", name)
        if refused is not None:
            return DownBy(Cause.REFUSED, f"{refused.code}: {refused.message}")
        try:
            self._slab = self._attach(self._peer.addresses["shm"], facts.slot_bytes)
        except (OSError, ValueError, KeyError) as error:
            return DownBy(Cause.CONNECTION, f"the slab of {name}: {error}")
        if self._slab.num_slots < facts.num_slots:
            text = f"the slab of {name} has {self._slab.num_slots} slots, not {facts.num_slots}"
            self.close()
            return DownBy(Cause.REFUSED, text)
        return None

    def _attach(self, path: str, slot_bytes: int) -> Slab:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            facts = os.fstat(fd)
            self._file = (path, facts.st_dev, facts.st_ino)
            mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        return Slab(mapping, slot_bytes, self._memory.facts.header_bytes)

    def _is_gone(self) -> bool:
        assert self._file is not None
        path, device, inode = self._file
        try:
            facts = os.stat(path, follow_symlinks=False)
        except OSError:
            return True
        return (facts.st_dev, facts.st_ino) != (device, inode)


def _copy_hashed(target: memoryview, source: memoryview) -> tuple[int, float]:
    """Copy; the digest of what arrived, and the seconds that hashing took."""
    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(target) <= _CHUNK_BYTES:
        np.copyto(to, of)
        started = perf_counter()
        return checksum_of(target), perf_counter() - started
    hasher = xxhash.xxh3_64()
    seconds = 0.0
    for start in range(0, len(target), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        np.copyto(to[start:end], of[start:end])
        started = perf_counter()
        hasher.update(target[start:end])
        seconds += perf_counter() - started
    return hasher.intdigest(), seconds


def _found(slab: Slab, slot: int) -> Found | None:
    header = slab.read_header(slot)
    if header is None:
        return None
    return Found(header.generation, header.key, header.length, header.checksum)
