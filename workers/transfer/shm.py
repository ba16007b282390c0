"""Blocks from another agent's slab on the same host: its file mapped, read-only.

There is no connection, so no handshake either: the slab's file mode (0600) says who may read, and
the facts that the peer published are compared as in a handshake. A slab whose file was unlinked or
replaced belongs to a process that is gone. Pushing is left to tcp: a reservation is the peer's to
give, and on one host pulling costs the same.

Copies run beside the engine's thread, several at a time (`copiers`): the engine decides and waits,
and who asks it for something waits for microseconds. What is small is moved in `poll`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
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
from workers.transfer.copiers import Copiers, num_copiers

DEPTH: Final = 4096
MAX_VERIFIED: Final = 4096
SMALL_BYTES: Final = 256 * 1024
"""So much is moved at once, in the engine's thread: to wake another takes as long."""
_CHUNK_BYTES: Final = 512 * 1024  # copied and hashed while it is in the cache

GoOn = Callable[[int], bool]
"""Told how many bytes have moved; False: stop here, the op was given up."""
_log = logging.getLogger(__name__)


class ShmTransport(Transport):
    name = "shm"
    pushes = False

    def __init__(self, memory: SlotMemory, num_threads: int | None = None) -> None:
        """`num_threads`: that copy at a time; by the machine's cores where it is not given."""
        self.memory = memory
        self.copiers = Copiers(num_threads or num_copiers(), "shm-copy")

    def connect(self, peer: PeerAddress, incarnation: int) -> Endpoint:
        return ShmEndpoint(self.memory, self.copiers, peer, incarnation)

    def close(self) -> None:
        self.copiers.close()


