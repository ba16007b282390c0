"""Verbs `perilune cache ...` and `perilune jobs ...`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from controlplane.cli_calls import (
    JsonOption,
    LimitOption,
    ReasonOption,
    UrlOption,
    call_control_plane,
    show,
)
from workers.core.errors import ConfigError, PeriluneError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from controlplane.client import Client
    from controlplane.jobs.schemas import Job, JobKind

NodeOption = Annotated[str | None, typer.Option(help="Only this node; by default all.")]
NamespaceOption = Annotated[
    str | None, typer.Option(help="Hex digest, or its first 8 digits and more.")
]
TenantOption = Annotated[str | None, typer.Option(help="Cache salt; `default` has none.")]
KeyArgument = Annotated[
    str | None, typer.Argument(help="Hex key of a block: the chain to it.", show_default=False)
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the job's end.")]
HottestOption = Annotated[int, typer.Option(min=1, max=1000, help="How many chains without KEY.")]
JobArgument = Annotated[int, typer.Argument(min=1, metavar="JOB")]
POLL_SECONDS = (0.1, 1.0)
EXIT_CANCELLED = 1
DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

cache_app = typer.Typer(help="What the pool holds, and acting on it.", no_args_is_help=True)
jobs_app = typer.Typer(help="Actions that take longer than a request.", no_args_is_help=True)


class JobFailedError(PeriluneError):
    """The job that was waited for did not end well; exit code 1."""


def register(app: typer.Typer) -> None:
    app.add_typer(cache_app, name="cache")
    app.add_typer(jobs_app, name="jobs")


@cache_app.command("stat")
def cache_stat(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Pools, tiers and namespaces, as the nodes last reported."""
    from controlplane.cache import calls, text  # noqa: PLC0415

    found = call_control_plane(url, lambda client: client.send(calls.stat()))
    show(found, lambda: text.stat(found), as_json=as_json)


@cache_app.command("list")
def cache_list(
    key: KeyArgument = None,
    node: NodeOption = None,
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    order: Annotated[Literal["newest", "hits"], typer.Option(help="What comes first.")] = "newest",
    limit: LimitOption = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chains of blocks; with KEY those through that block. The nodes are asked now."""
    from controlplane.cache import calls, text  # noqa: PLC0415

    call = calls.chains(
        node=node,
        namespace=namespace,
        tenant=tenant,
        key=key,
        order=order,
        limit=limit,
        cursor=cursor,
    )
    found = call_control_plane(url, lambda client: client.send(call))
    show(found, lambda: text.chains(found), as_json=as_json)


@cache_app.command("pins")
def cache_pins(
    key: KeyArgument = None,
    node: NodeOption = None,
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Operators' pins, with what they hold and when they end."""
    from controlplane.cache import calls, text  # noqa: PLC0415

    call = calls.pins(node=node, namespace=namespace, tenant=tenant, key=key)
    found = call_control_plane(url, lambda client: client.send(call))
    show(found, lambda: text.pins(found), as_json=as_json)


@cache_app.command("pin")
def cache_pin(
    key: KeyArgument = None,
    node: NodeOption = None,
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    name: Annotated[str | None, typer.Option(help="To end it by; by default made up.")] = None,
    lasts: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="e.g. 30m, 12h, 7d; else for good.")
    ] = None,
    max_share: Annotated[float, typer.Option(help="Most of a pool that pins may hold.")] = 0.2,
    reason: ReasonOption = "",
    wait: WaitOption = True,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a chain, a tenant or a namespace from eviction: on all nodes or on none."""
    from controlplane.cache.schemas import CachePin  # noqa: PLC0415

    values = {"name": name, "for_seconds": _seconds(lasts), "max_share": max_share}
    body = _body(CachePin, key, node, namespace, tenant, reason, values)
    _operate("pin", body, url, wait=wait, as_json=as_json)


@cache_app.command("unpin")
def cache_unpin(
    key: KeyArgument = None,
    name: Annotated[str | None, typer.Option(help="The pin's name.")] = None,
    node: NodeOption = None,
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    reason: ReasonOption = "",
    wait: WaitOption = True,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a pin by its name, or all that hold a block of a selection."""
    from controlplane.cache.schemas import CacheUnpin  # noqa: PLC0415

    body = _body(CacheUnpin, key, node, namespace, tenant, reason, {"name": name})
    _operate("unpin", body, url, wait=wait, as_json=as_json)


