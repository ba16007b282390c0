"""`perilune get ledger|running|health`, `describe request` and `request cancel`: the console's screens
as verbs."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli_calls import (
    JsonOption,
    LimitOption,
    ReasonOption,
    UrlOption,
    call_control_plane,
    show,
)

if TYPE_CHECKING:
    from controlplane.decisions.schemas import Decision
    from controlplane.gateways.running_schemas import RunningList
    from controlplane.gateways.schemas import Gateway
    from controlplane.ledger.schemas import LedgerList, LedgerSummary
    from controlplane.policies.schemas import PolicyRevision

Filter = Annotated[str | None, typer.Option()]
request_app = typer.Typer(help="Act on requests in flight.", no_args_is_help=True)


def register(app: typer.Typer, get_app: typer.Typer, describe_app: typer.Typer) -> None:
    """Add the verbs to `app`, to its `get` and its `describe`."""
    get_app.command("ledger")(get_ledger)
    get_app.command("running")(get_running)
    get_app.command("health")(get_health)
    describe_app.command("request")(describe_request)
    request_app.command("cancel")(cancel)
    app.add_typer(request_app, name="request")


def get_ledger(
    kind: Annotated[str | None, typer.Option(help="rejected, shed or probe.")] = None,
    model: Filter = None,
    tenant: Filter = None,
    priority: Filter = None,
    window: Annotated[float, typer.Option(min=1, help="Seconds back from now.")] = 3600,
    limit: LimitOption = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Would-be rejections: what was predicted, what came of the probes, how many were wrong."""
    from controlplane.ledger import calls  # noqa: PLC0415 - heavy

    named = {"model": model, "tenant": tenant, "priority": priority}
    page = call_control_plane(
        url, lambda client: client.send(calls.ledger(kind, window, limit, **named))
    )
    total = call_control_plane(url, lambda client: client.send(calls.summary(window, **named)))
    active = call_control_plane(url, lambda client: client.policies())
    show(page, lambda: _ledger(page, total, active), as_json=as_json)


def get_running(
    limit: LimitOption = 50, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Requests in flight at all gateways: what each waits for, how long it may, what then happens."""
    from controlplane.gateways import calls  # noqa: PLC0415 - heavy

    found = call_control_plane(url, lambda client: client.send(calls.running(limit)))
    show(found, lambda: _running(found), as_json=as_json)


def get_health(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Workers as the gateways meet them: ejected, on trial, failing; how far predictions are off."""
    items = call_control_plane(url, lambda client: client.gateways())
    show(items, lambda: _health(items), as_json=as_json)


def describe_request(request_id: str, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """One request: outcome, phases, every candidate's terms, what admission and observe said."""
    found = call_control_plane(url, lambda client: client.decision(request_id))
    show(found, lambda: _request(found), as_json=as_json)


def cancel(
    request_id: str,
    gateway: Annotated[str, typer.Option(help="That it runs at; by default all are asked.")] = "",
    reason: ReasonOption = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a request in flight: its client gets 503 cancelled_by_operator, or an error event."""
    from controlplane.gateways import calls  # noqa: PLC0415 - heavy
    from controlplane.gateways.running_schemas import RequestCancel  # noqa: PLC0415

    body = RequestCancel(gateway=gateway, reason=reason)
    reply = call_control_plane(url, lambda client: client.send(calls.cancel(request_id, body)))
    row = reply.cancelled
    text = f"Cancelled request {row.request_id} at {row.gateway}, which was {row.state}."
    show(reply, lambda: text, as_json=as_json)


def _request(decision: Decision) -> str:
    from console.text import sentences, table_text  # noqa: PLC0415
    from console.viewmodel import requests  # noqa: PLC0415
    from console.viewmodel.table import Text  # noqa: PLC0415

    view = requests.request(decision, now=_now(), tz=_zone())
    tables = (requests.phases(view), view.prefill, view.decode, view.legs)
    parts = [
        f"{view.request_id}\n{sentences(view.head)}",
        sentences((Text(f"OUTCOME  {view.outcome.text}"), *view.remarks)),
        *(table_text(table) for table in tables),
    ]
    return "\n\n".join(part for part in parts if part)


def _ledger(page: LedgerList, total: LedgerSummary, active: list[PolicyRevision]) -> str:
    from console.text import sentences, table_text  # noqa: PLC0415
    from console.viewmodel import ledger  # noqa: PLC0415

    head = ledger.head(total, active, now=_now(), tz=_zone())
    rows = table_text(ledger.ledger(page.items, now=_now(), tz=_zone(), whole_ids=True))
    classes = f"\n{table_text(head.classes)}" if len(head.classes.rows) > 1 else ""
    return f"{rows}\n\n{sentences((head.counts, *head.causes, head.wrong))}{classes}"


def _running(found: RunningList) -> str:
    from console.text import sentences, table_text  # noqa: PLC0415
    from console.viewmodel import running  # noqa: PLC0415

    head = sentences(running.head(found, now=_now(), tz=_zone(), whole_ids=True))
    return f"{table_text(running.running(found, whole_ids=True))}\n\n{head}"


def _health(items: list[Gateway]) -> str:
    from console.text import sentences, table_text  # noqa: PLC0415
    from console.viewmodel import worker_health  # noqa: PLC0415

    rows = table_text(worker_health.worker_health(items))
    return f"{rows}\n\n{sentences(worker_health.head(items))}"


def _now() -> float:
    return datetime.now(UTC).timestamp()


def _zone() -> tzinfo:
    from console.tui.localtime import LocalZone  # noqa: PLC0415

    return LocalZone()
