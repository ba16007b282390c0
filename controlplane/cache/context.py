"""What a running cache operation is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.cache.agents import NodeError, Target, first_problem, targets
from controlplane.clock import Clock
from controlplane.jobs.service import Outcome
from controlplane.nodes.service import NodeRegistry


@dataclass(slots=True)
class JobContext:
    """One attempt at one job. `by_node` and `undo` fill as it goes on: a cancelled job has them
    too."""

    job_id: int
    spec: dict[str, Any]
    attempts: int
    nodes: NodeRegistry
    clock: Clock
    tell: Callable[[int, int | None, str], None]
    by_node: dict[str, dict[str, object]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    undo: dict[str, object] = field(default_factory=dict)
    done: int = 0
    total: int | None = None

    def progress(self, more: int, note: str = "") -> None:
        self.done += more
        self.tell(self.done, self.total, note)

    def expect(self, more: int) -> None:
        """So many blocks are to come besides those expected so far; fewer if negative."""
        self.total = (self.total or 0) + more
        self.tell(self.done, self.total, "")

    def targets(self) -> list[Target]:
        """Where to act; NodeError where there is nowhere."""
        found = targets(self.nodes, self.spec.get("node"))
        if not found:
            raise NodeError("any", "", "no node is known that is not lost", "perilune get nodes.")
        return found

    async def on_each(self, act: Callable[[Target], Awaitable[dict[str, object]]]) -> None:
        """Act on every target, one after another; one that fails holds up no other."""
        for target in self.targets():
            try:
                self.by_node[target.node] = await act(target)
            except NodeError as error:
                self.problems[target.node] = str(error)

    def sum(self, figure: str) -> int:
        values = (figures.get(figure, 0) for figures in self.by_node.values())
        return sum(value for value in values if isinstance(value, int))

    def outcome(self, undo: Mapping[str, object], **figures: object) -> Outcome:
        """By node and in sum; failed where a node was."""
        self.undo = dict(undo)
        error = first_problem(self.problems) if self.problems else ""
        result: dict[str, object] = {**figures, "nodes": self.by_node}
        return Outcome(result, self.undo, error)


Operation = Callable[[JobContext], Awaitable[Outcome]]


class OperationError(Exception):
    """The operation cannot do what was asked; the text says why and the way out."""
