"""Revisions of a policy, each with what it changed."""

from __future__ import annotations

from datetime import UTC
from typing import Any

from console.viewmodel import policy_history

REASON = 5


def shown(world: Any, *revisions: Any) -> list[list[str]]:
    table = policy_history.history(revisions, now=world.now, tz=UTC)
    return [[cell.text for cell in row.cells] for row in table.rows]


def test_each_says_what_it_changed_against_the_one_before(world: Any) -> None:
    old = world.policy("slo", 1, {"mode": "observe", "max_ttft_ms": 10000}, active=False)
    new = world.policy("slo", 2, {"mode": "enforce", "max_ttft_ms": 300}, reason="")
    rows = shown(world, old, new)
    assert [row[:2] for row in rows] == [["r2", "active"], ["r1", ""]]
    assert rows[0][4] == "mode observe -> enforce, max_ttft_ms 10000 -> 300"
    assert rows[1][4] == "first"
    table = policy_history.history([old, new], now=world.now, tz=UTC)
    assert [text.text for text in policy_history.in_full(table.rows[0])] == [
        f"r2  {rows[0][4]}",
        "no reason given",
    ]


def test_the_oldest_that_was_read_is_not_called_the_first(world: Any) -> None:
    rows = shown(world, world.policy("slo", 41, {"mode": "observe"}))
    assert rows[0][4] == "--", "r40 was not read: what r41 changed is not known"
