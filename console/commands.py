"""Verbs of the package `console`: `console`, `status`, `logs`, `version`."""

from __future__ import annotations

from importlib.metadata import version as version_of

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs of this package."""
    app.command()(version)


def version() -> None:
    """Print the version."""
    print(version_of("perilune"))
