"""`perilune bench placement`: whose placement gives the shortest time to first token.

A trace is replayed against the same emulated workers behind our gateway, with each of its
algorithms, and behind vllm-router. Ours knows what nodes hold and may move blocks between them
(emulated workers pay for it); routers choose workers and no more. KV goes to decode at no cost
for either: layer by layer, behind the prefill. `simulate` runs our algorithms alone, without
processes and clocks.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx2
import msgspec
import uvloop

from controlplane.bench import placement_cluster as cluster
from controlplane.bench.placement_cluster import MODEL, PEER_PROGRAM, Fleet, Shape
from controlplane.bench.placement_trace import (
    BLOCK_TOKENS,
    TOKEN_SCALE,
    Traced,
    ideal_seconds,
    read_slice,
    simulated,
    spread,
    write_tokenizer,
)
from controlplane.core.agreement import BOUND_SECONDS, BOUND_SHARE, Agreement
from controlplane.core.placement import ALGORITHMS, Rules
from controlplane.sim.placement import PlacementSim, SimCluster
from workers.core.cost_model import PRESETS
from workers.core.errors import ConfigError, PeriluneError

DEFAULT: Final = "cost"
PEER: Final = "vllm-router:"
PEER_POLICIES: Final = ("cache_aware", "power_of_two")
COMPRESSION: Final = "5x"
ANSWER_SECONDS: Final = 900.0
ASKED_ONE_IN: Final = 3
ASKED_BEFORE_SECONDS: Final = 0.02
TARGET_MEAN: Final = 0.9
TARGET_P90: Final = 1.05


class NoPeerError(PeriluneError):
    """Asked to compare with a peer that is not installed."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class PlacementBench:
    """What to run. `loads` are `5x` (of the trace's pace) or shares of capacity: the rate at which
    the prefill workers could just serve the slice if each found all that any had computed."""

    trace: Path
    start: int = 0
    requests: int = 600
    repeats: int = 3
    loads: tuple[str, ...] = (COMPRESSION, "0.5", "0.8", "1.0")
    algorithms: tuple[str, ...] = (*ALGORITHMS, *(PEER + name for name in PEER_POLICIES))
    shape: Shape = field(default_factory=Shape)
    gateways: int = 1  # of ours, over the same workers; a peer is always one


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Seconds of emulated time; `imbalance` is the busiest prefill worker over the mean."""

    load: str
    algorithm: str
    repeat: int
    ttft_mean: float
    ttft_p90: float
    hit_tokens: int
    prompt_tokens: int
    imbalance: float
    failed: int = 0
    requests_per_second: float = 0.0
    agreement: dict[str, float] | None = None  # of several gateways


def run_placement_bench(bench: PlacementBench) -> dict[str, Any]:
    """Every algorithm at every load, repeats inside loads alternate. Raises `NoPeerError`."""
    if any(name.startswith(PEER) for name in bench.algorithms) and not PEER_PROGRAM.exists():
        raise NoPeerError(f"vllm-router is not installed ({PEER_PROGRAM}); run `make peers`")
    requests = read_slice(bench.trace, bench.start, bench.requests)
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, _end)
    for load in bench.loads:
        speed = speed_of(load, requests, bench.shape)
        for repeat in range(1, bench.repeats + 1):
            for name in bench.algorithms:
                rows.append(_run(bench, spread(requests, speed, repeat), load, name, repeat))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    return report(bench, rows, requests, "processes")


def _end(*_: object) -> None:
    """As Ctrl-C does: what was started is ended on the way out."""
    raise KeyboardInterrupt


def simulate(bench: PlacementBench) -> dict[str, Any]:
    """The same grid for our own algorithms, on the simulator."""
    requests = read_slice(bench.trace, bench.start, bench.requests)
    costs, shape = PRESETS[bench.shape.cost_model], bench.shape
    sim = SimCluster(
        shape.prefill_workers, shape.node_blocks, BLOCK_TOKENS, costs, gateways=bench.gateways
    )
    rows: list[Row] = []
    for load in bench.loads:
        speed = speed_of(load, requests, shape)
        for repeat in range(1, bench.repeats + 1):
            arrivals = simulated(spread(requests, speed, repeat))
            for name in ALGORITHMS:
                rng = Random(repeat)
                result = PlacementSim(sim, Rules(algorithm=name), rng).run(arrivals)
                rows.append(Row(
                    load, name, repeat, statistics.fmean(result.ttft_seconds),
                    _p90(result.ttft_seconds), result.hit_tokens, result.prompt_tokens,
                    _imbalance(result.busy_seconds), 0, len(arrivals) / arrivals[-1].at,
                    result.agreement.summary() if bench.gateways > 1 else None,
                ))  # fmt: skip
    return report(bench, rows, requests, "simulator")


def speed_of(load: str, requests: list[Traced], shape: Shape) -> float:
    """How many times the trace's pace a load is. ConfigError: no load."""
    try:
        if load.endswith("x"):
            speed = float(load[:-1])
        else:
            rate = len(requests) / max(requests[-1].at, 1e-3)
            ideal = ideal_seconds(requests, PRESETS[shape.cost_model])
            speed = float(load) * shape.prefill_workers / ideal / rate
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e6:
        raise ConfigError("--load", load, "is no load", "Say 5x, or a share of capacity as 0.8.")
    return speed


