"""Workers whose node has fallen silent, kept in service where nobody else could take their place.

A node counts as lost when its agent has said nothing for a while, and its workers with it. They may
serve all the same: an agent that is restarted or stopped takes no engine with it. Whether they do is
what their legs show; one that cannot be reached is ejected like any other.
"""

from collections.abc import Iterable, Sequence

import msgspec
import structlog

from controlplane.gateway.wire import ViewWorker

log = structlog.get_logger(__name__)


class Orphans:
    """`keep` takes each view's workers in turn."""

    def __init__(self) -> None:
        self._were_ready: set[str] = set()  # when their node was heard last
        self._kept: set[str] = set()

    def keep(self, rows: Sequence[ViewWorker]) -> list[ViewWorker]:
        """The rows; a lost worker that was ready stays so where its model and role lack another."""
        for row in rows:
            if row.state == "ready":
                self._were_ready.add(row.id)
            elif row.state != "lost":
                self._were_ready.discard(row.id)
        self._were_ready &= {row.id for row in rows}
        served = {key for row in rows if row.state == "ready" for key in _serves(row)}
        kept = {
            row.id
            for row in rows
            if row.state == "lost"
            and row.id in self._were_ready
            and not served.issuperset(_serves(row))
        }
        if kept != self._kept:
            log.warning(
                "lost_workers_kept", workers=sorted(kept),
                reason="their nodes are silent, and nobody else serves in their place",
            )  # fmt: skip
            self._kept = kept
        if not kept:
            return list(rows)
        as_ready = msgspec.structs.replace
        return [as_ready(row, state="ready") if row.id in kept else row for row in rows]


def _serves(row: ViewWorker) -> Iterable[tuple[str, str]]:
    roles = ("prefill", "decode") if row.role == "both" else (row.role,)
    return [(row.model, role) for role in roles]
