"""A real agent with an SSD tier: what goes down comes back, and nothing wrong ever does."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.core.stats_messages import NamespaceSpec

MakeTenant = Callable[..., Any]
SLAB_BYTES = 4 << 20
SSD_BYTES = 16 << 20
NUM_SLOTS = SLAB_BYTES // (16384 + 4096)
NUM_CHAINS = 50  # of 8 blocks each: about twice the slab


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def agent(make_agent: Callable[..., Any], folder: Path) -> Any:
    arguments = ("--ssd-path", str(folder), "--ssd-bytes", str(SSD_BYTES))
    return make_agent(*arguments, slab_bytes=SLAB_BYTES).start()


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.ssd")
    return path


def data_offset(path: Path, slot_bytes: int) -> int:
    """Where the slots begin: the file's end is theirs."""
    size = path.stat().st_size
    num_slots = min(SSD_BYTES // (slot_bytes + 256), size // slot_bytes)
    return size - num_slots * slot_bytes


def test_b24_what_went_down_comes_back_byte_for_byte(agent: Any, make_tenant: MakeTenant) -> None:
    worker = make_tenant(agent)
    chains = worker.fill("a", NUM_CHAINS)
    assert [worker.held(keys) for keys in chains] == [8] * NUM_CHAINS
    before = worker.ssd()
    assert before.used_blocks >= 8 * NUM_CHAINS - NUM_SLOTS
    for keys in chains:
        assert worker.load(keys) == [worker.payload(key) for key in keys]
    after = worker.ssd()
    assert after.read_blocks_total > before.read_blocks_total
    assert (after.failed_reads_total, after.failed_writes_total) == (0, 0)
    assert worker.client.stats().pinned_blocks == 0


def test_b08_a_full_pool_with_a_second_tier_finds_victims(
    agent: Any, make_tenant: MakeTenant
) -> None:
    worker = make_tenant(agent)
    worker.fill("a", NUM_CHAINS)
    stats = worker.client.stats()
    assert stats.starved_by_pins_total == 0
    keys = worker.chain("pinned", 160)
    worker.store(keys)
    worker.client.pin_prefix("transfer:hold", worker.namespace, keys)
    worker.store(worker.chain("more", 160))
    stats = worker.client.stats()
    assert stats.starved_by_pins_total > 0, "nothing evictable is counted, for the alarm"
    assert stats.eviction.attempts_total > stats.eviction.successes_total
    assert stats.eviction.pinned_bytes >= 160 * stats.block_bytes


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_b21_b25_disk_is_found_again_after_a_restart(
    agent: Any, make_tenant: MakeTenant, folder: Path, how: signal.Signals
) -> None:
    worker = make_tenant(agent)
    chains = worker.fill("a", NUM_CHAINS)
    agent.kill(how)
    assert len(list(folder.glob("*.ssd"))) == 1
    agent.spawn()
    agent.connect(worker.client)
    worker.attach()
    if how is signal.SIGTERM:  # the slab is gone, the worker brings its geometry again
        worker = make_tenant(agent, "w2")
    worker.eventually(lambda: worker.ssd().state == "ok" and worker.ssd().used_blocks > 0)
    held = [worker.held(keys) for keys in chains]
    assert sum(held) >= (8 * NUM_CHAINS if how is signal.SIGKILL else 8 * NUM_CHAINS - NUM_SLOTS)
    for keys, length in zip(chains, held, strict=True):
        assert worker.load(keys[:length]) == [worker.payload(key) for key in keys[:length]]
    assert worker.ssd().failed_reads_total == 0
    assert len(list(folder.glob("*.ssd"))) == 1


def test_b17_listed_but_empty_is_a_miss_and_leaves_the_index(
    agent: Any, make_tenant: MakeTenant, folder: Path
) -> None:
    worker = make_tenant(agent)
    chains = worker.fill("a", NUM_CHAINS)
    path = file_of(folder)
    slot_bytes = worker.client.connect().slot_bytes
    start = data_offset(path, slot_bytes)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(path.stat().st_size - start))
        file.flush()
        os.fsync(file.fileno())
    before = [worker.held(keys) for keys in chains]
    for keys in chains:
        data = worker.load(keys)
        assert data == [worker.payload(key) for key in keys[: len(data)]]
    stats = worker.client.stats()
    assert stats.tiers[1].failed_reads_total > 0
    assert stats.evicted_by_cause["corrupt"] > 0
    assert sum(worker.held(keys) for keys in chains) < sum(before)


