"""What is in which slot of the slab, noted in shared memory beside it: it outlives a killed agent.

Only the agent writes here, before the reply that names a slot leaves. So a slot whose note says
`stored` was whole when it was noted, and one that says `writing` may be half filled.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, Self

import xxhash

from workers.core.tiers import BlockRecord
from workers.pool.arena import Slab, checksum_of
from workers.pool.records import RECORD_BYTES, SlotRecord, pack_record, unpack_record

VERIFY_SECONDS: Final = 10.0
_MAGIC: Final = b"PERIJRN1"
_HEADER: Final = Struct("<8sQQQ")
_SUM: Final = Struct("<Q")
_HEADER_BYTES: Final = RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the slab is cut."""

    slot_bytes: int
    block_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """`stored`: verified blocks. `writing`: slots (with generations) that a client may still be
    filling. `num_lost`: noted as stored, but not intact."""

    geometry: Geometry
    stored: list[BlockRecord]
    writing: dict[int, int]
    num_lost: int = 0


class Journal:
    """Mapped; a note is a copy of `RECORD_BYTES` bytes with a checksum of its own."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry) -> None:
        self.geometry = geometry
        self._mapping = mapping

    @classmethod
    def create(cls, path: Path, geometry: Geometry) -> Self:
        """An empty one, its memory set aside. OSError."""
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            size = _HEADER_BYTES + geometry.num_slots * RECORD_BYTES
            os.posix_fallocate(fd, 0, size)
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        body = _HEADER.pack(_MAGIC, geometry.slot_bytes, geometry.block_bytes, geometry.num_slots)
        whole = body + _SUM.pack(xxhash.xxh3_64_intdigest(body))
        mapping[: len(whole)] = whole
        return cls(mapping, geometry)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """What a former agent left; None where there is none that can be read."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = os.fstat(fd).st_size
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED) if size >= _HEADER_BYTES else None
        finally:
            os.close(fd)
        geometry = None if mapping is None else _geometry_of(mapping)
        return cls(mapping, geometry) if mapping is not None and geometry is not None else None

    def note(self, slot: int, record: SlotRecord | None) -> None:
        """What is in this slot from now on; None: nothing of worth."""
        start = _HEADER_BYTES + slot * RECORD_BYTES
        self._mapping[start : start + RECORD_BYTES] = pack_record(record)

    def read(self, slot: int) -> SlotRecord | None:
        start = _HEADER_BYTES + slot * RECORD_BYTES
        return unpack_record(self._mapping[start : start + RECORD_BYTES])

    def close(self) -> None:
        self._mapping.close()


def recover(journal: Journal, slab: Slab, seconds: float = VERIFY_SECONDS) -> Recovered:
    """Compare the notes with the slab, payloads included, for at most so long; what could not be
    looked at in time counts as lost."""
    deadline = time.monotonic() + seconds
    noted = [(slot, journal.read(slot)) for slot in range(journal.geometry.num_slots)]
    writing = {s: r.generation for s, r in noted if r is not None and r.state == "writing"}
    claimed = [(s, r) for s, r in noted if r is not None and r.state == "stored"]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        verdicts = threads.map(lambda pair: _is_intact(slab, pair[0], pair[1], deadline), claimed)
        intact = [pair for pair, good in zip(claimed, verdicts, strict=True) if good]
    stored = [
        BlockRecord(
            slot, r.generation, r.key, r.parent, r.namespace, r.tenant, r.length, r.checksum
        )
        for slot, r in intact
    ]
    return Recovered(journal.geometry, stored, writing, len(claimed) - len(intact))


def _is_intact(slab: Slab, slot: int, record: SlotRecord, deadline: float) -> bool:
    if time.monotonic() > deadline:
        return False
    header = slab.read_header(slot)
    if header is None or (header.generation, header.key) != (record.generation, record.key):
        return False
    if (header.length, header.checksum) != (record.length, record.checksum):
        return False
    return checksum_of(slab.payload(slot, record.length)) == record.checksum


def _geometry_of(mapping: mmap.mmap) -> Geometry | None:
    body = mapping[: _HEADER.size]
    (found,) = _SUM.unpack_from(mapping, _HEADER.size)
    magic, slot_bytes, block_bytes, num_slots = _HEADER.unpack(body)
    whole = len(mapping) == _HEADER_BYTES + num_slots * RECORD_BYTES
    if magic != _MAGIC or found != xxhash.xxh3_64_intdigest(body) or not whole:
        return None
    return Geometry(slot_bytes, block_bytes, num_slots)
