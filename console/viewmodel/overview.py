"""Overview: is it fine, what is not, what changed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import tzinfo

from console.viewmodel import numbers
from console.viewmodel.cache import queue_text
from console.viewmodel.history import History, merge
from console.viewmodel.state import Snapshot
from console.viewmodel.table import Column, Row, Table, Text, Tone, cell, clean
from controlplane.stats.schemas import Attention, Overview, SeriesReply

SPARK_COLUMNS = 30
KV_WAIT_ALARM = 0.15
REJECTED_ALARM = 0.05


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that is always visible: `hit 58.1 %`."""

    label: str
    text: str
    breach: bool = False


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """Of the window, the course of it (None = gap), and the limit it is held against."""

    key: str
    label: str
    now: str
    values: tuple[float | None, ...]
    limit: str = ""
    ceiling: float | None = None  # the sparkline's scale reaches at least to here
    breach: bool = False


@dataclass(frozen=True, slots=True)
class OverviewView:
    """Everything on the screen. `setup` is filled instead while no worker has joined."""

    figures: tuple[Figure, ...]
    service: tuple[ServiceRow, ...]
    roles: Table
    attention: Table
    changes: Table
    window: str
    step: str
    num_critical: int
    num_warn: int
    empty: str = ""
    setup: tuple[tuple[str, bool], ...] = ()


def overview(snapshot: Snapshot, history: History, *, now: float, tz: tzinfo) -> OverviewView:
    """`now` is the control plane's time, in seconds since the epoch."""
    seen = snapshot.overview
    window = seen.window_seconds if seen else 900.0
    attention = seen.attention if seen else []
    return OverviewView(
        figures=figures(seen),
        service=service(seen, history.frame(_SPARK_METRICS, "cluster", end=now)),
        roles=_roles(seen),
        attention=_attention(seen, now, tz),
        changes=_changes(seen, now, tz),
        window=numbers.window(window),
        step=numbers.window(window / SPARK_COLUMNS),
        num_critical=sum(item.severity == "critical" for item in attention),
        num_warn=sum(item.severity == "warn" for item in attention),
        empty=_empty(seen),
        setup=_setup(snapshot) if not snapshot.workers else (),
    )


def figures(seen: Overview | None) -> tuple[Figure, ...]:
    """The four numbers that are always visible, then TTFT where width allows."""
    if seen is None:
        names = ("hit", "cache", "evict", "moved", "TTFT")
        return tuple(Figure(name, numbers.UNKNOWN) for name in names)
    slow = seen.slo_mode != "off" and _over(seen.ttft_p95_seconds, seen.slo_max_ttft_seconds)
    return (
        Figure("hit", _ratio(seen.hit_ratio, seen.prompt_tokens)),
        Figure("cache", numbers.used_of(seen.used_bytes, seen.capacity_bytes)),
        Figure("evict", numbers.per_second(seen.evictions_per_second)),
        Figure("moved", numbers.moved_rate(seen.moved_bytes_per_second)),
        Figure("TTFT", _latency(seen.ttft_p95_seconds, seen), slow),
    )


def service(seen: Overview | None, series: SeriesReply) -> tuple[ServiceRow, ...]:
    """The lines under SERVICE: of the window, as their head says, or as their label says."""
    if seen is None:
        return ()
    read = _Reader(series)
    rate = numbers.per_minute(seen.requests_per_minute)
    rejected = _bare(seen.rejected_ratio, seen)
    return (
        ServiceRow("requests", "requests, last min", rate, read("requests")),
        ServiceRow(
            "rejected",
            "rejected %",
            rejected,
            read("rejected"),
            numbers.percent(REJECTED_ALARM),
            breach=_over(seen.rejected_ratio, REJECTED_ALARM),
        ),
        *_latency_rows(seen, read),
        ServiceRow("queue", "queue P95", _queue(seen), read("queue_p95_seconds")),
        *_ratio_rows(seen, read),
    )


def _latency_rows(seen: Overview, read: _Reader) -> tuple[ServiceRow, ...]:
    """Held against the SLO, unless nothing is checked."""
    checked = seen.slo_mode != "off"
    lines = (
        ("ttft", "TTFT P95", seen.ttft_p95_seconds, seen.slo_max_ttft_seconds),
        ("tbt", "TBT P95", seen.tbt_p95_seconds, seen.slo_max_tbt_seconds),
    )
    return tuple(
        ServiceRow(
            key,
            label,
            _latency(now, seen),
            read(f"{key}_p95_seconds"),
            _limit_text(limit, seen) if checked else "",
            limit if checked else None,
            checked and _over(now, limit),
        )
        for key, label, now, limit in lines
    )


