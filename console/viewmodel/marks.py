"""Events under a time axis: one letter a column, a digit where there are more."""

from __future__ import annotations

from collections.abc import Sequence

from console.viewmodel.heatmap import HeatColumn
from console.viewmodel.state import Snapshot

LETTERS = {"policy": "P", "worker.restart": "R", "worker.drain": "D", "worker.resume": "D"}


def events_of(columns: Sequence[HeatColumn], snapshot: Snapshot) -> dict[str, str]:
    """Column key to its mark: P policy, R restart, D drain, J joined, L lost; `2`-`9` for several."""
    found: dict[str, list[str]] = {}
    for at, letter in _events(snapshot):
        key = _column_at(columns, at)
        if key is not None:
            found.setdefault(key, []).append(letter)
    return {
        key: letters[0] if len(letters) == 1 else str(min(9, len(letters)))
        for key, letters in found.items()
    }


def _events(snapshot: Snapshot) -> list[tuple[float, str]]:
    events: list[tuple[float, str]] = []
    for row in snapshot.audit:
        letter = LETTERS.get(row.verb) or LETTERS.get(row.verb.partition(".")[0])
        if letter and row.result == "ok":
            events.append((row.at.timestamp(), letter))
    for node in snapshot.nodes:
        events.append((node.joined_at.timestamp(), "J"))
        if node.state == "lost":
            events.append((node.last_heartbeat_at.timestamp(), "L"))
    return events


def _column_at(columns: Sequence[HeatColumn], at: float) -> str | None:
    for column in columns:
        if column.start is not None and column.end is not None and column.start <= at < column.end:
            return column.key
    return None
