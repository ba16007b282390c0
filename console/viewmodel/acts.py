"""What an operator does to the cache and to jobs: what will happen, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from console.viewmodel import numbers, running
from console.viewmodel.jobs import done_text, is_live
from console.viewmodel.pool import group_name, short_name
from console.viewmodel.table import Text, cell
from controlplane.cache.schemas import (
    CachePin,
    CachePinned,
    CachePrefetch,
    CachePurge,
    CacheUnpin,
)
from controlplane.doctor.schemas import DoctorReport, DoctorRun
from controlplane.gateways.running_schemas import RequestCancel, RunningList, RunningRequest
from controlplane.jobs.schemas import Job
from controlplane.nodes.pool_schemas import PoolGroup, PoolReport
from workers.core.doctor_messages import DEFAULT_PROBE_BYTES

PIN_SECONDS = 1800.0
PIN_SHARE_LIMIT = 0.20
HOTTEST = 10
MAX_PROBED_PAIRS = 128
"""Of one run of the doctor; the control plane's plan has the bound."""
LET_RUN = "Let it run"
NAME_DIGITS = 12
"""Of a namespace, in the name that one types to agree to a purge."""

Body = CachePin | CacheUnpin | CachePurge | CachePrefetch | DoctorRun | RequestCancel
Kind = Literal[
    "pin", "unpin", "purge", "prefetch", "cancel", "undo", "doctor", "cancel_request"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Act:
    """`typed` must be repeated by hand where it is given. Of `body` and `job_id` one is set;
    `request_id` beside the body of a running request's cancel."""

    kind: Kind
    title: str
    button: str
    lines: tuple[Text, ...]
    typed: str = ""
    body: Body | None = None
    job_id: int | None = None
    request_id: str = ""
    leave: str = "Cancel"
    """The button that does nothing; of an act that itself cancels it must not say so."""


def of_group(action: str, key: str, report: PoolReport) -> Act | str:
    """`key` is the row's: `tenant/acme`. A sentence where the action is not possible."""
    group = next((g for g in report.groups if f"{g.kind}/{g.name}" == key), None)
    if group is None:
        return "This tenant or namespace holds nothing any more."
    if group.others:
        return f"{group_name(group)} is a sum: `perilune cache` takes the one you mean by name."
    makers = {"pin": pin_group, "prefetch": prefetch_group, "purge": purge_group}
    return makers[action](group, report)


def purge_group(group: PoolGroup, report: PoolReport) -> Act:
    """All blocks of a tenant or namespace, on all nodes."""
    where = _selection(group)
    confirm = group.name if group.kind == "tenant" else group.name[:NAME_DIGITS]
    name = short_name(group.name)
    held = sum(sum(t.used_bytes for t in n.tiers) or n.used_bytes or 0 for n in report.nodes)
    lines = [
        Text(f"warn  {_amount(group)} leave the pool; their next requests compute them again", "warn"),
        Text(f"ok    {_share(group.used_bytes, held)} of what the pool holds becomes free"),
        Text("ok    running requests keep what they read until they end; no worker restarts"),
        Text("ok    blocks that an operator has pinned stay until their pins end"),
        Text("warn  this cannot be undone", "warn"),
    ]  # fmt: skip
    if report.measured_hit_rate is not None:
        rate = numbers.percent(report.measured_hit_rate)
        lines.insert(
            1, Text(f"ok    the pool finds {rate} of what it is asked for; that will fall")
        )
    title = f"PURGE {group.kind} {group_name(group)}"
    body = CachePurge.model_validate({**where, "confirm": confirm})
    return Act("purge", title, f"Purge {name}", tuple(lines), typed=name, body=body)


def purge_node(node: str, report: PoolReport) -> Act | None:
    """All blocks of one node."""
    found = next((n for n in report.nodes if n.node == node), None)
    if found is None:
        return None
    size = numbers.stored_bytes(found.used_bytes)
    lines = (
        Text(f"warn  everything that {node} holds in all tiers leaves: {size} in DRAM", "warn"),
        Text(f"ok    {numbers.stored_bytes(found.pinned_bytes)} are pinned now; what an operator has pinned stays"),
        Text("ok    running requests keep what they read until they end; no worker restarts"),
        Text("warn  this cannot be undone", "warn"),
    )  # fmt: skip
    body = CachePurge(node=node, confirm=node)
    return Act("purge", f"PURGE node {node}", f"Purge {node}", lines, typed=node, body=body)


def pin_group(group: PoolGroup, report: PoolReport) -> Act:
    """Keep from eviction for a while."""
    capacity = sum(n.capacity_bytes or 0 for n in report.nodes)
    pinned = sum(n.pinned_bytes or 0 for n in report.nodes)
    after = (pinned + group.used_bytes) / capacity if capacity else None
    over = after is not None and after > PIN_SHARE_LIMIT
    limit = numbers.percent(PIN_SHARE_LIMIT)
    mark = "warn" if over else "ok  "
    lines = [
        Text(f"ok    {_amount(group)} are kept from eviction for {numbers.window(PIN_SECONDS)}"),
        Text(f"{mark}  pinned after: at most {numbers.percent(after)} of DRAM, limit {limit} a node"
             + (": the job is refused where it would pass" if over else ""), "warn" if over else "plain"),
        Text("ok    blocks stored later are not pinned by this"),
        Text("undo  pins lists it, and ends it", "muted"),
    ]  # fmt: skip
    body = CachePin.model_validate({**_selection(group), "for_seconds": PIN_SECONDS})
    return Act("pin", f"PIN {group.kind} {group_name(group)}", "Pin", tuple(lines), body=body)


def prefetch_group(group: PoolGroup, report: PoolReport) -> Act:
    """From SSD into DRAM."""
    ssd = sum(t.used_bytes for n in report.nodes for t in n.tiers if t.tier == "ssd")
    nothing = "; no node has an SSD tier: nothing will move" if not _has_ssd(report) else ""
    lines = (
        Text(f"{'warn' if nothing else 'ok  '}  the {HOTTEST} hottest chains of {group_name(group)} are read from SSD into DRAM{nothing}", "warn" if nothing else "plain"),
        Text(f"ok    SSD holds {numbers.stored_bytes(ssd)} in all; what DRAM has no room for evicts by the policy"),
        Text("undo  none needed: the copies on SSD stay", "muted"),
    )  # fmt: skip
    body = CachePrefetch.model_validate({**_selection(group), "hottest": HOTTEST})
    title = f"PREFETCH {group.kind} {group_name(group)}"
    return Act("prefetch", title, "Prefetch", lines, body=body)


def unpin(pins: Sequence[CachePinned]) -> Act | None:
    """End one operator's pin on every node where it is; `pins` are its rows."""
    if not pins:
        return None
    name = pins[0].name
    blocks = sum(pin.blocks for pin in pins)
    lines = (
        Text(f"ok    {numbers.count(blocks)} blocks on {_nodes(len(pins))} may be evicted again"),
        Text("undo  the job can be taken back: what is still there is pinned again", "muted"),
    )
    return Act("unpin", f"UNPIN {name}", "Unpin", lines, body=CacheUnpin(name=name))


def cancel(job: Job) -> Act | None:
    """Stop a job; what it has done stays done."""
    if not is_live(job):
        return None
    lines = (
        Text(f"ok    {done_text(job.progress)} are done and stay done"),
        Text("ok    it stops after the slice at hand", "muted"),
    )
    title = f"CANCEL job {job.id} {job.kind} {job.target}"
    return Act("cancel", title, "Cancel the job", lines, job_id=job.id, leave=LET_RUN)


def undo(job: Job) -> Act | None:
    """Take a job back, where the control plane says that it can."""
    if not job.undo.possible:
        return None
    lines = (Text(f"ok    {job.undo.how or 'another job takes it back'}"),)
    return Act("undo", f"UNDO job {job.id} {job.kind} {job.target}", "Undo", lines, job_id=job.id)


def cancel_running(found: RunningList | None, key: str) -> Act | str:
    """`key` is the row's. A sentence where it has ended, or nobody answers who could end it."""
    item = running.find(found, key)
    if found is None or item is None:
        return "This request has ended: it is not in flight any more."
    if item.gateway in running.silent(found):
        return f"Gateway {item.gateway} does not answer: it cannot be told to end the request."
    return cancel_request(item)


def cancel_request(item: RunningRequest) -> Act:
    """End a request in flight, at its gateway."""
    name = numbers.short_id(item.request_id)
    waits = f"{item.state.replace('_', ' ')}, for {numbers.duration(item.age_seconds)}"
    if item.waits_for:
        waits += f"; waits {numbers.duration(item.wait_seconds)} for {item.waits_for}"
    left = running.seconds_left(item)
    if left is None:
        bound = "ok    the policy has no bound for this wait: nothing else ends it but its client"
    elif item.at_bound == "report":
        bound = "ok    the policy would only report it (watchdog: report), never end it"
    else:
        bound = f"ok    without this the policy ends it in {numbers.duration(max(0.0, left))}"
    lines = (
        cell(f"      {item.tenant or 'no tenant'}, {item.model}, at {item.gateway}: {waits}"),
        Text("warn  its client gets 503 cancelled_by_operator, or an error event in a stream that has begun", "warn"),
        Text(f"warn  what was computed of {numbers.count(item.prompt_tokens)} prompt tokens and of its output is lost to it; blocks stored stay in the pool", "warn"),
        Text("ok    its decode slot, its place in queues and its pins are given back; no worker is blamed"),
        cell(bound),
        Text("undo  none; OpenAI's SDKs are told not to send it again by themselves", "muted"),
    )  # fmt: skip
    body = RequestCancel(gateway=item.gateway)
    title = f"CANCEL request {name}"
    return Act(
        "cancel_request", title, f"End {name}", lines, body=body, request_id=item.request_id, leave=LET_RUN,
    )  # fmt: skip


def run_doctor(
    report: DoctorReport | None, num_nodes: int, pair: tuple[str, str] | None = None
) -> Act | str:
    """Check all nodes and pairs, or one pair both ways. A sentence where it cannot begin now."""
    if report is not None and report.state == "running":
        return f"Run {report.number} is under way ({report.done} of {report.total} answers): it ends by itself."
    if not num_nodes:
        return "No node has joined: there is nothing to look at."
    every = num_nodes * (num_nodes - 1)
    num_pairs = 2 if pair else min(MAX_PROBED_PAIRS, every)
    left_out = (
        ""
        if pair or every <= num_pairs
        else f", {numbers.count(every - num_pairs)} pairs are left out"
    )
    asked = 2 if pair else num_nodes
    lines = [
        Text(f"ok    {_nodes(asked)} {'is' if asked == 1 else 'are'} asked for facts; {numbers.count(num_pairs)} pairs probe each other{left_out}"),
        Text(f"ok    a probe moves up to {numbers.stored_bytes(DEFAULT_PROBE_BYTES)} by each transport, beside traffic and after it (class batch)"),
        Text("ok    it uses slots that no key names; nothing that is cached is touched"),
    ]  # fmt: skip
    if report is not None and report.number:
        lines.append(Text(f"ok    its report replaces that of run {report.number}"))
    title = f"DOCTOR {pair[0]} -> {pair[1]} and back" if pair else "DOCTOR all nodes and pairs"
    body = DoctorRun(pair=f"{pair[0]}:{pair[1]}") if pair else DoctorRun()
    button = "Probe the pair" if pair else "Run the doctor"
    return Act("doctor", title, button, tuple(lines), body=body)


def why_no_undo(job: Job) -> str:
    """For the key that does nothing here."""
    if is_live(job):
        return f"Job {job.id} is {job.state}: K cancels it."
    return f"Job {job.id} cannot be taken back: {job.undo.how or 'nothing of it is left'}."


def with_reason(act: Act, reason: str) -> Act:
    """The act with the reason for the audit row."""
    if act.body is None:
        return act
    return replace(act, body=act.body.model_copy(update={"reason": reason}))


def _selection(group: PoolGroup) -> dict[str, str]:
    return {"tenant" if group.kind == "tenant" else "namespace": group.name}


def _amount(group: PoolGroup) -> str:
    size = numbers.stored_bytes(group.used_bytes)
    return f"{numbers.count(group.used_blocks)} blocks, {size} on {_nodes(group.nodes)}"


def _nodes(num: int) -> str:
    return f"{num} node{'' if num == 1 else 's'}"


def _share(part: int, whole: int) -> str:
    return numbers.percent(min(1.0, part / whole)) if whole else numbers.UNKNOWN


def _has_ssd(report: PoolReport) -> bool:
    return any(t.tier == "ssd" and t.state != "off" for n in report.nodes for t in n.tiers)