def _limit_text(limit: float | None, seen: Overview) -> str:
    enforced = "" if seen.slo_mode == "enforce" else f" ({seen.slo_mode})"
    return f"{numbers.duration(limit)}{enforced}" if limit else ""


def _ratio_rows(seen: Overview, read: _Reader) -> tuple[ServiceRow, ...]:
    hit = numbers.percent(seen.hit_ratio, unit=False)
    wait = read.ratio("kv_wait_seconds", "decode_seconds")
    return (
        ServiceRow(
            "hit",
            "hit rate %",
            numbers.NO_TRAFFIC if seen.prompt_tokens == 0 else hit,
            read.ratio("hit_tokens", "prompt_tokens"),
            ceiling=1.0,
        ),
        ServiceRow(
            "kv_wait",
            "KV wait %",
            _bare(seen.kv_wait_ratio, seen),
            wait,
            numbers.percent(KV_WAIT_ALARM),
            KV_WAIT_ALARM,
            _over(seen.kv_wait_ratio, KV_WAIT_ALARM),
        ),
        ServiceRow(
            "slo",
            "SLO met %",
            _bare(seen.slo_attainment_ratio, seen),
            read.share("slo_met", "slo_missed"),
            ceiling=1.0,
        ),
    )


_SPARK_METRICS = (
    "requests", "rejected", "ttft_p95_seconds", "tbt_p95_seconds", "queue_p95_seconds",
    "hit_tokens", "prompt_tokens", "kv_wait_seconds", "decode_seconds", "slo_met", "slo_missed",
)  # fmt: skip


class _Reader:
    """Cluster series in SPARK_COLUMNS columns."""

    def __init__(self, series: SeriesReply) -> None:
        self._values = {s.metric: s.values for s in series.series}

    def __call__(self, metric: str) -> tuple[float | None, ...]:
        seen = self._values.get(metric, [])[-3 * SPARK_COLUMNS :]
        values: list[float | None] = [None] * (3 * SPARK_COLUMNS - len(seen))
        values.extend(seen)
        groups = [values[i : i + 3] for i in range(0, len(values), 3)]
        return tuple(merge(metric, group) for group in groups)

    def ratio(self, part: str, whole: str) -> tuple[float | None, ...]:
        """None where nothing was asked for."""
        pairs = zip(self(part), self(whole), strict=True)
        return tuple(None if p is None or not w else p / w for p, w in pairs)

    def share(self, good: str, bad: str) -> tuple[float | None, ...]:
        """good / (good + bad)."""
        pairs = zip(self(good), self(bad), strict=True)
        return tuple(_share(g, b) for g, b in pairs)


def _share(good: float | None, bad: float | None) -> float | None:
    whole = (good or 0.0) + (bad or 0.0)
    return None if not whole else (good or 0.0) / whole


def _queue(seen: Overview) -> str:
    """The worst role's."""
    known = [role.queue_p95_seconds for role in seen.roles if role.queue_p95_seconds is not None]
    return numbers.duration(max(known)) if known else numbers.NO_TRAFFIC


def _quiet(seen: Overview) -> bool:
    return not seen.requests_per_minute and not seen.prompt_tokens


def _latency(seconds: float | None, seen: Overview) -> str:
    """Unknown without traffic is not unknown: it is no traffic."""
    if seconds is None and _quiet(seen):
        return numbers.NO_TRAFFIC
    return numbers.duration(seconds)


def _bare(ratio: float | None, seen: Overview) -> str:
    if ratio is None and _quiet(seen):
        return numbers.NO_TRAFFIC
    return numbers.percent(ratio, unit=False)


def _ratio(ratio: float | None, whole: int | None) -> str:
    return numbers.NO_TRAFFIC if ratio is None and whole == 0 else numbers.percent(ratio)


