"""One pair of nodes in full: what moved, where the time went, the links, the slowest transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from console.viewmodel import numbers
from console.viewmodel.freshness import is_old
from console.viewmodel.levels import LATENCY
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell, clean
from console.viewmodel.transfers import IN_PLACE
from controlplane.nodes.schemas import Node
from controlplane.stats.schemas import Matrix
from controlplane.transfers.schemas import (
    NodeLink,
    NodeTransferList,
    NodeTransfers,
    SlowestTransfer,
    TransferStage,
)
from workers.core.transfer_choice import PRIORS, SMALL_BYTES
from workers.core.transfer_stats import BUCKET_SECONDS, CHOICE_BYTES

STAGES = (("queue_wait", "queue"), ("setup", "setup"), ("wire", "wire"), ("verify", "verify"))
"""Name in REST and word on screens, in the order in which a transfer goes through them."""
LETTERS = {"queue_wait": "q", "setup": "s", "wire": "w", "verify": "v"}
BAR_WIDTH = 28
MAX_SLOWEST = 10
NOT_YET = "Asking for the pair's transfers."
NONE = "No KV has travelled between these two since their agents started."

KIND_COLUMNS = (
    Column("path", "PATH", 5),
    Column("class", "CLASS", 11),
    Column("mode", "MODE", 4, drop=4),
    Column("transfers", "TRANSFERS", 9, "right"),
    Column("bytes", "BYTES", 9, "right"),
    Column("pieces", "PIECES", 8, "right", drop=2),
    Column("retries", "RETRIES", 7, "right", drop=1),
    Column("missing", "MISSING", 12, grow=True),
    Column("flying", "IN FLIGHT", 9, "right"),
    Column("bar", "WHERE THE TIME WENT", BAR_WIDTH, drop=3),
)
STAGE_COLUMNS = (
    Column("path", "PATH", 5),
    Column("class", "CLASS", 11),
    Column("what", "WHAT", 10),
    *(Column(name, word.upper(), 9, "right") for name, word in STAGES),
    Column("total", "TOTAL", 9, "right"),
)
LINK_COLUMNS = (
    Column("link", "LINK OF", 18, grow=True),
    Column("path", "PATH", 5),
    Column("state", "STATE", 7),
    Column("breaker", "BREAKER", 9),
    Column("latency", "LATENCY", 9, "right"),
    Column("rate", "BANDWIDTH", 10, "right"),
    Column("cost", "1 MiB TAKES", 11, "right", drop=2),
    Column("choice", "CHOICE", 11),
    Column("window", "QUEUE DEPTH", 11, "right", drop=3),
    Column("flying", "IN FLIGHT", 9, "right", drop=5),
    Column("resent", "SENT AGAIN", 10, "right", drop=4),
    Column("cap", "CAP", 10, "right", drop=6),
)
SLOW_COLUMNS = (
    Column("age", "ENDED", 10),
    Column("path", "PATH", 5),
    Column("class", "CLASS", 11, drop=2),
    Column("bytes", "BYTES", 9, "right"),
    Column("pieces", "PIECES", 6, "right", drop=4),
    *(Column(name, word.upper(), 8, "right") for name, word in STAGES),
    Column("total", "TOTAL", 8, "right"),
    Column("retries", "RETRIES", 7, "right", drop=3),
    Column("missing", "MISSING", 7, "right"),
    Column("transfer", "TRANSFER", 16, drop=5),
    Column("error", "ERROR", 20, grow=True, drop=1),
)
NO_LINK = "No link between the two has been opened yet."
NO_SLOW = "No transfer has ended in the last ten minutes."


@dataclass(frozen=True, slots=True)
class NodePairView:
    """`head` and `alarms` are sentences. Counters run since the agents started, `head` says so."""

    source: str
    target: str
    head: tuple[Text, ...]
    alarms: tuple[Text, ...]
    kinds: Table
    stages: Table
    links: Table
    slowest: Table
    notes: tuple[Text, ...] = ()

    @property
    def name(self) -> str:
        """`n1 -> n2`."""
        return clean(f"{self.source} -> {self.target}")


def node_pair(
    source: str,
    target: str,
    found: NodeTransferList | None,
    *,
    matrix: Matrix | None = None,
    nodes: Sequence[Node] = (),
) -> NodePairView:
    """`found` is the report on this pair; None while it has not come."""
    rows = _rows(source, target, found)
    links = _links(source, target, found)
    empty = NOT_YET if found is None else NONE
    return NodePairView(
        source,
        target,
        head=(*_head(source, target, rows, matrix, nodes), *_modes(source, target, found)),
        alarms=tuple(_alarms(source, target, found)),
        kinds=Table(KIND_COLUMNS, tuple(map(_kind_row, rows)), empty),
        stages=Table(STAGE_COLUMNS, tuple(r for row in rows for r in _stage_rows(row)), empty),
        links=Table(LINK_COLUMNS, tuple(_link_row(link) for link in links), NOT_YET if found is None else NO_LINK),
        slowest=Table(SLOW_COLUMNS, _slow_rows(rows), NOT_YET if found is None else NO_SLOW),
        notes=tuple(_notes(links)),
    )  # fmt: skip


def _rows(source: str, target: str, found: NodeTransferList | None) -> list[NodeTransfers]:
    rows = found.rows if found else ()
    return [row for row in rows if (row.source, row.destination) == (source, target)]


def _links(source: str, target: str, found: NodeTransferList | None) -> list[NodeLink]:
    """The puller's first: blocks go from source to target because target pulls them."""
    links = [x for x in (found.links if found else ()) if {x.node, x.peer} == {source, target}]
    return sorted(links, key=lambda link: (link.node != target, not link.chosen, link.transport))


