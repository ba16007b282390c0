"""Verbs of the package `workers`: `up`, `down`, `model ...`, `acceptance` and benches."""

from __future__ import annotations

import typer

from workers.verbs import register_verbs


def register(app: typer.Typer) -> None:
    """Add the verbs of this package; each part imports its heavy modules when it runs."""
    register_verbs(app, "workers.models.commands", verb="model", extra="workers")
