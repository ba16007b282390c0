"""/metrics of the gateway: every series by name, kind, help and labels."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from controlplane.gateway.wire import HISTOGRAM_BOUNDS_SECONDS, GatewayStats, Histogram

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric; labels are worker ids at most, which the view bounds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Series:
    return Series(f"perilune_gateway_{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Series:
    return Series(f"perilune_gateway_{name}", "gauge", text, labels)


def _histogram(name: str, text: str) -> Series:
    return Series(f"perilune_gateway_{name}_seconds", "histogram", text)


REQUESTS = _counter("requests", "Requests of /v1 that were understood.")
REJECTED = _counter("rejected", "Requests rejected by SLO admission (429).")
FAILED = _counter("failed", "Requests that failed by our or a worker's fault.")
CANCELLED = _counter("cancelled", "Requests whose client left before the end.")
CLIENT_ERRORS = _counter("client_errors", "Requests refused as the client's error (4xx).")
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of ended requests.")
HIT_TOKENS = _counter("hit_tokens", "Prompt tokens that the prefill leg found cached.")
OUTPUT_TOKENS = _counter("output_tokens", "Output tokens, where the engine told the usage.")
MISMATCH = _counter("tokenizer_mismatch", "Prompts that the engine counted otherwise than we did.")
SLO_MET = _counter("slo_met", "Streams within the SLO's TTFT and TBT.")
SLO_MISSED = _counter("slo_missed", "Streams beyond the SLO's TTFT or TBT.")
SHED = _counter("shed", "Of the rejected, those that had waited for their turn at prefill.")
PROBES = _counter("probes", "Would-be rejections let in to learn from, ended.")
PROBES_MET = _counter("probes_met", "Of these, those that met the SLO.")
FALSE_REJECTS = _gauge("false_reject_ratio", "Share of probes that met the SLO.")
DROPPED = _counter("decisions_dropped", "Decision records dropped: the buffer was full.")
RETRIES = _counter("leg_retries", "Tries of a leg that failed and went on elsewhere.", "leg")
DECODE_SIDE = _counter("decode_side_prefills", "Requests whose prompt decode had to compute.")
HANDOFF = _counter("handoff_missing", "Prefill replies without transfer parameters.")
STAGED_RELEASED = _counter(
    "staged_released", "KV at foreign prefill workers, freed by a decode leg."
)
STAGED_LEFT = _counter("staged_left", "KV at foreign prefill workers, left to their own timer.")
SHARES_REFUSED = _counter(
    "shares_refused", "Loads told to other gateways that a node's agent refused to pass on."
)
HEDGED = _counter("hedged_prefills", "Prefill legs sent beside a late one.")
HEDGES_WON = _counter("hedges_won", "Of these, those that answered first.")
STUCK = _counter("stuck_requests", "Requests that waited beyond their state's bound.", "state")
BY_STATE = _gauge("requests_by_state", "Requests being served, by where they are.", "state")
SAMPLED_OUT = _counter(
    "decisions_sampled_out", "Requests not recorded, as the records policy says."
)
PROMPTS_LEFT_OUT = _counter("prompts_left_out", "Records sent without prompt: too many waited.")
IN_FLIGHT = _gauge("in_flight", "Requests being served.")
INDEX_BLOCKS = _gauge("index_blocks", "Entries of the prefix index.")
VIEW_REVISION = _gauge("view_revision", "Revision of the cluster view in use.")
RSS = _gauge("rss_bytes", "Resident memory of the process.")
CACHES = _gauge("cache_bytes", "Of these, counted in caches of token ids and block keys.", "cache")
BUFFERED = _gauge("decisions_buffered", "Decision records that wait for the control plane.")
RUNNING = _gauge("worker_running", "Legs in flight on a worker.", "worker")
WAITING = _gauge("worker_waiting", "Legs that wait for a worker.", "worker")
QUEUED_TOKENS = _gauge("worker_queued_tokens", "Prompt tokens in flight on a worker.", "worker")
WORKER_REQUESTS = _counter("worker_requests", "Legs sent to a worker.", "worker")
WORKER_FAILURES = _counter("worker_failures", "Legs that failed on a worker.", "worker")
PREFETCHED = _counter(
    "prefetched_blocks", "Blocks that decode nodes were told to fetch when leg 1 went out."
)
PREFETCHES_CANCELLED = _counter(
    "prefetches_cancelled", "Requests whose blocks decode nodes were told not to fetch any more."
)
REPLICATED = _counter(
    "replicated_blocks", "Hot blocks that nodes which lacked them were told to fetch."
)
PREFILL_ERROR = _gauge(
    "worker_prefill_error_ratio",
    "Median of abs(predicted - actual) / actual over its last 64 prefills.",
    "worker",
)
TBT_ERROR = _gauge(
    "worker_tbt_error_ratio", "The same for the time between tokens of its streams.", "worker"
)
TTFT_ERROR = _gauge(
    "ttft_error_ratio",
    "The same for streams' time to first token, as predicted when they were placed.",
)
TRANSFER_ERROR = _gauge(
    "transfer_error_ratio", "The same for transfers between nodes that prefill legs waited for."
)
EJECTED = _gauge("worker_ejected", "1 while a worker gets no legs but trials.", "worker")
TTFT = _histogram("time_to_first_token", "From a stream's request to its first byte back.")
TBT = _histogram("inter_token_latency", "Between two pieces of a stream.")
QUEUE = _histogram("queue", "Waiting for a decode slot.")

ALL: tuple[Series, ...] = tuple(value for value in list(globals().values())
                                if isinstance(value, Series))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extra:
    """What is shown beside `GatewayStats`."""

    retries_prefill: int
    retries_decode: int
    decode_side_prefills: int
    handoff_missing: int
    staged_released: int
    staged_left: int
    shares_refused: int
    sampled_out: int
    prompts_left_out: int
    prefetches_cancelled: int
    hedges_sent: int
    hedges_won: int
    stuck: dict[str, int]
    by_state: dict[str, int]
    cache_bytes: dict[str, int]
    view_revision: int
    decisions_buffered: int


def render(stats: GatewayStats, extra: Extra) -> bytes:
    """Prometheus text."""
    lines: list[str] = []
    for series, value in _plain(stats, extra):
        lines += [*_head(series), f"{series.name} {value}"]
    lines += _head(RETRIES)
    lines.append(f'{RETRIES.name}{{leg="prefill"}} {extra.retries_prefill}')
    lines.append(f'{RETRIES.name}{{leg="decode"}} {extra.retries_decode}')
    for states, values in ((STUCK, extra.stuck), (BY_STATE, extra.by_state)):
        lines += _head(states)
        lines += [f'{states.name}{{state="{state}"}} {n}' for state, n in values.items()]
    lines += _head(CACHES)
    lines += [f'{CACHES.name}{{cache="{cache}"}} {n}' for cache, n in extra.cache_bytes.items()]
    for error, ratio in ((TTFT_ERROR, stats.ttft_error), (TRANSFER_ERROR, stats.transfer_error)):
        lines += [*_head(error), *([] if ratio is None else [f"{error.name} {ratio:.6g}"])]
    lines += _workers(stats)
    for series, histogram in ((TTFT, stats.ttft), (TBT, stats.tbt), (QUEUE, stats.queue)):
        lines += [*_head(series), *_buckets(series.name, histogram)]
    return ("\n".join(lines) + "\n").encode()


def _plain(stats: GatewayStats, extra: Extra) -> list[tuple[Series, float]]:
    return [
        (REQUESTS, stats.requests_total),
        (REJECTED, stats.rejected_total),
        (FAILED, stats.failed_total),
        (CANCELLED, stats.cancelled_total),
        (CLIENT_ERRORS, stats.client_errors_total),
        (PROMPT_TOKENS, stats.prompt_tokens_total),
        (HIT_TOKENS, stats.hit_tokens_total),
        (OUTPUT_TOKENS, stats.output_tokens_total),
        (MISMATCH, stats.tokenizer_mismatch_total),
        (SLO_MET, stats.slo_met_total),
        (SLO_MISSED, stats.slo_missed_total),
        (SHED, stats.shed_total),
        (PROBES, stats.probes_total),
        (PROBES_MET, stats.probes_met_total),
        (FALSE_REJECTS, stats.probes_met_total / max(1, stats.probes_total)),
        (DROPPED, stats.decisions_dropped_total),
        (DECODE_SIDE, extra.decode_side_prefills),
        (HANDOFF, extra.handoff_missing),
        (STAGED_RELEASED, extra.staged_released),
        (STAGED_LEFT, extra.staged_left),
        (SHARES_REFUSED, extra.shares_refused),
        (HEDGED, extra.hedges_sent),
        (HEDGES_WON, extra.hedges_won),
        (SAMPLED_OUT, extra.sampled_out),
        (PROMPTS_LEFT_OUT, extra.prompts_left_out),
        (PREFETCHED, stats.prefetched_blocks_total),
        (PREFETCHES_CANCELLED, extra.prefetches_cancelled),
        (REPLICATED, stats.replicated_blocks_total),
        (IN_FLIGHT, stats.in_flight),
        (INDEX_BLOCKS, stats.index_blocks),
        (VIEW_REVISION, extra.view_revision),
        (RSS, stats.rss_bytes),
        (BUFFERED, extra.decisions_buffered),
    ]


def _workers(stats: GatewayStats) -> Iterable[str]:
    yield from _head(EJECTED)
    for worker_id, load in sorted(stats.workers.items()):
        yield f'{EJECTED.name}{{worker="{_escaped(worker_id)}"}} {int(load.data_path != "ok")}'
    for series, field in ((PREFILL_ERROR, "prefill_error"), (TBT_ERROR, "tbt_error")):
        yield from _head(series)
        for worker_id, load in sorted(stats.workers.items()):
            if (ratio := getattr(load, field)) is not None:
                yield f'{series.name}{{worker="{_escaped(worker_id)}"}} {ratio:.6g}'
    rows = [
        (RUNNING, "running"),
        (WAITING, "waiting"),
        (QUEUED_TOKENS, "queued_tokens"),
        (WORKER_REQUESTS, "requests_total"),
        (WORKER_FAILURES, "failures_total"),
    ]
    for series, field in rows:
        yield from _head(series)
        for worker_id, load in sorted(stats.workers.items()):
            yield f'{series.name}{{worker="{_escaped(worker_id)}"}} {getattr(load, field)}'


def _head(series: Series) -> list[str]:
    return [f"# HELP {series.name} {series.help}", f"# TYPE {series.name} {series.kind}"]


def _buckets(name: str, histogram: Histogram) -> Iterable[str]:
    total = 0
    for bound, count in zip(HISTOGRAM_BOUNDS_SECONDS, histogram.counts, strict=False):
        total += count
        yield f'{name}_bucket{{le="{bound:g}"}} {total}'
    total += histogram.counts[-1]
    yield f'{name}_bucket{{le="+Inf"}} {total}'
    yield f"{name}_sum {histogram.sum_seconds}"
    yield f"{name}_count {total}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