# --- sentences --------------------------------------------------------------------------------


def _head(
    source: str,
    target: str,
    rows: Sequence[NodeTransfers],
    matrix: Matrix | None,
    nodes: Sequence[Node],
) -> Iterator[Text]:
    if source == target:
        yield Text(f"{clean(source)}: {IN_PLACE}.", "muted")
        return
    yield _window(source, target, matrix)
    if rows:
        yield _since_start(rows)
    for row in rows:
        if sum(row.missing.values()):
            yield Text(f"missing, {clean(row.transport)} {_words(row.priority)}: {clean(_causes(row.missing))}", "critical")  # fmt: skip
    yield from _ages(sorted({row.reported_by for row in rows} or {target}), nodes)


def _window(source: str, target: str, matrix: Matrix | None) -> Text:
    pairs = matrix.pairs if matrix else ()
    pair = next((p for p in pairs if (p.source, p.destination) == (source, target) and p.kind == "node"), None)  # fmt: skip
    window = numbers.window(matrix.window_seconds if matrix else 300)
    if pair is None or not (pair.transfers or pair.failures):
        return Text(f"last {window}: no traffic", "muted")
    rate = numbers.moved_rate(pair.bytes / max(1.0, matrix.window_seconds if matrix else 300.0))
    slow = LATENCY.breaches(pair.p99_seconds)
    failed = f", {numbers.count(pair.failures)} pieces missing!" if pair.failures else ""
    text = (
        f"last {window}: {numbers.count(pair.transfers)} transfers, {numbers.moved_bytes(pair.bytes)}, "
        f"{rate}; P50 {numbers.duration(pair.p50_seconds)}, P99 {numbers.duration(pair.p99_seconds)}"
        f"{'!' if slow else ''}{failed}"
    )
    return Text(text, "warn" if slow or pair.failures else "strong")


def _since_start(rows: Sequence[NodeTransfers]) -> Text:
    moved = numbers.moved_bytes(sum(row.bytes for row in rows))
    flying = sum(row.in_flight for row in rows)
    sums = {name: sum(_sum(row, name) for row in rows) for name, _ in STAGES}
    whole = sum(sums.values())
    parts = ", ".join(f"{word} {numbers.percent(sums[name] / whole)}" for name, word in STAGES) if whole else "not measured"  # fmt: skip
    return Text(f"since its agent started: {moved}, {flying} in flight; time: {parts}")


def _ages(reporters: Sequence[str], nodes: Sequence[Node]) -> Iterator[Text]:
    """Numbers of a node that is silent are those of its last word."""
    known = {node.id: node for node in nodes}
    for name in reporters:
        node = known.get(name)
        if node is not None and is_old(node.heartbeat_age_seconds):
            age = numbers.age(node.heartbeat_age_seconds)
            yield Text(f"~ {clean(name)} is {node.state}: what follows is {age} old", "stale")


def _alarms(source: str, target: str, found: NodeTransferList | None) -> Iterator[Text]:
    """Of one end, about the other."""
    for alarm in found.alarms if found else ():
        other = {source: target, target: source}.get(alarm.node)
        if other is not None and f" {other} " in f" {alarm.text} ".replace(":", " "):
            yield Text(f"ALARM {clean(alarm.node)}: {clean(alarm.text)}", "critical")


def alarms(found: NodeTransferList | None) -> tuple[Text, ...]:
    """Paths that carry nothing now, of all pairs."""
    items = found.alarms if found else ()
    return tuple(Text(f"ALARM {clean(a.node)}: {clean(a.text)}", "critical") for a in items)


