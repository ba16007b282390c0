"""The doctor's last run: what is wrong and what to do, then all checks by node and by pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Literal

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.pool import bar
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell, clean
from controlplane.doctor.schemas import (
    CheckState,
    DoctorBound,
    DoctorCheck,
    DoctorNode,
    DoctorPair,
    DoctorReport,
)
from controlplane.nodes.schemas import Node
from workers.core.disaggregation import gbps

View = Literal["findings", "nodes", "pairs"]
VIEWS: tuple[View, ...] = ("findings", "nodes", "pairs")
STATES: tuple[CheckState, ...] = ("fail", "warn", "unknown", "ok")
TONES: dict[CheckState, Tone] = {
    "fail": "critical", "warn": "warn", "unknown": "accent", "ok": "well",
}  # fmt: skip
FIELDS: dict[str, FieldKind] = {
    "state": "text", "node": "text", "pair": "text", "check": "text", "value": "text",
}  # fmt: skip
COLUMNS = (
    Column("state", "STATE", 7),
    Column("where", "WHERE", 10),
    Column("check", "CHECK", 18),
    Column("value", "VALUE", 34, grow=True),
    Column("wanted", "WANTED", 24, grow=True, drop=1),
    Column("what", "WHAT TO DO", 30, grow=True, drop=2),
)
DISAGGREGATION = "disaggregation"
OLD_SECONDS = 3600.0
"""An older report says so: what it found may long be otherwise."""
BAR_WIDTH = 20
NOT_YET = "Asking the control plane for the last run."
NEVER = "The doctor has not run since the control plane started."
ALL_WELL = "Nothing to mend: every check of this run is ok."
NOTHING_IN = "No answer is in yet."
LOOKS_AT = "It looks at devices, MTU, GID, locked memory, clocks, room and blocks, and at what each transport really moves."
NO_PAIRS = "This run probed no pair: one node alone has none."

Part = DoctorNode | DoctorPair


@dataclass(frozen=True, slots=True)
class DoctorHead:
    """What stands above every view. `progress` is a share while a run is under way."""

    state: Text
    counts: tuple[Text, ...]
    scope: Text
    bound: Text
    progress: float | None = None
    bar: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """One node's or pair's checks, those that failed first."""

    key: str
    title: str
    state: Text
    summary: str
    opens: str
    checks: Table


def head(
    report: DoctorReport | None, *, now: float, tz: tzinfo, nodes: Sequence[Node] = ()
) -> DoctorHead:
    """`now` in seconds since the epoch."""
    if report is None or report.state == "none":
        words = NOT_YET if report is None else NEVER
        return DoctorHead(Text(words, "muted"), (), Text("", "muted"), Text("", "muted"))
    share = report.done / report.total if report.total else 0.0
    running = report.state == "running"
    return DoctorHead(
        _state(report, now, tz),
        tuple(_counts(report)),
        _scope(report, nodes),
        bound_text(report),
        share if running else None,
        bar(share, BAR_WIDTH) if running else "",
    )


def is_running(report: DoctorReport | None) -> bool:
    """Its report still grows."""
    return report is not None and report.state == "running"


def _state(report: DoctorReport, now: float, tz: tzinfo) -> Text:
    who = f"Run {report.number} by {clean(report.actor) or 'an operator'}"
    begun = numbers.stamp(report.started_at, now, tz) if report.started_at else numbers.UNKNOWN
    answers = f"{numbers.count(report.done)} of {numbers.count(report.total)} answers are in"
    if report.state == "running":
        return Text(f"{who} is under way since {begun}: {answers}", "accent")
    age = _age(report.finished_at, now)
    took = _took(report)
    if report.state == "failed":
        error = clean(report.error) or "no cause was given"
        return Text(f"{who} did not come to its end {age}: {error} {answers}.", "critical")
    text = f"{who}, {begun}, ended {age}{took}"
    if report.finished_at is not None and now - report.finished_at.timestamp() > OLD_SECONDS:
        return Text(f"~ {text}: old, run it again before you rely on it", "stale")
    return Text(text, "strong")


def _age(at: datetime | None, now: float) -> str:
    """In steps that a reader cares for."""
    if at is None:
        return "at an unknown time"
    seconds = max(0.0, now - at.timestamp())
    if seconds < 60:
        return "less than a minute ago"
    if seconds < 7200:
        return f"{seconds // 60:.0f} min ago"
    return f"{seconds // 3600:.0f} h ago"


def _took(report: DoctorReport) -> str:
    if report.started_at is None or report.finished_at is None:
        return ""
    return f", took {numbers.duration((report.finished_at - report.started_at).total_seconds())}"


def _counts(report: DoctorReport) -> Iterator[Text]:
    """Failing first; a state that nothing is in stays plain."""
    for state in STATES:
        num = report.counts.get(state, 0)
        yield Text(f"{numbers.count(num)} {state}", TONES[state] if num else "muted")


def _scope(report: DoctorReport, nodes: Sequence[Node]) -> Text:
    known = f" of {len(nodes)}" if len(nodes) >= len(report.nodes) else ""
    text = f"{len(report.nodes)}{known} nodes, {len(report.pairs)} pairs checked"
    if report.pairs_left_out:
        left = numbers.count(report.pairs_left_out)
        return Text(f"{text}; {left} pairs were not probed: perilune doctor --pair A:B probes one", "warn")  # fmt: skip
    partial = report.state == "done" and len(nodes) > len(report.nodes)
    return Text(text + (": the run was of a part" if partial else ""), "plain")


# --- the bound of disaggregation ----------------------------------------------------------------


def bound_text(report: DoctorReport) -> Text:
    """`disaggregation needs 38 Gbps (...); the slowest pair, n1 -> n2, has 12 Gbps`."""
    if report.bound is None and is_running(report):
        return Text(f"{DISAGGREGATION}: what it needs is not known yet", "muted")
    if report.bound is None:
        why = "unknown: prompts of 256 tokens or more must have been served, or perilune doctor --prefill-rate gives it"
        return Text(f"{DISAGGREGATION}: what it needs is {why}", "muted")
    needs = (
        f"{DISAGGREGATION} needs {gbps(report.bound.bytes_per_second)} ({_origin(report.bound)})"
    )
    rates = {pair: rate for pair in range(len(report.pairs)) if (rate := _best(report.pairs[pair])) is not None}  # fmt: skip
    if not rates:
        return Text(f"{needs}; no pair was measured", "plain")
    at = min(rates, key=lambda place: rates[place])
    name = pair_name(report.pairs[at])
    short = rates[at] < report.bound.bytes_per_second
    return Text(f"{needs}; the slowest pair, {name}, has {gbps(rates[at])}{'!' if short else ''}", "warn" if short else "plain")  # fmt: skip


def _origin(bound: DoctorBound) -> str:
    how = {"measured": "measured", "given": "given", "geometry": "from the model's geometry"}
    return (
        f"{numbers.count(bound.kv_bytes_per_token)} bytes a token x "
        f"{numbers.count(bound.tokens_per_second)} tokens/s, {how[bound.origin]}"
    )


def _best(pair: DoctorPair) -> float | None:
    rates = [found.bytes_per_second for found in pair.transports if found.bytes_per_second]
    return max(rates, default=None)


# --- checks -------------------------------------------------------------------------------------


def checks(report: DoctorReport | None, view: View) -> Table:
    """`findings`: all that is not ok, worst first. `nodes`, `pairs`: all checks, by subject."""
    rows = _rows(report, view)
    if view == "findings":
        rows = [row for row in rows if row.facts["state"] != "ok"]
        rows.sort(key=lambda row: STATES.index(_state_of(row)))
    return Table(COLUMNS, tuple(rows), _empty(report, view))


def _state_of(row: Row) -> CheckState:
    return next(state for state in STATES if state == row.facts["state"])


def _parts(report: DoctorReport | None, view: View) -> list[Part]:
    if report is None:
        return []
    nodes: list[Part] = [] if view == "pairs" else list(report.nodes)
    pairs: list[Part] = [] if view == "nodes" else list(report.pairs)
    return sorted([*nodes, *pairs], key=lambda part: STATES.index(part.state))


def _rows(report: DoctorReport | None, view: View) -> list[Row]:
    return [row for part in _parts(report, view) for row in part_rows(part)]


def part_rows(part: Part) -> tuple[Row, ...]:
    """The checks of one node or pair. A name that comes twice has two keys."""
    seen: Counter[str] = Counter()
    rows = []
    for check in part.checks:
        rows.append(_row(part, check, seen[check.name]))
        seen[check.name] += 1
    return tuple(rows)


def _row(part: Part, check: DoctorCheck, place: int) -> Row:
    bad = check.state != "ok"
    cells = (
        Text(check.state.upper() if check.state == "fail" else check.state, TONES[check.state]),
        cell(name_of(part)),
        cell(check.name),
        cell(check.value or numbers.UNKNOWN, "strong" if check.state == "fail" else "plain"),
        cell(check.wanted, "plain" if bad else "muted"),
        cell(check.what_to_do if bad else "", "strong"),
    )  # fmt: skip
    key = f"{key_of(part)}/{check.name}" + (f"/{place}" if place else "")
    facts: dict[str, Fact] = {
        "state": check.state,
        "check": check.name,
        "value": check.value,
        "node": part.node_id if isinstance(part, DoctorNode) else None,
        "pair": pair_name(part) if isinstance(part, DoctorPair) else None,
    }
    return Row(key, cells, facts, opens_of(part))


def name_of(part: Part) -> str:
    """`n1`, `n1 -> n2`."""
    return part.node_id if isinstance(part, DoctorNode) else pair_name(part)


def pair_name(pair: DoctorPair) -> str:
    """`n1 -> n2`."""
    return clean(f"{pair.source} -> {pair.destination}")


def key_of(part: Part) -> str:
    """`node/n1`, `pair/n1>n2`."""
    if isinstance(part, DoctorNode):
        return f"node/{part.node_id}"
    return f"pair/{part.source}>{part.destination}"


def opens_of(part: Part) -> str:
    """The console path of the node or pair."""
    if isinstance(part, DoctorNode):
        return f"node/{part.node_id}"
    return f"transfers/{part.source}/{part.destination}"


def _empty(report: DoctorReport | None, view: View) -> str:
    if report is None:
        return NOT_YET
    if report.state == "none":
        return LOOKS_AT
    if not report.nodes and not report.pairs:
        return NOTHING_IN if report.state == "running" else "No node answered and none was checked."
    if view == "findings":
        return "Nothing to mend so far." if report.state == "running" else ALL_WELL
    return NO_PAIRS if view == "pairs" and report.state == "done" else NOTHING_IN


def groups(report: DoctorReport | None, view: View) -> tuple[Group, ...]:
    """`nodes` or `pairs` one by one, those that failed first."""
    return tuple(_group(part) for part in _parts(report, view))


def _group(part: Part) -> Group:
    found = part_rows(part)
    kept = [
        place
        for place, column in enumerate(COLUMNS)
        if column.key != "where" and any(row.cells[place].text for row in found)
    ]
    rows = tuple(Row(row.key, tuple(row.cells[at] for at in kept), row.facts) for row in found)
    table = Table(tuple(COLUMNS[at] for at in kept), rows, NOTHING_IN)
    return Group(key_of(part), name_of(part), _worst(part), _summary(part), opens_of(part), table)


def _worst(part: Part) -> Text:
    word = part.state.upper() if part.state == "fail" else part.state
    return Text(word, TONES[part.state])


def _summary(part: Part) -> str:
    """`1 warn, 8 ok`, and of a pair what it can."""
    states = Counter(check.state for check in part.checks)
    parts = [f"{states[state]} {state}" for state in STATES if states[state]]
    if isinstance(part, DoctorPair):
        best = _best(part)
        parts.append(f"moves {numbers.moved_rate(best)}" if best else "not measured")
    return ", ".join(parts)


def of_pair(report: DoctorReport | None, source: str, target: str) -> Group | None:
    """The checks of one pair in the last run, if it was in it."""
    pairs = report.pairs if report else ()
    found = [pair for pair in pairs if (pair.source, pair.destination) == (source, target)]
    return _group(found[0]) if found else None


def describe(row: Row) -> tuple[Row, ...]:
    """A check in full: what the pane beside or below the list says, what to do before the rest."""
    fields = {column.key: (column, text) for column, text in zip(COLUMNS, row.cells, strict=True)}
    shown = [fields[key] for key in ("value", "what", "wanted")]
    return tuple(
        Row(column.key, (Text(column.label.lower(), "muted"), text))
        for column, text in shown
        if text.text
    )
