"""The ledger, requests in flight, workers as gateways meet them, and remarks on a decision."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest
from request_objects import make_answer, make_gateway, make_running_request, make_summary, wrong

from console.viewmodel import acts, filters, ledger, placement, running, worker_health
from console.viewmodel.table import Table
from controlplane.decisions.schemas import ObservedPlacement, Verdict
from controlplane.gateways.running_schemas import RunningList
from controlplane.gateways.schemas import WorkerLoad


def texts(table: Table, column: str) -> list[str]:
    place = [one.key for one in table.columns].index(column)
    return [row.cells[place].text for row in table.rows]


class TestLedger:
    def table(self, world: Any) -> Table:
        return ledger.ledger(world.ledger.items, now=world.now, tz=UTC)

    def test_each_row_says_what_was_predicted_and_whether_it_was_right(self, world: Any) -> None:
        table = self.table(world)
        assert texts(table, "met") == [
            "likely no, 1 of 20",
            "likely yes, 19 of 20",
            "open, 9 of 20",
            "open, none alike",
            "- (wait was over)",
            "yes, it was let in",
            "no, it was let in",
            "open, not measured",
        ]
        assert texts(table, "predicted")[0] == "2.31 s!"
        assert texts(table, "retry")[:1] == ["3.00 s"]
        assert texts(table, "retry")[5:] == ["-", "-", "-"]
        assert texts(table, "gate")[3:5] == ["TBT", "queue"]
        assert table.rows[0].opens == "request/00000001cafe4711"

    def test_filters_go_by_seconds_over_the_limit(self, world: Any) -> None:
        chosen = filters.parse("what=rejected over>100ms", ledger.FIELDS)
        assert len(chosen.apply(self.table(world).rows)) == 3

    def test_the_head_counts_and_gives_the_interval_with_its_samples(self) -> None:
        head = ledger.head(make_summary())
        assert head.counts.text == (
            "last 1 h: 1,204 rejected, 31 shed while they waited, 62 let in as probes"
        )
        assert head.wrong.text.startswith(
            "rejected wrongly: 12.1 % of 58 probes (95 %: 6.0 to 22.9 %)"
        )
        assert texts(head.classes, "wrong")[1] == "--"

    def test_the_head_names_the_revisions_that_turned_them_away(self, world: Any) -> None:
        head = ledger.head(make_summary(), world.policies, now=world.now, tz=UTC)
        assert [text.text for text in head.causes] == [
            "1,190 by slo/default r41 (TTFT), in force since 08:07:30, by ana: tighter",
            "14 by slo/default r40 (TTFT), no longer in force; last 13:07:21",
        ]
        many = [make_summary().causes[0]] * 5
        said = ledger.head(make_summary(causes=many), world.policies, now=world.now, tz=UTC)
        assert said.causes[-1].text == "and 2 more"

    def test_each_row_names_its_policy(self, world: Any) -> None:
        assert texts(self.table(world), "policy")[0] == "slo r41"
        rows = self.table(world).rows
        assert len(filters.parse("policy=slo/default", ledger.FIELDS).apply(rows)) == len(rows)
        assert not filters.parse("revision<41", ledger.FIELDS).apply(rows)
        older = world.ledger.items[0].model_copy(update={"policy": ""})
        assert texts(ledger.ledger([older], now=world.now, tz=UTC), "policy") == ["--"]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"rejected": 0, "shed": 0, "probes": 0}, "rejected wrongly: - (nobody was)"),
            ({"rejected": 5, "probes": 2}, "rejected wrongly: --, no probe has ended yet"),
            ({"rejected": 5, "probes": 0}, "no probe was let in (probe_share of admission)"),
        ],
    )
    def test_what_is_not_known_is_said_as_such(self, changes: dict[str, int], words: str) -> None:
        head = ledger.head(make_summary(false_rejects=wrong(0, 0), **changes))
        assert words in head.wrong.text
        assert "0.0 %" not in head.wrong.text

    def test_nobody_was_turned_away(self) -> None:
        assert "Nobody was turned away" in ledger.ledger([], now=0.0, tz=UTC).empty
        assert ledger.head(None).counts.text == ledger.NOT_YET


class TestRunning:
    def test_what_it_waits_for_how_long_and_what_then(self, world: Any) -> None:
        table = running.running(world.running)
        assert texts(table, "state") == ["stuck: prefilling", "waiting", "decoding", "decoding ~"]
        assert texts(table, "waited")[:2] == ["5 min 40 s!", "1 min 40 s"]
        assert texts(table, "bound") == ["5 min 30 s", "2 min 00 s", "2 min 30 s", "-"]
        assert texts(table, "then") == ["504 now", "reported only", "504", "no bound"]
        assert texts(table, "waits") == [
            "p3: prefill leg", "its turn at a prefill worker", "d5: next piece, decode leg",
            "client to read",
        ]  # fmt: skip
        tones = [row.cells[1].tone for row in table.rows]
        assert tones == ["critical", "warn", "plain", "stale"]
        assert table.rows[0].key == "gw-1/00000001cafe4711"
        assert running.find(world.running, "gw-1/00000002cafe4711") is world.running.items[1]
        assert running.find(world.running, "gw-9/x") is None

    def test_the_head_names_the_silent_and_since_when(self, world: Any) -> None:
        counts, stuck, silent = running.head(world.running, now=world.now, tz=UTC)
        assert counts.text == (
            "5 in flight at 2 gateways: 2 decoding, 1 prefilling, 1 waiting (of 4 listed)"
        )
        assert stuck.text == "1 stuck: 00000001 waits 5 min 40 s for p3: prefill leg"
        assert stuck.tone == "critical"
        assert silent.text == (
            "~ gw-2 (lost) has not answered since 13:06:46: no answer within 2 s; its last report"
            " is 46 s old; of it is shown what ran 45 s ago"
        )

    def test_a_cut_list_says_so(self, world: Any) -> None:
        found = world.running.model_copy(update={"items": world.running.items[:2]})
        heads = [text.text for text in running.head(found, now=world.now, tz=UTC)]
        assert "the 2 nearest to their bounds are shown" in heads

    @pytest.mark.parametrize(
        ("answers", "words"),
        [
            ((), "No gateway has joined"),
            ((True,), "Nothing is in flight at 1 gateway."),
            ((False,), "No gateway answers: what is in flight is not known."),
            ((True, False), "Nothing is in flight at 1 gateway. 1 of 2 did not answer."),
        ],
    )
    def test_nothing_unknown_and_nobody_differ(
        self, world: Any, answers: tuple[bool, ...], words: str
    ) -> None:
        gateways = [
            make_answer(f"gw-{n}", world.at, answers=answer, silent_since=world.at)
            for n, answer in enumerate(answers)
        ]
        assert words in running.running(RunningList(items=[], gateways=gateways)).empty
        assert running.running(None).empty == running.NOT_YET

    def test_a_hostile_tenant_cannot_move_a_column(self) -> None:
        item = make_running_request(1, tenant="a\nb\x1b[2J", waits_for="x\ry")
        row = running.running(RunningList(items=[item])).rows[0]
        assert not any(char in cell.text for cell in row.cells for char in "\n\r\x1b")

    def test_a_cancel_says_what_its_client_gets_and_what_happens_without(self) -> None:
        ends = acts.cancel_request(make_running_request(1, wait_seconds=30.0))
        words = "\n".join(line.text for line in ends.lines)
        assert "503 cancelled_by_operator" in words
        assert "the policy ends it in 2 min 00 s" in words
        assert (ends.request_id, ends.typed) == ("00000001cafe4711", "")
        assert acts.with_reason(ends, "hangs").body.reason == "hangs"  # type: ignore[union-attr]
        only_said = acts.cancel_request(make_running_request(1, at_bound="report"))
        assert any("only report it" in line.text for line in only_said.lines)
        unbound = acts.cancel_request(make_running_request(1, bound_seconds=None))
        assert any("no bound for this wait" in line.text for line in unbound.lines)


class TestWorkerHealth:
    def test_the_worst_comes_first_with_its_window_and_pause(self, world: Any) -> None:
        table = worker_health.worker_health(world.gateways)
        assert texts(table, "worker") == ["d5", "d7", "d6", "p3", "p3"]
        assert texts(table, "state") == [
            "ejected, trial in 4.2 s", "on trial, one leg", "failing", "ok", "ok ~",
        ]  # fmt: skip
        assert texts(table, "window") == ["10 of 20", "5 of 8", "1 of 3", "none", "none"]
        assert texts(table, "tbt")[2] == "71.0 %! of 30"
        assert texts(table, "prefill")[3] == "6.2 % of 64"
        assert texts(table, "prefill")[0] == "-"
        assert table.rows[0].opens == "worker/d5"
        assert table.rows[4].cells[0].tone == "stale"
        one = worker_health.worker_health(world.gateways, "p3")
        assert [row.key for row in one.rows] == ["p3/gw-1", "p3/gw-2"]

    def test_the_head_says_who_is_left_out_and_which_gateway_is_silent(self, world: Any) -> None:
        out, first, second = worker_health.head(world.gateways)
        assert out.text == "left out after failures: d5 at gw-1"
        assert "TTFT predictions off by 8.1 %, transfers by 20.0 %" in first.text
        assert second.text.startswith("~ gw-2 is stale: its last report is 14 s old")

    def test_a_sound_cluster_and_an_empty_one(self, world: Any) -> None:
        sound = [make_gateway("g", world.at, {"p1": WorkerLoad()})]
        assert worker_health.head(sound)[0].text == "no worker is left out"
        assert worker_health.worker_health([]).empty == "No gateway has reported yet."
        bare = [make_gateway("g", world.at, {}, stats=None)]
        assert worker_health.head(bare)[1].text == "g: no statistics yet"

    def test_many_ejected_ones_are_counted(self, world: Any) -> None:
        loads = {f"d{n}": WorkerLoad(data_path="ejected") for n in range(1, 7)}
        head = worker_health.head([make_gateway("g", world.at, loads)])
        assert head[0].text == "left out after failures: d1 at g, d2 at g, d3 at g and 3 more"


class TestRemarks:
    def test_a_rejection_a_probe_and_one_that_was_shed(self, world: Any) -> None:
        def said(status: str = "finished_stop", **verdict: Any) -> str:
            values = {
                "gate": "ttft",
                "predicted_seconds": 2.31,
                "limit_seconds": 2.0,
                "percentile": 95.0,
            }
            record = world.decision(1, status=status, admission=Verdict(**(values | verdict)))
            text = placement.admission(record)
            return text.text if text else ""

        assert said("rejected") == (
            "ADMISSION  rejected by slo/default r41: predicted TTFT 2.31 s at P95 > 2.00 s"
        )
        assert "it kept the SLO (1.90 s measured)" in said(
            probe=True, met=True, measured_seconds=1.9
        )
        assert "it still runs" in said("running", probe=True)
        assert "its end says nothing" in said("failed", probe=True)
        assert said("rejected", gate="queue_full").endswith("the queue was full")
        assert placement.admission(world.decision(1)) is None

    def test_what_observe_would_have_chosen_and_at_what_price(self, world: Any) -> None:
        other = ObservedPlacement(
            algorithm="cache_aware", worker_id="p1", predicted_ttft_seconds=0.237
        )
        text = placement.observed(world.decision(1, observed_placement=other))
        assert text is not None
        assert text.text == (
            "OBSERVE  cache_aware would have chosen p1: predicted 237 ms, 24 ms later than p3"
        )
        same = other.model_copy(update={"worker_id": "p3"})
        text = placement.observed(world.decision(1, observed_placement=same))
        assert text is not None
        assert "would have chosen p3 too" in text.text
        assert placement.observed(world.decision(1)) is None

    def test_class_wait_rules_and_sampling(self, world: Any) -> None:
        record = world.decision(
            1, priority="batch", dispatch_wait_seconds=1.2, normalised=["spaces"], sampled_one_in=10
        )
        assert placement.waited(record) == (
            "class batch, waited 1.20 s for its turn, normalised: spaces, 1 of 10 like it is recorded"
        )
        assert placement.waited(world.decision(1)) == ""
