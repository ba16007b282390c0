"""Reads of blocks over RDMA, beside perftest's `ib_read_bw` with the same device in the same run.

Where this machine has no active RDMA port, the VM with Soft-RoCE runs it (scripts/rdma-vm): the
ratio then says what our code costs on top of the device's path, the rates say nothing of hardware.

Two processes, a holder and this one as the reader; every block is verified, which perftest does not
do. Runs alternate; figures are medians, ratios medians of the ratios of neighbouring runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
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

from workers.bench.transfer_nodes import INCARNATION, SECRET, facts_of, key_of, open_memory
from workers.core.errors import ConfigError
from workers.core.transfer_types import Piece, TransferLimits, TransferRequest
from workers.pool.arena import SlabFile
from workers.process import die_with_parent
from workers.transfer.base import PeerAddress
from workers.transfer.engine import TransferEngine
from workers.transfer.rdma.node import RdmaNode, usable_ports
from workers.transfer.rdma.port import OpenPort
from workers.transfer.rdma.server import RdmaServer
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.transport import RdmaTransport

BLOCK_BYTES: Final = (64 * 1024, 1 << 20, 4 << 20)
TOTAL_BYTES: Final = 256 << 20
EMULATED_BYTES: Final = 16 << 20
MIN_BLOCKS: Final = 16
"""Fewer would measure how a transfer begins and ends. Both sides move the same number."""
VM_SECONDS: Final = 600
VM: Final = Path(__file__).parents[2] / "scripts" / "rdma-vm" / "vm.py"
_DEADLINE_SECONDS: Final = 120.0
_PERFTEST: Final = "ib_read_bw"
_PERFTEST_TRIES: Final = 3


def run_rdma_bench(runs: int) -> dict[str, Any]:
    """Here, or in the VM. ConfigError: neither can be had."""
    try:
        usable_ports(RdmaSettings())
    except ConfigError as error:
        if not VM.exists():
            raise
        return _run_in_vm(runs, error)
    return measure(runs, TOTAL_BYTES)


def measure(runs: int, total_bytes: int, device: str | None = None) -> dict[str, Any]:
    """`rows`, one a block size, with the first active device of this machine."""
    settings = RdmaSettings(devices=(device or usable_ports(RdmaSettings())[0].device,))
    rows = [_measure(settings, block_bytes, runs, total_bytes) for block_bytes in BLOCK_BYTES]
    return {"rows": rows, "runs": runs, "verified": True, "emulated": False}


def _measure(
    settings: RdmaSettings, block_bytes: int, runs: int, total_bytes: int
) -> dict[str, Any]:
    num_blocks = max(MIN_BLOCKS, total_bytes // block_bytes)
    num_bytes = num_blocks * block_bytes
    ours: list[float] = []
    theirs: list[float] = []
    with _reader(settings, block_bytes, num_blocks) as reader:
        reader.read(num_blocks)  # connect, and touch every page once
        for _ in range(runs):
            ours.append(num_bytes / reader.read(num_blocks))
            theirs.append(_perftest_rate(reader.port, block_bytes, num_blocks))
    return {
        "transport": "rdma",
        "bytes": block_bytes,
        "gb_per_s": median(ours) / 1e9,
        "peer": _PERFTEST,
        "peer_gb_per_s": median(theirs) / 1e9,
        "over_peer": median(mine / other for mine, other in zip(ours, theirs, strict=True)),
    }


class _Reader:
    """Pulls the holder's blocks into a slab of its own, in the calling thread."""

    def __init__(self, engine: TransferEngine, port: OpenPort, block_bytes: int) -> None:
        self.port = port
        self._engine = engine
        self._block_bytes = block_bytes
        self._number = 0

    def read(self, count: int) -> float:
        """Seconds for all blocks in one transfer."""
        self._number += 1
        pieces = tuple(
            Piece(i, i + 1, i, self._number, key_of(i), self._block_bytes) for i in range(count)
        )
        started = time.perf_counter()
        deadline = time.monotonic() + _DEADLINE_SECONDS
        result = self._engine.run(
            TransferRequest(f"bench-{self._number}", "holder", pieces, deadline)
        )
        seconds = time.perf_counter() - started
        if result.missing:
            raise RuntimeError(f"{len(result.missing)} blocks are missing: {result.detail}")
        return seconds


