"""One pair of the transfer matrix: of nodes by path, class and stage; of workers with its requests."""

from __future__ import annotations

from collections.abc import Sequence

from console.tui.context import Context
from console.tui.keys import RUN_DOCTOR, Key
from console.tui.pages.base import Location
from console.tui.pages.detail import DetailPage
from console.viewmodel import acts
from console.viewmodel.acts import Act
from console.viewmodel.state import Snapshot
from console.viewmodel.transfers import is_node_pair


class PairPage(DetailPage):
    """Enter goes on to the pair's requests."""

    def __init__(self) -> None:
        super().__init__("pair")
        self._snapshot = Snapshot()

    @property
    def ends(self) -> tuple[str, str]:
        """Source and destination."""
        source, _, target = self.name_shown.partition("/")
        return source, target

    @property
    def of_nodes(self) -> bool:
        """Not a pair of workers."""
        return is_node_pair(*self.ends, self._snapshot.matrix, self._snapshot.nodes)

    @property
    def keys(self) -> Sequence[Key]:  # type: ignore[override]  # nodes can be probed
        """Those of the kind of pair."""
        return (RUN_DOCTOR,) if self.of_nodes else ()

    @property
    def wanted(self) -> frozenset[str]:
        """The report on this pair, and what the doctor said of it."""
        if not self.of_nodes:
            return frozenset()
        return frozenset({"doctor", f"pair:{'>'.join(self.ends)}"})

    def show_context(self, context: Context) -> None:
        """Draw the pair anew."""
        self._snapshot = context.snapshot
        super().show_context(context)

    def opens(self) -> tuple[str, Location | None]:
        """The requests that went this way."""
        source, target = self.ends
        if not self.of_nodes:
            return "requests of the pair", Location("requests", filter=f"prefill={source} decode={target}")  # fmt: skip
        workers = self._snapshot.workers
        prefill = "|".join(w.id for w in workers if w.node_id == source and w.role != "decode")
        decode = "|".join(w.id for w in workers if w.node_id == target and w.role != "prefill")
        if not prefill or not decode:
            return "", None
        return "requests of the pair", Location("requests", filter=f"prefill={prefill} decode={decode}")  # fmt: skip

    def act_on(self, action: str) -> Act | str:
        """Probe this pair, both ways."""
        if not self.of_nodes:
            return "Workers are not probed: their nodes are."
        source, target = self.ends
        if source == target:
            return "A node is no pair with itself."
        return acts.run_doctor(
            self._snapshot.doctor, len(self._snapshot.nodes), pair=(source, target)
        )
