"""Snapshot and events into one state."""

from __future__ import annotations

from typing import Any

from console.viewmodel.state import MAX_DECISIONS, ConsoleState
from controlplane.events.schemas import Event


def event(kind: str, data: dict[str, object]) -> Event:
    return Event.model_validate({"id": "b-1", "type": kind, "data": data})


def dump(row: Any) -> dict[str, object]:
    found: dict[str, object] = row.model_dump(mode="json")
    return found


def test_a_tick_brings_overview_points_and_time(world: Any) -> None:
    state = ConsoleState()
    data = {
        "at": world.now,
        "overview": dump(world.overview),
        "points": {"cluster": {"requests": 3}},
    }
    assert state.apply(event("tick", data), 50.0) == {"overview", "history"}
    snapshot = state.snapshot()
    assert snapshot.received == 50.0
    assert snapshot.server_now(52.0) == world.now + 2
    assert state.history.frame(("requests",), "cluster").series[0].values[-1] == 3


def test_a_later_record_of_a_request_wins_and_keeps_its_place(world: Any) -> None:
    state = ConsoleState()
    first = world.decision(1, status="running", ttft_seconds=None)
    state.apply(event("decision", dump(first)), 1.0)
    state.apply(event("decision", dump(world.decision(2))), 1.0)
    state.apply(event("decision", dump(world.decision(1))), 2.0)
    rows = state.snapshot().decisions
    assert [row.status for row in rows] == ["finished_stop", "finished_stop"]
    assert rows[0].request_id == first.request_id


def test_e12_requests_are_bounded(world: Any) -> None:
    state = ConsoleState()
    for number in range(MAX_DECISIONS + 20):
        state.apply(event("decision", dump(world.decision(number))), 1.0)
    rows = state.snapshot().decisions
    assert len(rows) == MAX_DECISIONS
    assert rows[-1].request_id == world.decision(MAX_DECISIONS + 19).request_id


def test_e02_a_returned_node_keeps_its_one_row(world: Any) -> None:
    state = ConsoleState()
    for incarnation in range(1, 7):
        node = world.node(1, incarnation=incarnation, restarts=incarnation - 1)
        state.apply(event("node", dump(node)), 1.0)
    nodes = state.snapshot().nodes
    assert [(n.id, n.restarts) for n in nodes] == [("node-01", 5)]


def test_e04_a_removed_node_takes_its_workers_along(world: Any) -> None:
    state = ConsoleState()
    state.load(1.0, nodes=world.nodes, workers=world.workers)
    assert state.apply(event("node_removed", {"id": "node-01"}), 2.0) == {"nodes", "workers"}
    snapshot = state.snapshot()
    assert "node-01" not in {node.id for node in snapshot.nodes}
    assert "p1" not in {worker.id for worker in snapshot.workers}


def test_reset_asks_for_everything_again() -> None:
    assert ConsoleState().apply(event("reset", {}), 1.0) == {"reset"}


def test_an_event_that_does_not_fit_is_counted_not_raised(world: Any) -> None:
    state = ConsoleState()
    assert state.apply(event("node", {"id": "x", "unheard": 1}), 1.0) == frozenset()
    assert state.apply(event("tick", {}), 1.0) == frozenset()
    assert state.apply(event("node_removed", {}), 1.0) == frozenset()
    assert state.snapshot().bad_events == 3


def test_only_active_policies_are_shown(world: Any) -> None:
    state = ConsoleState()
    state.load(1.0, policies=world.policies)
    draft = world.policy("slo", 42, {"mode": "off"}, active=False)
    state.apply(event("policy", dump(draft)), 1.0)
    assert {p.kind: p.revision for p in state.snapshot().policies}["slo"] == 41
    state.apply(event("policy", dump(draft.model_copy(update={"active": True}))), 1.0)
    assert {p.kind: p.revision for p in state.snapshot().policies}["slo"] == 42


def test_age_of_a_row_grows_until_it_is_heard_of_again(world: Any) -> None:
    state = ConsoleState()
    state.load(10.0, nodes=[world.node(1)])
    assert state.snapshot().age_of("node:node-01", 0.4, 15.0) == 5.4
