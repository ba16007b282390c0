"""Verbs of the terminal console: `console` and `top`."""

from __future__ import annotations

from typing import Annotated

import typer

_URL = typer.Option(help="Address of the control plane; default $PERILUNE_URL, else loopback.")


def register(app: typer.Typer) -> None:
    """Add the verbs of this package."""
    app.command()(console)
    app.command()(top)


def console(
    url: Annotated[str | None, _URL] = None,
    plain: Annotated[bool, typer.Option(help="Lines of text instead of a screen.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="ASCII characters only.")] = False,
    light: Annotated[bool, typer.Option(help="The terminal's background is light.")] = False,
    screen: Annotated[str, typer.Option(help="overview, topology, cache, ...")] = "overview",
) -> None:
    """Open the console. Without a terminal, or with TERM=dumb, it prints its screen once as text."""
    from console.tui.run import console as start  # noqa: PLC0415 - other verbs must not pay for the toolkit

    code = start(url, plain=plain, ascii_only=ascii_only, light=light, screen=screen)
    raise typer.Exit(code)


def top(
    url: Annotated[str | None, _URL] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The overview as one JSON object.")
    ] = False,
) -> None:
    """Print the overview once."""
    from console.tui.run import top as start  # noqa: PLC0415 - other verbs must not pay for the toolkit

    raise typer.Exit(start(url, as_json=as_json))
