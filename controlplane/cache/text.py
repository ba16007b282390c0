"""Cache and jobs as plain text for a terminal or a pipe. Pure."""

from __future__ import annotations

from datetime import datetime

from controlplane.cache.names import SHORT_DIGITS
from controlplane.cache.schemas import CacheChainList, CachePinList, CacheStat
from controlplane.cli_text import clock, percent, table
from controlplane.jobs.schemas import Job
from workers.core import numbers
from workers.core.numbers import count as number
from workers.core.numbers import duration


def stat(found: CacheStat) -> str:
    """Nodes, tiers and namespaces."""
    return "\n\n".join(part for part in (_nodes(found), _tiers(found), _namespaces(found)) if part)


def _nodes(found: CacheStat) -> str:
    head = ("NODE", "STATE", "USED", "CAPACITY", "USED %", "PINNED", "BLOCK", "HIT %", "POLICY")
    rows = (
        (
            node.node,
            node.state,
            number(node.used_blocks),
            number(node.capacity_blocks),
            percent(node.used_blocks, node.capacity_blocks),
            number(node.pinned_blocks),
            numbers.stored_bytes(node.block_bytes),
            percent(node.hit_tokens_total, node.prompt_tokens_total),
            node.policy or "--",
        )
        for node in found.nodes
    )
    return table(head, rows, "No node has joined. perilune up starts one.")


def _tiers(found: CacheStat) -> str:
    head = ("NODE", "TIER", "STATE", "USED", "CAPACITY", "EVICTED")
    rows = (
        (
            node.node,
            tier.tier,
            tier.state,
            numbers.stored_bytes(tier.used_bytes),
            numbers.stored_bytes(tier.capacity_bytes),
            number(tier.evicted_blocks_total),
        )
        for node in found.nodes
        for tier in node.tiers
    )
    return table(head, rows, "")


def _namespaces(found: CacheStat) -> str:
    head = ("NAMESPACE", "MODEL", "WEIGHTS", "DTYPE", "NODES", "WORKERS", "USED")
    rows = (
        (
            space.namespace[:SHORT_DIGITS],
            space.model,
            space.weights_version,
            space.kv_dtype,
            ",".join(space.nodes),
            ",".join(space.workers) or "none",
            number(space.used_blocks),
        )
        for space in found.namespaces
    )
    return table(head, rows, "No worker has brought a model yet.")


def chains(found: CacheChainList) -> str:
    head = ("NODE", "NAMESPACE", "TENANT", "KEY", "BLOCKS", "BYTES", "TIER", "HITS", "IDLE", "PINS", "PINNED BY")  # fmt: skip
    rows = (
        (
            chain.node,
            chain.namespace[:SHORT_DIGITS],
            chain.tenant,
            chain.key,
            number(chain.blocks),
            numbers.stored_bytes(chain.bytes),
            chain.tier,
            number(chain.hits),
            duration(chain.idle_seconds),
            number(chain.pins),
            ",".join(chain.pinned_by) or "-",
        )
        for chain in found.items
    )
    lines = [table(head, rows, "No chain matches.")]
    if found.next_cursor:
        lines.append(f"more: --cursor {found.next_cursor}")
    return "\n".join([*lines, *found.unreachable.values()])


def pins(found: CachePinList) -> str:
    head = ("NAME", "NODE", "BLOCKS", "BYTES", "SHARE %", "CHAINS", "ENDS")
    rows = (
        (
            pin.name,
            pin.node,
            number(pin.blocks),
            numbers.stored_bytes(pin.bytes),
            numbers.percent(pin.share, unit=False),
            number(pin.chains),
            _time(pin.expires_at, "never"),
        )
        for pin in found.items
    )
    lines = table(head, rows, "Nothing is pinned. perilune cache pin KEY pins a chain.")
    return "\n".join([lines, *found.unreachable.values()])


def jobs(items: list[Job]) -> str:
    head = ("JOB", "KIND", "TARGET", "STATE", "DONE", "TOTAL", "CREATED", "AUTHOR", "WHY")
    rows = (
        (
            str(job.id),
            job.kind,
            job.target,
            _state(job),
            number(job.progress.done),
            number(job.progress.total),
            clock(job.created_at),
            job.author,
            job.error[:80] or job.reason[:80],
        )
        for job in items
    )
    return table(head, rows, "No job has been started yet.")


def job(found: Job) -> str:
    """One job: where it is, what came of it, whether it can be taken back."""
    lines = [f"job {found.id}  {found.kind}  {found.target}  {_state(found)}"]
    if found.reason:
        lines.append(f"reason: {found.reason}")
    by = "the control plane" if found.automatic else found.author
    lines.append(f"by {by} at {clock(found.created_at)}, ended {_time(found.finished_at, '--')}")
    if found.attempts > 1:
        lines.append(f"attempt {found.attempts}: the control plane restarted while it ran")
    if found.error:
        lines.append(f"error: {found.error}")
    lines += [f"{name.replace('_', ' ')}: {value}" for name, value in _figures(found).items()]
    lines += [f"  {node}: {value}" for node, value in _by_node(found).items()]
    if found.undo.possible:
        lines.append(f"undo: perilune jobs undo {found.id} ({found.undo.how})")
    elif found.undo.how:
        lines.append(f"undo: no. {found.undo.how}")
    return "\n".join(lines)


def progress(found: Job) -> str:
    """One line while it runs."""
    done, total = found.progress.done, found.progress.total
    share = f" of {number(total)}" if total is not None else ""
    note = f", {found.progress.note}" if found.progress.note else ""
    return f"job {found.id} {found.kind} {_state(found)}: {number(done)}{share} blocks{note}"


def _state(found: Job) -> str:
    return "cancelling" if found.cancelling else found.state


def _figures(found: Job) -> dict[str, object]:
    return {name: value for name, value in found.result.items() if name != "nodes"}


def _by_node(found: Job) -> dict[str, str]:
    nodes = found.result.get("nodes")
    if not isinstance(nodes, dict) or len(nodes) < 2:
        return {}
    return {
        str(node): ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
        for node, figures in nodes.items()
        if isinstance(figures, dict)
    }


def _time(at: datetime | None, never: str) -> str:
    return never if at is None else clock(at)
