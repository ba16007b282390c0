"""The pool's tables and curve: unknown, zero and no traffic stay apart; alarms carry words."""

from __future__ import annotations

from typing import Any

import pytest

from console.viewmodel import acts, curve, jobs, pool
from console.viewmodel.table import Table


def row(table: Table, key: str) -> dict[str, str]:
    found = next(row for row in table.rows if row.key == key)
    return {c.key: t.text for c, t in zip(table.columns, found.cells, strict=True)}


def tone(table: Table, key: str, column: str) -> str:
    found = next(row for row in table.rows if row.key == key)
    place = [c.key for c in table.columns].index(column)
    return found.cells[place].tone


def with_nodes(world: Any, *nodes: Any) -> Any:
    return world.pool.model_copy(update={"nodes": list(nodes)})


class TestHead:
    def test_a_policy_that_does_not_act_everywhere_yet(self, world: Any) -> None:
        late = world.pool_node("node-02", eviction={"policy": "lru"})
        report = with_nodes(world, world.pool_node("node-01"), late)
        head = pool.head(report, world.policies)
        assert head.policy.text == "decay, cache/default r17; not yet on node-02 (decay, lru)"
        assert head.policy.tone == "warn"

    def test_the_fullest_queue_is_shown_and_breaches_past_70_percent(self, world: Any) -> None:
        full = world.pool_node("node-02", write_queue_blocks=351)
        found = pool.queue(with_nodes(world, world.pool_node("node-01"), full))
        assert found.text == "351 / 500, 70.2 %, fullest of 2: node-02"
        assert found.breach

    def test_claims_unknown_none_and_some(self, world: Any) -> None:
        report = world.pool
        texts = [
            pool.claims(found).text
            for found in (
                None,
                report.model_copy(update={"claims_checked": 0, "claims_stale": 0}),
                report.model_copy(update={"claims_checked": 200, "claims_stale": 4}),
            )
        ]
        assert texts == ["no data", "-", "2.0 % of 200 checked"]

    def test_nothing_reported_is_no_data(self) -> None:
        head = pool.head(None, [])
        assert (head.queue.text, head.queue.share, head.claims.text) == ("no data", None, "no data")


class TestTables:
    def test_an_older_agent_has_a_slab_and_no_rates(self, world: Any) -> None:
        table = pool.tiers(with_nodes(world, world.pool_node("node-01", tiers=[])))
        shown = row(table, "node-01/dram")
        assert (shown["used"], shown["state"], shown["read"]) == ("141/160 GiB", "no data", "--")

    @pytest.mark.parametrize(
        ("state", "expected"),
        [("ok", "well"), ("full", "warn"), ("rebuilding", "warn"), ("EIO", "critical")],
    )
    def test_states_of_a_tier(self, state: str, expected: str, world: Any) -> None:
        tier = world.tier("node-01", "ssd", state=state)
        table = pool.tiers(with_nodes(world, world.pool_node("node-01", tiers=[tier])))
        assert tone(table, "node-01/ssd", "state") == expected

    def test_e05_a_stale_node_is_not_called_ok(self, world: Any) -> None:
        node = world.pool_node("node-01", state="stale")
        assert row(pool.tiers(with_nodes(world, node)), "node-01/ssd")["state"] == "stale"

    def test_groups_with_and_without_a_quota(self, world: Any) -> None:
        table = pool.groups(world.pool)
        acme, default = row(table, "tenant/acme"), row(table, "tenant/default")
        assert (acme["quota"], acme["full"], acme["bar"]) == ("2.93 TiB", "97.0!", "##########")
        assert (default["quota"], default["full"], default["bar"]) == ("none", "-", "")
        assert table.rows[-1].cells[0].text == "llama-8b 4f09c1d2e3aa"

    def test_a_hidden_tenant_by_its_first_digits(self, world: Any) -> None:
        group = world.group("tenant", "ab" * 32, 0.1)
        assert pool.group_name(group) == "abababababab"

    def test_health_unknown_zero_and_loud(self, world: Any) -> None:
        quiet = world.pool_node("a", eviction={"attempts": 0, "successes": 0, "evicted": 0, "wanted_again": 0, "age_p50_seconds": None})  # fmt: skip
        loud = world.pool_node("b", eviction={"starved_by_pins": 7, "wanted_again": 2000})
        bare = world.pool_node("c", eviction={"attempts": None, "successes": None, "wanted_again": None, "evicted": None, "policy": None, "age_p50_seconds": None})  # fmt: skip
        table = pool.health(with_nodes(world, quiet, loud, bare))
        assert [row(table, key)["done"] for key in "abc"] == ["-", "98.8", "--"]
        assert [row(table, key)["p50"] for key in "abc"] == ["-", "6 min 52 s", "--"]
        assert tone(table, "b", "starved") == "critical"
        assert tone(table, "b", "again") == "warn"
        assert pool.worst_first(table).rows[0].key == "b"


