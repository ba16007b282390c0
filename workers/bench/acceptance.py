"""The acceptance run: a fixed set of prompts twice through the pool, checked against a plain engine.

1. Run 1 sends every prompt once, one at a time, through the gateway.
2. The workers' device caches are emptied, so that run 2's hits are the pool's.
3. Run 2 sends the same prompts again.
4. A plain engine (same model, dtype, thread binding, order, chunk budget; no pool) answers each
   prompt twice: cold, and primed to hold exactly the tokens that the pool gave the decode worker
   (a completion of just these tokens, its cache emptied before). The primed answer is the
   reference: a prefill's shape changes low bits, so a cold prefill is not the same computation.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from workers.bench.openai_stream import (
    EngineAnswerError,
    TimedAnswer,
    complete,
    read_counter,
    reset_device_cache,
    tokenize,
)
from workers.bench.prompts import Prompt
from workers.bench.rss import PeakRss

_EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
_RECORD_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where a running cluster is. `pids` are the workers' root processes."""

    gateway_url: str
    control_plane_url: str
    model: str
    worker_urls: dict[str, str]
    prefill_workers: list[str]
    decode_workers: list[str]
    pids: list[int]


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """One prompt's answer through the gateway and what its legs took from caches, in tokens."""

    answer: TimedAnswer
    hit_tokens: int
    served_tokens: int  # what the decode leg did not compute


@dataclass(slots=True)
class PlainAnswers:
    """The plain engine's answers, in prompt order; seconds and bytes."""

    cold: list[TimedAnswer] = field(default_factory=list)
    primed: dict[tuple[int, int], str] = field(default_factory=dict)
    peak_rss_bytes: int = 0


def find_target(client: httpx2.Client, gateway_url: str, control_plane_url: str) -> Target:
    """Read the workers from the control plane. Raises EngineAnswerError without a ready pair."""
    reply = client.get(f"{control_plane_url}/api/v1/workers")
    reply.raise_for_status()
    payload = reply.json()
    rows: list[dict[str, Any]] = payload["items"] if isinstance(payload, dict) else payload
    ready = [row for row in rows if row["state"] == "ready"]
    prefill = [row["id"] for row in ready if row["role"] in ("prefill", "both")]
    decode = [row["id"] for row in ready if row["role"] in ("decode", "both")]
    if not prefill or not decode:
        states = ", ".join(f"{row['id']} {row['state']}" for row in rows) or "no workers at all"
        raise EngineAnswerError(f"no ready prefill and decode worker: {states}")
    return Target(
        gateway_url, control_plane_url, ready[0]["model"],
        {row["id"]: row["url"] for row in ready}, prefill, decode,
        [int(row["pid"]) for row in ready if row.get("pid")],
    )  # fmt: skip


def run_through_pool(
    client: httpx2.Client, target: Target, prompts: list[Prompt], max_tokens: int
) -> list[PoolAnswer]:
    """Send the prompts one at a time and read each one's decision record."""
    answers = []
    for prompt in prompts:
        answer = complete(client, target.gateway_url, target.model, prompt.text, max_tokens)
        record = _finished_record(client, target, answer.request_id)
        leg = record["decode_leg"]
        answers.append(
            PoolAnswer(
                answer,
                int(record["hit_tokens"] or 0),
                int(leg["device_hit_tokens"]) + int(leg["pool_hit_tokens"]),
            )
        )
    return answers


