"""The doctor's report: findings first, by node and by pair; how old it is; the bound; the act."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Any

import pytest

from console.viewmodel import acts, doctor
from controlplane.doctor.plan import MAX_PAIRS
from controlplane.doctor.schemas import DoctorReport, DoctorRun

NODES = ("n1", "n2", "n3")


def head(world: Any, report: DoctorReport | None, nodes: int = 3) -> doctor.DoctorHead:
    known = [world.node(number) for number in range(nodes)]
    return doctor.head(report, now=world.now, tz=UTC, nodes=known)


def test_findings_are_all_that_is_not_ok_worst_first(world: Any) -> None:
    table = doctor.checks(world.doctor_of(world.at, NODES), "findings")
    assert [row.facts["state"] for row in table.rows] == ["fail", "warn", "warn"]
    first = [text.text for text in table.rows[0].cells]
    assert first[:3] == ["FAIL", "n1 -> n3", "tcp.large"]
    assert first[5] == "Compare `ip link` at both ends and the switch."
    assert table.rows[0].opens == "transfers/n1/n3"
    assert table.rows[2].opens == "node/n1"


def test_by_node_and_by_pair_the_failing_ones_first(world: Any) -> None:
    report = world.doctor_of(world.at, NODES)
    assert [g.title for g in doctor.groups(report, "nodes")] == ["n1", "n2", "n3"]
    pairs = doctor.groups(report, "pairs")
    assert [(g.title, g.state.text) for g in pairs] == [("n1 -> n3", "FAIL"), ("n3 -> n1", "ok")]
    assert pairs[0].summary == "1 fail, 1 warn, 1 ok, moves 1.5 GB/s"
    assert [column.key for column in pairs[0].checks.columns] == ["state", "check", "value", "wanted", "what"]  # fmt: skip
    # nothing is wanted of checks that are well: no empty columns
    assert [column.key for column in pairs[1].checks.columns] == ["state", "check", "value"]


def test_checks_of_one_name_keep_their_own_keys(world: Any) -> None:
    report = world.doctor_of(world.at, NODES)
    twice = report.nodes[0].model_copy(
        update={"checks": [world.check("transfers.alarm", "warn")] * 3}
    )
    rows = doctor.checks(report.model_copy(update={"nodes": [twice]}), "nodes").rows
    assert len({row.key for row in rows}) == 3


@pytest.mark.parametrize(
    ("changes", "words", "tone"),
    [
        ({}, "Run 3 by ana, 13:05:56, ended 1 min ago, took 4.00 s", "strong"),
        ({"state": "running", "finished_at": None, "done": 2}, "is under way since 13:05:56: 2 of 5 answers are in", "accent"),
        ({"state": "failed", "error": "It took more than 300 s."}, "did not come to its end 1 min ago: It took more than 300 s.", "critical"),
    ],
)  # fmt: skip
def test_how_the_run_went(changes: Any, words: str, tone: str, world: Any) -> None:
    found = head(world, world.doctor_of(world.at, NODES, **changes))
    assert words in found.state.text
    assert found.state.tone == tone
    assert (found.progress is not None) == ("done" in changes)


def test_an_old_report_says_so(world: Any) -> None:
    then = world.at - timedelta(hours=3)
    found = head(world, world.doctor_of(then, NODES))
    assert found.state.tone == "stale"
    assert found.state.text.startswith("~ Run 3")
    assert "ended 3 h ago" in found.state.text


def test_never_run_and_not_yet_read_are_told_apart(world: Any) -> None:
    assert head(world, DoctorReport()).state.text == doctor.NEVER
    assert head(world, None).state.text == doctor.NOT_YET
    assert doctor.checks(DoctorReport(), "findings").empty == doctor.LOOKS_AT
    report = world.doctor_of(world.at, NODES).model_copy(update={"nodes": [], "pairs": []})
    assert doctor.checks(report, "findings").empty.startswith("No node answered")


def test_all_well(world: Any) -> None:
    report = world.doctor_of(world.at, NODES)
    well = report.model_copy(update={"nodes": report.nodes[1:], "pairs": report.pairs[1:]})
    assert doctor.checks(well, "findings").empty == doctor.ALL_WELL


def test_counts_and_what_was_left_out(world: Any) -> None:
    found = head(world, world.doctor_of(world.at, NODES, pairs_left_out=12), nodes=14)
    assert [text.text for text in found.counts] == ["1 fail", "2 warn", "0 unknown", "8 ok"]
    assert [text.tone for text in found.counts] == ["critical", "warn", "muted", "well"]
    assert "3 of 14 nodes, 2 pairs checked; 12 pairs were not probed" in found.scope.text
    part = head(world, world.doctor_of(world.at, NODES), nodes=14)
    assert part.scope.text.endswith("the run was of a part")


def test_the_bound_is_held_against_the_slowest_pair(world: Any) -> None:
    report = world.doctor_of(world.at, NODES)
    bound = doctor.bound_text(report)
    assert bound.text == (
        "disaggregation needs 38 Gbps (131,072 bytes a token x 36,200 tokens/s, measured); "
        "the slowest pair, n1 -> n3, has 12 Gbps!"
    )
    assert bound.tone == "warn"
    faster = report.model_copy(update={"pairs": report.pairs[1:]})
    assert doctor.bound_text(faster).tone == "plain"
    assert "no pair was measured" in doctor.bound_text(report.model_copy(update={"pairs": []})).text
    assert "256 tokens" in doctor.bound_text(report.model_copy(update={"bound": None})).text


def test_c12_a_pair_without_a_path_is_named_by_both_ends(world: Any) -> None:
    table = doctor.checks(world.doctor_of(world.at, NODES), "findings")
    assert "n3 cannot reach n1 over tcp" in table.rows[0].cells[3].text


def test_what_a_run_will_do(world: Any) -> None:
    act = acts.run_doctor(DoctorReport(), 3)
    assert isinstance(act, acts.Act)
    assert act.body == DoctorRun()
    assert "3 nodes are asked for facts; 6 pairs probe each other" in act.lines[0].text
    many = acts.run_doctor(None, 100)
    assert isinstance(many, acts.Act)
    assert "128 pairs probe each other, 9,772 pairs are left out" in many.lines[0].text
    assert acts.MAX_PROBED_PAIRS == MAX_PAIRS
    pair = acts.run_doctor(world.doctor_of(world.at, NODES), 3, pair=("n1", "n2"))
    assert isinstance(pair, acts.Act)
    assert isinstance(pair.body, DoctorRun)
    assert pair.body.pair == "n1:n2"
    assert "replaces that of run 3" in pair.lines[-1].text


def test_why_no_run_can_begin(world: Any) -> None:
    running = world.doctor_of(world.at, NODES, state="running", done=2)
    assert acts.run_doctor(running, 3) == "Run 3 is under way (2 of 5 answers): it ends by itself."
    assert acts.run_doctor(None, 0) == "No node has joined: there is nothing to look at."
