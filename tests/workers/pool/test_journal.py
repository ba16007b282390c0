"""What outlives a killed agent in shared memory: notes that agree with the slab, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.core.errors import ConfigError
from workers.pool.arena import Slab, SlabFile, checksum_of, journal_path
from workers.pool.journal import Geometry, Journal, recover
from workers.pool.records import (
    MAX_TENANT_BYTES,
    RECORD_BYTES,
    SlotRecord,
    pack_record,
    unpack_record,
)

SLOT_BYTES = 8192
BLOCK_BYTES = 6000
GEOMETRY = Geometry(SLOT_BYTES, BLOCK_BYTES, 8)
SPACE = b"n" * 32


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def note(number: int, data: bytes) -> SlotRecord:
    parent = key(number - 1) if number else b""
    return SlotRecord(
        "stored", 5, key(number), parent, SPACE, "tenant", len(data), checksum_of(data)
    )


@pytest.fixture
def slab_file(tmp_path: Path) -> Iterator[SlabFile]:
    made = SlabFile("s.slab", 8 * SLOT_BYTES, tmp_path)
    yield made
    made.close()


@pytest.fixture
def slab(slab_file: SlabFile) -> Iterator[Slab]:
    with Slab.attach(slab_file.path, SLOT_BYTES) as made:
        yield made


class TestRecords:
    def test_there_and_back(self) -> None:
        record = SlotRecord("stored", 1 << 60, key(3), key(2), SPACE, "Zoë", 7, (1 << 64) - 1)
        assert unpack_record(pack_record(record)) == record
        head = SlotRecord("stored", 1, key(0), b"", SPACE, "", 7, 9)
        assert unpack_record(pack_record(head)) == head

    def test_torn_and_empty_ones_are_none(self) -> None:
        whole = pack_record(SlotRecord("stored", 1, key(1), key(0), SPACE, "t", 7, 9))
        assert len(whole) == RECORD_BYTES
        assert unpack_record(bytes(RECORD_BYTES)) is None
        for at in range(0, 232, 7):
            torn = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
            found = unpack_record(torn)
            assert found is None or torn[:232] == whole[:232], at
        for length in range(8, 224, 16):
            assert unpack_record(whole[:length].ljust(RECORD_BYTES, b"\0")) is None

    def test_what_does_not_fit_is_not_noted(self) -> None:
        record = SlotRecord("stored", 1, key(1), key(0), SPACE, "t" * (MAX_TENANT_BYTES + 1), 7, 9)
        assert unpack_record(pack_record(record)) is None


class TestRecovery:
    def test_only_what_is_intact_is_recovered(self, slab_file: SlabFile, slab: Slab) -> None:
        journal = Journal.create(slab_file.journal_path, GEOMETRY)
        for number in range(5):
            data = bytes([number]) * BLOCK_BYTES
            slab.write_block(number, 5, key(number), data)
            journal.note(number, note(number, data))
        slab.payload(1)[100] ^= 1  # a byte
        slab.begin_write(2)  # a writer has begun
        slab.write_block(3, 6, key(3), b"x" * BLOCK_BYTES)  # another generation by now
        journal.note(6, SlotRecord("writing", 9))
        journal.close()

        again = Journal.load(slab_file.journal_path)
        assert again is not None
        assert again.geometry == GEOMETRY
        found = recover(again, slab)
        assert [(r.slot, r.key, r.tenant) for r in found.stored] == [
            (0, key(0), "tenant"), (4, key(4), "tenant"),
        ]  # fmt: skip
        assert (found.writing, found.num_lost) == ({6: 9}, 3)
        assert recover(again, slab, seconds=-1.0).stored == []
        again.close()

    @pytest.mark.parametrize("damage", ["head", "short", "gone", "empty"])
    def test_a_journal_that_cannot_be_read_is_none(self, slab_file: SlabFile, damage: str) -> None:
        path = slab_file.journal_path
        Journal.create(path, GEOMETRY).close()
        match damage:
            case "head":
                path.write_bytes(b"x" * 40 + path.read_bytes()[40:])
            case "short":
                path.write_bytes(path.read_bytes()[:-1])
            case "empty":
                path.write_bytes(b"")
            case _:
                path.unlink()
        assert Journal.load(path) is None


class TestSlabLeftBehind:
    def leave(self, tmp_path: Path, size: int = 4 * SLOT_BYTES) -> None:
        """As a killed agent does."""
        with (tmp_path / "s.slab").open("wb") as file:
            file.truncate(size)
        Journal.create(tmp_path / "s.slab.journal", GEOMETRY).close()

    def test_is_taken_over_by_the_same_name_and_size(self, tmp_path: Path) -> None:
        self.leave(tmp_path)
        made = SlabFile("s.slab", 4 * SLOT_BYTES, tmp_path)
        assert made.adopted
        assert made.journal_path == journal_path(made.path)
        made.close()
        assert not list(tmp_path.iterdir())

    def test_of_another_size_or_without_its_journal_is_made_anew(self, tmp_path: Path) -> None:
        self.leave(tmp_path, SLOT_BYTES)
        made = SlabFile("s.slab", 4 * SLOT_BYTES, tmp_path)
        assert not made.adopted
        assert not made.journal_path.exists()
        with pytest.raises(ConfigError, match="in use"):
            SlabFile("s.slab", 4 * SLOT_BYTES, tmp_path)
        made.close()
        (tmp_path / "s.slab").write_bytes(bytes(4 * SLOT_BYTES))
        made = SlabFile("s.slab", 4 * SLOT_BYTES, tmp_path)
        assert not made.adopted
        made.close()
