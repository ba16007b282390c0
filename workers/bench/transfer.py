"""Reads of blocks from another node's slab on this machine, beside Mooncake Store.

Two processes: a holder, and this one as the reader. Every block is verified (generation, key,
checksum). Runs of the two alternate, so that both meet the same noise; figures are medians, ratios
are medians of the ratios of neighbouring runs. CPU seconds are of both processes.

Shared memory is compared with memcpy, plain and verified, and also read into slots of first use:
such whose pages were made ahead, as an agent does it, and such whose were not.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from workers.bench.transfer_memcpy import Memcpy, Run
from workers.bench.transfer_mooncake import (
    Mooncake,
    PeerMissingError,
    running_mooncake,
)
from workers.bench.transfer_nodes import INCARNATION, SECRET, facts_of, key_of
from workers.core.transfer_types import Piece, TransferRequest
from workers.pool.arena import SlabFile
from workers.transfer.base import PeerAddress, SlotMemory, Transport
from workers.transfer.copiers import num_copiers
from workers.transfer.engine import TransferEngine
from workers.transfer.shm import ShmTransport
from workers.transfer.tcp import TcpTransport

BLOCK_BYTES: Final = (64 * 1024, 1 << 20, 16 << 20)
TOTAL_BYTES: Final = 128 << 20
SHM_BLOCK_BYTES: Final = (64 * 1024, 1 << 20, 8 << 20, 16 << 20)
SHM_TOTAL_BYTES: Final = 512 << 20  # more than caches hold
SINGLE_READS: Final = 32
TRANSPORTS: Final = ("tcp", "shm")
_DEADLINE_SECONDS: Final = 60.0
_TOUCH_SECONDS: Final = 120.0


def run_transfer_bench(transport: str, runs: int, *, peer: bool | None) -> dict[str, Any]:
    """`rows`, one a block size. `peer` None: where it is installed. PeerMissingError."""
    if transport == "shm":
        shm_rows = [_measure_shm(block_bytes, runs) for block_bytes in SHM_BLOCK_BYTES]
        return {"rows": shm_rows, "runs": runs, "verified": True, "peer_version": None,
                "threads": num_copiers()}  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder,
        contextlib.ExitStack() as s,
    ):
        mooncake: Mooncake | None = None
        if peer is not False and transport == "tcp":
            try:
                mooncake = s.enter_context(running_mooncake(Path(folder), TOTAL_BYTES))
            except PeerMissingError:
                if peer:
                    raise
        rows = [_measure(transport, block_bytes, runs, mooncake) for block_bytes in BLOCK_BYTES]
    return {
        "rows": rows,
        "runs": runs,
        "verified": True,
        "peer_version": mooncake.version if mooncake else None,
    }


def _measure(
    transport: str, block_bytes: int, runs: int, mooncake: Mooncake | None
) -> dict[str, Any]:
    num_blocks = TOTAL_BYTES // block_bytes
    if mooncake is not None:
        mooncake.put(block_bytes, num_blocks)
    ours: list[Run] = []
    single: list[Run] = []
    theirs: list[Run] = []
    batched: list[Run] = []
    with _reader(transport, block_bytes, num_blocks) as reader:
        reader.read(range(num_blocks))  # connect, and touch every page once
        for _ in range(runs):
            ours.append(reader.read(range(num_blocks)))
            if mooncake is not None:
                theirs.append(mooncake.read(block_bytes, num_blocks))
                batched.append(mooncake.read(block_bytes, num_blocks, batch=True))
            single.append(reader.read_one_by_one(min(SINGLE_READS, num_blocks)))
    return _row(transport, block_bytes, ours, single, theirs, batched)


def _measure_shm(block_bytes: int, runs: int) -> dict[str, Any]:
    num_blocks = SHM_TOTAL_BYTES // block_bytes
    total, single_bytes = num_blocks * block_bytes, min(SINGLE_READS, num_blocks) * block_bytes
    with _reader("shm", block_bytes, num_blocks) as reader:
        untouched = reader.read(range(num_blocks))
    ours: list[Run] = []
    single: list[Run] = []
    plain: list[Run] = []
    verified: list[Run] = []
    memcpy = Memcpy(total, block_bytes)
    with _reader("shm", block_bytes, num_blocks, touched=True) as reader:
        first = reader.read(range(num_blocks))
        for _ in range(runs):
            ours.append(reader.read(range(num_blocks)))
            plain.append(memcpy.run(verified=False))
            verified.append(memcpy.run(verified=True))
            single.append(reader.read_one_by_one(min(SINGLE_READS, num_blocks)))
    return {
        "transport": "shm",
        "bytes": block_bytes,
        "gb_per_s": _rate(ours, total),
        "cpu_s_per_gb": _cpu(ours, total),
        "one_by_one_gb_per_s": _rate(single, single_bytes),
        "memcpy_gb_per_s": _rate(plain, total),
        "memcpy_verified_gb_per_s": _rate(verified, total),
        "memcpy_verified_cpu_s_per_gb": _cpu(verified, total),
        "over_memcpy_verified": _ratio(ours, verified),
        "first_use_gb_per_s": _rate([first], total),
        "first_use_cpu_s_per_gb": _cpu([first], total),
        "untouched_gb_per_s": _rate([untouched], total),
        "untouched_cpu_s_per_gb": _cpu([untouched], total),
        "peer": None,
        "over_peer": None,
    }


def _row(
    transport: str, block_bytes: int,
    ours: list[Run], single: list[Run], theirs: list[Run], batched: list[Run],
) -> dict[str, Any]:  # fmt: skip
    single_bytes = block_bytes * min(SINGLE_READS, TOTAL_BYTES // block_bytes)
    row: dict[str, Any] = {
        "transport": transport,
        "bytes": block_bytes,
        "gb_per_s": _rate(ours, TOTAL_BYTES),
        "cpu_s_per_gb": _cpu(ours, TOTAL_BYTES),
        "one_by_one_gb_per_s": _rate(single, single_bytes),
        "peer": None,
        "over_peer": None,
    }
    if theirs:
        scale = single_bytes / TOTAL_BYTES
        row |= {
            "peer": "mooncake get_into",
            "peer_gb_per_s": _rate(theirs, TOTAL_BYTES),
            "peer_cpu_s_per_gb": _cpu(theirs, TOTAL_BYTES),
            "over_peer": _ratio(ours, theirs),
            "one_by_one_over_peer": _ratio(single, theirs) * scale,
            "peer_batch_gb_per_s": _rate(batched, TOTAL_BYTES),
            "over_peer_batch": _ratio(ours, batched),
        }
    return row


def _rate(runs: list[Run], num_bytes: int) -> float:
    return median(num_bytes / seconds for seconds, _ in runs) / 1e9


def _cpu(runs: list[Run], num_bytes: int) -> float:
    return median(cpu for _, cpu in runs) / (num_bytes / 1e9)


def _ratio(ours: list[Run], theirs: list[Run]) -> float:
    """How many times as fast, run by run."""
    return median(t[0] / o[0] for o, t in zip(ours, theirs, strict=True))


class _Reader:
    """Pulls the holder's blocks into a slab of its own, in the calling thread."""

    def __init__(self, engine: TransferEngine, block_bytes: int, holder: int) -> None:
        self._engine = engine
        self._block_bytes = block_bytes
        self._holder = psutil.Process(holder)
        self._number = 0

    def read(self, indices: range) -> Run:
        """All of these in one transfer."""
        before = self._cpu_seconds()
        started = time.perf_counter()
        self._pull(indices)
        return time.perf_counter() - started, self._cpu_seconds() - before

    def read_one_by_one(self, count: int) -> Run:
        before = self._cpu_seconds()
        started = time.perf_counter()
        for index in range(count):
            self._pull(range(index, index + 1))
        return time.perf_counter() - started, self._cpu_seconds() - before

    def _pull(self, indices: range) -> None:
        self._number += 1
        pieces = tuple(
            Piece(i, i + 1, i, self._number, key_of(i), self._block_bytes) for i in indices
        )
        result = self._engine.run(
            TransferRequest(
                f"bench-{self._number}",
                "holder",
                pieces,
                time.monotonic() + _DEADLINE_SECONDS,
                incarnation=INCARNATION,
            )
        )
        if result.missing:
            raise RuntimeError(f"{len(result.missing)} blocks are missing: {result.detail}")

    def _cpu_seconds(self) -> float:
        times = self._holder.cpu_times()
        return float(times.user + times.system) + time.process_time()