def _over(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _empty(seen: Overview | None) -> str:
    if seen is None:
        return "Waiting for the control plane's first answer."
    if _quiet(seen):
        window = numbers.window(seen.window_seconds)
        return f"No requests in the last {window}. Send one: y copies a curl."
    return ""


def _setup(snapshot: Snapshot) -> tuple[tuple[str, bool], ...]:
    return (
        ("control plane answers", snapshot.overview is not None),
        ("a node has joined (perilune up, or perilune agent --join)", bool(snapshot.nodes)),
        ("a worker is ready", False),
    )


_ROLE_COLUMNS = (
    Column("role", "ROLE", 9),
    Column("ready", "READY", 7, "right"),
    Column("running", "RUNNING", 9, "right"),
    Column("waiting", "WAITING", 9, "right"),
    Column("queue", "QUEUE P95", 11, "right", drop=1),
    Column("write", "WRITE QUEUE", 14, "right", drop=2),
)


def _roles(seen: Overview | None) -> Table:
    rows = []
    for role in seen.roles if seen else ():
        short = role.ready < role.total
        cells = (
            cell(role.role),
            Text(f"{role.ready} / {role.total}", "warn" if short else "plain"),
            Text(numbers.count(role.running)),
            Text(numbers.count(role.waiting)),
            Text(
                numbers.NO_TRAFFIC
                if role.queue_p95_seconds is None
                else numbers.duration(role.queue_p95_seconds)
            ),
            Text(
                numbers.NO_TRAFFIC
                if role.write_queue_bound is None
                else queue_text(role.write_queue_blocks, role.write_queue_bound)
            ),
        )
        rows.append(Row(role.role, cells, {"role": role.role}, "topology"))
    return Table(_ROLE_COLUMNS, tuple(rows), "No workers have joined.")


_ATTENTION_COLUMNS = (
    Column("severity", "", 4),
    Column("text", "NEEDS ATTENTION", 40, grow=True),
    Column("since", "SINCE", 8, drop=1),
    Column("opens", "ENTER OPENS", 11, drop=2),
)


def _attention(seen: Overview | None, now: float, tz: tzinfo) -> Table:
    rows = []
    for item in seen.attention if seen else ():
        tone: Tone = "critical" if item.severity == "critical" else "warn"
        word = "CRIT" if item.severity == "critical" else "warn"
        since = numbers.stamp(item.since, now, tz) if item.since is not None else ""
        cells = (Text(word, tone), cell(item.text), Text(since), cell(item.opens))
        key = f"{item.severity}:{item.opens}:{_without_numbers(item.text)}"
        rows.append(Row(key, cells, {"severity": word}, _opens(item, seen)))
    return Table(_ATTENTION_COLUMNS, tuple(rows), "Nothing needs attention.")


def _opens(item: Attention, seen: Overview | None) -> str:
    """Slow requests are found by the limit that they broke: `requests/slow?ttft>2000ms`."""
    if seen is None or item.opens != "requests/slow":
        return item.opens
    of_tbt = item.text.startswith("TBT")
    limit = seen.slo_max_tbt_seconds if of_tbt else seen.slo_max_ttft_seconds
    return f"{item.opens}?{'tbt' if of_tbt else 'ttft'}>{limit * 1000:g}ms" if limit else item.opens


def _without_numbers(text: str) -> str:
    """A line stays the same line while its number changes."""
    return "".join(char for char in text if not char.isdigit() and char not in ".,")


_CHANGE_COLUMNS = (
    Column("at", "", 11),
    Column("text", "CHANGED IN THE LAST HOUR", 40, grow=True),
    Column("actor", "BY", 12, drop=1),
    Column("reason", "REASON", 18, drop=2),
)


def _changes(seen: Overview | None, now: float, tz: tzinfo) -> Table:
    rows = tuple(
        Row(
            f"{change.at}:{change.text}",
            (
                Text(numbers.stamp(change.at, now, tz), "muted"),
                cell(change.text),
                cell(change.actor),
                cell(change.reason or numbers.NO_TRAFFIC, "muted"),
            ),
            {"actor": change.actor},
        )
        for change in (seen.changes if seen else ())
    )
    return Table(_CHANGE_COLUMNS, rows, "Nothing changed in the last hour.")


def headline(view: OverviewView) -> str:
    """`1 CRIT 2 warn`, or nothing."""
    parts = []
    if view.num_critical:
        parts.append(f"{view.num_critical} CRIT")
    if view.num_warn:
        parts.append(f"{view.num_warn} warn")
    return clean(" ".join(parts))
