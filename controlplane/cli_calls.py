"""What the verbs of this package share: options, one call of the control plane, printing."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from workers.core.errors import ConfigError, PeriluneError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from controlplane.client import Client
    from controlplane.client_http import ClientError

UrlOption = Annotated[
    str | None, typer.Option("--url", help="Control plane; by default $PERILUNE_URL or loopback.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the audit trail.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=500, help="How many at most.")]
T = TypeVar("T")


class RefusedValueError(ConfigError):
    """The control plane named a value of the command line that cannot work: exit code 2."""

    def __init__(self, error: ClientError) -> None:
        PeriluneError.__init__(self, str(error))
        self.field, self.value = error.field or "", error.value
        self.problem, self.way_out = str(error), error.way_out or ""


def call_control_plane(url: str | None, use: Callable[[Client], T]) -> T:
    """Use a client for one verb. RefusedValueError; ClientError for all else that goes wrong."""
    from controlplane.client import Client, ClientError  # noqa: PLC0415 - only when a verb runs

    try:
        actor = getpass.getuser()
    except (KeyError, OSError):
        actor = "operator"
    with Client(url, actor=actor) as client:
        try:
            return use(client)
        except ClientError as error:
            if error.status == 422:
                raise RefusedValueError(error) from error
            raise


def show(value: BaseModel | list[Any], text: Callable[[], str], *, as_json: bool) -> None:
    """The value as one JSON object, or as text."""
    if not as_json:
        typer.echo(text())
    elif isinstance(value, list):
        typer.echo(json.dumps({"items": [item.model_dump(mode="json") for item in value]}))
    else:
        typer.echo(value.model_dump_json())
