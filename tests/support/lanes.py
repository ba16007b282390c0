"""How test processes share the work: whole files, so that what a file starts is started once."""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

LANES: Final = ("vm", "soaks", "netns", "processes", "chromium", "etcd", "tmux")
"""Groups of tests (`xdist_group`) that take minutes, the longest first: they begin at once, since
they mostly wait, and other files fill the gaps. Two tests of a group never run side by side."""


class Lanes(LoadGroupScheduling):
    """A process gets a whole group or file at a time."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return scope.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
        super()._assign_work_unit(node)


def rank(scope: str) -> int:
    return LANES.index(scope) if scope in LANES else len(LANES)
