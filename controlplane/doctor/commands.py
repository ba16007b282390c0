"""`perilune doctor`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.cli_calls import JsonOption, ReasonOption, UrlOption, call_control_plane, show
from workers.core.errors import ConfigError, PeriluneError

if TYPE_CHECKING:
    from controlplane.client import Client
    from controlplane.doctor.schemas import DoctorReport, DoctorRun

WAIT_SECONDS = 330.0
POLL_SECONDS = 0.3
GIB = 1 << 30


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    node: Annotated[str | None, typer.Option(help="Only this node and its pairs.")] = None,
    pair: Annotated[str | None, typer.Option(help="Only A:B, both ways.")] = None,
    probe: Annotated[bool, typer.Option(help="Also move scratch blocks between nodes.")] = True,
    last: Annotated[bool, typer.Option("--last", help="Show the last run, start none.")] = False,
    local: Annotated[bool, typer.Option("--local", help="This machine, without a control plane.")] = False,
    slab_gib: Annotated[float | None, typer.Option(help="With --local: of a slab to come.")] = None,
    prefill_rate: Annotated[float | None, typer.Option(help="Prefill tokens a second, instead of measured ones.")] = None,
    flops: Annotated[float | None, typer.Option(help="FLOPS that a prefill instance really reaches.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="With --flops.", min=1)] = 8192,
    reason: ReasonOption = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Check nodes and pairs of nodes, and say what to do. Exit code 1: a check failed."""
    from controlplane.doctor import text  # noqa: PLC0415 - heavy

    if local:
        if node or pair:
            name, value = ("--node", node) if node else ("--pair", pair)
            raise ConfigError(name, value, "does not go with --local", "Leave one of them out.")
        found = _local(slab_gib)
    else:
        body: dict[str, object] = {
            "node": node, "pair": pair, "probe": probe, "reason": reason, "flops": flops,
            "prefill_tokens_per_second": prefill_rate, "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        wanted = None if last else _body(body)
        found = call_control_plane(url, lambda client: _run(client, wanted))
    show(found, lambda: text.report(found), as_json=as_json)
    if found.state == "failed" or found.counts.get("fail"):
        raise typer.Exit(1)


def _body(values: dict[str, object]) -> DoctorRun:
    """ConfigError: a value that cannot be."""
    from pydantic import ValidationError  # noqa: PLC0415

    from controlplane.doctor.schemas import DoctorRun  # noqa: PLC0415

    try:
        return DoctorRun.model_validate(values)
    except ValidationError as error:
        found = error.errors()[0]
        name, problem = str(found["loc"][0]), str(found["msg"]).lower()
        way_out = "Pairs are written A:B; see perilune doctor --help."
        raise ConfigError(name, found["input"], problem, way_out) from error


def _run(client: Client, body: DoctorRun | None) -> DoctorReport:
    """The last report; with a body, after a new run has come to its end."""
    from controlplane.doctor import calls  # noqa: PLC0415

    if body is None:
        return client.send(calls.last())
    report = client.send(calls.run(body))
    number, deadline = report.number, time.monotonic() + WAIT_SECONDS
    while report.state == "running" and report.number == number:
        if time.monotonic() > deadline:
            raise PeriluneError(
                f"The doctor is not ready after {WAIT_SECONDS:.0f} s "
                f"({report.done} of {report.total}). perilune doctor --last shows the rest later."
            )
        time.sleep(POLL_SECONDS)
        report = client.send(calls.last())
    return report


def _local(slab_gib: float | None) -> DoctorReport:
    from controlplane.doctor.local import local_report  # noqa: PLC0415
    from workers.data_dir import default_data_dir  # noqa: PLC0415

    return local_report(default_data_dir(), int((slab_gib or 0.0) * GIB))
