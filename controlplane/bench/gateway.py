"""`perilune bench gateway`: CPU a request and latency of the gateway, beside a peer's.

The engines answer at once, so that what is measured is the proxy. Ours runs as in production: it
tokenises, hashes, places by cost, records, ships its records and counts. Tokenising, which the
peer does not do, is timed apart as well, on the same prompts.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import uvloop

from controlplane.bench.gateway_cluster import (
    PEER_POLICY,
    NoPeerError,
    Ports,
    Proxy,
    agent,
    counters,
    fill_pool,
    gateway,
    make_model,
    peer,
    upstream,
    write_view,
)
from controlplane.bench.gateway_load import (
    Kind,
    Timed,
    as_fast_as_it_goes,
    at_rate,
    body_of,
    prompts,
)
from controlplane.bench.tokenise import spent_seconds, tokenise_figures
from controlplane.gateway.prompts import PromptTokenizer

__all__ = ["Load", "NoPeerError", "run_gateway_bench"]
COUNTED: Final = ("requests_total", "index_blocks", "tokenizer_mismatch_total",
                  "decisions_dropped_total", "decisions_buffered")  # fmt: skip
"""They show what ran: engines here always say 300 tokens, so a mismatch is a prompt tokenised."""
MOST_TIMED: Final = 10_000
"""Requests, whose bodies are made before they are sent."""
KINDS: Final = tuple(Kind(chars, stream) for chars in (2_000, 20_000) for stream in (True, False))


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent in a run: to measure CPU, `requests` over `clients` connections; for times, as
    many at the rate that takes `core_share` of a core of the costlier proxy, or at `rate` a second,
    and more until `seconds` have passed: p99 of a third of a second is what happened to four."""

    requests: int = 400
    clients: int = 16
    core_share: float = 0.25
    rate: float | None = None
    seconds: float = 5.0

    def rate_for(self, cpu_ms: float) -> float:
        """Requests a second, where the costlier proxy takes `cpu_ms` for each."""
        return self.rate or self.core_share * 1000 / cpu_ms

    def timed_requests(self, rate: float) -> int:
        """In a run for times."""
        return min(max(self.requests, round(rate * self.seconds)), MOST_TIMED)


def run_gateway_bench(
    *, peer_name: str | None, load: Load, model_path: str | None, rounds: int = 5,
    kinds: Sequence[Kind] = KINDS,
) -> dict[str, Any]:  # fmt: skip
    """`peer_name` "vllm-router", or None. Rounds alternate between both; medians are given."""
    before = os.getloadavg()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-bench-")))
        model = Path(model_path) if model_path else make_model(folder / "model")
        tokenizer = PromptTokenizer(model)
        ports = stack.enter_context(upstream(folder / "view.json"))
        address = stack.enter_context(agent(folder))
        for kind in kinds:
            fill_pool(address, tokenizer, kind)
        write_view(folder / "view.json", ports, address, model)
        targets: dict[str, Proxy | None] = {"direct": None}
        if peer_name:
            targets["peer"] = stack.enter_context(peer(ports))
        targets["ours"] = ours = stack.enter_context(gateway(ports))
        bench = _Bench(load, ports, targets, tokenizer)
        rows: dict[str, dict[str, Any]] = {}
        for kind in kinds:
            rows.setdefault(str(kind.chars), {})[kind.name] = bench.compare(kind, rounds)
        figures = tokenise_figures(str(model))
        counted, rss = counters(ours), ours.process.memory_info().rss
    return {
        "peer": peer_name, "policy": PEER_POLICY if peer_name else None,
        "requests": load.requests, "clients": load.clients, "rounds": rounds,
        "seconds": load.seconds, "core_share": None if load.rate else load.core_share,
        "tokenizer": model.name if model_path else None,
        "load_average": [before[0], os.getloadavg()[0]],
        "chars": rows, "counted": {name: counted[name] for name in COUNTED}, "gateway_rss_bytes": rss, "tokenise": figures,
    }  # fmt: skip


@dataclass(slots=True)
class _Run:
    """What one target has shown, a value a round."""

    cpu_ms: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    held_up_ms: list[float] = field(default_factory=list)


