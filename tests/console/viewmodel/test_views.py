"""Overview, topology, requests, policies and audit as rows."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest

from console.viewmodel import audit, overview, policies, requests, topology
from console.viewmodel.cache import TimeAxis, hit_rate
from console.viewmodel.history import History
from console.viewmodel.marks import events_of
from console.viewmodel.policies import Draft
from console.viewmodel.state import ConsoleState, Snapshot
from console.viewmodel.table import Table, cell, clean
from controlplane.decisions.schemas import Verdict


def snapshot_of(world: Any) -> Snapshot:
    state = ConsoleState()
    state.load(
        0.0, overview=world.overview, nodes=world.nodes, workers=world.workers,
        policies=world.policies, decisions=world.decisions, audit=world.audit, matrix=world.matrix,
    )  # fmt: skip
    return state.snapshot()


def texts(table: Table, key: str) -> list[str]:
    place = table.index(key)
    assert place is not None
    return [c.text for c in table.rows[place].cells]


class TestOverview:
    def test_the_numbers_that_are_always_visible(self, world: Any) -> None:
        shown = [f"{f.label} {f.text}" for f in overview.figures(world.overview)]
        assert shown == [
            "hit 58.1 %", "cache 1.52/1.88 TiB", "evict 71/s", "moved 6.3 GB/s", "TTFT 3.91 s",
        ]  # fmt: skip
        assert overview.figures(world.overview)[4].breach

    def test_breaches_carry_their_limit(self, world: Any) -> None:
        view = overview.overview(snapshot_of(world), History(), now=world.now, tz=UTC)
        rows = {row.key: row for row in view.service}
        assert rows["ttft"].breach
        assert rows["ttft"].limit == "2.00 s"
        assert not rows["tbt"].breach
        assert (view.num_critical, view.num_warn) == (1, 2)
        assert overview.headline(view) == "1 CRIT 2 warn"

    def test_e07_no_traffic_is_a_dash_without_alarm(self, empty_world: Any) -> None:
        view = overview.overview(snapshot_of(empty_world), History(), now=empty_world.now, tz=UTC)
        now = {row.key: row.now for row in view.service}
        assert now["ttft"] == "-"
        assert now["hit"] == "-"
        assert now["requests"] == "0"
        assert not any(row.breach for row in view.service)
        assert view.empty.startswith("No requests in the last 15 min.")
        assert [done for _, done in view.setup] == [True, False, False]

    def test_unknown_under_traffic_is_unknown(self, world: Any) -> None:
        seen = world.make_overview(ttft_p95_seconds=None, hit_ratio=None)
        shown = {f.label: f.text for f in overview.figures(seen)}
        assert shown["TTFT"] == "--"
        assert shown["hit"] == "--"

    def test_e34_one_request_shows_as_one(self, world: Any) -> None:
        world.overview = world.make_overview(requests_per_minute=1.0)
        view = overview.overview(snapshot_of(world), History(), now=world.now, tz=UTC)
        assert next(row.now for row in view.service if row.key == "requests") == "1"


class TestTopology:
    def test_e05_a_lost_node_shows_its_age_and_greys(self, world: Any) -> None:
        world.nodes[4] = world.node(5, state="lost", heartbeat_age_seconds=38.0)
        table = topology.nodes(snapshot_of(world), now=0.0)
        row = texts(table, "node-05/d1")
        assert row[1] == "lost 38 s"
        assert row[3] == "-- / 16"
        assert row[5] == "~141/160 GiB"
        assert texts(table, "node-06/d2")[1] == "ready"

    def test_e03_null_fields_say_unknown_in_their_row_only(self, world: Any) -> None:
        names = (
            "used_blocks",
            "capacity_blocks",
            "pinned_blocks",
            "block_bytes",
            "rss_bytes",
            "slab_bytes",
            "write_queue_blocks",
        )
        world.nodes[0] = world.node(1, **dict.fromkeys(names))
        table = topology.nodes(snapshot_of(world), now=0.0)
        assert texts(table, "node-01/p1")[5:8] == ["--", "--", "--"]
        assert texts(table, "node-02/p2")[5] == "141/160 GiB"

    def test_e23_every_state_has_its_word(self, world: Any) -> None:
        states = (
            "requested",
            "launching",
            "loading",
            "ready",
            "draining",
            "stopped",
            "failed",
            "lost",
        )
        world.workers = [world.worker(f"w{s}", "node-01", "decode", state=s) for s in states]
        table = topology.workers(snapshot_of(world))
        assert {row.cells[1].text for row in table.rows} == set(states)

    def test_emulated_is_said(self, world: Any) -> None:
        world.workers = [world.worker("p1", "node-01", "prefill", engine="emulated")]
        snapshot = snapshot_of(world)
        assert snapshot.emulated
        assert texts(topology.nodes(snapshot, now=0.0), "node-01/p1")[2] == "prefill p1 emu"

    def test_pairings(self, world: Any) -> None:
        table = topology.pairings(world.decisions, now=world.now)
        assert texts(table, "p3>d5")[:3] == ["p3 -> d5", "30", "100.0"]

    def test_nobody_has_joined(self, empty_world: Any) -> None:
        assert "No nodes have joined" in topology.nodes(snapshot_of(empty_world), now=0.0).empty


class TestRequests:
    def test_what_is_unusual_is_the_reason(self, world: Any) -> None:
        table = requests.requests([world.decision(1)], now=world.now, tz=UTC)
        row = [c.text for c in table.rows[0].cells]
        assert row[5] == "66.7"
        assert row[6] == "4.47 s!"
        assert row[8] == "p3 -> d5"
        assert row[10] == "handover 26x"

    def test_a_rejection_names_predicted_limit_and_retry(self, world: Any) -> None:
        verdict = Verdict(gate="ttft", predicted_seconds=2.31, limit_seconds=2.0)
        decision = world.decision(
            1, status="rejected", http_status=429, error="predicted TTFT 2.31 s > 2.00 s",
            retry_after_seconds=3.0, ttft_seconds=None, hit_tokens=None, prefill_worker="",
            decode_worker="", phases=[], admission=verdict, policy_revisions={"slo/default": 41},
        )  # fmt: skip
        row = [c.text for c in requests.requests([decision], now=world.now, tz=UTC).rows[0].cells]
        assert row[3] == "rejected"
        assert row[5:8] == ["-", "-", "31 ms"]
        assert row[8] == "p3 best"
        assert row[10] == "TTFT 2.31 s > 2.00 s, slo/default r41; 429, Retry-After 3.00 s"

    def test_waterfall_bars_follow_each_other(self, world: Any) -> None:
        bars, total = requests.waterfall(world.decision(1))
        assert total == pytest.approx(4.47, abs=0.01)
        handover = next(bar for bar in bars if bar.name == "handover")
        assert handover.slow
        assert handover.predicted == "161 ms"
        assert handover.start == pytest.approx(0.05, abs=0.01)
        assert all(0 <= (bar.start or 0) <= (bar.end or 0) <= 1 for bar in bars)

    def test_nothing_measured_yet(self, world: Any) -> None:
        decision = world.decision(1, status="running", ttft_seconds=None, phases=[])
        view = requests.request(decision, now=world.now, tz=UTC)
        assert view.bars == ()
        assert view.total == "--"
        assert view.outcome.text.startswith("running; predicted TTFT 402 ms")

    def test_every_candidates_terms_are_shown(self, world: Any) -> None:
        view = requests.request(world.decision(1), now=world.now, tz=UTC)
        assert [row.key for row in view.prefill.rows] == ["prefill:p3", "prefill:p1"]
        assert [c.text for c in view.prefill.rows[1].cells][3:] == [
            "0", "0", "8,192", "12 ms", "107 ms", "118 ms", "237 ms", "24 ms slower: transfer",
        ]  # fmt: skip
        assert view.legs.rows[1].cells[5].text == "1"


class TestPolicies:
    def draft(self, world: Any) -> Draft:
        return Draft(next(p for p in world.policies if p.kind == "slo"))

    def test_an_untouched_draft_changes_nothing(self, world: Any) -> None:
        checked = policies.check(self.draft(world))
        assert checked.changes == ()
        assert checked.spec is not None

    @pytest.mark.parametrize(
        ("field", "text", "error"),
        [
            ("max_ttft_ms", "0", "must be 1 to 600,000"),
            ("max_ttft_ms", "-5", "must be 1 to 600,000"),
            ("max_ttft_ms", "soon", "must be 1 to 600,000"),
            ("max_ttft_ms", "nan", "must be 1 to 600,000"),
            ("mode", "maybe", "must be off | observe | enforce"),
            ("retry_after_max_s", "1.5", "must be 1 to 600 (whole number)"),
            ("percentile", "", "must be 50 to 99.9"),
        ],
    )
    def test_an_error_stands_on_its_line(
        self, world: Any, field: str, text: str, error: str
    ) -> None:
        checked = policies.check(self.draft(world).with_value(field, text))
        assert checked.spec is None
        assert {v.name: v.error for v in checked.fields if v.error} == {field: error}

    def test_diff_and_consequences(self, world: Any) -> None:
        draft = self.draft(world).with_value("max_ttft_ms", "1")
        checked = policies.check(draft)
        assert checked.spec is not None
        assert checked.spec["max_ttft_ms"] == 1.0
        assert [t.text for t in policies.diff(draft, checked)] == [
            "max_ttft_ms  2000  ->  1", "(4 fields unchanged)",
        ]  # fmt: skip
        said = " ".join(t.text for t in policies.consequences(draft, checked, world.overview))
        assert "warn  now TTFT P50 350 ms, P95 3.91 s against 1 ms" in said

    def test_a_rebased_draft_keeps_only_its_own_changes(self, world: Any) -> None:
        draft = self.draft(world).with_value("max_ttft_ms", "1500")
        newer = draft.base.model_copy(
            update={
                "revision": 42,
                "author": "ben",
                "spec": {**draft.base.spec, "max_tbt_ms": 80.0},
            }
        )
        assert "slo/default r42 was taken by ben at" in policies.conflict(draft, newer, UTC)
        rebased = policies.check(draft.rebased(newer))
        assert rebased.changes == (("max_ttft_ms", "2000", "1500"),)
        assert rebased.spec is not None
        assert rebased.spec["max_tbt_ms"] == 80.0


class TestAuditAndMarks:
    def test_newest_first_with_the_difference(self, world: Any) -> None:
        table = audit.audit(world.audit, now=world.now, tz=UTC)
        assert table.rows[0].key == "5"
        assert table.rows[0].cells[4].text == "max_ttft_ms 2000 -> 1"

    def test_change_of_other_texts(self) -> None:
        assert audit.change("", "x") == "- -> x"
        assert audit.change('{"spec": {"a": true}}', '{"spec": {"a": false}}') == "a true -> false"

    def test_events_under_the_axis(self, world: Any) -> None:
        axis = TimeAxis(world.now, UTC, 900, 15)
        columns = hit_rate(world.series(world.now), world.nodes, axis).columns
        marks = events_of(columns, snapshot_of(world))
        assert set(marks.values()) <= {"P", "J", "2", "3", "4", "5"}


class TestClean:
    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ("plain", "plain"),
            ("節点-01", "節点-01"),
            ("a\x1b[31mb", "a?[31mb"),
            ("\u2764\ufe0f x", "\u2764 x"),
            ("a\u202eb\u200dc", "abc"),
            ("two\nlines", "two lines"),
        ],
    )
    def test_e21_names_cannot_shift_columns_or_drive_the_terminal(
        self, text: str, kept: str
    ) -> None:
        assert clean(text) == kept
        assert cell(text).text == kept


class TestFailures:
    def test_the_message_inside_the_engines_answer(self, world: Any) -> None:
        body = '{"error":{"message":"max_tokens must be at least 1, got -4.","code":400}}'
        refused = world.decision(1, status="failed", http_status=400, error=body)
        assert requests.why(refused) == "400: max_tokens must be at least 1, got -4."
        assert requests.is_client_error(refused)
        broken = world.decision(
            1, status="failed", http_status=502, error="reset", failed_leg="decode"
        )
        assert requests.why(broken) == "502: decode leg: reset"
        assert not requests.is_client_error(broken)

    def test_a_clients_mistake_is_no_failure_of_the_pair(self, world: Any) -> None:
        decisions = [
            world.decision(1, status="failed", http_status=status, error="no")
            for status in (400, 502)
        ]
        row = topology.pairings(decisions, now=world.now).rows[0]
        assert row.cells[-1].text == "1"

    def test_not_streamed_has_nothing_to_measure(self, world: Any) -> None:
        quiet = world.decision(1, ttft_seconds=None, tbt_p95_seconds=None, stream=False)
        assert requests.latency(quiet, None) == "-"
        streamed = world.decision(1, ttft_seconds=None, stream=True)
        assert requests.latency(streamed, None) == "--"