@contextmanager
def _reader(settings: RdmaSettings, block_bytes: int, num_blocks: int) -> Iterator[_Reader]:
    facts = facts_of(block_bytes, num_blocks)
    name = f"perilune-bench-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        files = [SlabFile(f"{name}-{role}", facts.slot_bytes * num_blocks) for role in "hr"]
        for file in files:
            stack.callback(file.close)
        port = stack.enter_context(_holder(settings, files[0].path, block_bytes, num_blocks))
        memory = open_memory(files[1].path, block_bytes, num_blocks, 0)
        stack.callback(memory.slab.close)
        node = RdmaNode(memory, settings)
        stack.callback(node.close)
        limits = TransferLimits(connect_seconds=10.0, stall_seconds=10.0)
        transport = RdmaTransport(node, "reader", SECRET)
        engine = TransferEngine("reader", memory, [transport], limits=limits)
        stack.callback(engine.close)
        engine.set_peer(PeerAddress("holder", {"rdma": f"127.0.0.1:{port}"}, INCARNATION, facts))
        yield _Reader(engine, node.ports[0], block_bytes)


@contextmanager
def _holder(settings: RdmaSettings, path: Path, block_bytes: int, count: int) -> Iterator[int]:
    """A process that holds the blocks, until the end of the context; the port of its handshake."""
    command = [sys.executable, "-m", "workers.bench.transfer_rdma", "hold"]
    command += [str(path), str(block_bytes), str(count), settings.devices[0]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the holder ended with code {process.wait(5)}")
        yield int(line)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
        process.kill()
        process.wait()


def _hold(path: str, block_bytes: int, num_blocks: int, device: str) -> None:
    die_with_parent()
    memory = open_memory(path, block_bytes, num_blocks, INCARNATION)
    data = os.urandom(block_bytes)
    for index in range(num_blocks):
        memory.slab.write_block(index, index + 1, key_of(index), data)
    node = RdmaNode(memory, RdmaSettings(devices=(device,)))
    server = RdmaServer(node, "holder", SECRET)
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()
    node.close()


def _perftest_rate(port: OpenPort, block_bytes: int, iterations: int) -> float:
    """On a starved machine it now and then says 0.00, which is no measurement."""
    for _ in range(_PERFTEST_TRIES):
        if rate := _perftest(port, block_bytes, iterations):
            return rate
    raise RuntimeError(f"{_PERFTEST} measured nothing in {_PERFTEST_TRIES} runs")


def _perftest(port: OpenPort, block_bytes: int, iterations: int) -> float:
    """Bytes a second, as `ib_read_bw` says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    command = [
        _PERFTEST, "-F", "-d", port.port.device, "-i", str(port.number), "-x", str(port.gid.index),
        "-s", str(block_bytes), "-n", str(iterations), "-o", str(port.queues.reads),
        "-p", str(number),
    ]  # fmt: skip
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **quiet) as server:  # type: ignore[call-overload]
        try:
            output = _client([*command, "127.0.0.1"], number)
            server.wait(timeout=30)
        finally:
            server.kill()
    rows = [line.split() for line in output.splitlines()]
    rates = [float(row[3]) for row in rows if len(row) == 5 and row[0] == str(block_bytes)]
    if not rates:
        raise RuntimeError(f"{_PERFTEST} says nothing of {block_bytes} bytes:\n{output}")
    return rates[0] * (1 << 20)


def _client(command: list[str], port: int) -> str:
    """Once the server listens."""
    listening = f":{port:04X} "
    deadline = time.monotonic() + 30
    while listening not in Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{_PERFTEST} does not listen on {port}")
        time.sleep(0.05)
    reply = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return reply.stdout + reply.stderr


def _run_in_vm(runs: int, reason: ConfigError) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="perilune-bench-") as name:
        inside = shlex.join([sys.executable, "-m", "workers.bench.transfer_rdma", str(runs)])
        reply = subprocess.run(
            [sys.executable, VM, "--timeout", str(VM_SECONDS), "--out", name, inside],
            capture_output=True, text=True, check=False, cwd=VM.parents[2],
        )  # fmt: skip
        result = Path(name) / "out" / "result.json"
        if reply.returncode or not result.exists():
            raise ConfigError(
                "transport", "rdma", f"{reason}; nor in the VM: {reply.stderr[-2000:]}"
                f"{reply.stdout[-2000:]}", "",
            )  # fmt: skip
        measured: dict[str, Any] = json.loads(result.read_text())
    return measured | {"emulated": True}


def main() -> None:
    """`hold ...`, or in the VM: the number of runs; the result goes to $OUT/result.json."""
    if sys.argv[1] == "hold":
        _hold(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        return
    result = measure(int(sys.argv[1]), EMULATED_BYTES)
    (Path(os.environ["OUT"]) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
