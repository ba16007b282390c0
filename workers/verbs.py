"""Registering verbs of modules whose third-party packages may not be installed here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import typer

from workers.core.errors import PeriluneError

if TYPE_CHECKING:
    from collections.abc import Callable

OWN_PACKAGES = ("console", "controlplane", "workers", "migrations")


class MissingExtraError(PeriluneError):
    """A verb needs a Python package that is not installed; names the extra that brings it."""

    def __init__(self, verb: str, module: str, extra: str) -> None:
        super().__init__(
            f"{verb} needs the Python module {module}, which is not installed here. "
            f"pip install 'perilune[{extra}]'"
        )
        self.module = module
        self.extra = extra


def register_verbs(app: typer.Typer, module: str, *, verb: str, extra: str) -> None:
    """Call `register(app)` of `module`; where its packages are missing, `verb` says so instead."""
    try:
        register: Callable[[typer.Typer], None] = import_module(module).register
    except ModuleNotFoundError as error:
        if is_own_module(error.name):
            raise
        _register_apology(app, verb, error.name or "?", extra)
        return
    register(app)


def is_own_module(name: str | None) -> bool:
    """Is a module of this name part of this project (so that its absence is our mistake)?"""
    return (name or "").partition(".")[0] in OWN_PACKAGES


def _register_apology(app: typer.Typer, verb: str, module: str, extra: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(verb, context_settings=settings, help=f"(needs perilune[{extra}])")
    def apologise(_context: typer.Context) -> None:
        raise MissingExtraError(f"perilune {verb}", module, extra)
