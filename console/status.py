"""`perilune status`: what runs on this machine, measured, and what the control plane says of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from console.viewmodel import numbers
from workers.supervisor.procfs import (
    ProcessIdentity,
    find_processes,
    own_memory_bytes,
    session_memory_bytes,
)
from workers.supervisor.state_file import ComponentState, read_holder, read_state

if TYPE_CHECKING:
    from workers.supervisor.home import Home

HTTP_TIMEOUT_SECONDS = 2.0
SILENT = f"no answer within {HTTP_TIMEOUT_SECONDS:g} s (perilune logs control-plane)"
"""Sooner than the supervisor sees it: probes have a minute."""
COLUMNS = ("component", "state", "pid", "memory", "restarts", "for", "address or error")
RIGHT = frozenset({"pid", "memory", "restarts", "for"})


def collect(home: Home) -> dict[str, Any]:
    """One JSON object. Memory is resident, without shared memory: the agent's slab is beside it.

    Keys: `cluster`, `state` (ready, starting, stopping, down, unknown), `data`, `model`, `engine`,
    `emulated`, `uptime_seconds`, `urls`, `control_plane` (its /health, or null), `pool` (its report
    of tiers, tenants and eviction, or null), `supervisor`,
    `slab_paths`, and `components`, each with `name`, `kind`, `pid`, `state`, `rss_bytes`,
    `restarts`, `age_seconds`, `url`, `log_file`, `last_error`, `note` (that it runs and does not
    answer, and what it does instead; else empty); `consoles` are the terminal consoles open on this
    machine (`pid`, `rss_bytes`). Unknown is null.
    """
    state = read_state(home.state_file)
    if state is None or not ProcessIdentity(state.pid, state.start_ticks).is_alive():
        return _without_state(home)
    now = time.time()  # noqa: TID251 - compared with another process's wall clock
    health = _get(f"{state.control_plane_url}/health")
    answers = health is not None
    components = [_component(each, now) for each in state.components]
    for each in components:
        if each["kind"] == "controlplane" and each["state"] == "ready" and not answers:
            each["note"] = each["note"] or SILENT
    return {
        "cluster": state.cluster,
        "state": state.state,
        "data": str(home.data),
        "model": state.model,
        "engine": state.engine,
        "emulated": state.engine == "emulated",
        "uptime_seconds": round(now - state.started_at, 1),
        "urls": {"control_plane": state.control_plane_url, "gateway": state.gateway_url},
        "control_plane": health,
        "pool": _get(f"{state.control_plane_url}/api/v1/cache/pool") if answers else None,
        # The supervisor may share its session with a shell: its own memory only.
        "supervisor": {"pid": state.pid, "rss_bytes": own_memory_bytes(state.pid)},
        "slab_paths": state.slab_paths,
        "components": components,
        "consoles": [
            {"pid": pid, "rss_bytes": own_memory_bytes(pid)} for pid in find_processes(_is_console)
        ],
    }


def _without_state(home: Home) -> dict[str, Any]:
    """Nothing runs here, or what runs has not written (or has lost) its state file."""
    holder = read_holder(home.lock_file)
    found: dict[str, Any] = {"cluster": None, "data": str(home.data), "components": []}
    if holder is None:
        return {**found, "state": "down"}
    supervisor = {"pid": holder.pid, "rss_bytes": own_memory_bytes(holder.pid)}
    return {**found, "state": "unknown", "supervisor": supervisor}


def render(status: dict[str, Any]) -> str:
    """For a terminal or a pipe: the address stands last and is never cut or wrapped."""
    if status["state"] == "unknown":
        pid = status["supervisor"]["pid"]
        return (
            f"process {pid} runs a cluster of {status['data']}, but its run/supervisor.json cannot "
            f"be read: it is just starting, or the file is broken (perilune down ends it)"
        )
    if status["state"] == "down":
        return f"no cluster of {status['data']} is running (perilune up starts one)"
    emulated = ", emulated engine" if status["emulated"] else ""
    title = f"{status['cluster']}: {status['state']}, model {status['model']}{emulated}"
    rows = [COLUMNS, *map(_row, status["components"])]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    lines = [title, *(_padded(row, widths) for row in rows)]
    nodes = (status.get("pool") or {}).get("nodes", [])
    return "\n".join([*lines, *map(_pool_line, nodes)])


def _pool_line(node: dict[str, Any]) -> str:
    """`pool n1: dram 15.5/16 MiB ok, ssd 0.6/1.95 TiB ok; policy decay r17; write queue 0 / 500`."""
    tiers = [
        f"{tier['tier']} {numbers.used_of(tier['used_bytes'], tier['capacity_bytes'])} {tier['state']}"
        for tier in node["tiers"]
    ] or [f"dram {numbers.used_of(node['used_bytes'], node['capacity_bytes'])}"]
    policy = node["eviction"]["policy"] or numbers.UNKNOWN
    revision = node["eviction"]["policy_revision"]
    acts = f" r{revision}" if revision else ""
    queue = (
        f"{numbers.count(node['write_queue_blocks'])} / {numbers.count(node['write_queue_bound'])}"
    )
    return f"pool {node['node']}: {', '.join(tiers)}; policy {policy}{acts}; write queue {queue}"


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    has_failed = each["state"] == "failed"
    at = each["note"] or each["url"]
    return (
        each["name"],
        each["state"],
        str(each["pid"] or "-"),
        numbers.stored_bytes(each["rss_bytes"]),
        numbers.count(each["restarts"]),
        numbers.duration(each["age_seconds"]),
        f"{each['last_error']} (log: {each['log_file']})" if has_failed else at,
    )


def _padded(row: tuple[str, ...], widths: list[int]) -> str:
    cells = (
        cell.rjust(width) if name in RIGHT else cell.ljust(width)
        for name, cell, width in zip(COLUMNS, row, widths, strict=True)
    )
    return "  ".join(cells).rstrip()


def _component(component: ComponentState, now: float) -> dict[str, Any]:
    identity = ProcessIdentity(component.pid, component.start_ticks)
    is_alive = bool(component.pid) and identity.is_alive()
    return {
        "name": component.name,
        "kind": component.kind,
        "state": component.state,
        "pid": component.pid or None,
        "rss_bytes": session_memory_bytes(component.pid) if is_alive else None,
        "restarts": component.restarts,
        "age_seconds": round(max(now - component.since, 0.0), 1) if component.since else None,
        "url": component.url,
        "log_file": component.log_file,
        "last_error": component.last_error,
        "note": component.note,
    }


def _is_console(command: list[str]) -> bool:
    """Is this `perilune console`, under whichever name Python runs it?"""
    for place, word in enumerate(command[:-1]):
        is_ours = word.rpartition("/")[2] == "perilune" or command[place - 1 : place + 1] == [
            "-m", "console",
        ]  # fmt: skip
        if is_ours and command[place + 1] == "console":
            return True
    return False


def _get(url: str) -> dict[str, Any] | None:
    import httpx2  # noqa: PLC0415 - not needed where nothing runs

    try:
        reply = httpx2.get(url, timeout=HTTP_TIMEOUT_SECONDS, trust_env=False)
        content: dict[str, Any] | None = reply.json() if reply.status_code == 200 else None
    except (httpx2.HTTPError, OSError, ValueError):
        return None
    return content
