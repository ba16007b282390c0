"""Verbs that measure: `perilune acceptance`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this package."""
    app.command()(acceptance)


def acceptance(
    as_json: JsonOption = False,
    prompts: Annotated[int, typer.Option(min=4, max=200, help="Prompts a run.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens an answer.")] = 24,
    dtype: Annotated[str, typer.Option(help="The engines' dtype.")] = "float32",
    block_tokens: Annotated[int, typer.Option(help="Tokens of one pool block.")] = 64,
    model: Annotated[str, typer.Option(help="smollm2, or a folder.")] = "smollm2",
    seed: Annotated[int, typer.Option(help="Of the made prompts.")] = 7,
) -> None:
    """Run a fixed set of prompts twice through a cluster of its own and judge the pool by it.

    Exits 1 when an answer differs from the plain engine's, or a pin is left.
    """
    from workers.bench.acceptance_run import run_acceptance  # noqa: PLC0415 - heavy

    with tempfile.TemporaryDirectory(prefix="perilune-acceptance-") as folder:
        result = run_acceptance(
            Path(folder), model=model, num_prompts=prompts, max_tokens=max_tokens, dtype=dtype,
            block_tokens=block_tokens, seed=seed,
        )  # fmt: skip
    _show(result, as_json=as_json)
    if result["outputs_identical"] != result["outputs_total"] or result["leaked_pins"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    from workers.bench.cluster import write_json  # noqa: PLC0415 - heavy

    if as_json:
        write_json(result)
        return
    width = max(map(len, result))
    for name, value in result.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:<{width}}  {shown}")