def _modes(source: str, target: str, found: NodeTransferList | None) -> Iterator[Text]:
    """Pulled or pushed, and why."""
    for mode in found.modes if found else ():
        if (mode.source, mode.destination) != (source, target):
            continue
        failed = (
            f", {numbers.count(mode.failed_pushes)} pushes failed!" if mode.failed_pushes else ""
        )
        yield Text(
            f"requests of late: {numbers.count(mode.pulled)} pulled, {numbers.count(mode.pushed)} pushed{failed}; "
            f"waited {numbers.duration(mode.pull_seconds)} by pull, {numbers.duration(mode.push_seconds)} by push "
            f"for {numbers.moved_bytes(mode.bytes)}; now {mode.mode}: {clean(mode.why)}",
            "warn" if mode.failed_pushes else "plain",
        )


def _notes(links: Sequence[NodeLink]) -> Iterator[Text]:
    for link in links:
        if link.chosen and link.why:
            yield Text(f"{clean(link.node)} to {clean(link.peer)} takes {clean(link.transport)}: {clean(link.why)}")  # fmt: skip
    if any(map(_is_assumed, links)):
        yield Text(f"? assumed: no transfer of more than {numbers.stored_bytes(SMALL_BYTES)} has measured it", "muted")  # fmt: skip
    for link in links:
        if link.last_error:
            yield Text(f"last error of {clean(link.node)} to {clean(link.peer)} by {link.transport}: {clean(link.last_error)}", "warn")  # fmt: skip
    for link in links:
        if link.retries_refused:
            yield Text(f"{clean(link.node)} to {clean(link.peer)} by {link.transport}: {numbers.count(link.retries_refused)} retries were refused, the budget was spent", "warn")  # fmt: skip


# --- tables -----------------------------------------------------------------------------------


def _kind_row(row: NodeTransfers) -> Row:
    lost = sum(row.missing.values())
    cells = (
        cell(row.transport),
        Text(_words(row.priority)),
        Text(row.mode),
        Text(numbers.count(row.transfers)),
        Text(numbers.moved_bytes(row.bytes)),
        Text(numbers.count(row.pieces)),
        Text(numbers.count(row.retries), "warn" if row.retries else "plain"),
        cell(f"{_causes(row.missing)}!" if lost else "0", "critical" if lost else "plain"),
        Text(numbers.count(row.in_flight)),
        Text(bar(row)),
    )
    facts: dict[str, Fact] = {"path": row.transport, "class": row.priority, "missing": lost}
    return Row(_key(row), cells, facts)


def _key(row: NodeTransfers) -> str:
    return f"{row.transport}/{row.priority}/{row.mode}"


