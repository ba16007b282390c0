"""When a node counts as ready, stale or lost. Pure."""

from __future__ import annotations

from controlplane.nodes.schemas import NodeState

READY_SECONDS = 3.0
LOST_SECONDS = 10.0


def node_state(age_seconds: float) -> NodeState:
    """By the age of the last heartbeat: under 3 s ready, under 10 s stale, else lost."""
    if age_seconds < READY_SECONDS:
        return "ready"
    return "stale" if age_seconds < LOST_SECONDS else "lost"


class Grace:
    """Silence that may be our own is held against nobody.

    After a start, and after this process itself stood still, nodes have had no chance to be
    heard: for a while none becomes lost that was not lost before.
    """

    def __init__(self, now: float, seconds: float = LOST_SECONDS) -> None:
        self._until = now + seconds
        self._looked_at = now

    def look(self, now: float, stalled_after: float = READY_SECONDS) -> bool:
        """True while grace holds; call it at every sweep."""
        if now - self._looked_at > stalled_after:
            self._until = max(self._until, now + READY_SECONDS)
        self._looked_at = now
        return now < self._until
