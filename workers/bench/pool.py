"""`perilune bench pool`: what the pool costs, beside what the machine can do.

Latencies go through a real agent process, from this process as a worker's client.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workers.bench.pool_copy import measure_copies
from workers.bench.pool_ssd import measure_ssd
from workers.client import AgentClient, make_hello
from workers.connector.layout import PagedKv
from workers.connector.load import Load
from workers.connector.metadata import BlockLoad, LoadOrder, PageTarget
from workers.connector.slots import SlabSlots
from workers.core.errors import AgentUnavailableError, PeriluneError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import StoredSlot
from workers.core.stats_messages import NamespaceSpec
from workers.pool.arena import SHM_FOLDER

LOOKUP_BLOCKS = 500
_BLOCK_TOKENS = 64
_LAYERS = 32
_BLOCK_BYTES = 1 << 20
_SLAB_BYTES = 640 << 20
_START_SECONDS = 30.0


class BenchError(PeriluneError):
    """The run's own agent did not come up; the text has its last words."""


def run_pool_bench(rounds: int, ssd_folder: Path | None = None) -> dict[str, object]:
    """All figures. Shares are of memcpy or of raw file I/O in the same run, 1 is as fast.

    `ssd_folder` None puts the SSD part into the working folder's disk.
    """
    figures = measure_copies(rounds)
    figures |= _measure_agent(rounds)
    with tempfile.TemporaryDirectory(prefix=".perilune-bench-", dir=ssd_folder or Path.cwd()) as at:
        figures |= measure_ssd(Path(at))
    return figures


def _measure_agent(rounds: int) -> dict[str, object]:
    with (
        tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder,
        _agent(Path(folder)) as at,
    ):
        worker = _Worker(at)
        try:
            return worker.measure(rounds)
        finally:
            worker.close()


class _Worker:
    """A worker's client with an engine's cache: stores and loads single blocks, looks up chains."""

    def __init__(self, address: str) -> None:
        page = _BLOCK_BYTES // _LAYERS
        self._spec = NamespaceSpec(
            "bench", "1", "uint8", "bench", "bench", (page,) * _LAYERS, _BLOCK_TOKENS,
            _BLOCK_TOKENS, 1, "tp1",
        )  # fmt: skip
        self._namespace = namespace_digest(self._spec)
        hello = make_hello("worker", "bench", namespace=self._spec)
        self._client = AgentClient(address, hello, timeout_seconds=5.0)
        self._slots = SlabSlots(self._client.connect(), _BLOCK_BYTES)
        cache = torch.ones(_LAYERS, LOOKUP_BLOCKS + 1, page, dtype=torch.uint8)
        self._paged = PagedKv({f"layer.{i}": cache[i] for i in range(_LAYERS)}, 1)
        root = root_hash(self._namespace, None, None)
        tokens = list(range(LOOKUP_BLOCKS * _BLOCK_TOKENS))
        self._chain: list[bytes] = list(block_hashes(root, tokens, _BLOCK_TOKENS))

    def close(self) -> None:
        self._client.close()

    def measure(self, rounds: int) -> dict[str, object]:
        """The chain grows block by block, is read block by block, then looked up whole."""
        stores = _times(self._store, LOOKUP_BLOCKS)
        self._load(0)  # once for warmth
        loads = _times(self._load, LOOKUP_BLOCKS)
        lookups = _times(lambda _: self._lookup(), max(200, 20 * rounds))
        return {
            "block_bytes": _BLOCK_BYTES,
            "store_p50_us": _micros(stores, 0.5),
            "store_p99_us": _micros(stores, 0.99),
            "load_p50_us": _micros(loads, 0.5),
            "load_p99_us": _micros(loads, 0.99),
            "lookup_500_us": _micros(lookups, 0.5),
            "lookup_500_p99_us": _micros(lookups, 0.99),
        }

    def _store(self, index: int) -> None:
        """Ask for a slot, copy, sum up, publish."""
        parent = self._chain[index - 1] if index else b""
        key = self._chain[index]
        answer = self._client.prepare_store("store:bench", self._namespace, parent, [key])
        ref = answer.slots[0]
        assert ref is not None, answer
        self._paged.gather([index], self._slots.begin_write(ref.slot))
        stored = StoredSlot(ref.slot, ref.generation, self._slots.seal(ref, key))
        assert self._client.complete_store("store:bench", [stored]) == 1
        self._client.release("store:bench")

    def _load(self, index: int) -> None:
        """Look up, pin, copy, verify, unpin."""
        keys = [self._chain[index]]
        assert self._client.lookup(self._namespace, keys).num_held == 1
        (ref,) = self._client.prepare_load("load:bench:1", self._namespace, keys)
        block = BlockLoad(keys[0], ref.slot, ref.generation, (PageTarget(0, index),))
        load = Load(
            LoadOrder("b", 0, self._slots.incarnation, 0, (block,)), self._slots, self._paged
        )
        load.copy_layers(_LAYERS)
        result, _, _ = load.finish(by_layer=False)
        assert result.loaded_blocks == 1
        self._client.release("load:bench:1")

    def _lookup(self) -> None:
        assert self._client.lookup(self._namespace, self._chain).num_held == LOOKUP_BLOCKS


def _times(work: Callable[[int], None], count: int) -> list[float]:
    seconds = []
    for index in range(count):
        began = time.perf_counter()
        work(index)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)


def _micros(seconds: list[float], quantile: float) -> float:
    return seconds[min(len(seconds) - 1, int(len(seconds) * quantile))] * 1e6


@contextmanager
def _agent(folder: Path) -> Iterator[str]:
    """An agent of this run's own, its slab allocated before anything is measured."""
    address, log_file = folder / "agent.sock", folder / "agent.log"
    slab = f"perilune-bench-{os.getpid()}.slab"
    command = [
        sys.executable, "-m", "workers", "agent", "--node-id", "bench", "--socket", str(address),
        "--slab-name", slab, "--slab-bytes", str(_SLAB_BYTES),
        "--block-tokens", str(_BLOCK_TOKENS), "--touch-bytes-per-second", str(8 << 30),
    ]  # fmt: skip
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_ready(str(address), process, log_file)
        _wait_allocated(SHM_FOLDER / slab)
        yield str(address)
    finally:
        process.terminate()
        try:
            process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(address: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    client = AgentClient(address, make_hello("cli", "bench"))
    try:
        while True:
            try:
                client.connect()
                break
            except AgentUnavailableError:
                if process.poll() is not None or time.monotonic() > deadline:
                    words = log_file.read_text(errors="replace")[-2000:]
                    raise BenchError(f"the node agent did not start: {words}") from None
                time.sleep(0.05)
    finally:
        client.close()


def _wait_allocated(slab: Path) -> None:
    """First touches of shared memory are no part of a store."""
    deadline = time.monotonic() + _START_SECONDS
    while slab.stat().st_blocks * 512 < _SLAB_BYTES and time.monotonic() < deadline:
        time.sleep(0.05)
