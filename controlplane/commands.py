"""Verbs of the package `controlplane`: `get`, `describe`, `policy`, `audit`, `node`, `worker`, `key`;
`cache` and `jobs` are in `controlplane.cache.commands`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from controlplane.cache.commands import register as register_cache
from controlplane.cli_calls import JsonOption, LimitOption, ReasonOption, UrlOption
from controlplane.cli_calls import call_control_plane as _call
from controlplane.cli_calls import show as _show
from controlplane.doctor.commands import register as register_doctor
from workers.core.errors import ConfigError
from workers.verbs import register_verbs

if TYPE_CHECKING:
    from pydantic import BaseModel

    from controlplane.client import Client
    from controlplane.policies.schemas import PolicyRevision

PolicyArgument = Annotated[str, typer.Argument(metavar="KIND/SCOPE", help="e.g. slo/default")]
KINDS = ("slo", "scheduling", "cache", "admission", "transfer", "records")

get_app = typer.Typer(
    help="List nodes, workers, requests, what runs, rejections, ledger, transfers.",
    no_args_is_help=True,
)
describe_app = typer.Typer(help="Everything about one thing.", no_args_is_help=True)
policy_app = typer.Typer(help="See and change policies.", no_args_is_help=True)
node_app = typer.Typer(help="Act on nodes.", no_args_is_help=True)
worker_app = typer.Typer(help="Act on workers.", no_args_is_help=True)
key_app = typer.Typer(help="Client keys of /v1.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the verbs of this package; each imports its heavy modules when it runs."""
    for name, verbs in (
        ("get", get_app),
        ("describe", describe_app),
        ("policy", policy_app),
        ("node", node_app),
        ("worker", worker_app),
        ("key", key_app),
    ):
        app.add_typer(verbs, name=name)
    app.command("audit")(audit)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("gateway", context_settings=anything)(gateway)
    register_cache(app)
    register_doctor(app)
    if find_spec("controlplane.bench") and find_spec("controlplane.bench.commands"):
        register_verbs(app, "controlplane.bench.commands", verb="bench", extra="controlplane")


def gateway(context: typer.Context) -> None:
    """Serve /v1 over workers that a control plane or a file (--static) names; --help has more."""
    from controlplane.gateway.__main__ import main  # noqa: PLC0415

    raise typer.Exit(main(context.args))