@cache_app.command("purge")
def cache_purge(
    key: KeyArgument = None,
    node: NodeOption = None,
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    include_pinned: Annotated[
        bool, typer.Option("--include-pinned", help="Operators' pins on them end too.")
    ] = False,
    confirm: Annotated[
        str, typer.Option(metavar="TARGET", help="The target's name, where much goes.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: ReasonOption = "",
    wait: WaitOption = True,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks from the pool; this cannot be undone. Running requests keep what they read."""
    from controlplane.cache.schemas import CachePurge  # noqa: PLC0415

    values = {"include_pinned": include_pinned, "confirm": confirm}
    body = _body(CachePurge, key, node, namespace, tenant, reason, values)
    if not confirm:
        body = body.model_copy(update={"confirm": _agreed(body, yes=yes)})
    _operate("purge", body, url, wait=wait, as_json=as_json)


@cache_app.command("prefetch")
def cache_prefetch(
    key: KeyArgument = None,
    node: NodeOption = None,
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    hottest: HottestOption = 10,
    reason: ReasonOption = "",
    wait: WaitOption = True,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a chain, or the hottest of a selection, from SSD into memory."""
    from controlplane.cache.schemas import CachePrefetch  # noqa: PLC0415

    body = _body(CachePrefetch, key, node, namespace, tenant, reason, {"hottest": hottest})
    _operate("prefetch", body, url, wait=wait, as_json=as_json)


@cache_app.command("replicate")
def cache_replicate(
    key: KeyArgument = None,
    source: Annotated[str, typer.Option("--from", metavar="NODE")] = "",
    destination: Annotated[str, typer.Option("--to", metavar="NODE")] = "",
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    hottest: HottestOption = 10,
    mib_per_second: Annotated[float, typer.Option(help="At most so fast.")] = 256,
    reason: ReasonOption = "",
    wait: WaitOption = True,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a chain, or the hottest of a selection, from one node to another."""
    from controlplane.cache.schemas import CacheReplicate  # noqa: PLC0415

    for option, value in (("--from", source), ("--to", destination)):
        if not value:
            raise ConfigError(option, value, "is missing", "Name a node: perilune get nodes.")
    values = {
        "source": source,
        "destination": destination,
        "hottest": hottest,
        "mib_per_second": mib_per_second,
    }
    body = _body(CacheReplicate, key, None, namespace, tenant, reason, values)
    _operate("replicate", body, url, wait=wait, as_json=as_json)


@jobs_app.command("list")
def jobs_list(
    state: Annotated[str | None, typer.Option(help="e.g. failed")] = None,
    kind: Annotated[str | None, typer.Option(help="e.g. purge")] = None,
    limit: LimitOption = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Jobs, newest first."""
    from controlplane.cache import calls, text  # noqa: PLC0415

    call = calls.jobs(state=state, kind=kind, limit=limit)
    found = call_control_plane(url, lambda client: client.send(call))
    show(found, lambda: text.jobs(found.items), as_json=as_json)


@jobs_app.command("show")
def jobs_show(job_id: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """One job: its progress, what came of it, whether it can be taken back."""
    from controlplane.cache import calls, text  # noqa: PLC0415

    found = call_control_plane(url, lambda client: client.send(calls.job(job_id)))
    show(found, lambda: text.job(found), as_json=as_json)


@jobs_app.command("cancel")
def jobs_cancel(
    job_id: JobArgument,
    reason: ReasonOption = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a job stop; what it has done stays done."""
    from controlplane.cache import calls, text  # noqa: PLC0415

    call = calls.cancel_job(job_id, reason)
    found = call_control_plane(url, lambda client: client.send(call))
    show(found, lambda: text.progress(found), as_json=as_json)


@jobs_app.command("undo")
def jobs_undo(
    job_id: JobArgument,
    reason: ReasonOption = "",
    wait: WaitOption = True,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a job back with another one, where that can be done."""
    from controlplane.cache import calls  # noqa: PLC0415

    call = calls.undo_job(job_id, reason)
    job = call_control_plane(url, lambda client: client.send(call))
    _follow(job, url, wait=wait, as_json=as_json)


# --- inside ---------------------------------------------------------------------------------


def _body(
    kind: Any,
    key: str | None,
    node: str | None,
    namespace: str | None,
    tenant: str | None,
    reason: str,
    more: Mapping[str, object],
) -> Any:
    """The request's body; ConfigError names the option that cannot be."""
    from pydantic import ValidationError  # noqa: PLC0415

    values = {"key": key, "node": node, "namespace": namespace, "tenant": tenant, **more}
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return kind(**given, reason=reason)
    except ValidationError as error:
        found = error.errors()[0]
        field = str(found["loc"][0]) if found["loc"] else "selection"
        problem = str(found["msg"]).lower()
        value = found["input"] if found["loc"] else given
        expected = found.get("ctx", {}).get("expected")
        way_out = "perilune cache list shows keys, perilune cache stat namespaces."
        if expected:
            way_out = f"Give {expected}. {way_out}"
        raise ConfigError(field, value, problem, way_out) from error


def _operate(kind: JobKind, body: BaseModel, url: str | None, *, wait: bool, as_json: bool) -> None:
    from controlplane.cache import calls  # noqa: PLC0415

    call = calls.operate(kind, body)  # type: ignore[arg-type]  # made by `_body` for this kind
    reply = call_control_plane(url, lambda client: client.send(call))
    _follow(reply.job, url, wait=wait, as_json=as_json)


def _follow(job: Job, url: str | None, *, wait: bool, as_json: bool) -> None:
    """Print the job; when waiting, where it is, then its end. Ctrl-C leaves it running."""
    from controlplane.cache import text  # noqa: PLC0415

    if wait:
        try:
            job = call_control_plane(url, lambda client: _await(client, job))
        except KeyboardInterrupt:
            print(f"job {job.id} goes on: perilune jobs show {job.id}", file=sys.stderr)
            raise
    waited_for = job.state in ("done", "failed", "cancelled")
    show(job, lambda: text.job(job) if waited_for else text.progress(job), as_json=as_json)
    if job.state in ("failed", "cancelled"):
        why = job.error or "it was cancelled."
        raise JobFailedError(f"job {job.id} {job.state}: {why}")


def _await(client: Client, job: Job) -> Job:
    from controlplane.cache import calls, text  # noqa: PLC0415
    from controlplane.jobs.schemas import LIVE_STATES  # noqa: PLC0415

    live = sys.stderr.isatty()
    pause, longest = POLL_SECONDS
    told = ""
    while job.state in LIVE_STATES:
        line = text.progress(job)
        if live and line != told:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            told = line
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
        job = client.send(calls.job(job.id))
    if told:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return job


def _agreed(body: Any, *, yes: bool) -> str:
    """The target's name, where the operator agrees; "" where the control plane is to decide."""
    from controlplane.cache.names import target_name  # noqa: PLC0415

    name = target_name(body.model_dump())
    if yes:
        return name
    if body.key is not None or not sys.stdin.isatty():
        return ""
    print(f"This purges {name} and cannot be undone.", file=sys.stderr)
    typed = typer.prompt("Type its name to agree", err=True, default="", show_default=False)
    if typed != name:
        raise ConfigError("confirm", typed, "is not the target's name", f"It is {name}.")
    return str(typed)


def _seconds(lasts: str | None) -> float | None:
    if lasts is None:
        return None
    found = DURATION.fullmatch(lasts)
    if found is None:
        raise ConfigError("--for", lasts, "is no time", "Write it as 90s, 30m, 12h or 7d.")
    return float(found[1]) * UNIT_SECONDS[found[2]]