def report(
    bench: PlacementBench, rows: list[Row], requests: list[Traced], how: str
) -> dict[str, Any]:
    """All rows, means by load and algorithm, and how ours compares with the best peer."""
    shape = bench.shape
    ideal = ideal_seconds(requests, PRESETS[shape.cost_model])
    summary = {load: _summary(load, rows) for load in bench.loads}
    return {
        "emulated": True,
        "how": how,
        "trace": bench.trace.name,
        "slice": [bench.start, bench.start + bench.requests],
        "prefill_workers": shape.prefill_workers,
        "decode_workers": shape.decode_workers,
        "gateways": bench.gateways,
        "agreement_bound": {"seconds": BOUND_SECONDS, "share": BOUND_SHARE},
        "cost_model": shape.cost_model,
        "time_factor": shape.time_factor,
        "tokens_a_wire_token": TOKEN_SCALE,
        "capacity_requests_per_second": shape.prefill_workers / ideal,
        "rows": [msgspec.to_builtins(row) for row in rows],
        "summary": summary,
        "meets_target": all(
            comparison["meets_target"] for by in summary.values()
            if (comparison := by.get("over_best_peer")) is not None
        ),
    }  # fmt: skip


def _summary(load: str, rows: list[Row]) -> dict[str, Any]:
    of_load = [row for row in rows if row.load == load]
    means: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row.algorithm for row in of_load):
        runs = [row for row in of_load if row.algorithm == name]
        means[name] = {
            "ttft_mean": statistics.fmean(row.ttft_mean for row in runs),
            "ttft_p90": statistics.fmean(row.ttft_p90 for row in runs),
            "hit_share": sum(r.hit_tokens for r in runs)
            / max(1, sum(r.prompt_tokens for r in runs)),
            "imbalance": statistics.fmean(row.imbalance for row in runs),
            "failed": sum(row.failed for row in runs),
            **_agreement(runs),
        }
    peers = {name: row for name, row in means.items() if name.startswith(PEER)}
    if not peers or DEFAULT not in means:
        return dict(means)
    best = min(peers, key=lambda name: peers[name]["ttft_mean"])
    mean = means[DEFAULT]["ttft_mean"] / peers[best]["ttft_mean"]
    p90 = means[DEFAULT]["ttft_p90"] / min(row["ttft_p90"] for row in peers.values())
    meets = mean <= TARGET_MEAN and p90 <= TARGET_P90
    compared = {"peer": best, "ttft_mean": mean, "ttft_p90": p90, "meets_target": meets}
    return {**means, "over_best_peer": compared}


def _agreement(runs: list[Row]) -> dict[str, float]:
    """Means over the runs; nothing where one gateway ran."""
    found = [row.agreement for row in runs if row.agreement is not None]
    names = found[0].keys() - {"asked"} if found else ()
    return {name: statistics.fmean(one[name] for one in found) for name in sorted(names)}


def _line(row: Row) -> str:
    """Of a run that has ended: the whole grid takes long."""
    hits = row.hit_tokens / max(1, row.prompt_tokens)
    agreed = ""
    if row.agreement is not None:
        agreed = f", agreed {row.agreement['within_bound_share']:.1%}"
    return (
        f"load {row.load:<4} {row.algorithm:<24} #{row.repeat} TTFT mean {row.ttft_mean:.3f} s,"
        f" P90 {row.ttft_p90:.3f} s, hits {hits:.1%}, imbalance {row.imbalance:.2f}{agreed}"
    )


def _p90(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.9 * len(seconds)))]


def _imbalance(busy: list[float]) -> float:
    mean = statistics.fmean(busy)
    return max(busy) / mean if mean > 0 else 1.0


# --- one run on real processes ---


