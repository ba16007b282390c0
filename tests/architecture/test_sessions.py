"""While a database session is open nothing else is awaited: an agent that is stopped costs no
connection, and nobody waits behind it for the write lock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "controlplane").rglob("*.py"))
OPENERS = ("db.read()", "db.write()")
SESSIONS = ("session", "tx", "tx.session")
WAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)


def waits_in_sessions(tree: ast.AST) -> Iterator[ast.AST]:
    for block in ast.walk(tree):
        if isinstance(block, ast.AsyncWith) and any(
            ast.unparse(item.context_expr).endswith(OPENERS) for item in block.items
        ):
            for statement in block.body:
                yield from (node for node in ast.walk(statement) if isinstance(node, WAITS))


def is_of_database(wait: ast.AST) -> bool:
    """A call of the session's, or one that is given the session or the transaction."""
    if not isinstance(wait, ast.Await) or not isinstance(wait.value, ast.Call):
        return False
    called, given = wait.value.func, wait.value.args
    of_session = isinstance(called, ast.Attribute) and ast.unparse(called.value) in SESSIONS
    return of_session or (bool(given) and ast.unparse(given[0]) in SESSIONS)


def test_only_the_database_is_awaited_in_a_session() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{wait.lineno}": is_of_database(wait)  # type: ignore[attr-defined]
        for path in SOURCES
        for wait in waits_in_sessions(ast.parse(path.read_text()))
    }
    assert len(found) > 30, "the blocks are not found any more"
    assert not [place for place, fine in found.items() if not fine]


@pytest.mark.parametrize(
    ("line", "fine"),
    [
        ("await session.execute(query)", True),
        ("await plane.audit.record(tx, actor=name)", True),
        ("await prune(tx.session, 5)", True),
        ("await agent.call(Holds(keys), HoldsReply)", False),
        ("await asyncio.sleep(1)", False),
        ("async for change in feed: pass", False),
        ("async with open_agent(target) as agent: pass", False),
    ],
)
def test_the_rule_sees(line: str, fine: bool) -> None:
    source = f"async def f():\n  async with self._plane.db.write() as tx:\n    {line}"
    [wait] = waits_in_sessions(ast.parse(source))
    assert is_of_database(wait) is fine
