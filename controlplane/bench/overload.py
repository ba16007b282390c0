"""`perilune bench overload`: goodput of admission `enforce` against `off` beyond capacity.

A real gateway and emulated workers, each in a process of its own; the bench's process is the
clients'. Capacity is what the cost model gives: prefill workers over the mean prefill time.
Both modes get the same requests at the same times.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from tokenizers import Tokenizer, models

from controlplane.bench.overload_load import (
    CLASSES,
    MAX_VOCABULARY,
    MODEL,
    TENANTS,
    Arrival,
    Seen,
    Shape,
    Tally,
    arrivals,
    key_digest,
    play,
)
from controlplane.bench.processes import free_port, running, wait_port
from controlplane.core.ledger import false_rejects
from workers.core.errors import PeriluneError

START_SECONDS = 60.0
WARM_UP_SHARE = 0.5  # of capacity
WARM_UP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Overload:
    """One bench. `factor` times capacity for `seconds`."""

    seconds: float = 60.0
    factor: float = 1.5
    prefill_workers: int = 16
    decode_workers: int = 4
    prefill_ms_per_token: float = 4.0
    max_ttft_seconds: float = 10.0
    max_tbt_seconds: float = 1.0
    percentile: float = 95.0
    probe_share: float = 0.05
    seed: int = 1
    shape: Shape = field(default_factory=Shape)

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.prefill_workers * 1000 / self.prefill_ms_per_token / self.shape.mean_tokens


def run_overload_bench(bench: Overload) -> dict[str, Any]:
    """Both modes one after the other, each with a gateway of its own."""
    load = arrivals(bench.shape, bench.factor * bench.capacity, bench.seconds, bench.seed)
    warm_up = arrivals(bench.shape, WARM_UP_SHARE * bench.capacity, WARM_UP_SECONDS, bench.seed + 1)
    result: dict[str, Any] = {
        "capacity_per_second": bench.capacity,
        "offered_per_second": len(load) / bench.seconds,
        "seconds": bench.seconds,
        "requests": len(load),
        "max_ttft_seconds": bench.max_ttft_seconds,
        "percentile": bench.percentile,
        "probe_share": bench.probe_share,
    }
    for mode in ("off", "enforce"):
        result[mode] = _run(bench, mode, warm_up, load)
    good = result["off"]["goodput_per_second"]
    result["goodput_ratio"] = result["enforce"]["goodput_per_second"] / good if good else None
    counted = result["enforce"].pop("counted")
    result["off"].pop("counted")
    found = false_rejects(counted["probes"], counted["probes_met"])
    result["false_rejects"] = {
        "samples": found.samples, "met": found.met, "ratio": found.ratio,
        "low": found.low, "high": found.high,
    }  # fmt: skip
    return result


def _run(bench: Overload, mode: str, warm_up: list[Arrival], load: list[Arrival]) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-bench-")))
        tokenizer = _tokenizer(folder)
        urls = stack.enter_context(_workers(bench))
        view = folder / "view.json"
        view.write_text(json.dumps(_view(bench, mode, urls, str(tokenizer))))
        port = stack.enter_context(_gateway(view))
        seen, counted = uvloop.run(_load(port, bench, warm_up, load))
    return _result(bench, seen, counted)


async def _load(
    port: int, bench: Overload, warm_up: list[Arrival], load: list[Arrival]
) -> tuple[list[Seen], dict[str, int]]:
    await play(port, warm_up, bench.shape)
    before = await _counters(port)
    seen = await play(port, load, bench.shape)
    after = await _counters(port)
    return seen, {name: after[name] - before[name] for name in after}


def _result(bench: Overload, seen: list[Seen], counted: dict[str, int]) -> dict[str, Any]:
    total, classes = Tally(), {name: Tally() for name, _ in bench.shape.classes}
    for one in seen:
        for tally in (total, classes[one.priority]):
            tally.add(one, bench.max_ttft_seconds, bench.max_tbt_seconds)
    by_class = {name: _shown(bench, tally) for name, tally in classes.items()}
    return {
        **_shown(bench, total),
        "shed": counted["shed"],
        "classes": by_class,
        "counted": counted,
    }


def _shown(bench: Overload, tally: Tally) -> dict[str, Any]:
    times = sorted(tally.ttft)
    return {
        "requests": tally.requests,
        "within_slo": tally.within_slo,
        "late": tally.late,
        "rejected": tally.rejected,
        "failed": tally.failed,
        "goodput_per_second": tally.within_slo / bench.seconds,
        "ttft_p50_seconds": times[len(times) // 2] if times else None,
        "ttft_p95_seconds": times[int(0.95 * len(times))] if times else None,
    }


async def _counters(port: int) -> dict[str, int]:
    """Of the gateway's /metrics."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(START_SECONDS):
            text = (await reader.read()).decode()
    finally:
        writer.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("perilune"))
    names = ("shed", "probes", "probes_met", "rejected")
    return {name: int(values[f"perilune_gateway_{name}_total"]) for name in names}


# --- what it runs on ---


def _tokenizer(folder: Path) -> Path:
    """Prompts of the bench are token ids; a gateway counts them with a model's tokenizer only."""
    vocabulary = {f"t{i}": i for i in range(MAX_VOCABULARY)}
    path = folder / "model"
    path.mkdir()
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(path / "tokenizer.json"))
    return path


def _view(bench: Overload, mode: str, urls: dict[str, str], tokenizer: str) -> dict[str, Any]:
    slo = {
        "mode": mode, "max_ttft_ms": bench.max_ttft_seconds * 1000,
        "max_tbt_ms": bench.max_tbt_seconds * 1000, "percentile": bench.percentile,
    }  # fmt: skip
    policies = {
        "slo": slo,
        "admission": {"probe_share": bench.probe_share, "max_wait_s": 600, "max_waiting": 100_000},
        "scheduling": {"max_concurrent_per_decode": 4096, "max_waiting_s": 3600},
    }
    return {
        "workers": [
            {"id": name, "node_id": "n1", "role": "prefill" if name[0] == "p" else "decode",
             "model": MODEL, "url": url, "state": "ready", "engine": "emulated",
             "max_concurrent_requests": 4096}
            for name, url in urls.items()
        ],
        "models": [{"id": MODEL, "path": tokenizer}],
        "policies": [
            {"kind": kind, "scope": "default", "revision": 1, "spec": spec}
            for kind, spec in policies.items()
        ],
        "client_keys": [
            {"key_sha256": key_digest(tenant), "tenant": tenant, "max_priority": CLASSES[0][0]}
            for tenant, _ in TENANTS
        ],
    }  # fmt: skip


@contextmanager
def _workers(bench: Overload) -> Iterator[dict[str, str]]:
    command = [
        sys.executable, "-m", "workers.engines.emulated", "--model", MODEL,
        "--prefill-ms-per-token", str(bench.prefill_ms_per_token), "--decode-ms", "5",
        "--block-tokens", "1",  # decode computes no rest of a block
    ]  # fmt: skip
    for role, count in (("prefill", bench.prefill_workers), ("decode", bench.decode_workers)):
        for i in range(count):
            command += ["--worker", f"{role[0]}{i + 1}:{role}:0"]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise PeriluneError("the bench's workers did not start")
        yield json.loads(line)["workers"]


@contextmanager
def _gateway(view: Path) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "controlplane.gateway", "--port", str(port),
               "--static", str(view), "--log-level", "error"]  # fmt: skip
    with running(command) as process:
        wait_port(port, process, START_SECONDS)
        yield port
