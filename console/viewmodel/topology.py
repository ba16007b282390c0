"""Nodes, their workers, and which prefill fed which decode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import tzinfo

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.freshness import is_old, marked
from console.viewmodel.requests import is_client_error
from console.viewmodel.state import Snapshot
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell
from controlplane.decisions.schemas import Decision
from controlplane.fleet.schemas import Worker
from controlplane.nodes.schemas import Node

NODE_COLUMNS = (
    Column("node", "NODE", 12, grow=True),
    Column("state", "STATE", 14),
    Column("worker", "WORKER", 16, grow=True),
    Column("run", "RUN/CAP", 8, "right"),
    Column("wait", "WAIT", 5, "right"),
    Column("used", "SLAB USED", 15, "right", drop=3),
    Column("pinned", "PINNED", 7, "right", drop=5),
    Column("queue", "WRITE QUEUE", 12, "right", drop=6),
    Column("restarts", "RESTARTS", 8, "right", drop=4),
    Column("rss", "AGENT RSS", 10, "right", drop=7),
    Column("age", "AGE", 8, "right"),
)
WORKER_COLUMNS = (
    Column("worker", "WORKER", 12, grow=True),
    Column("state", "STATE", 10),
    Column("role", "ROLE", 8),
    Column("node", "NODE", 10),
    Column("run", "RUN/CAP", 8, "right"),
    Column("wait", "WAIT", 5, "right"),
    Column("restarts", "RESTARTS", 8, "right", drop=3),
    Column("engine", "ENGINE", 9, drop=4),
    Column("model", "MODEL", 14, drop=5, grow=True),
    Column("rss", "RSS", 9, "right", drop=2),
    Column("url", "URL", 24, drop=6),
    Column("error", "LAST ERROR", 16, drop=1, grow=True),
)
PAIRING_COLUMNS = (
    Column("pair", "PREFILL -> DECODE", 20, grow=True),
    Column("requests", "REQUESTS", 9, "right"),
    Column("share", "SHARE %", 8, "right"),
    Column("ttft", "TTFT WORST", 11, "right"),
    Column("hit", "HIT %", 7, "right"),
    Column("bytes", "LOADED", 10, "right", drop=1),
    Column("failed", "FAILED", 7, "right"),
)
FIELDS: dict[str, FieldKind] = {
    "node": "text",
    "worker": "text",
    "role": "text",
    "state": "text",
    "engine": "text",
    "model": "text",
    "run": "number",
    "wait": "number",
    "used": "bytes",
    "age": "seconds",
    "restarts": "number",
    "from": "text",
    "to": "text",
    "requests": "number",
}
NO_NODES = (
    "No nodes have joined. On this machine: perilune up. Elsewhere: perilune agent --join ..."
)
PAIRING_SECONDS = 300.0


def nodes(snapshot: Snapshot, *, now: float) -> Table:
    """One row a worker under its node; a node without workers keeps one row. `now` monotonic."""
    known = {node.id for node in snapshot.nodes}
    rows: list[Row] = []
    for node in snapshot.nodes:
        own = [worker for worker in snapshot.workers if worker.node_id == node.id]
        seconds = snapshot.age_of(f"node:{node.id}", node.heartbeat_age_seconds, now)
        if not own:
            rows.append(_node_row(node, None, seconds, first=True))
        rows.extend(_node_row(node, w, seconds, first=i == 0) for i, w in enumerate(own))
    rows.extend(
        _orphan_row(worker, snapshot.age_of(f"worker:{worker.id}", worker.age_seconds, now))
        for worker in snapshot.workers
        if worker.node_id not in known
    )
    return Table(NODE_COLUMNS, tuple(rows), NO_NODES)


def _node_row(node: Node, worker: Worker | None, seconds: float, *, first: bool) -> Row:
    old = node.state != "ready" or is_old(seconds)
    tone: Tone = "stale" if old else "plain"
    used = _product(node.used_blocks, node.block_bytes)
    slab = numbers.used_of(used, _product(node.capacity_blocks, node.block_bytes))
    own = (
        Text(marked(slab, old=old), tone),
        Text(marked(numbers.count(node.pinned_blocks), old=old), tone),
        Text(marked(_queue(node), old=old), tone),
        Text(numbers.count(node.restarts), tone),
        Text(marked(numbers.stored_bytes(node.rss_bytes), old=old), tone),
        Text(numbers.age(seconds), "critical" if old else "plain"),
    )
    blank = (Text(""),) * len(own)
    cells = (
        cell(node.id if first else "", "strong" if first and not old else tone),
        _state(node, worker, seconds),
        *_worker_cells(worker, old=old),
        *(own if first else blank),
    )
    key = f"{node.id}/{worker.id}" if worker else node.id
    facts: dict[str, Fact] = {
        "node": node.id,
        "state": _word_of(_state(node, worker, seconds)),
        "used": used,
        "age": seconds,
        "restarts": node.restarts,
    }
    return Row(key, cells, facts | _worker_facts(worker), f"node/{node.id}")


def _orphan_row(worker: Worker, seconds: float) -> Row:
    """A worker that was registered without a node of ours."""
    blank = (Text(numbers.UNKNOWN, "muted"),) * 5
    cells = (
        cell(worker.node_id, "muted"),
        worker_state(worker),
        *_worker_cells(worker, old=False),
        *blank,
        Text(numbers.age(seconds)),
    )
    state = worker_state(worker)
    facts: dict[str, Fact] = {"node": worker.node_id, "state": state.text, "age": seconds}
    return Row(f"{worker.node_id}/{worker.id}", cells, facts | _worker_facts(worker))


def _state(node: Node, worker: Worker | None, seconds: float) -> Text:
    if node.state == "lost":
        return Text(f"lost {numbers.age(seconds)}", "critical")
    if node.state == "stale" or is_old(seconds):
        return Text(f"stale {numbers.age(seconds)}", "stale")
    if node.state == "not_ready" and (worker is None or worker.state == "ready"):
        return Text("not ready", "critical")
    return Text("ready", "well") if worker is None else worker_state(worker)


def _word_of(state: Text) -> str:
    """What a filter compares: `lost` of `lost 38 s`."""
    aged = state.text.startswith(("lost ", "stale "))
    return state.text.partition(" ")[0] if aged else state.text


def worker_state(worker: Worker) -> Text:
    """As its supervisor says, or as requests meet it where that is worse: `ejected`."""
    if worker.state == "ready" and worker.data_path not in (None, "ok"):
        return Text(worker.data_path, "critical")  # its probe may be fine: requests are not
    tones: dict[str, Tone] = {"ready": "well", "failed": "critical", "lost": "critical"}
    return Text(worker.state, tones.get(worker.state, "warn"))


def _worker_cells(worker: Worker | None, *, old: bool) -> tuple[Text, Text, Text]:
    if worker is None:
        return (
            Text(numbers.NO_TRAFFIC, "muted"),
            Text(numbers.NO_TRAFFIC),
            Text(numbers.NO_TRAFFIC),
        )
    tone: Tone = "stale" if old else "plain"
    emulated = " emu" if worker.engine == "emulated" else ""
    return (
        cell(f"{worker.role:<7} {worker.id}{emulated}", tone),
        Text(_running(worker, old=old), tone),
        Text(numbers.UNKNOWN if old else numbers.count(worker.waiting), tone),
    )


def _running(worker: Worker, *, old: bool = False) -> str:
    running = numbers.UNKNOWN if old else numbers.count(worker.running)
    return f"{running} / {worker.max_concurrent_requests}"


def _worker_facts(worker: Worker | None) -> dict[str, Fact]:
    if worker is None:
        return {}
    return {
        "worker": worker.id,
        "role": worker.role,
        "engine": worker.engine,
        "model": worker.model,
        "run": worker.running,
        "wait": worker.waiting,
    }


def _queue(node: Node) -> str:
    if node.write_queue_blocks is None:
        return numbers.UNKNOWN
    return f"{numbers.count(node.write_queue_blocks)} / {numbers.count(node.write_queue_bound)}"


def _product(first: int | None, second: int | None) -> float | None:
    return None if first is None or second is None else float(first * second)


def workers(snapshot: Snapshot) -> Table:
    """One row a worker process."""
    return Table(
        WORKER_COLUMNS,
        tuple(_worker_row(worker) for worker in snapshot.workers),
        "No workers have joined. On this machine: perilune up.",
    )


def _worker_row(worker: Worker) -> Row:
    old = worker.state == "lost"
    tone: Tone = "stale" if old else "plain"
    error = worker.data_path_note or worker.last_error
    cells = (
        cell(worker.id, tone),
        worker_state(worker),
        Text(worker.role, tone),
        cell(worker.node_id, tone),
        Text(_running(worker, old=old), tone),
        Text(numbers.UNKNOWN if old else numbers.count(worker.waiting), tone),
        Text(numbers.count(worker.restarts), "warn" if worker.restarts else tone),
        Text(worker.engine, "warn" if worker.engine == "emulated" else tone),
        cell(worker.model, tone),
        Text(numbers.stored_bytes(worker.rss_bytes), tone),
        cell(worker.url, tone),
        cell(error or numbers.NO_TRAFFIC, "warn" if error else "muted"),
    )
    facts: dict[str, Fact] = {
        "node": worker.node_id,
        "state": worker_state(worker).text,
        "restarts": worker.restarts,
    }
    return Row(worker.id, cells, facts | _worker_facts(worker), f"worker/{worker.id}")


def pairings(decisions: Sequence[Decision], *, now: float) -> Table:
    """Which prefill worker fed which decode worker in the last 5 min. `now` since the epoch."""
    groups: dict[tuple[str, str], list[Decision]] = defaultdict(list)
    for decision in decisions:
        recent = now - decision.at.timestamp() <= PAIRING_SECONDS
        if recent and decision.prefill_worker and decision.decode_worker:
            groups[decision.prefill_worker, decision.decode_worker].append(decision)
    total = sum(map(len, groups.values()))
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = tuple(_pairing_row(*pair, group, total) for pair, group in ordered)
    return Table(PAIRING_COLUMNS, rows, "No request was paired in the last 5 min.")


def _pairing_row(source: str, target: str, group: Sequence[Decision], total: int) -> Row:
    slowest = max((d.ttft_seconds for d in group if d.ttft_seconds is not None), default=None)
    asked = sum(d.prompt_tokens or 0 for d in group if d.hit_tokens is not None)
    hit = sum(d.hit_tokens or 0 for d in group)
    failed = sum(d.status == "failed" and not is_client_error(d) for d in group)
    loaded = sum(d.decode_leg.loaded_bytes for d in group if d.decode_leg)
    cells = (
        cell(f"{source} -> {target}"),
        Text(numbers.count(len(group))),
        Text(numbers.percent(len(group) / total, unit=False)),
        Text(numbers.NO_TRAFFIC if slowest is None else numbers.duration(slowest)),
        Text(numbers.percent(hit / asked, unit=False) if asked else numbers.NO_TRAFFIC),
        Text(numbers.moved_bytes(loaded)),
        Text(numbers.count(failed), "critical" if failed else "plain"),
    )
    facts: dict[str, Fact] = {"from": source, "to": target, "requests": len(group)}
    return Row(f"{source}>{target}", cells, facts, f"transfers/{source}/{target}")


def describe_node(snapshot: Snapshot, node_id: str, *, now: float, tz: tzinfo) -> tuple[Row, ...]:
    """Every field of a node, as name and value."""
    node = next((n for n in snapshot.nodes if n.id == node_id), None)
    if node is None:
        return ()
    seconds = snapshot.age_of(f"node:{node.id}", node.heartbeat_age_seconds, now)
    used = _product(node.used_blocks, node.block_bytes)
    capacity = _product(node.capacity_blocks, node.block_bytes)
    fields = (
        ("state", f"{node.state}, heard {numbers.age(seconds)} ago"),
        ("joined", node.joined_at.astimezone(tz).strftime("%Y-%m-%d %H:%M:%S")),
        ("incarnation", f"{node.incarnation}, restarts {numbers.count(node.restarts)}"),
        (
            "slab",
            f"{numbers.used_of(used, capacity)}, file {numbers.stored_bytes(node.slab_bytes)}",
        ),
        ("blocks", f"{numbers.count(node.used_blocks)} of {numbers.count(node.capacity_blocks)}"),
        ("pinned", f"{numbers.count(node.pinned_blocks)} blocks"),
        (
            "block",
            f"{numbers.count(node.block_tokens)} tokens, {numbers.stored_bytes(node.block_bytes)}",
        ),
        ("write queue", _queue(node)),
        ("agent RSS", f"{numbers.stored_bytes(node.rss_bytes)} beside the slab"),
        ("events", node.events_endpoint or numbers.UNKNOWN),
        ("namespaces", ", ".join(n[:12] for n in node.namespaces) or "none yet"),
    )
    return tuple(Row(name, (Text(name, "muted"), cell(value))) for name, value in fields)