@get_app.command("nodes")
def get_nodes(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Nodes, their state and their pools."""
    from controlplane import cli_text  # noqa: PLC0415

    items = _call(url, lambda client: client.nodes())
    _show(items, lambda: cli_text.nodes(items), as_json=as_json)


@get_app.command("workers")
def get_workers(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Workers, their state and their load."""
    from controlplane import cli_text  # noqa: PLC0415

    items = _call(url, lambda client: client.workers())
    _show(items, lambda: cli_text.workers(items), as_json=as_json)


@get_app.command("requests")
def get_requests(
    status: Annotated[str | None, typer.Option(help="e.g. failed")] = None,
    model: Annotated[str | None, typer.Option()] = None,
    tenant: Annotated[str | None, typer.Option()] = None,
    worker: Annotated[str | None, typer.Option(help="Either leg's.")] = None,
    since: Annotated[str | None, typer.Option(help="RFC 3339 time.")] = None,
    limit: LimitOption = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Requests, newest first."""
    from controlplane import cli_text  # noqa: PLC0415

    found = _call(
        url,
        lambda client: client.decisions(
            status=status, model=model, tenant=tenant, worker=worker, since=since, limit=limit
        ),
    )
    _show(found, lambda: cli_text.requests(found.items), as_json=as_json)


@get_app.command("rejections")
def get_rejections(
    since: Annotated[str | None, typer.Option(help="RFC 3339 time.")] = None,
    limit: LimitOption = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Requests that admission turned away, newest first."""
    from controlplane import cli_text  # noqa: PLC0415

    found = _call(url, lambda client: client.rejections(since=since, limit=limit))
    _show(found, lambda: cli_text.requests(found.items), as_json=as_json)


@get_app.command("transfers")
def get_transfers(
    window: Annotated[float, typer.Option(min=1, help="Seconds back from now.")] = 300,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Between nodes, since they started.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What each pair of workers and of nodes moved; --nodes: by transport, class and stage."""
    from controlplane import cli_text  # noqa: PLC0415
    from controlplane.transfers import calls, text  # noqa: PLC0415

    if nodes:
        moved = _call(url, lambda client: client.send(calls.nodes()))
        _show(moved, lambda: text.node_transfers(moved), as_json=as_json)
        return
    found = _call(url, lambda client: client.matrix(window))
    _show(found, lambda: cli_text.transfers(found.pairs), as_json=as_json)


@describe_app.command("node")
def describe_node(node_id: str, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """One node, all fields."""
    found = _call(url, lambda client: client.node(node_id))
    _show(found, lambda: _fields(found), as_json=as_json)


@describe_app.command("worker")
def describe_worker(worker_id: str, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """One worker, all fields."""
    found = _call(url, lambda client: client.worker(worker_id))
    _show(found, lambda: _fields(found), as_json=as_json)


def _fields(value: BaseModel) -> str:
    known = {k: v for k, v in value.model_dump(mode="json").items() if v not in (None, "")}
    width = max(len(name) for name in known)
    return "\n".join(f"{name.ljust(width)}  {field}" for name, field in known.items())


@policy_app.command("list")
def policy_list(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """The active policies."""
    from controlplane import cli_text  # noqa: PLC0415

    items = _call(url, lambda client: client.policies())
    _show(items, lambda: cli_text.policies(items), as_json=as_json)


@policy_app.command("show")
def policy_show(
    policy: PolicyArgument,
    revision: Annotated[str | None, typer.Option(help="e.g. r3; by default the active.")] = None,
    history: Annotated[bool, typer.Option("--history", help="List its revisions.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """One policy, or its history."""
    from controlplane import cli_text  # noqa: PLC0415

    kind, scope = _split(policy)
    if history:
        page = _call(url, lambda client: client.policy_revisions(kind, scope))
        _show(page, lambda: cli_text.policies(page.items), as_json=as_json)
        return
    found = _call(url, lambda client: _revision(client, kind, scope, revision))
    _show(found, lambda: cli_text.policy(found), as_json=as_json)


@policy_app.command("diff")
def policy_diff(
    policy: PolicyArgument,
    old: Annotated[str | None, typer.Argument(help="By default the one before.")] = None,
    new: Annotated[str | None, typer.Argument(help="By default the active one.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What one revision changed against another."""
    from controlplane import cli_text  # noqa: PLC0415

    kind, scope = _split(policy)

    def both(client: Client) -> tuple[PolicyRevision, PolicyRevision]:
        after = _revision(client, kind, scope, new)
        before = old or str(max(1, after.revision - 1))
        return _revision(client, kind, scope, before), after

    before, after = _call(url, both)
    if as_json:
        pair = {"old": before.model_dump(mode="json"), "new": after.model_dump(mode="json")}
        print(json.dumps(pair))
    else:
        print(cli_text.difference(before, after))


@policy_app.command("put")
def policy_put(
    policy: PolicyArgument,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Repeatable.")
    ] = None,
    reason: ReasonOption = "",
    if_match: Annotated[int | None, typer.Option(help="Only if this is the active one.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change values of a policy: a new revision, active at once."""
    from controlplane import cli_text  # noqa: PLC0415
    from controlplane.client import ClientError  # noqa: PLC0415
    from controlplane.policies.schemas import PolicyPut  # noqa: PLC0415

    kind, scope = _split(policy)
    changes = dict(_setting(text) for text in settings or [])
    if not changes:
        raise ConfigError("--set", None, "nothing to change", "Give --set NAME=VALUE.")

    def put(client: Client) -> Any:
        try:
            old = client.policy(kind, scope)
        except ClientError as error:
            if error.status != 404:
                raise
            return None, client.put_policy(kind, scope, PolicyPut(spec=changes, reason=reason))
        body = PolicyPut(spec={**old.spec, **changes}, reason=reason)
        return old, client.put_policy(kind, scope, body, if_match or old.revision)

    old, reply = _call(url, put)
    _show(reply, lambda: cli_text.policy_put(reply, old), as_json=as_json)


@policy_app.command("revert")
def policy_revert(
    policy: PolicyArgument,
    revision: Annotated[str, typer.Argument(help="e.g. r3")],
    reason: ReasonOption = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to an old revision's values, as a new revision."""
    from controlplane import cli_text  # noqa: PLC0415
    from controlplane.policies.schemas import PolicyRevert  # noqa: PLC0415

    kind, scope = _split(policy)
    body = PolicyRevert(revision=_number(revision), reason=reason)

    def revert(client: Client) -> Any:
        old = client.policy(kind, scope)
        return old, client.revert_policy(kind, scope, body, old.revision)

    old, reply = _call(url, revert)
    _show(reply, lambda: cli_text.policy_put(reply, old), as_json=as_json)


def audit(
    actor: Annotated[str | None, typer.Option()] = None,
    verb: Annotated[str | None, typer.Option(help="e.g. policy.put")] = None,
    target: Annotated[str | None, typer.Option(help="e.g. slo/default")] = None,
    limit: LimitOption = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who changed what, newest first."""
    from controlplane import cli_text  # noqa: PLC0415

    found = _call(
        url, lambda client: client.audit(actor=actor, verb=verb, target=target, limit=limit)
    )
    _show(found, lambda: cli_text.audit(found.items), as_json=as_json)


@node_app.command("remove")
def node_remove(
    node_id: str, reason: ReasonOption = "", url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Take a lost node out of the picture."""
    _call(url, lambda client: client.remove_node(node_id, reason))
    print(json.dumps({"removed": node_id}) if as_json else f"{node_id} removed")


@worker_app.command("restart")
def worker_restart(
    worker_id: str, reason: ReasonOption = "", url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Have its supervisor restart a worker."""
    _worker_action(worker_id, "restart", reason, url, as_json=as_json)


@worker_app.command("drain")
def worker_drain(
    worker_id: str, reason: ReasonOption = "", url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """No new requests for a worker; running ones end."""
    _worker_action(worker_id, "drain", reason, url, as_json=as_json)


@worker_app.command("resume")
def worker_resume(
    worker_id: str, reason: ReasonOption = "", url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """End a drain."""
    _worker_action(worker_id, "resume", reason, url, as_json=as_json)


def _worker_action(
    worker_id: str,
    action: Literal["restart", "drain", "resume"],
    reason: str,
    url: str | None,
    *,
    as_json: bool,
) -> None:
    from controlplane.fleet.schemas import WorkerAction  # noqa: PLC0415

    body = WorkerAction(action=action, reason=reason)
    reply = _call(url, lambda client: client.worker_action(worker_id, body))
    _show(reply, lambda: f"{worker_id}: {action} asked for, {reply.worker.state}", as_json=as_json)


@key_app.command("create")
def key_create(
    tenant: str,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
    max_priority: Annotated[str, typer.Option(help="Highest class it may claim.")] = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a client key; its secret is shown once."""
    from pydantic import ValidationError  # noqa: PLC0415

    from controlplane.tokens.schemas import KeyCreate  # noqa: PLC0415

    try:
        body = KeyCreate(tenant=tenant, note=note, max_priority=max_priority)
    except ValidationError as error:
        found = error.errors()[0]
        problem = str(found["msg"]).lower()
        way_out = "Tenants: up to 64 of a-z, 0-9, dot, dash, underscore; classes: 32, no dot."
        raise ConfigError(str(found["loc"][0]), found["input"], problem, way_out) from error
    created = _call(url, lambda client: client.create_key(body))
    text = f"key {created.id} of {created.tenant}, shown only now:\n{created.secret}"
    _show(created, lambda: text, as_json=as_json)


@key_app.command("list")
def key_list(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Client keys, without their secrets."""
    from controlplane import cli_text  # noqa: PLC0415

    items = _call(url, lambda client: client.keys())
    _show(items, lambda: cli_text.keys(items), as_json=as_json)


@key_app.command("delete")
def key_delete(
    key_id: int, reason: ReasonOption = "", url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Take a client key back."""
    deleted = _call(url, lambda client: client.delete_key(key_id, reason))
    _show(deleted, lambda: f"key {deleted.id} of {deleted.tenant} deleted", as_json=as_json)


def _split(policy: str) -> tuple[str, str]:
    kind, _, scope = policy.partition("/")
    if kind not in KINDS:
        way_out = f"Kinds: {', '.join(KINDS)}; e.g. slo/default."
        raise ConfigError("policy", policy, "no such kind", way_out)
    return kind, scope or "default"


def _number(revision: str) -> int:
    text = revision.removeprefix("r")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("revision", revision, "not a revision", "Write it as r3 or 3.")
    return int(text)


def _revision(client: Client, kind: str, scope: str, revision: str | None) -> PolicyRevision:
    if revision is None:
        return client.policy(kind, scope)
    return client.policy_revision(kind, scope, _number(revision))


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError("--set", text, "is no NAME=VALUE", "e.g. --set max_ttft_ms=2000")
    try:
        read = json.loads(value)
    except ValueError:
        return name, value
    finite = not isinstance(read, float) or isfinite(read)
    return name, read if finite else value
