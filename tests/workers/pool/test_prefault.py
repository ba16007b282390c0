"""Pages of a slab are made and mapped before their first use."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.core.blocks import slot_bytes_of
from workers.pool import arena, prefault
from workers.pool.arena import Slab, SlabFile
from workers.pool.headroom import room_for
from workers.pool.prefault import PageMapper, Pages, core_share, pause_after

MIB = 1 << 20
SLAB_BYTES = 40 * MIB
SLOT_BYTES = slot_bytes_of(MIB)
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def slab_file() -> Iterator[SlabFile]:
    made = SlabFile(f"perilune-test-{os.getpid()}-prefault.slab", SLAB_BYTES)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def kernel_can() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        able = Pages(probe).populate(0, mmap.PAGESIZE)
    if not able:
        pytest.skip("this kernel has no MADV_POPULATE_READ")


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def fill(slab: Slab) -> int:
    """Page faults of writing all of it."""
    data = bytes(slab.slot_bytes - slab.header_bytes)
    before = faults()
    for slot in range(slab.num_slots):
        slab.payload(slot)[:] = data
    return faults() - before


def test_slots_that_were_touched_cost_no_page_fault(
    slab_file: SlabFile, eventually: Eventually
) -> None:
    slab_file.start_touching(1e12)
    eventually(lambda: slab_file.touched_bytes == SLAB_BYTES)
    slab = slab_file.slab(SLOT_BYTES)
    pages = slab.num_slots * SLOT_BYTES // mmap.PAGESIZE
    assert fill(slab) < pages // 10
    slab.close()


def test_another_process_maps_what_exists_and_makes_nothing(
    slab_file: SlabFile, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "_LOOK_AGAIN_SECONDS", 0.01)
    with Slab.attach(slab_file.path, SLOT_BYTES) as slab:
        mapper = PageMapper(slab.everything)
        mapper.start()
        assert not Pages(slab.everything).exist(0, SLAB_BYTES)
        assert slab_file.path.stat().st_blocks == 0, "it waits for the agent"
        slab_file.start_touching(1e12)
        eventually(lambda: mapper.mapped_bytes == SLAB_BYTES)
        mapper.close()
        assert fill(slab) < SLAB_BYTES // mmap.PAGESIZE // 10


def test_what_is_in_a_slot_stays(slab_file: SlabFile, eventually: Eventually) -> None:
    key, data = b"k" * 16, os.urandom(MIB)
    with Slab.attach(slab_file.path, SLOT_BYTES) as slab:
        slab.write_block(30, 7, key, data)
        slab_file.start_touching(1e12)
        eventually(lambda: slab_file.touched_bytes == SLAB_BYTES)
        assert slab.read_block(30, 7, key) == data
        own = slab_file.slab(SLOT_BYTES)
        assert own.read_block(30, 7, key) == data
        own.close()


def test_touching_waits_while_memory_is_short(
    slab_file: SlabFile, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_POOR_SECONDS", 0.01)
    asked: list[int] = []
    plenty = False

    def has_room(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return plenty

    monkeypatch.setattr(arena, "room_for", has_room)
    slab_file.start_touching(1e12)
    eventually(lambda: len(asked) > 3)
    assert slab_file.path.stat().st_blocks == 0
    assert not slab_file.touch_error
    plenty = True
    eventually(lambda: slab_file.touched_bytes == SLAB_BYTES)


def test_an_old_kernel_has_pages_allocated_and_no_more(
    slab_file: SlabFile, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "_POPULATE_READ", 9999)
    slab_file.start_touching(1e12)
    eventually(lambda: slab_file.touched_bytes == SLAB_BYTES)
    assert slab_file.path.stat().st_blocks * 512 == SLAB_BYTES
    mapper = PageMapper(slab_file.slab(SLOT_BYTES).everything)
    mapper.start()
    mapper.close()
    assert mapper.mapped_bytes == 0


def test_a_mapper_that_waits_ends_when_it_is_told(slab_file: SlabFile) -> None:
    with Slab.attach(slab_file.path, SLOT_BYTES) as slab:
        mapper = PageMapper(slab.everything)
        mapper.start()
        mapper.close()
        assert not mapper._thread.is_alive()


def test_a_share_of_one_core_by_the_machines_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {}
    for cores in (1, 2, 8, 16, 128):
        monkeypatch.setattr(prefault.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        shares[cores] = core_share()
    assert shares == {1: 0.125, 2: 0.125, 8: 0.5, 16: 1.0, 128: 1.0}
    assert pause_after(1.0, 0.25) == 3.0
    assert pause_after(1.0, 1.0) == 0.0


class TestHeadroom:
    """What may still be taken, by the machine's and the cgroups' files."""

    @pytest.fixture
    def proc(self, tmp_path: Path) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemTotal: 10485760 kB\nMemAvailable: 1048576 kB\n")
        (tmp_path / "proc/self/cgroup").write_text("0::/\n")
        return tmp_path / "proc"

    def test_the_machine(self, proc: Path, tmp_path: Path) -> None:
        """10 GiB with 1 GiB free: a twentieth is kept."""
        assert room_for(512 * MIB, proc, tmp_path)
        assert not room_for(513 * MIB, proc, tmp_path)

    def test_a_cgroup_and_those_above_it(self, proc: Path, tmp_path: Path) -> None:
        (proc / "self/cgroup").write_text("0::/pod/box\n")
        box = tmp_path / "pod/box"
        box.mkdir(parents=True)
        (box / "memory.max").write_text("max\n")
        (box / "memory.current").write_text("5\n")
        assert room_for(500 * MIB, proc, tmp_path)
        (box.parent / "memory.max").write_text(f"{1024 * MIB}\n")
        (box.parent / "memory.current").write_text(f"{900 * MIB}\n")
        assert not room_for(100 * MIB, proc, tmp_path)
        (box.parent / "memory.stat").write_text(f"anon 5\ninactive_file {300 * MIB}\n")
        assert room_for(100 * MIB, proc, tmp_path)

    def test_cgroups_of_version_1(self, proc: Path, tmp_path: Path) -> None:
        (proc / "self/cgroup").write_text("3:cpu:/x\n2:memory:/box\n0::/\n")
        box = tmp_path / "memory/box"
        box.mkdir(parents=True)
        (box / "memory.limit_in_bytes").write_text(f"{1024 * MIB}\n")
        (box / "memory.usage_in_bytes").write_text(f"{700 * MIB}\n")
        assert room_for(60 * MIB, proc, tmp_path)
        assert not room_for(80 * MIB, proc, tmp_path)

    def test_where_nobody_says(self, tmp_path: Path) -> None:
        assert room_for(1 << 40, tmp_path / "none", tmp_path / "none")