class ShmEndpoint(Endpoint):
    """`move` runs in the copiers' threads, all else in the engine's. The copies and the hashes
    release the interpreter."""

    def __init__(
        self, memory: SlotMemory, copiers: Copiers, peer: PeerAddress, incarnation: int
    ) -> None:
        self._memory = memory
        self._copiers = copiers
        self._peer = peer
        self._incarnation = incarnation
        self._lock = threading.Lock()  # of the next four
        self._open: set[int] = set()  # ops that were taken and have not ended
        self._given_up: set[int] = set()
        self._done: list[tuple[Completion, float]] = []  # and when its first byte moved
        self._moved_bytes = 0
        self._lost: DownBy | None = None  # why this endpoint can do no more
        self._verified: dict[int, Found] = {}
        self._small: list[Op] = []
        self._report = Report()
        self._slab: Slab | None = None
        self._file: tuple[str, int, int] | None = None
        self._ended = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        down = self._map()
        if down is not None:
            self._report.down = down
            self.close()
        else:
            self._report.opened = OpenedBy(DEPTH, incarnation or peer.incarnation)

    def post(self, ops: Sequence[Op]) -> int:
        if self._ended:
            return 0
        with self._lock:
            idle = not self._open
            taken = ops[: max(0, DEPTH - len(self._open))]
            self._open.update(op.id for op in taken)
        if idle and sum(op.length for op in taken) <= SMALL_BYTES:
            self._small.extend(taken)
        else:
            self._copiers.post(self, taken)
        return len(taken)

    def cancel(self, op_ids: Sequence[int]) -> None:
        wanted = set(op_ids)
        back = {*self._copiers.withdraw(self, wanted)}
        back |= {op.id for op in self._small if op.id in wanted}
        self._small = [op for op in self._small if op.id not in wanted]
        with self._lock:
            self._open -= back
            self._given_up |= wanted & self._open  # a copier has it: it stops at the next piece
        self._report.completions += [Completion(op_id, Cause.CANCELLED) for op_id in back]

    def poll(self, now: float) -> Report:
        report, self._report = self._report, Report()
        if self._ended:
            return report
        small, self._small = self._small, []
        self._move_all(small)
        self._hush()
        with self._lock:
            done, self._done = self._done, []
            report.moved_bytes, self._moved_bytes = self._moved_bytes, 0
        at = perf_counter()
        report.completions += [
            Completion(one.op_id, one.cause, one.checksum, one.verify_seconds, at - began)
            for one, began in done
        ]
        if self._lost is not None:
            self.close()
            report.down = self._lost
        return report

    def fileno(self) -> int:
        return self._bell

    def wake_at(self, now: float) -> float | None:
        report = self._report
        due = self._small or report.completions or report.down or report.opened
        return now if due else None

    def close(self) -> None:
        self._ended = True  # copiers stop at the next piece
        self._small = []
        self._copiers.withdraw(self)
        self._copiers.wait_still(self)
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()

    # --- in the copiers' threads ------------------------------------------------------------

    def move(self, ops: Sequence[Op]) -> None:
        """Copy and verify these, until this endpoint ends."""
        try:
            self._move_all(ops)
        except Exception as error:
            _log.exception("a copy from the slab of %s failed", self._peer.node_id)
            text = f"a copy from the slab of {self._peer.node_id} failed: {error}"
            self._lost = DownBy(Cause.CONNECTION, text)
        os.eventfd_write(self._bell, 1)  # `close` waits for this

    def _move_all(self, ops: Sequence[Op]) -> None:
        if ops and self._is_gone():
            text = f"the slab of {self._peer.node_id} is gone"
            self._lost = DownBy(Cause.INCARNATION, text)
        for op in ops:
            if self._ended or self._lost is not None:
                return
            began = perf_counter()
            wanted = self._go_on(op.id, 0)
            completion = self._move(op) if wanted else Completion(op.id, Cause.CANCELLED)
            with self._lock:
                self._open.discard(op.id)
                self._given_up.discard(op.id)
                self._done.append((completion, began))

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    # --- copying -----------------------------------------------------------------------------

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
        if not op.whole and not self._is_sound(slab, piece.remote_slot, found):
            return Completion(op.id, Cause.CORRUPT)  # a range of a bad block proves nothing
        source = slab.payload(piece.remote_slot, op.offset + op.length)[op.offset :]
        target = self._memory.range(piece.local_slot, op.offset, op.length)
        wanted = found.checksum if op.whole else checksum_of(source)
        copied = _copy_hashed(target, source, lambda moved: self._go_on(op.id, moved))
        if copied is None:
            return Completion(op.id, Cause.CANCELLED)
        digest, seconds = copied
        if _found(slab, piece.remote_slot) != found:
            return Completion(op.id, Cause.STALE)
        cause = None if digest == wanted else Cause.CORRUPT
        return Completion(op.id, cause, found.checksum, seconds / max(1, self._copiers.num_busy))

    def _is_sound(self, slab: Slab, slot: int, found: Found) -> bool:
        """Hashed whole, once for all ranges of it."""
        if self._verified.get(slot) == found:
            return True
        if checksum_of(slab.payload(slot, found.length)) != found.checksum:
            return False
        if len(self._verified) >= MAX_VERIFIED:
            self._verified.clear()
        self._verified[slot] = found
        return True

    def _go_on(self, op_id: int, moved_bytes: int) -> bool:
        with self._lock:
            self._moved_bytes += moved_bytes
            return not self._ended and op_id not in self._given_up

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


def _copy_hashed(target: memoryview, source: memoryview, go_on: GoOn) -> tuple[int, float] | None:
    """Copy; the digest of what arrived, and the seconds that hashing took. None: it was stopped."""
    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    hasher = xxhash.xxh3_64()
    seconds = 0.0
    for start in range(0, len(target), _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, len(target))
        np.copyto(to[start:end], of[start:end])
        started = perf_counter()
        hasher.update(target[start:end])
        seconds += perf_counter() - started
        if not go_on(end - start):
            return None
    return hasher.intdigest(), seconds


def _found(slab: Slab, slot: int) -> Found | None:
    header = slab.read_header(slot)
    if header is None:
        return None
    return Found(header.generation, header.key, header.length, header.checksum)
