"""Verbs of the package `console`: `console`, `status`, `logs`, `version`, `request`; of `get`: `ledger`,
`running`, `health`; of `describe`: `request`."""

from __future__ import annotations

import json
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from console import get
from controlplane.commands import describe_app, get_app
from workers.core.errors import ConfigError
from workers.data_dir import default_data_dir
from workers.supervisor.home import Home
from workers.verbs import register_verbs

DataOption = Annotated[Path | None, typer.Option(help="Data folder; by default $PERILUNE_HOME.")]
EXIT_NOT_READY = 1


def register(app: typer.Typer) -> None:
    """Add the verbs of this package; each imports its heavy modules when it runs."""
    app.command()(status)
    app.command()(logs)
    app.command()(version)
    get.register(app, get_app, describe_app)
    if find_spec("console.tui.commands") is not None:
        register_verbs(app, "console.tui.commands", verb="console", extra="console")


def version() -> None:
    """Print the version."""
    print(version_of("perilune"))


def status(
    data: DataOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Show what runs on this machine: state, memory, restarts. Exit 1 unless all is ready and answers."""
    from console.status import collect, render  # noqa: PLC0415 - only here

    found = collect(_home(data))
    print(json.dumps(found) if as_json else render(found))
    if not _all_ready(found):
        raise typer.Exit(EXIT_NOT_READY)


def logs(
    component: Annotated[str, typer.Argument(help="A name of `perilune status`.")],
    data: DataOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with it.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many to show.")] = 50,
) -> None:
    """Show the end of a component's log."""
    from console import follow as files  # noqa: PLC0415 - only here

    path = _log_file(_home(data), component)
    for line in files.tail(path, lines):
        print(line)
    if follow:
        for chunk in files.follow(path):
            print(chunk, end="", flush=True)


def _home(data: Path | None) -> Home:
    return Home(data.expanduser().absolute() if data else default_data_dir())


def _log_file(home: Home, component: str) -> Path:
    path = home.log_file(component)
    if path.is_file():
        return path
    names = ", ".join(sorted(each.stem for each in home.logs.glob("*.log"))) or "none yet"
    raise ConfigError("component", component, f"has no log in {home.logs}", f"There are: {names}.")


def _all_ready(found: dict[str, object]) -> bool:
    components = found["components"]
    assert isinstance(components, list)
    answering = (each["state"] == "ready" and not each["note"] for each in components)
    return found["state"] == "ready" and all(answering)
