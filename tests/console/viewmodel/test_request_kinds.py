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
