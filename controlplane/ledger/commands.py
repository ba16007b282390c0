"""`perilune get ledger`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli_calls import JsonOption, LimitOption, UrlOption, call_control_plane, show

Filter = Annotated[str | None, typer.Option()]


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
    from controlplane.ledger import calls, text  # noqa: PLC0415 - heavy

    named = {"model": model, "tenant": tenant, "priority": priority}
    page = call_control_plane(
        url, lambda client: client.send(calls.ledger(kind, window, limit, **named))
    )
    total = call_control_plane(url, lambda client: client.send(calls.summary(window, **named)))
    show(page, lambda: text.ledger(page, total), as_json=as_json)