def _causes(missing: dict[str, int]) -> str:
    ordered = sorted(missing.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{numbers.count(num)} {cause}" for cause, num in ordered if num)


def kinds_of(source: str, target: str, found: NodeTransferList) -> list[NodeTransfers]:
    """What the rows of `kinds` are made from, in their order."""
    return _rows(source, target, found)


def shares(row: NodeTransfers) -> dict[str, float]:
    """Each stage's share of all time; empty where none was spent."""
    sums = {name: _sum(row, name) for name, _ in STAGES}
    whole = sum(sums.values())
    return {name: sums[name] / whole for name in sums if sums[name] > 0} if whole else {}


def bar(row: NodeTransfers, width: int = BAR_WIDTH) -> str:
    """`qqswwwwwwwwv`: each stage's share of all time, a letter for what would round to nothing."""
    used = shares(row)
    if not used:
        return ""
    sizes = {name: max(1, round(used[name] * width)) for name in used}
    longest = max(used, key=lambda name: sizes[name])
    sizes[longest] = max(1, sizes[longest] + width - sum(sizes.values()))
    return "".join(LETTERS[name] * sizes[name] for name in used)


def _sum(row: NodeTransfers, name: str) -> float:
    return sum(stage.sum_seconds for stage in row.stages if stage.stage == name)


def _stage_rows(row: NodeTransfers) -> Iterator[Row]:
    stages: dict[str, TransferStage] = {stage.stage: stage for stage in row.stages}
    whole = sum(_sum(row, name) for name, _ in STAGES)
    names = [*(name for name, _ in STAGES), "total"]
    key = _key(row)
    pushed = " pushed" if row.mode == "push" else ""
    lead = (cell(row.transport), Text(_words(row.priority) + pushed))
    for what in ("P50", "P99"):
        values = tuple(_percentile(stages.get(name), what) for name in names)
        yield Row(f"{key}/{what}", (*lead, Text(what), *values))
    shares = [_sum(row, name) / whole if whole else None for name, _ in STAGES]
    texts = [Text(numbers.percent(share), "muted") for share in shares]
    total = Text(numbers.duration(whole), "muted")
    yield Row(f"{key}/share", (*lead, Text("share, sum", "muted"), *texts, total))


def _percentile(stage: TransferStage | None, what: str) -> Text:
    value = None if stage is None else stage.p50_seconds if what == "P50" else stage.p99_seconds
    if value is not None and value <= BUCKET_SECONDS[0]:
        return Text(f"<{numbers.duration(BUCKET_SECONDS[0])}")  # as fine as the histogram is
    slow = stage is not None and stage.stage == "total" and LATENCY.breaches(value)
    return Text(numbers.duration(value) + ("!" if slow else ""), "warn" if slow else "plain")


def _link_row(link: NodeLink) -> Row:
    tone: Tone = "plain" if link.breaker == "closed" else "critical"
    cells = (
        cell(f"{link.node} to {link.peer}"),
        cell(link.transport),
        Text(link.state),
        Text(link.breaker.replace("_", " ") + ("" if tone == "plain" else "!"), tone),
        Text(numbers.duration(link.latency_seconds)),
        Text(numbers.moved_rate(link.bytes_per_second) + ("?" if _is_assumed(link) else "")),
        Text(numbers.duration(_takes(link))),
        _choice(link),
        Text(f"{numbers.count(link.window_ops)} ops"),
        Text(f"{numbers.count(link.in_flight_ops)} ops"),
        Text(numbers.moved_bytes(link.resent_bytes), "warn" if link.resent_bytes else "plain"),
        Text("none" if link.cap_bytes_per_second is None else numbers.moved_rate(link.cap_bytes_per_second)),
    )  # fmt: skip
    facts: dict[str, Fact] = {"node": link.node, "path": link.transport, "breaker": link.breaker}
    return Row(f"{link.node}>{link.peer}/{link.transport}", cells, facts)


def _is_assumed(link: NodeLink) -> bool:
    """Nothing large enough has measured the bandwidth: it is what the transport starts from."""
    prior = PRIORS.get(link.transport)
    return prior is not None and link.bytes_per_second == prior.bytes_per_second


def _takes(link: NodeLink) -> float | None:
    """The cost of a transfer of `CHOICE_BYTES`, as the agent says; or of what it has measured."""
    if link.cost_seconds is not None:
        return link.cost_seconds
    if link.latency_seconds is None or not link.bytes_per_second:
        return None
    return link.latency_seconds + CHOICE_BYTES / link.bytes_per_second


def _choice(link: NodeLink) -> Text:
    if link.override:
        return Text("set by hand", "accent")
    return Text("chosen", "strong") if link.chosen else Text("not now", "muted")


def _slow_rows(rows: Sequence[NodeTransfers]) -> tuple[Row, ...]:
    """The slowest first, whatever their kind."""
    found = [(row, slow) for row in rows for slow in row.slowest]
    found.sort(key=lambda item: (-item[1].total_seconds, item[1].transfer_id))
    return tuple(_slow_row(row, slow) for row, slow in found[:MAX_SLOWEST])


def _slow_row(row: NodeTransfers, slow: SlowestTransfer) -> Row:
    total = slow.total_seconds
    breach = LATENCY.breaches(total)
    stages = (
        slow.queue_wait_seconds,
        slow.setup_seconds,
        slow.wire_seconds,
        slow.verify_seconds,
    )
    cells = (
        Text(f"{_ago(slow.age_seconds)} ago"),
        cell(row.transport),
        Text(_words(row.priority)),
        Text(numbers.moved_bytes(slow.bytes)),
        Text(numbers.count(slow.pieces)),
        *(Text(numbers.duration(seconds)) for seconds in stages),
        Text(numbers.duration(total) + ("!" if breach else ""), "warn" if breach else "strong"),
        Text(numbers.count(slow.retries), "warn" if slow.retries else "plain"),
        Text(numbers.count(slow.missing), "critical" if slow.missing else "plain"),
        cell(slow.transfer_id),
        cell(slow.error or numbers.NO_TRAFFIC, "critical" if slow.error else "muted"),
    )
    return Row(f"{_key(row)}/{slow.transfer_id}", cells, {"total": total})


def _ago(seconds: float) -> str:
    """Steps that a reader cares for: a column of seconds that run would be sent every second."""
    if seconds < 60:
        return "<1 min"
    return f"{seconds // 60:.0f} min"


def _words(priority: str) -> str:
    return priority.replace("_", " ")
