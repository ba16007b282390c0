"""docs/metrics.md and /metrics say the same, both ways."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from controlplane.gateway.metrics import ALL as GATEWAY_SERIES
from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS
from controlplane.metrics.series import ALL
from workers.core.ids import NodeId
from workers.core.prefix_index import Claim

DOC = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(
    r"^\| `(perilune_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE
)


def documented():
    rows = ROW.findall(DOC.read_text().partition("# The gateway's own /metrics")[0])
    return {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)), unit.strip(), definition.strip())
        for name, kind, labels, unit, definition in rows
    }


def transfers():
    """Of an agent that pulled from another."""
    pair = {
        "source": "n2", "destination": "n1", "transport": "tcp", "priority": "batch",
        "transfers_total": 2, "bytes_total": 8192, "pieces_total": 2, "retries_total": 1,
        "missing_by_cause": {"stale": 1}, "slowest": [],
        "seconds": [{"stage": "total", "counts": [2] + [0] * 17, "sum_seconds": 0.1}],
    }  # fmt: skip
    link = {
        "peer": "n2", "transport": "tcp", "state": "up", "breaker": "closed", "window_ops": 256,
        "in_flight_ops": 0, "in_flight_bytes": 0, "opens_total": 1, "small_ops_total": 0,
        "resent_bytes_total": 0, "retries_refused_total": 0, "late_completions_total": 0,
        "bytes_per_second": 1e9,
    }  # fmt: skip
    port = {
        "name": "mlx5_0/1", "state": "ACTIVE", "gid": "::ffff:10.0.0.1", "gid_index": 3,
        "gid_type": "roce_v2", "gid_reason": "", "active_mtu": 4096, "queue_depth": 1024,
        "inline_bytes": 256, "reads": 16, "numa_node": 0, "queue_pairs": 1,
    }  # fmt: skip
    return {"pairs": [pair], "links": [link], "ports": [port]}


async def scraped(api, bodies):
    """Every series with at least one sample: {name: (kind, labels, help)}."""
    pair = {"p1>d1": 1}
    await api.heartbeat(
        "n1",
        workers=[bodies["worker"]("p1", rss_bytes=1)],
        evicted_by_cause={"capacity": 1},
        tiers=[bodies["tier"]("dram"), bodies["tier"]("ssd")],
        groups=[
            {"kind": "tenant", "name": "a", "used_blocks": 1, "used_bytes": 1, "quota_bytes": 9}
        ],
        eviction={
            "age_p50_seconds": 1.0,
            "age_p99_seconds": 2.0,
            "demoted_blocks_total": 3,
            "promoted_blocks_total": 2,
            "dropped_undemoted_blocks_total": 1,
        },
        whatif=[{"capacity_factor": 1.0, "capacity_blocks": 100, "hit_rate": 0.5}],
        shm_bytes_by_pair=pair,
        shm_seconds_by_pair={"p1>d1": 0.5},
        transfers=transfers(),
    )
    await api.report(workers={"p1": {"running": 1}}, probes_total=2, probes_met_total=1)
    api.plane.stats.collector.claims("n1", 10, 1)
    claim = Claim(NodeId("n1"), b"s" * 32, b"k" * 16, "dram")
    api.plane.index_audit.findings("n1").count(claim, stale=True, at=api.clock.now())
    await api.http.post("/api/v1/cache/prefetch", json={"tenant": "a"})
    response = await api.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels), family.documentation, len(family.samples))
    return found


async def test_documented_and_exported_are_the_same(api, bodies):
    docs, real = documented(), await scraped(api, bodies)
    assert set(docs) == set(real)
    for name, (kind, labels, unit, definition) in docs.items():
        assert real[name][:3] == (kind, labels, definition), name
        assert real[name][3] > 0, f"{name} has no sample in a cluster with everything"
        assert unit


def test_the_gateways_own_series_are_documented():
    section = DOC.read_text().partition("# The gateway's own /metrics")[2]
    rows = ROW.findall(section.partition("# The connector's series")[0])
    found = {name: (kind, definition.strip()) for name, kind, _, _, definition in rows}
    assert found == {series.name: (series.kind, series.help) for series in GATEWAY_SERIES}


def test_names_follow_the_rules():
    for spec in ALL:
        assert spec.full_name.startswith("perilune_")
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        for unit in ("seconds", "bytes"):
            assert (spec.unit == unit) == (unit in spec.name), spec.name


async def test_histograms_are_cumulative(api):
    counts = [0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1)
    counts[3], counts[5] = 2, 1
    await api.report(ttft={"counts": counts, "sum_seconds": 0.09})
    text = (await api.http.get("/metrics")).text
    name = "perilune_gateway_time_to_first_token_seconds"
    assert f'{name}_bucket{{gateway="gw-1",le="0.01"}} 2.0' in text
    assert f'{name}_bucket{{gateway="gw-1",le="+Inf"}} 3.0' in text
    assert f'{name}_sum{{gateway="gw-1"}} 0.09' in text


async def test_a_client_cannot_add_series(api):
    for index in range(20):
        await api.http.get(f"/api/v1/nothing/{index}")
        await api.http.request(f"VERB{index}", "/api/v1/nodes")
    text = (await api.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if "http_requests_total{" in line]
    assert len(lines) < 6
