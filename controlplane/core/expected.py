"""Blocks that prompts on their way will leave behind: nodes tell of them only when they are stored.

A request that continues such a prompt, on the node where that waits or runs, finds its blocks by
the time its own turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_LEGS: Final = 4096
Change = tuple[str, str, Sequence[bytes]]
"""Leg, node, and its keys; none: it has ended."""


@dataclass(slots=True)
class ExpectedBlocks:
    """Chains of the prefill legs in flight, by node. A chain's keys name all that comes before."""

    _legs: dict[str, tuple[str, Sequence[bytes]]] = field(default_factory=dict)
    _counts: dict[bytes, dict[str, int]] = field(default_factory=dict)  # key -> node -> legs
    changes: deque[Change] | None = None  # for other gateways, where somebody wants them

    def __len__(self) -> int:
        return len(self._legs)

    def start(self, leg: str, node_id: str, keys: Sequence[bytes]) -> None:
        """`leg` is on its way to `node_id`; beyond `MAX_LEGS` it is not counted."""
        known = self._legs.get(leg)
        if known is not None and known[0] == node_id and known[1] is keys:
            return
        self.end(leg)
        if keys and self.hear(leg, node_id, keys) and self.changes is not None:
            self.changes.append((leg, node_id, keys))

    def hear(self, leg: str, node_id: str, keys: Sequence[bytes]) -> bool:
        """Another gateway's leg, new; whether it counts."""
        if len(self._legs) >= MAX_LEGS or leg in self._legs:
            return False
        self._legs[leg] = (node_id, keys)
        for key in keys:
            nodes = self._counts.get(key)
            if nodes is None:
                self._counts[key] = {node_id: 1}
            else:
                nodes[node_id] = nodes.get(node_id, 0) + 1

        return True

    def end(self, leg: str) -> None:
        """It has ended, one way or another. Idempotent."""
        node_id = self.forget(leg)
        if node_id and self.changes is not None:
            self.changes.append((leg, node_id, ()))

    def forget(self, leg: str) -> str:
        """Another gateway's leg; the node it was on its way to. Idempotent."""
        known = self._legs.pop(leg, None)
        if known is None:
            return ""
        node_id, keys = known
        for key in keys:
            nodes = self._counts[key]
            if nodes[node_id] > 1:
                nodes[node_id] -= 1
            elif len(nodes) > 1:
                del nodes[node_id]
            else:
                del self._counts[key]
        return node_id

    def lengths(self, keys: Sequence[bytes]) -> dict[str, int]:
        """For each node that some leg of these is on its way to: how many keys from the head."""
        if not self._counts or not keys or keys[0] not in self._counts:
            return {}
        found: dict[str, int] = {}
        for node_id in self._counts[keys[0]]:
            low, high = 1, len(keys)  # the first `low` are on their way there
            while low < high:
                middle = (low + high + 1) // 2
                if node_id in self._counts.get(keys[middle - 1], ()):
                    low = middle
                else:
                    high = middle - 1
            found[node_id] = low
        return found

    def check_integrity(self) -> None:
        """Counts are those of the legs."""
        counted: dict[bytes, dict[str, int]] = {}
        for node_id, keys in self._legs.values():
            for key in keys:
                nodes = counted.setdefault(key, {})
                nodes[node_id] = nodes.get(node_id, 0) + 1
        assert counted == self._counts
        assert len(self._legs) <= MAX_LEGS