class _Bench:
    """Everything of one run of the bench."""

    def __init__(
        self, load: Load, ports: Ports, targets: dict[str, Proxy | None],
        tokenizer: PromptTokenizer,
    ) -> None:  # fmt: skip
        self._load = load
        self._ports = ports
        self._targets = targets
        self._tokenizer = tokenizer
        self._seeds = count(1)

    def compare(self, kind: Kind, rounds: int) -> dict[str, Any]:
        """One row: a warm-up, then the rounds, in each all targets one after the other."""
        load = self._load
        runs = {name: _Run() for name in self._targets}
        for name, proxy in self._targets.items():
            if proxy is not None:
                self._as_fast(name, kind, max(load.clients, load.requests // 4))
        for number in range(rounds):
            for name, proxy in self._in_turn(number):
                if proxy is not None:
                    self._measure_cpu(name, proxy, kind, runs[name])
        proxies = [runs[name] for name, proxy in self._targets.items() if proxy is not None]
        rate = load.rate_for(max(statistics.median(run.cpu_ms) for run in proxies))
        for number in range(rounds):
            for name, _proxy in self._in_turn(number):
                self._measure_times(name, kind, runs[name], rate)
        asked = list(prompts(kind, load.requests, next(self._seeds)))
        tokenise_ms = spent_seconds(self._tokenizer, asked) / len(asked) * 1000
        timed = load.timed_requests(rate)
        return {"rate_per_second": rate, "timed_requests": timed, **_row(runs, tokenise_ms)}

    def _in_turn(self, number: int) -> list[tuple[str, Proxy | None]]:
        """Each round begins with another target: what one leaves to do is done in the next one's
        time."""
        targets = list(self._targets.items())
        first = number % len(targets)
        return targets[first:] + targets[:first]

    def _measure_cpu(self, name: str, proxy: Proxy, kind: Kind, run: _Run) -> None:
        before = proxy.cpu_seconds()
        timed = self._as_fast(name, kind, self._load.requests)
        run.cpu_ms.append((proxy.cpu_seconds() - before) / len(timed.first_bytes) * 1000)

    def _measure_times(self, name: str, kind: Kind, run: _Run, rate: float) -> None:
        bodies = self._bodies(kind, self._load.timed_requests(rate))
        seed = len(bodies)  # the same arrivals for all
        timed = uvloop.run(at_rate(self._ports_of(name), bodies, rate, seed))
        run.p50_ms.append(timed.ms(0.5))
        run.p99_ms.append(timed.ms(0.99))
        run.held_up_ms.append(timed.held_up_seconds * 1000)

    def _as_fast(self, name: str, kind: Kind, requests: int) -> Timed:
        bodies, clients = self._bodies(kind, requests), self._load.clients
        timed: Timed = uvloop.run(as_fast_as_it_goes(self._ports_of(name), bodies, clients))
        return timed

    def _bodies(self, kind: Kind, requests: int) -> list[bytes]:
        return [body_of(kind, prompt) for prompt in prompts(kind, requests, next(self._seeds))]

    def _ports_of(self, name: str) -> tuple[int, ...]:
        proxy = self._targets[name]
        return (self._ports.prefill, self._ports.decode) if proxy is None else (proxy.port,)


# --- figures ---


def _row(runs: dict[str, _Run], tokenise_ms: float) -> dict[str, Any]:
    """Medians. `added_...`: through the proxy less straight to both legs, at the same rate;
    `ttft_...`: as clients see it. `held_up_ms`: of a run for times, what the sender stood still."""
    ours, direct, theirs = runs["ours"], runs["direct"], runs.get("peer")
    row: dict[str, Any] = {"cpu_ms": statistics.median(ours.cpu_ms), "tokenise_ms": tokenise_ms}
    quotient = _quotient_with(theirs)
    row["cpu_over_peer"] = quotient(lambda run: statistics.median(run.cpu_ms), row["cpu_ms"])
    row["cpu_over_peer_without_tokenising"] = quotient(
        lambda run: statistics.median(run.cpu_ms), row["cpu_ms"] - tokenise_ms
    )
    row["peer_cpu_ms"] = None if theirs is None else statistics.median(theirs.cpu_ms)
    row["held_up_ms"] = statistics.median(ours.held_up_ms)
    row["peer_held_up_ms"] = None if theirs is None else statistics.median(theirs.held_up_ms)
    for name, times in (("p50", _p50), ("p99", _p99)):
        base = times(direct)
        mine, added = times(ours), times(ours) - base
        row |= {
            f"ttft_{name}_ms": mine, f"direct_{name}_ms": base, f"added_{name}_ms": added,
            f"peer_ttft_{name}_ms": None if theirs is None else times(theirs),
            f"peer_added_{name}_ms": None if theirs is None else times(theirs) - base,
            f"ttft_{name}_over_peer": quotient(times, mine),
            f"added_{name}_over_peer": quotient(lambda run: times(run) - base, added),  # noqa: B023 - called at once
        }  # fmt: skip
    return row


def _p50(run: _Run) -> float:
    return statistics.median(run.p50_ms)


def _p99(run: _Run) -> float:
    return statistics.median(run.p99_ms)


def _quotient_with(theirs: _Run | None) -> Callable[[Callable[[_Run], float], float], float | None]:
    def quotient(read: Callable[[_Run], float], mine: float) -> float | None:
        if theirs is None:
            return None
        other = read(theirs)
        return mine / other if other > 0 else None

    return quotient
