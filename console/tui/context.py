"""What a page draws from: one frozen instant, the same for every page and for plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import Protocol, TypeVar

from console.tui.caps import Caps
from console.viewmodel import filters, freshness
from console.viewmodel.history import History
from console.viewmodel.state import Snapshot
from console.viewmodel.table import Row, Table
from controlplane.audit.schemas import AuditList
from controlplane.calls import Call
from controlplane.decisions.schemas import Decision, DecisionList
from controlplane.fleet.schemas import Worker
from controlplane.gateways.schemas import Gateway
from controlplane.nodes.schemas import Node
from controlplane.policies.schemas import PolicyList, PolicyPut, PolicyPutReply, PolicyRevision
from controlplane.stats.schemas import Matrix, Overview, SeriesReply

T = TypeVar("T")


class Source(Protocol):
    """The calls of `controlplane.client.AsyncClient` that a console makes.

    Each raises `ClientError` (`UnreachableError` without an answer) and is bounded in time.
    """

    url: str

    async def send(self, call: Call[T]) -> T: ...
    async def overview(self, window: float = 900) -> Overview: ...
    async def nodes(self) -> list[Node]: ...
    async def workers(self) -> list[Worker]: ...
    async def gateways(self) -> list[Gateway]: ...
    async def policies(self) -> list[PolicyRevision]: ...
    async def policy(self, kind: str, scope: str) -> PolicyRevision: ...
    async def policy_revisions(
        self, kind: str, scope: str, limit: int | None = None, cursor: str | None = None
    ) -> PolicyList: ...
    async def put_policy(
        self, kind: str, scope: str, body: PolicyPut, if_match: int | None = None
    ) -> PolicyPutReply: ...
    async def decisions(self, *, limit: int | None = None) -> DecisionList: ...
    async def decision(self, request_id: str) -> Decision: ...
    async def audit(self, *, limit: int | None = None) -> AuditList: ...
    async def matrix(self, window: float = 300) -> Matrix: ...
    async def series(
        self,
        metric: str,
        source: str = "cluster",
        window: float = 900,
        step: float = 10,
        end: float | None = None,
    ) -> SeriesReply: ...


@dataclass(frozen=True, slots=True)
class Context:
    """`now` is the monotonic clock, `server_now` the control plane's time since the epoch."""

    snapshot: Snapshot
    history: History
    now: float
    server_now: float
    tz: tzinfo
    fresh: freshness.Freshness
    caps: Caps = field(default_factory=Caps)
    can_act: bool = False
    is_operator: bool = False  # has a token; may still not act while a moment is held
    width: int = 80
    height: int = 24
    problem: str = ""  # why there is no answer, in one sentence

    @property
    def stale(self) -> bool:
        """Values must look old."""
        return self.fresh.is_stale

    @property
    def loading(self) -> str:
        """What is waited for, while nothing has come yet."""
        if self.snapshot.overview is not None:
            return ""
        return self.problem or "Waiting for the control plane's first answer."


@dataclass(slots=True)
class Filtered:
    """A page's filter and how much of its table it leaves."""

    filter: filters.Filter = field(default_factory=filters.Filter)
    shown: int = 0
    total: int = 0

    def apply(self, table: Table, *, empty: str = "") -> Table:
        """The rows that match; what is empty because of the filter says so."""
        rows: Sequence[Row] = self.filter.apply(table.rows)
        self.shown, self.total = len(rows), len(table.rows)
        if rows or not table.rows:
            return Table(table.columns, tuple(rows), table.empty)
        sentence = (
            empty or f"No row matches /{self.filter.source}. {self.total} in all; Esc clears it."
        )
        return Table(table.columns, (), sentence)
