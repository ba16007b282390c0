"""Verbs that print the console's view models: the same words as the screens."""

from __future__ import annotations

from typing import Any

from request_objects import make_gateways

from console import get
from console.text import table_text
from console.viewmodel import running
from controlplane.decisions.schemas import ObservedPlacement


def test_what_runs_reads_as_on_the_screen(world: Any) -> None:
    text = get._running(world.running)
    assert text.startswith("REQUEST ")
    table = running.running(world.running)
    for row in table.rows:
        line = next(line for line in text.splitlines() if row.cells[0].text in line)
        assert all(cell.text in line for cell in row.cells)
    assert "1 stuck: 00000001" in text


def test_ids_are_whole_as_the_other_verbs_take_them(world: Any) -> None:
    text = get._running(world.running)
    for item in world.running.items:
        assert any(line.startswith(f"{item.request_id} ") for line in text.splitlines())
    stuck = next(item for item in world.running.items if item.stuck)
    assert f"1 stuck: {stuck.request_id} waits" in text
    turned_away = get._ledger(world.ledger, world.summary, world.policies)
    assert all(f" {entry.request_id} " in turned_away for entry in world.ledger.items)


def test_the_ledger_ends_with_what_it_comes_to(world: Any) -> None:
    text = get._ledger(world.ledger, world.summary, world.policies)
    assert "1,190 by slo/default r41 (TTFT), in force since" in text
    assert "rejected wrongly: 12.1 % of 58 probes (95 %: 6.0 to 22.9 %)" in text
    assert "interactive" in text


def test_health_names_who_is_left_out(world: Any) -> None:
    text = get._health(make_gateways(world.at))
    assert "ejected, trial in 4.2 s" in text
    assert "left out after failures: d5 at gw-1" in text
    assert get._health([]).splitlines()[0] == "No gateway has reported yet."


def test_columns_stay_under_their_labels(world: Any) -> None:
    lines = table_text(running.running(world.running)).splitlines()
    at = lines[0].index("THEN")
    assert all(line[at - 1] == " " and line[at] != " " for line in lines[1:])


def test_a_request_in_full_has_every_term_and_remark(world: Any) -> None:
    other = ObservedPlacement(algorithm="mooncake", worker_id="p1", predicted_ttft_seconds=0.237)
    text = get._request(
        world.decision(1, status="rejected", error="predicted TTFT 2.31 s > 2.00 s",
                       http_status=429, retry_after_seconds=3.0, observed_placement=other)
    )  # fmt: skip
    for part in (
        "00000001cafe4711", "Retry-After 3.00 s", "slo/default r41", "8,192", "54 ms",
        "24 ms slower: transfer", "mooncake would have chosen p1", "handover", "4.22 s",
    ):  # fmt: skip
        assert part in text, part