def _run(
    bench: PlacementBench, requests: list[Traced], load: str, algorithm: str, repeat: int
) -> Row:
    shape = bench.shape
    agreement = Agreement()
    with tempfile.TemporaryDirectory(prefix="perilune-bench-") as text:
        folder = Path(text)
        model_folder = write_tokenizer(folder / "model")
        with cluster.fleet(shape, folder, model_folder) as workers:
            with _front(bench, workers, algorithm, folder, model_folder) as urls:
                began = time.monotonic()
                seconds = uvloop.run(_replay(urls, requests, shape, Random(repeat), agreement))
                lasted = time.monotonic() - began
            states = [workers.state(name) for name, role in shape.names if role == "prefill"]
    served = [one for one in seconds if one is not None]
    if not served:
        raise PeriluneError(f"no request of {algorithm} at load {load} was served")
    return Row(
        load, algorithm, repeat, statistics.fmean(served), _p90(served),
        sum(state["device_hits"] + state["pool_hits"] for state in states) * TOKEN_SCALE,
        sum(state["prompt_tokens"] for state in states) * TOKEN_SCALE,
        _imbalance([state["prefill_seconds"] for state in states]),
        len(seconds) - len(served), len(seconds) / lasted * shape.time_factor,
        agreement.summary() if agreement.asked else None,
    )  # fmt: skip


@contextmanager
def _front(
    bench: PlacementBench, workers: Fleet, algorithm: str, folder: Path, model_folder: Path
) -> Iterator[list[str]]:
    shape = bench.shape
    if algorithm.startswith(PEER):
        with cluster.router(shape, workers, algorithm.removeprefix(PEER), folder) as url:
            yield [url]
        return
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                cluster.gateway(shape, workers, algorithm, folder, model_folder, number)
            )
            for number in range(1, bench.gateways + 1)
        ]
        for url in urls:
            _wait_for_agents(url, len(shape.names), bench.gateways - 1)
        time.sleep(2.0)  # the next statistics bring namespaces and paths
        yield urls


def _wait_for_agents(url: str, count: int, others: int) -> None:
    deadline = time.monotonic() + cluster.START_SECONDS
    while time.monotonic() < deadline:
        health = httpx2.get(f"{url}/health", timeout=5).json()
        ready = health.get("agents") == count and health.get("status") == "ok"
        if ready and health.get("other_gateways") == others:
            return
        time.sleep(0.1)
    raise PeriluneError(f"the gateway does not follow its {count} agents: {health}")


async def _replay(
    urls: list[str], requests: list[Traced], shape: Shape, rng: Random, agreement: Agreement
) -> list[float | None]:
    """Seconds to the first token of each, in emulated time; None: not served. Each request goes to
    one of `urls` at random; all are asked where they would place it just before."""
    loop = asyncio.get_running_loop()
    fronts = [rng.choice(urls) for _ in requests]
    bodies = [_request(url, request) for url, request in zip(fronts, requests, strict=True)]
    first = loop.time() + 0.5
    tasks = [
        loop.create_task(_send(url, body, first + request.at * shape.time_factor))
        for url, body, request in zip(fronts, bodies, requests, strict=True)
    ]
    if len(urls) > 1:
        ask = _ask_all(urls, requests, first, shape.time_factor, agreement)
        tasks.append(loop.create_task(ask))
    seconds = (await asyncio.gather(*tasks))[: len(requests)]
    return [None if one is None else one / shape.time_factor for one in seconds]


async def _ask_all(
    urls: list[str], requests: list[Traced], first: float, factor: float, agreement: Agreement
) -> None:
    """Every pair of gateways, of every `ASKED_ONE_IN`th request."""
    loop = asyncio.get_running_loop()
    async with httpx2.AsyncClient(timeout=30, trust_env=False) as client:
        for request in requests[::ASKED_ONE_IN]:
            await asyncio.sleep(first + request.at * factor - ASKED_BEFORE_SECONDS - loop.time())
            body = {"model": MODEL, "prompt": request.prompt, "max_tokens": request.wire_output}
            path = "/debug/place/v1/completions"
            replies = await asyncio.gather(*(client.post(u + path, json=body) for u in urls))
            plans = [
                [(c["worker_id"], c["ttft_seconds"]) for c in reply.json()["prefill_candidates"]]
                for reply in replies
            ]
            for one, other in permutations(plans, 2):
                agreement.count(one, other[0][0])


def _request(url: str, request: Traced) -> bytes:
    body = msgspec.json.encode({
        "model": MODEL, "prompt": request.prompt, "max_tokens": request.wire_output,
        "ignore_eos": True, "stream": True,
    })  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _send(url: str, request: bytes, at: float) -> float | None:
    """One connection a request, as many clients would; read to its end."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at - loop.time())
    host, _, port = url.removeprefix("http://").partition(":")
    start = loop.time()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(request)
                return await _first_token(reader, start)
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError, ValueError):
        return None


async def _first_token(reader: asyncio.StreamReader, start: float) -> float | None:
    loop = asyncio.get_running_loop()
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.lower().startswith(b"http/1.1 200"):
        return None
    await reader.readuntil(b"data: ")
    seconds = loop.time() - start
    last = b""
    while piece := await reader.read(65_536):
        last = (last + piece)[-64:]
    return seconds if b"[DONE]" in last else None
