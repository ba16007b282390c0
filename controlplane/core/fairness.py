"""Deficit round robin between tenants, over uncached tokens (Shreedhar and Varghese, 1995).

What a leg costs is what prefill computes for it. A tenant is served while its deficit covers its
next leg; each visit adds a quantum times its weight. Two tenants that both wait are never further
apart, by their weights, than one quantum and the dearest leg of each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

MIN_COST_TOKENS = 16
"""Even a prompt that is cached whole takes a place in a batch."""
DEFAULT_WEIGHT = 1.0


class QueuedLeg(msgspec.Struct, frozen=True, gc=False):
    """A prefill leg that waits or runs. `rank` 0 is the highest priority class."""

    request_id: str
    tokens: int  # uncached, to be computed
    seconds: float  # predicted
    rank: int = 0
    hit: bool = False
    tenant: str = ""

    @property
    def cost(self) -> int:
        return max(self.tokens, MIN_COST_TOKENS)


@dataclass(slots=True)
class _Line:
    """One tenant's legs, first come first."""

    legs: deque[QueuedLeg] = field(default_factory=deque)
    deficit: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class TenantRounds:
    """Who of the waiting tenants is next. `peek` changes nothing that another `peek` would see."""

    quantum_tokens: float
    weights: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # predicted, of all that wait
    num_waiting: int = 0
    _lines: dict[str, _Line] = field(default_factory=dict)
    _turns: deque[str] = field(default_factory=deque)

    def push(self, leg: QueuedLeg) -> None:
        line = self._lines.get(leg.tenant)
        if line is None:
            line = self._lines[leg.tenant] = _Line()
            self._turns.append(leg.tenant)
        line.legs.append(leg)
        line.seconds += leg.seconds
        self.seconds += leg.seconds
        self.num_waiting += 1

    def peek(self) -> QueuedLeg | None:
        """The next leg; None when nobody waits."""
        if not self._turns:
            return None
        if len(self._turns) == 1:
            line = self._lines[self._turns[0]]
            line.deficit = max(line.deficit, float(line.legs[0].cost))
            return line.legs[0]
        while True:
            for _ in range(len(self._turns)):
                line = self._lines[self._turns[0]]
                if line.deficit < line.legs[0].cost:
                    line.deficit += self._quantum(self._turns[0])
                if line.deficit >= line.legs[0].cost:
                    return line.legs[0]
                self._turns.rotate(-1)
            self._skip_rounds()

    def pop(self) -> QueuedLeg:
        """Take the leg that `peek` shows."""
        leg = self.peek()
        assert leg is not None, "nobody waits"
        line = self._lines[leg.tenant]
        line.legs.popleft()
        line.deficit -= leg.cost
        self._left(leg, line)
        if line.legs and line.deficit < line.legs[0].cost:
            self._turns.rotate(-1)
        return leg

    def remove(self, leg: QueuedLeg) -> None:
        """It stops waiting."""
        line = self._lines[leg.tenant]
        line.legs.remove(leg)
        self._left(leg, line)

    def newest(self) -> QueuedLeg:
        """The last leg of whoever has most waiting: the first to be shed."""
        longest = max(self._lines.values(), key=lambda line: line.seconds)
        return longest.legs[-1]

    def ahead_seconds(self, tenant: str, seconds: float) -> float:
        """Predicted seconds served before a new leg of `tenant` that takes `seconds` itself: its
        own line, and of each other line at most what the tenant gets in the same rounds."""
        own = self._lines.get(tenant)
        mine = own.seconds if own is not None else 0.0
        weight = self._weight(tenant)
        ahead = mine
        for name, line in self._lines.items():
            if name != tenant:
                ahead += min(line.seconds, (mine + seconds) * self._weight(name) / weight)
        return ahead

    def legs(self) -> list[QueuedLeg]:
        return [leg for line in self._lines.values() for leg in line.legs]

    def check_integrity(self) -> None:
        assert sorted(self._turns) == sorted(self._lines), "a line without a turn"
        assert all(line.legs for line in self._lines.values()), "an empty line is left"
        assert self.num_waiting == sum(len(line.legs) for line in self._lines.values())
        assert all(line.deficit >= 0 for line in self._lines.values()), "a debt"

    def _left(self, leg: QueuedLeg, line: _Line) -> None:
        line.seconds -= leg.seconds
        self.seconds -= leg.seconds
        self.num_waiting -= 1
        if not line.legs:  # credit ends with the line, else idle tenants would save it up
            del self._lines[leg.tenant]
            self._turns.remove(leg.tenant)
        if not self._lines:
            self.seconds = 0.0  # what rounding left

    def _skip_rounds(self) -> None:
        """All rounds at once in which nobody would be served."""
        rounds = min(
            math.ceil((line.legs[0].cost - line.deficit) / self._quantum(name))
            for name, line in self._lines.items()
        )
        for name, line in self._lines.items():
            line.deficit += max(0, rounds - 1) * self._quantum(name)

    def _quantum(self, tenant: str) -> float:
        return self.quantum_tokens * self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, DEFAULT_WEIGHT)
