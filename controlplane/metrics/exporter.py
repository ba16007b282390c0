"""/metrics: the plane's state as Prometheus text. Labels are ids that the registries bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS, Histogram
from controlplane.loops.runner import Loops
from controlplane.metrics.index import index_values
from controlplane.metrics.pool import pool_values
from controlplane.metrics.series import ALL, GATEWAY, POOL, SeriesSpec
from controlplane.metrics.transfers import transfer_values
from controlplane.plane import Plane
from controlplane.stats.pool_values import causes_of
from workers.process import rss_bytes

NODE_STATES = ("ready", "stale", "lost")
HISTOGRAM_FIELDS = {
    "time_to_first_token_seconds": "ttft",
    "inter_token_latency_seconds": "tbt",
    "queue_seconds": "queue",
}
FALSE_REJECTS = "gateway_false_reject_ratio"
POOL_FIELDS = {"owners": "num_owners"}
Value = tuple[Sequence[str], float]
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Exporter(Collector):
    """One scrape reads everything once; nothing is kept between scrapes."""

    def __init__(self, plane: Plane, loops: Loops) -> None:
        self._plane = plane
        self._loops = loops
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        values: dict[str, list[Value]] = {}
        for name, labels, value in (
            *self._controlplane(),
            *self._cluster(),
            *self._pool(),
            *pool_values(self._plane),
            *index_values(self._plane),
            *transfer_values(self._plane),
            *self._gateways(),
        ):
            values.setdefault(name, []).append((labels, value))
        histograms = {f"gateway_{name}": field for name, field in HISTOGRAM_FIELDS.items()}
        for spec in ALL:
            if spec.kind == "histogram":
                yield self._histogram(spec, histograms[spec.name])
            else:
                yield _family(spec, values.get(spec.name, []))

    def _controlplane(self) -> Iterator[tuple[str, Sequence[str], float]]:
        plane = self._plane
        yield "controlplane_uptime_seconds", (), plane.clock.monotonic() - plane.started_at
        yield "controlplane_rss_bytes", (), rss_bytes()
        for key, count in plane.counts.counts.items():
            yield "controlplane_http_requests_total", key, count
        yield "controlplane_event_streams", (), plane.bus.num_subscribers
        yield "controlplane_events_total", (), plane.bus.published_total
        yield "controlplane_event_resets_total", (), plane.bus.resets_total
        yield "controlplane_view_revision", (), plane.view.revision
        yield "controlplane_decisions_stored_total", (), plane.decisions.stored_total
        for loop in self._loops.all:
            yield "controlplane_loop_errors_total", (loop.name,), loop.errors
        dropped = plane.stats.collector.sources_dropped
        yield "controlplane_stat_sources_dropped_total", (), dropped

    def _cluster(self) -> Iterator[tuple[str, Sequence[str], float]]:
        plane = self._plane
        nodes, workers, gateways = plane.nodes.list(), plane.fleet.list(), plane.gateways.list()
        node_states = Counter(str(node.state) for node in nodes)
        gateway_states = Counter(gateway.state for gateway in gateways)
        yield "nodes", ("not_ready",), node_states["not_ready"]
        for state in NODE_STATES:
            yield "nodes", (state,), node_states[state]
            yield "gateways", (state,), gateway_states[state]
        for (role, worker_state), count in Counter((w.role, w.state) for w in workers).items():
            yield "workers", (role, worker_state), count
        for policy in plane.policies.list():
            yield "policy_revision", (policy.kind, policy.scope), policy.revision
        for node in nodes:
            yield "node_heartbeat_age_seconds", (node.id,), node.heartbeat_age_seconds
            yield "node_restarts_total", (node.id,), node.restarts
        for worker in workers:
            yield "worker_restarts_total", (worker.id,), worker.restarts
            for name in ("running", "waiting", "rss_bytes"):
                value = getattr(worker, name)
                if value is not None:
                    yield f"worker_{name}", (worker.id,), value

    def _pool(self) -> Iterator[tuple[str, Sequence[str], float]]:
        simple = [spec for spec in POOL if spec.labels == ("node",)]
        for node in self._plane.nodes.live():
            stats = node.stats
            if stats is None:
                continue
            for spec in simple:
                name = spec.name.removeprefix("pool_")
                yield spec.name, (node.id,), getattr(stats, POOL_FIELDS.get(name, name))
            for cause, count in causes_of(stats).items():
                yield "pool_evicted_blocks_total", (node.id, cause), count
            for pair, num_bytes in stats.shm_bytes_by_pair.items():
                yield "pool_shm_bytes_total", (node.id, pair), num_bytes
            for pair, seconds in stats.shm_seconds_by_pair.items():
                yield "pool_shm_seconds_total", (node.id, pair), seconds

    def _gateways(self) -> Iterator[tuple[str, Sequence[str], float]]:
        simple = [s for s in GATEWAY if s.labels == ("gateway",) and s.kind != "histogram"]
        simple = [spec for spec in simple if spec.name != FALSE_REJECTS]
        for gateway in self._plane.gateways.live():
            if gateway.stats is None:
                continue
            for spec in simple:
                value = getattr(gateway.stats, spec.name.removeprefix("gateway_"))
                yield spec.name, (gateway.id,), value
            probes = gateway.stats.probes_total
            if probes:
                yield FALSE_REJECTS, (gateway.id,), gateway.stats.probes_met_total / probes
            for worker_id, load in gateway.stats.workers.items():
                labels = (gateway.id, worker_id)
                yield "gateway_worker_requests_total", labels, load.requests_total
                yield "gateway_worker_failures_total", labels, load.failures_total
                yield "gateway_worker_queued_tokens", labels, load.queued_tokens

    def _histogram(self, spec: SeriesSpec, field: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(spec.full_name, spec.definition, labels=spec.labels)
        for gateway in self._plane.gateways.live():
            if gateway.stats is not None:
                histogram: Histogram = getattr(gateway.stats, field)
                family.add_metric(
                    (gateway.id,), _cumulative(histogram.counts), histogram.sum_seconds
                )
        return family


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    bounds = [*(str(bound) for bound in HISTOGRAM_BOUNDS_SECONDS), "+Inf"]
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def _family(spec: SeriesSpec, values: list[Value]) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(spec.full_name, spec.definition, labels=spec.labels)
    for labels, value in values:
        family.add_metric(labels, float(value))
    return family