@contextmanager
def _reader(
    transport: str, block_bytes: int, num_blocks: int, *, touched: bool = False
) -> Iterator[_Reader]:
    """`touched`: the reader's pages have been made ahead."""
    facts = facts_of(block_bytes, num_blocks)
    name = f"perilune-bench-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        files = [SlabFile(f"{name}-{role}", facts.slot_bytes * num_blocks) for role in "hr"]
        for file in files:
            stack.callback(file.close)
        process = subprocess.Popen(
            [
                sys.executable, "-m", "workers.bench.transfer_holder",
                str(files[0].path), str(block_bytes), str(num_blocks),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(_end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the holder ended with code {process.wait(5)}")
        if touched:
            _touch(files[1])
        memory = SlotMemory(files[1].slab(facts.slot_bytes), facts)
        engine = TransferEngine("reader", memory, [_make(transport, memory)])
        stack.callback(memory.slab.close)
        stack.callback(engine.close)
        addresses = {"tcp": f"127.0.0.1:{int(line)}", "shm": str(files[0].path)}
        engine.set_peer(
            PeerAddress("holder", {transport: addresses[transport]}, INCARNATION, facts)
        )
        yield _Reader(engine, block_bytes, process.pid)


def _touch(file: SlabFile) -> None:
    """As fast as it goes. RuntimeError where it does not."""
    file.start_touching(1e12)
    deadline = time.monotonic() + _TOUCH_SECONDS
    while file.touched_bytes < file.slab_bytes:
        if file.touch_error or time.monotonic() > deadline:
            raise RuntimeError(f"no pages for {file.path}: {file.touch_error or 'not in time'}")
        time.sleep(0.01)


def _make(transport: str, memory: SlotMemory) -> Transport:
    if transport == "shm":
        return ShmTransport(memory)
    return TcpTransport(memory, "reader", SECRET)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=5)
    process.stdout.close()