def test_b22_truncated_flipped_and_cleared_are_three_misses(
    agent: Any, make_tenant: MakeTenant, folder: Path
) -> None:
    worker = make_tenant(agent)
    chains = worker.fill("a", NUM_CHAINS)
    path = file_of(folder)
    slot_bytes = worker.client.connect().slot_bytes
    start = data_offset(path, slot_bytes)
    used = worker.ssd().used_blocks
    with path.open("r+b") as file:
        for slot in range(2, 12):  # one bit each
            file.seek(start + slot * slot_bytes + 5000)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        file.seek(4096 + 13 * 256)
        file.write(bytes(256))  # a record
        file.flush()
        os.fsync(file.fileno())
        file.truncate(start + (used - 5) * slot_bytes)
    for keys in chains:
        data = worker.load(keys)
        assert data == [worker.payload(key) for key in keys[: len(data)]]
    assert worker.ssd().failed_reads_total >= 3
    for keys in chains:  # what was lost is stored anew, and stays
        worker.store(keys)
        assert worker.load(keys) == [worker.payload(key) for key in keys]


def test_b16_two_writers_of_one_key_and_a_reader_gets_all_or_nothing(
    agent: Any, make_tenant: MakeTenant
) -> None:
    writers = [make_tenant(agent, f"p{i}") for i in range(2)]
    reader = make_tenant(agent, "d1")
    names = [f"same{i}" for i in range(150)]
    failures: list[BaseException] = []

    def write(worker: Any) -> None:
        try:
            for i, name in enumerate(names):
                worker.store(worker.chain(name, 1 if i % 2 else 7))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(worker,)) for worker in writers]
    for thread in threads:
        thread.start()
    for i, name in enumerate(names):
        keys = reader.chain(name, 1 if i % 2 else 7)
        data = reader.load(keys)
        assert data == [reader.payload(key) for key in keys[: len(data)]]
    for thread in threads:
        thread.join(timeout=60)
    assert not failures


def test_promotions_for_a_first_token_overtake_those_in_bulk(
    agent: Any, make_tenant: MakeTenant
) -> None:
    worker = make_tenant(agent)
    chains = worker.fill("a", NUM_CHAINS)
    for i, keys in enumerate(chains[:4]):
        worker.client.promote(f"load:w:bulk{i}", worker.namespace, keys, "batch")
    worker.bring_back(chains[6], "load:w:first")
    refs = worker.client.prepare_load("load:w:first", worker.namespace, chains[6])
    assert len(refs) == 8
    for owner in ("load:w:first", *(f"load:w:bulk{i}" for i in range(4))):
        worker.client.release(owner)


def test_b02_a_read_slower_than_its_lease_gets_a_miss_never_other_bytes(
    make_agent: Callable[..., Any], make_tenant: MakeTenant
) -> None:
    worker = make_tenant(make_agent("--lease-seconds", "0.4").start())
    slow, kept = worker.chain("slow"), worker.chain("kept")
    worker.store(slow)
    worker.store(kept)
    slow_refs = worker.client.prepare_load("load:w:slow", worker.namespace, slow)
    kept_refs = worker.client.prepare_load("load:w:kept", worker.namespace, kept)
    for i in range(12):  # three times the pool, over several leases; one reader renews
        assert worker.client.renew(["load:w:kept"]) == 1
        worker.store(worker.chain(f"other{i}", 10))
        threading.Event().wait(0.1)
    worker.eventually(lambda: worker.client.renew(["load:w:kept", "load:w:slow"]) == 1)
    for refs, keys, allowed in ((slow_refs, slow, {None}), (kept_refs, kept, set())):
        for ref, key in zip(refs, keys, strict=True):
            data = worker.slab.read_block(ref.slot, ref.generation, key)
            assert data == worker.payload(key) or data in allowed
    assert worker.client.release("load:w:kept") == 8


def test_b18_b20_without_a_cap_a_small_disk_is_never_run_full(
    spec: NamespaceSpec, tmp_path: Path
) -> None:
    """A tmpfs of 64 MiB in a namespace of its own; the tier's default is a tenth of it."""
    script = Path(__file__).with_name("small_disk.py")
    mount = tmp_path / "disk"
    mount.mkdir()
    command = f"mount -t tmpfs -o size=64m none {mount} && exec {sys.executable} {script} {mount}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout
