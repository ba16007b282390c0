"""Records of requests that have no candidates and no legs, and of those with a leg too many."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest

from console.viewmodel import placement, requests
from controlplane.decisions.schemas import Decision, Hedge, Phase


def passed(world: Any, **more: Any) -> Decision:
    """As gateways tell of `/v1/embeddings`."""
    values: dict[str, Any] = {
        "request_id": "0a1b2c3d", "at": world.decision(1).at, "gateway_id": "gw-1",
        "status": "finished_stop", "model": "m", "api": "other", "route": "/v1/embeddings",
        "decode_worker": "d1", "http_status": 200, "e2e_seconds": 0.031,
        "request_bytes": 2048, "reply_bytes": 8192,
        "phases": [
            Phase(name="admitted", measured_seconds=0.001, start_seconds=0.0),
            Phase(name="reply", measured_seconds=0.03, start_seconds=0.001),
        ],
    }  # fmt: skip
    return Decision(**(values | more))


def row(decision: Decision, world: Any) -> dict[str, str]:
    table = requests.requests([decision], now=world.now, tz=UTC)
    names = [column.label for column in table.columns]
    return dict(zip(names, (cell.text for cell in table.rows[0].cells), strict=True))


class TestPassedWhole:
    def test_its_row_has_worker_and_times_and_no_numbers_that_never_come(self, world: Any) -> None:
        shown = row(passed(world), world)
        assert shown["P -> D"] == "- -> d1"
        assert (shown["HIT %"], shown["TTFT"], shown["TBT P95"]) == ("-", "-", "-")
        assert shown["WHERE THE TIME WENT"].startswith("a")
        assert "r::::" in shown["WHERE THE TIME WENT"]
        assert shown["WHY"] == ""

    def test_opened_it_says_route_bytes_and_how_long_it_took(self, world: Any) -> None:
        view = requests.request(passed(world), now=world.now, tz=UTC)
        head = " ".join(line.text for line in view.head)
        assert "route /v1/embeddings" in head
        assert "in, " in head
        assert view.outcome.text == "answered whole by one worker, e2e 31 ms"
        assert [bar.name for bar in view.bars] == ["admitted", "reply"]
        assert view.prefill.rows == view.decode.rows == view.legs.rows == ()

    @pytest.mark.parametrize("status", ["running", "cancelled", "failed"])
    def test_however_it_ends(self, world: Any, status: str) -> None:
        record = passed(
            world, status=status, phases=[], reply_bytes=None, e2e_seconds=None, http_status=502,
            error="request 0a1b2c3d failed on worker d1: answered 500", retries=2,
        )  # fmt: skip
        shown = row(record, world)
        assert shown["STATUS"] == status
        assert "answered 500" in shown["WHY"]
        assert requests.request(record, now=world.now, tz=UTC).outcome.text


class TestHedges:
    @pytest.mark.parametrize(
        ("winner", "status", "end"),
        [
            ("first", "finished_stop", "the first one answered first"),
            ("second", "finished_stop", "it answered first"),
            ("", "failed", "none was used"),
            ("", "running", "none has answered yet"),
        ],
    )
    def test_whose_answer_was_taken(self, world: Any, winner: Any, status: str, end: str) -> None:
        hedge = Hedge(worker_id="p2", sent_after_seconds=0.25, winner=winner)
        record = world.decision(1, status=status, hedge=hedge)
        text = placement.hedged(record)
        assert text is not None
        assert text.text == f"HEDGE  a second prefill leg went to p2 after 250 ms: {end}"
        assert text in requests.request(record, now=world.now, tz=UTC).remarks

    def test_nothing_is_said_where_there_was_one_leg(self, world: Any) -> None:
        assert placement.hedged(world.decision(1)) is None


class TestRetries:
    ERROR = "prefill leg on p1: the connection ended before the reply did"

    def test_a_served_request_says_what_its_first_try_met(self, world: Any) -> None:
        record = world.decision(
            1, retries=1, error=self.ERROR, failed_leg="prefill", http_status=200
        )
        assert row(record, world)["WHY"] == f"1 retry: {self.ERROR}"
        view = requests.request(record, now=world.now, tz=UTC)
        said = [remark for remark in view.remarks if remark.text.startswith("RETRIED")]
        assert [remark.text for remark in said] == [f"RETRIED  1x, the last after: {self.ERROR}"]
        assert said[0].tone == "warn"
        assert view.outcome.text.startswith("TTFT ")

    def test_a_failed_one_names_its_leg_once(self, world: Any) -> None:
        record = world.decision(
            1, status="failed", retries=2, error=self.ERROR, failed_leg="prefill", http_status=502
        )
        assert row(record, world)["WHY"] == f"502: {self.ERROR}"
        remarks = requests.request(record, now=world.now, tz=UTC).remarks
        assert remarks[0].text == "RETRIED  2x"

    def test_retries_without_an_error_are_counted(self, world: Any) -> None:
        calm = world.decision(1, phases=[], retries=3)
        assert row(calm, world)["WHY"] == "3 retries"
        assert placement.retried(world.decision(1)) is None


class TestWithoutMeasurement:
    def test_what_was_turned_away_is_not_waited_for(self, world: Any) -> None:
        record = world.decision(
            1, status="rejected", phases=[], prefill_leg=None, decode_leg=None, hit_tokens=None,
            prefill_worker="", decode_worker="",
        )  # fmt: skip
        view = requests.request(record, now=world.now, tz=UTC)
        assert view.no_bars == "It was turned away: no phase began."
        assert view.legs.empty == "It was turned away: no leg was sent."
        assert requests.phases(view).empty == view.no_bars
        assert view.head[1].text.endswith("  hit -"), "no share of nothing"

    @pytest.mark.parametrize(
        ("status", "words"),
        [("running", "No leg has reported yet."), ("failed", "No worker reported on its leg.")],
    )
    def test_only_what_runs_may_still_report(self, world: Any, status: str, words: str) -> None:
        record = world.decision(1, status=status, prefill_leg=None, decode_leg=None)
        assert requests.request(record, now=world.now, tz=UTC).legs.empty == words


class TestPredictedTtft:
    def test_what_follows_prefill_stands_between_the_sum_and_the_prediction(
        self, world: Any
    ) -> None:
        record = world.decision(1)
        chosen = next(c for c in record.prefill_candidates if c.worker_id == record.prefill_worker)
        rest = (record.predicted_ttft_seconds - chosen.ttft_seconds) * 1000
        context = requests.request(record, now=world.now, tz=UTC).context
        assert f"SUM + {rest:.0f} ms after prefill = predicted TTFT 402 ms" in context

    def test_of_a_rejected_one_it_is_the_best_candidate(self, world: Any) -> None:
        record = world.decision(1, status="rejected", prefill_worker="", decode_worker="")
        best = min(c.ttft_seconds for c in record.prefill_candidates)
        rest = (record.predicted_ttft_seconds - best) * 1000
        assert f"SUM + {rest:.0f} ms" in requests.request(record, now=world.now, tz=UTC).context
        bare = record.model_copy(update={"predicted_ttft_seconds": None})
        assert "SUM" not in requests.request(bare, now=world.now, tz=UTC).context


def test_a_worker_that_took_over_and_the_one_chosen_first_both_say_so(world: Any) -> None:
    record = world.decision(1, retries=1, prefill_worker="p1", decode_worker="d5")
    view = requests.request(record, now=world.now, tz=UTC)
    verdicts = {
        row.cells[1].text: (row.cells[0].text, row.cells[-1].text) for row in view.prefill.rows
    }
    assert verdicts["p3"] == ("", "chosen first")
    assert verdicts["p1"] == (">", "took it; 24 ms slower: transfer")
    assert "SUM + 189 ms after prefill = predicted TTFT 402 ms" in view.context, (
        "of p3, as predicted"
    )
    assert [row.cells[-1].text for row in view.decode.rows] == ["chosen"]