class TestCurve:
    def report(self, world: Any, rates: list[float | None], measured: float | None = None) -> Any:
        points = [
            p.model_copy(update={"hit_rate": rate})
            for p, rate in zip(world.pool.curve, rates, strict=True)
        ]
        return world.pool.model_copy(update={"curve": points, "measured_hit_rate": measured})

    @pytest.mark.parametrize(
        ("rates", "words"),
        [
            ([0.3, 0.4, 0.5, 0.6, 0.7], "2x the capacity (3.75 TiB) would add +10.0 pp"),
            ([0.4, 0.5, 0.5, 0.5, 0.5], "Capacity is not the limit: 0.5x of it would hit 50.0 %"),
            ([0.1, 0.3, 0.5, 0.504, 0.51], "More capacity would add next to nothing: +0.4 pp"),
        ],
    )
    def test_verdicts(self, rates: list[float | None], words: str, world: Any) -> None:
        assert curve.curve(self.report(world, rates)).verdict.startswith(words)

    def test_far_below_the_prediction_is_said(self, world: Any) -> None:
        found = curve.curve(self.report(world, [0.5] * 5, 0.3))
        assert "Measured is 20.0 pp below the prediction" in found.verdict

    def test_too_few_keys_is_not_a_hit_rate_of_zero(self, world: Any) -> None:
        found = curve.curve(self.report(world, [None] * 5))
        assert "not a hit rate of 0" in found.empty
        assert found.measured_text == "--"

    def test_nobody_asked_is_no_traffic(self, world: Any) -> None:
        quiet = self.report(world, [None] * 5).model_copy(update={"asked_tokens": 0})
        assert curve.curve(quiet).measured_text == "-"

    def test_points_against_now(self, world: Any) -> None:
        found = curve.curve(world.pool)
        assert [p.difference for p in found.points] == ["-19.5 pp", "-7.2 pp", "now", "+7.1 pp", "+9.5 pp"]  # fmt: skip


class TestActs:
    def test_a_sum_of_others_cannot_be_acted_on(self, world: Any) -> None:
        report = world.pool.model_copy(
            update={"groups": [world.group("tenant", "other", 0.1, others=12)]}
        )
        assert "is a sum" in str(acts.of_group("purge", "tenant/other", report))

    def test_a_pin_over_the_limit_says_so(self, world: Any) -> None:
        act = acts.of_group("pin", "tenant/acme", world.pool)
        assert isinstance(act, acts.Act)
        assert any("the job is refused" in line.text for line in act.lines)

    def test_a_purge_sends_the_whole_name(self, world: Any) -> None:
        report = world.pool.model_copy(update={"groups": [world.group("tenant", "ab" * 32, 0.1)]})
        act = acts.of_group("purge", f"tenant/{'ab' * 32}", report)
        assert isinstance(act, acts.Act)
        assert act.typed == "ab" * 6
        assert getattr(act.body, "confirm", "") == "ab" * 32


class TestJobs:
    def test_progress_without_a_total(self, world: Any) -> None:
        job = world.job(1, progress={"done": 12, "total": None})
        assert jobs.done_text(job.progress) == "12 blocks"
        assert jobs.share(job) is None

    def test_what_runs_now(self, world: Any) -> None:
        assert jobs.running(world.jobs).text == "running: purge batch 62.0 %"
        assert jobs.running([]).text == "none"
        two = [world.job(1), world.job(2, state="queued")]
        assert jobs.running(two).text.endswith(", 1 more")
