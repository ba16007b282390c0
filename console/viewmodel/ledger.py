"""The admission ledger: who was turned away and why, and how often that was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Column, Fact, Row, Table, Text, cell
from controlplane.ledger.schemas import FalseRejects, LedgerEntry, LedgerSummary
from controlplane.policies.schemas import PolicyRevision

WINDOW_SECONDS = 3600.0
"""Of the summary."""
MAX_CAUSES = 3
NOT_YET = "The ledger has not been read yet."
COLUMNS = (
    Column("at", "TIME", 8),
    Column("request", "REQUEST", 8),
    Column("kind", "WHAT", 8),
    Column("gate", "GATE", 10),
    Column("policy", "POLICY", 8),
    Column("priority", "CLASS", 8, drop=3),
    Column("tenant", "TENANT", 8, drop=4),
    Column("predicted", "PREDICTED", 9, "right"),
    Column("limit", "LIMIT", 8, "right", drop=1),
    Column("retry", "RETRY", 7, "right", drop=2),
    Column("measured", "MEASURED", 9, "right", drop=5),
    Column("met", "WOULD HAVE MET SLO", 18, grow=True),
)
_GATES = {"ttft": "TTFT", "tbt": "TBT", "queue_full": "queue", "deadline": "wait"}
_GATE_WORDS = _GATES | {"queue_full": "queue full", "deadline": "waited up to the deadline"}
CLASS_COLUMNS = (
    Column("priority", "CLASS", 12),
    Column("rejected", "REJECTED", 9, "right"),
    Column("shed", "SHED", 7, "right"),
    Column("probes", "PROBES", 7, "right"),
    Column("wrong", "REJECTED WRONGLY", 34, grow=True),
)
FIELDS: dict[str, FieldKind] = {
    "id": "text",
    "what": "text",
    "gate": "text",
    "policy": "text",
    "revision": "number",
    "class": "text",
    "tenant": "text",
    "model": "text",
    "predicted": "seconds",
    "limit": "seconds",
    "over": "seconds",
    "retry": "seconds",
    "measured": "seconds",
    "met": "text",
}


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """Above the rows: what the window holds, by which policies' revisions, what became of the
    probes, the same by class."""

    counts: Text
    wrong: Text
    classes: Table
    causes: tuple[Text, ...] = ()


def ledger(
    entries: Sequence[LedgerEntry], *, now: float, tz: tzinfo, whole_ids: bool = False
) -> Table:
    """Newest first, as they come. `now` in seconds since the epoch; `whole_ids` where they are typed
    again."""
    rows = tuple(_row(entry, now, tz, whole_id=whole_ids) for entry in entries)
    return Table(COLUMNS, rows, "Nobody was turned away, and no probe was let in.")


def head(
    summary: LedgerSummary | None,
    policies: Sequence[PolicyRevision] = (),
    *,
    now: float = 0.0,
    tz: tzinfo = UTC,
) -> LedgerHead:
    """The sentence an operator wants first: how many, by what, and how many of them wrongly.
    `policies`: those in force. `now` in seconds since the epoch."""
    if summary is None:
        return LedgerHead(Text(NOT_YET, "muted"), Text(""), Table(CLASS_COLUMNS, ()))
    window = numbers.window(summary.window_seconds)
    counts = (
        f"last {window}: {numbers.count(summary.rejected)} rejected, {numbers.count(summary.shed)} shed"
        f" while they waited, {numbers.count(summary.probes)} let in as probes"
    )
    rows = [
        Row(
            one.priority or "-",
            (
                cell(one.priority or "-"),
                Text(numbers.count(one.rejected)),
                Text(numbers.count(one.shed)),
                Text(numbers.count(one.probes)),
                Text(share(one.false_rejects)),
            ),
            {"class": one.priority},
        )
        for one in summary.classes
    ]
    return LedgerHead(
        Text(counts),
        _wrong(summary),
        Table(CLASS_COLUMNS, tuple(rows), "No class has a rejection."),
        _causes(summary, policies, now, tz),
    )


def _causes(
    summary: LedgerSummary, policies: Sequence[PolicyRevision], now: float, tz: tzinfo
) -> tuple[Text, ...]:
    """`512 by slo/default r3 (TTFT): in force since 11:07:48, by root: drill`; the last ones."""
    in_force = {f"{one.kind}/{one.scope} r{one.revision}": one for one in policies if one.active}
    said = []
    for cause in summary.causes[:MAX_CAUSES]:
        by = cause.policy or "a policy that no record names"
        text = f"{numbers.count(cause.turned_away)} by {by} ({_GATE_WORDS.get(cause.gate, cause.gate) or 'no gate named'})"
        found = in_force.get(cause.policy)
        if found is not None:
            since = numbers.stamp(found.created_at, now, tz)
            reason = f": {found.reason}" if found.reason else ""
            text += f", in force since {since}, by {found.author}{reason}"
        elif in_force and cause.policy:
            text += f", no longer in force; last {numbers.stamp(cause.last_at, now, tz)}"
        said.append(cell(text, "plain" if found is not None else "muted"))
    more = len(summary.causes) - MAX_CAUSES
    return (*said, Text(f"and {more} more", "muted")) if more > 0 else tuple(said)


def share(found: FalseRejects) -> str:
    """`8.3 % of 60 probes (95 %: 3.6 to 18.1 %)`; `--` where no probe has ended."""
    if found.ratio is None or found.low is None or found.high is None:
        return numbers.UNKNOWN
    low, high = numbers.percent(found.low, unit=False), numbers.percent(found.high)
    return f"{numbers.percent(found.ratio)} of {_probes(found.samples)} (95 %: {low} to {high})"


def _wrong(summary: LedgerSummary) -> Text:
    found = summary.false_rejects
    if found.ratio is not None:
        text = f"rejected wrongly: {share(found)}; they kept the SLO though predicted not to"
        return Text(text, "warn" if (found.low or 0.0) > 0.5 else "plain")
    if not summary.rejected + summary.shed + summary.probes:
        return Text("rejected wrongly: - (nobody was)", "muted")
    why = (
        "no probe has ended yet"
        if summary.probes
        else "no probe was let in (probe_share of admission)"
    )
    return Text(f"rejected wrongly: {numbers.UNKNOWN}, {why}", "muted")


def _row(entry: LedgerEntry, now: float, tz: tzinfo, *, whole_id: bool) -> Row:
    verdict = _met(entry)
    over = entry.predicted_seconds - entry.limit_seconds
    name, _, revision = entry.policy.partition(" r")
    cells = (
        Text(numbers.stamp(entry.at, now, tz)),
        cell(entry.request_id if whole_id else numbers.short_id(entry.request_id)),
        Text(entry.kind, "accent" if entry.kind == "probe" else "plain"),
        Text(_GATES.get(entry.gate, entry.gate or "-")),
        cell(_policy(entry.policy)),
        cell(entry.priority or "-"),
        cell(entry.tenant),
        Text(numbers.duration(entry.predicted_seconds) + ("!" if over > 0 else "")),
        Text(numbers.duration(entry.limit_seconds)),
        Text(_or_dash(entry.retry_after_seconds)),
        Text(_or_dash(entry.measured_seconds) + "!" * _missed(entry)),
        verdict,
    )
    facts: dict[str, Fact] = {
        "id": entry.request_id,
        "what": entry.kind,
        "gate": entry.gate,
        "policy": name,
        "revision": int(revision) if revision.isdigit() else None,
        "class": entry.priority,
        "tenant": entry.tenant,
        "model": entry.model,
        "predicted": entry.predicted_seconds,
        "limit": entry.limit_seconds,
        "over": over,
        "retry": entry.retry_after_seconds,
        "measured": entry.measured_seconds,
        "met": verdict.text,
    }
    return Row(entry.request_id, cells, facts, f"request/{entry.request_id}")


def _met(entry: LedgerEntry) -> Text:
    """Of a probe what came of it; of a rejected one what came of the probes most like it."""
    if entry.kind == "probe":
        if entry.met is None:
            return Text("open, not measured", "muted")
        return Text("yes, it was let in", "warn") if entry.met else Text("no, it was let in")
    found = entry.would_have_met
    if entry.kind == "shed":
        return Text("- (wait was over)", "muted")
    if found is None or not found.samples:
        return Text("open, none alike", "muted")
    like = f"{numbers.count(found.met)} of {numbers.count(found.samples)}"
    if found.low is not None and found.low > 0.5:
        return Text(f"likely yes, {like}", "warn")
    if found.high is not None and found.high < 0.5:
        return Text(f"likely no, {like}")
    return Text(f"open, {like}", "muted")


def _missed(entry: LedgerEntry) -> bool:
    measured = entry.measured_seconds
    return measured is not None and measured > entry.limit_seconds


def _policy(name: str) -> str:
    """`slo r2` of the default scope, `slo/llama-8b r2` of another one."""
    return name.replace("/default ", " ") or numbers.UNKNOWN


def _or_dash(seconds: float | None) -> str:
    return numbers.NO_TRAFFIC if seconds is None else numbers.duration(seconds)


def _probes(num: int) -> str:
    return f"{numbers.count(num)} probe{'' if num == 1 else 's'}"