def _finished_record(client: httpx2.Client, target: Target, request_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + _RECORD_WAIT_SECONDS
    url = f"{target.control_plane_url}/api/v1/decisions/{request_id}"
    while time.monotonic() < deadline:
        reply = client.get(url)
        if reply.status_code == 200:
            record: dict[str, Any] = reply.json()
            if record["status"] != "running" and record["decode_leg"] is not None:
                return record
        time.sleep(0.1)
    raise EngineAnswerError(
        f"no finished decision record with a decode leg for {request_id} at {url} "
        f"within {_RECORD_WAIT_SECONDS:.0f} s"
    )


def run_twice(
    client: httpx2.Client, target: Target, prompts: list[Prompt], max_tokens: int
) -> tuple[list[PoolAnswer], list[PoolAnswer], dict[str, float]]:
    """Both runs, the device caches emptied before each; the third value is what the engines
    counted as external hits (tokens) in run 2, by role."""
    _reset_all(client, target)
    first = run_through_pool(client, target, prompts, max_tokens)
    _reset_all(client, target)
    before = _external_hits(client, target)
    second = run_through_pool(client, target, prompts, max_tokens)
    after = _external_hits(client, target)
    return first, second, {role: after[role] - before[role] for role in after}


def _reset_all(client: httpx2.Client, target: Target) -> None:
    for url in target.worker_urls.values():
        reset_device_cache(client, url)


def _external_hits(client: httpx2.Client, target: Target) -> dict[str, float]:
    roles = {"prefill": target.prefill_workers, "decode": target.decode_workers}
    return {
        role: sum(read_counter(client, target.worker_urls[w], _EXTERNAL_HITS) for w in workers)
        for role, workers in roles.items()
    }


def run_plain(
    client: httpx2.Client, url: str, pid: int, model: str, prompts: list[Prompt],
    served: list[set[int]], max_tokens: int,
) -> PlainAnswers:  # fmt: skip
    """Cold answers, and one primed answer for each number of tokens the pool served."""
    out = PlainAnswers()
    with PeakRss([pid]) as rss:
        for number, prompt in enumerate(prompts):
            reset_device_cache(client, url)
            out.cold.append(complete(client, url, model, prompt.text, max_tokens))
            tokens = tokenize(client, url, model, prompt.text)
            for num_tokens in sorted(served[number]):
                reset_device_cache(client, url)
                if num_tokens:
                    complete(client, url, model, tokens[:num_tokens], 1)
                text = complete(client, url, model, prompt.text, max_tokens).text
                out.primed[number, num_tokens] = text
    out.peak_rss_bytes = rss.peak_bytes
    return out


def leaked_pins(client: httpx2.Client, control_plane_url: str, wait_seconds: float = 10.0) -> int:
    """Blocks still pinned once the pool has had `wait_seconds` to settle."""
    deadline = time.monotonic() + wait_seconds
    pinned = -1
    while time.monotonic() < deadline:
        reply = client.get(f"{control_plane_url}/api/v1/nodes")
        reply.raise_for_status()
        payload = reply.json()
        rows = payload["items"] if isinstance(payload, dict) else payload
        pinned = sum(int(row["pinned_blocks"] or 0) for row in rows)
        if pinned == 0:
            return 0
        time.sleep(0.5)
    return pinned


def report(
    first: list[PoolAnswer], second: list[PoolAnswer], plain: PlainAnswers,
    external_hits: dict[str, float], pins: int, peak_rss_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    """The figures; ratios are medians over medians, rates are tokens over tokens."""
    cold = [a.answer.ttft_seconds for a in first if a.hit_tokens == 0]
    hits = [a.answer.ttft_seconds for a in second if a.hit_tokens > 0]
    identical = sum(
        a.answer.text == plain.primed[number, a.served_tokens]
        for run in (first, second)
        for number, a in enumerate(run)
    )
    prompt_tokens = sum(a.answer.prompt_tokens for a in second)
    cold_ttft, hit_ttft = _median(cold), _median(hits)
    return {
        "runs": 2,
        "prompts": len(first),
        "prompt_tokens": prompt_tokens,
        "first_run_hit_rate": _rate(first),
        "second_run_hit_rate": _rate(second),
        "external_hit_tokens_second_run": external_hits,
        "outputs_identical": identical,
        "outputs_total": len(first) + len(second),
        "outputs_identical_to_cold_plain": sum(
            a.answer.text == b.text
            for run in (first, second)
            for a, b in zip(run, plain.cold, strict=True)
        ),
        "ttft_cold_seconds": cold_ttft,
        "ttft_hit_seconds": hit_ttft,
        "ttft_hit_over_cold": _ratio(hit_ttft, cold_ttft),
        "ttft_plain_cold_seconds": _median([a.ttft_seconds for a in plain.cold]),
        "ttft_over_plain": _ratio(
            _median([a.answer.ttft_seconds for a in second]),
            _median([a.ttft_seconds for a in plain.cold]),
        ),
        "throughput_over_plain": _ratio(
            sum(a.e2e_seconds for a in plain.cold), sum(a.answer.e2e_seconds for a in second)
        ),
        "max_decode_computed_tokens": max(
            a.answer.prompt_tokens - a.served_tokens for a in (*first, *second)
        ),
        "leaked_pins": pins,
        "peak_rss_bytes": peak_rss_bytes,
        "peak_rss_over_plain": _ratio(float(peak_rss_bytes), float(plain.peak_rss_bytes)),
    }


def _rate(answers: list[PoolAnswer]) -> float | None:
    tokens = sum(a.answer.prompt_tokens for a in answers)
    return sum(a.hit_tokens for a in answers) / tokens if tokens else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
