import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.core.blocks import SLOT_HEADER_BYTES, slot_bytes_of
from workers.core.errors import ConfigError
from workers.pool.arena import SHM_FOLDER, Slab, SlabFile, SlotHeader, checksum_of

KEY = b"k" * 16
SLOT_BYTES = slot_bytes_of(5000)


@pytest.fixture
def name() -> Iterator[str]:
    made = f"perilune-test-{uuid.uuid4().hex[:12]}"
    yield made
    (SHM_FOLDER / made).unlink(missing_ok=True)


@pytest.fixture
def slab_file(name: str) -> Iterator[SlabFile]:
    made = SlabFile(name, 4 * SLOT_BYTES + 100)
    yield made
    made.close()


@pytest.fixture
def slab(slab_file: SlabFile) -> Iterator[Slab]:
    with Slab.attach(slab_file.path, SLOT_BYTES) as attached:
        yield attached


class TestSlab:
    def test_slots_are_page_aligned_and_hold_header_and_payload(self, slab: Slab) -> None:
        assert SLOT_BYTES == 8192
        assert slab.num_slots == 4
        assert len(slab.payload(3)) == SLOT_BYTES - SLOT_HEADER_BYTES
        assert len(slab.payload(0, 5000)) == 5000

    def test_no_slot_outside(self, slab: Slab) -> None:
        for slot in (-1, 4):
            with pytest.raises(IndexError, match="has 4"):
                slab.payload(slot)

    def test_header_comes_back(self, slab: Slab) -> None:
        assert slab.read_header(1) is None
        slab.write_header(1, 2**62, 5000, 2**64 - 1, KEY)
        assert slab.read_header(1) == SlotHeader(2**62, 5000, 2**64 - 1, KEY)
        slab.begin_write(1)
        assert slab.read_header(1) is None

    def test_blocks_of_neighbours_do_not_touch(self, slab: Slab) -> None:
        blocks = [bytes([65 + slot]) * 5000 for slot in range(4)]
        for slot, data in enumerate(blocks):
            assert slab.write_block(slot, slot + 1, KEY, data) == checksum_of(data)
        assert [slab.read_block(slot, slot + 1, KEY) for slot in range(4)] == blocks

    def test_reader_misses_what_is_not_what_it_was_promised(self, slab: Slab) -> None:
        slab.write_block(0, 5, KEY, b"x" * 5000)
        assert slab.read_block(0, 4, KEY) is None
        assert slab.read_block(0, 5, b"o" * 16) is None
        slab.payload(0)[77] = 0
        assert slab.read_block(0, 5, KEY) is None

    def test_view_outlives_close(self, slab_file: SlabFile) -> None:
        slab = Slab.attach(slab_file.path, SLOT_BYTES)
        view = slab.payload(0, 3)
        view[:] = b"abc"
        slab.close()
        assert bytes(view) == b"abc"

    def test_bytes_travel_between_processes(self, slab: Slab, slab_file: SlabFile) -> None:
        code = (
            "import sys; from workers.pool.arena import Slab\n"
            "slab = Slab.attach(sys.argv[1], int(sys.argv[2]))\n"
            "slab.write_block(2, 9, b'k' * 16, bytes(range(250)) * 20)"
        )
        command = [sys.executable, "-c", code, str(slab_file.path), str(SLOT_BYTES)]
        subprocess.run(command, check=True)
        assert slab.read_block(2, 9, KEY) == bytes(range(250)) * 20


class TestSlabFile:
    def test_is_private_and_goes(self, name: str) -> None:
        made = SlabFile(name, 8192)
        assert made.path.stat().st_mode & 0o777 == 0o600
        made.close()
        assert not made.path.exists()

    def test_replaces_what_a_dead_agent_left(self, name: str) -> None:
        stale = SHM_FOLDER / name
        stale.write_bytes(b"x" * 100)
        made = SlabFile(name, 8192)
        assert made.path.stat().st_size == 8192
        made.close()

    def test_leaves_a_living_agents_slab_alone(self, slab_file: SlabFile) -> None:
        with pytest.raises(ConfigError, match="in use by another agent"):
            SlabFile(slab_file.path.name, 8192)
        assert slab_file.path.exists()

    def test_touching_allocates_every_page(
        self, name: str, eventually: Callable[[Callable[[], bool]], None]
    ) -> None:
        made = SlabFile(name, 40 << 20)
        assert made.path.stat().st_blocks == 0
        made.start_touching(1e12)
        eventually(lambda: made.touched_bytes == made.slab_bytes)
        assert made.path.stat().st_blocks * 512 == 40 << 20
        assert not made.touch_error
        made.close()

    def test_close_stops_touching(self, name: str) -> None:
        made = SlabFile(name, 64 << 20)
        made.start_touching(1.0)
        made.close()
        assert made.touched_bytes == 0

    @pytest.mark.parametrize("bad", ["", "a/b", ".hidden"])
    def test_name_must_be_plain(self, bad: str) -> None:
        with pytest.raises(ConfigError, match="slab_name"):
            SlabFile(bad, 8192)

    @pytest.mark.parametrize("size", [100, 2**60])
    def test_size_must_fit(self, name: str, size: int) -> None:
        with pytest.raises(ConfigError, match=f"slab_bytes = {size}"):
            SlabFile(name, size)
        assert not Path(SHM_FOLDER, name).exists()
