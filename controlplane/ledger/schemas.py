"""The ledger: requests that admission turned away, and those it let in to learn from."""

from datetime import datetime
from typing import Literal

from controlplane.schema_base import Page, Schema

EntryKind = Literal["rejected", "shed", "probe"]


class FalseRejects(Schema):
    """`ratio` of `samples` ended probes kept the SLO: so many of the rejections are wrong.
    `low`, `high`: its 95 % interval. Null without samples."""

    samples: int = 0
    met: int = 0
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class LedgerEntry(Schema):
    """`rejected`: at once, by prediction. `shed`: while it waited. `probe`: let in though it
    would be rejected; `measured_seconds` and `met` say what came of it, null where it did not end
    well or is no stream. `would_have_met`, of a rejected one: what came of the probes whose
    prediction was most like its own."""

    request_id: str
    at: datetime
    kind: EntryKind
    gate: str
    model: str
    tenant: str
    priority: str
    predicted_seconds: float
    limit_seconds: float
    measured_seconds: float | None = None
    met: bool | None = None
    retry_after_seconds: float | None = None  # what its client was told; null: nothing, or a probe
    would_have_met: FalseRejects | None = None
    policy: str = ""  # that decided: "slo/default r2"; empty in rows of older versions


class LedgerList(Page):
    """GET /api/v1/ledger, newest first."""

    items: list[LedgerEntry]


class ClassSummary(Schema):
    """The same of one priority class."""

    priority: str
    rejected: int = 0
    shed: int = 0
    probes: int = 0
    false_rejects: FalseRejects


class CauseSummary(Schema):
    """How many one revision of a policy turned away (rejected or shed) at one gate."""

    gate: str
    policy: str  # "slo/default r2"
    turned_away: int
    last_at: datetime


class LedgerSummary(Schema):
    """GET /api/v1/ledger/summary?window=3600. `causes`: the last one first, 20 at most."""

    window_seconds: float
    rejected: int = 0
    shed: int = 0
    probes: int = 0
    false_rejects: FalseRejects
    classes: list[ClassSummary] = []
    causes: list[CauseSummary] = []
