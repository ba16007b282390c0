"""Verbs that measure: `perilune bench gateway`, `... overload`, `... placement`."""

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

GROUP = "bench"


class Peer(StrEnum):
    """What to compare with."""

    VLLM_ROUTER = "vllm-router"
    NONE = "none"


def register(app: typer.Typer) -> None:
    """Add to the group `bench`, which another package may have made already."""
    for info in app.registered_groups:
        if info.name == GROUP and info.typer_instance is not None:
            _verbs(info.typer_instance)
            return
    group = typer.Typer(name=GROUP, help="Measure parts of the product.", no_args_is_help=True)
    group.callback()(_group)
    _verbs(group)
    app.add_typer(group, name=GROUP)


def _verbs(group: typer.Typer) -> None:
    group.command("gateway")(gateway)
    group.command("overload")(overload)
    group.command("placement")(placement)


def _group() -> None:
    """Measure parts of the product."""


def gateway(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    peer: Annotated[Peer, typer.Option(help="What to compare with.")] = Peer.VLLM_ROUTER,
    requests: Annotated[int, typer.Option(min=8, help="Of a run, at least.")] = 400,
    seconds: Annotated[float, typer.Option(min=0, help="Of a run for times, at least.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each; medians are given.")] = 5,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Connections, for CPU.")] = 16,
    core_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Of a core the costlier one takes, for times.")
    ] = 0.25,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second instead; 0: none.")] = 0,
    model: Annotated[str, typer.Option(help="Folder whose tokenizer is used.")] = "",
) -> None:
    """CPU a request and time to first byte of the gateway: streamed and plain, prompts of 2,000
    and 20,000 characters. CPU as fast as it goes, times at one rate for all.

    Exits 3 when the peer is not installed.
    """
    from controlplane.bench.gateway import Load, run_gateway_bench  # noqa: PLC0415 - heavy

    load = Load(requests=requests, clients=clients, core_share=core_share, rate=rate or None,
                seconds=seconds)  # fmt: skip
    name = None if peer is Peer.NONE else peer.value
    path = model or _default_model()
    result = run_gateway_bench(peer_name=name, load=load, model_path=path, rounds=rounds)
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        _show(key, value)


def overload(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    seconds: Annotated[float, typer.Option(min=2, max=3600, help="Of load, in each mode.")] = 60,
    factor: Annotated[float, typer.Option(min=0.1, max=10, help="Load over capacity.")] = 1.5,
    slo_ttft: Annotated[float, typer.Option(min=0.05, help="SLO: seconds to first token.")] = 10.0,
    percentile: Annotated[float, typer.Option(min=50, max=99.9, help="That are to keep it.")] = 95,
    probe_share: Annotated[float, typer.Option(min=0, max=0.5, help="Let in to learn.")] = 0.05,
    prefill_ms: Annotated[float, typer.Option(min=0.01, help="A token, as emulated.")] = 4.0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 16,
    mixed: Annotated[bool, typer.Option("--mixed", help="Three classes, two tenants.")] = False,
    seed: Annotated[int, typer.Option(help="Of the load.")] = 1,
) -> None:
    """Goodput beyond capacity with admission and without, and how many rejections were wrong.

    A gateway and emulated workers; requests within the SLO as their clients saw them.
    """
    from controlplane.bench.overload import Overload, run_overload_bench  # noqa: PLC0415 - heavy
    from controlplane.bench.overload_load import CLASSES, TENANTS, Shape  # noqa: PLC0415

    bench = Overload(
        seconds=seconds, factor=factor, max_ttft_seconds=slo_ttft, percentile=percentile,
        probe_share=probe_share, prefill_ms_per_token=prefill_ms, seed=seed, prefill_workers=workers,
        shape=Shape(classes=CLASSES, tenants=TENANTS) if mixed else Shape(),
    )  # fmt: skip
    result = run_overload_bench(bench)
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        _show(key, value)


def placement(
    trace: Annotated[Path, typer.Option(help="Requests: timestamp, input_length, hash_ids.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    start: Annotated[int, typer.Option(min=0, help="First request of the slice.")] = 0,
    requests: Annotated[int, typer.Option(min=10, help="Requests of the slice.")] = 600,
    repeats: Annotated[int, typer.Option(min=1, max=20, help="Of each run.")] = 3,
    load: Annotated[
        list[str] | None, typer.Option(help="5x, or a share of capacity; repeatable.")
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help="Ours, or vllm-router:POLICY; repeatable. All by default."),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 6,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 2,
    time_factor: Annotated[
        float, typer.Option(min=0.05, max=20, help="Seconds for one emulated second.")
    ] = 1.0,
    gateways: Annotated[int, typer.Option(min=1, max=8, help="Of ours, side by side.")] = 1,
    simulate: Annotated[bool, typer.Option(help="Ours alone, on the simulator.")] = False,
) -> None:
    """Time to first token by placement, on emulated workers that replay a trace.

    Exits 3 when the peer is not installed.
    """
    from controlplane.bench import placement as bench  # noqa: PLC0415 - heavy
    from controlplane.bench.placement_cluster import Shape  # noqa: PLC0415

    shape = Shape(prefill, decode, time_factor=time_factor)
    what = bench.PlacementBench(trace, start, requests, repeats, shape=shape, gateways=gateways)
    what = replace(
        what, loads=tuple(load or what.loads), algorithms=tuple(algorithm or what.algorithms)
    )
    result = bench.simulate(what) if simulate else bench.run_placement_bench(what)
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if name != "rows":
            _show(name, value)


def _show(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for inner, number in value.items():
            _show(f"{name}.{inner}", number)
    else:
        print(f"{name:<28} {value:.4g}" if isinstance(value, float) else f"{name:<28} {value}")


def _default_model() -> str | None:
    """The prepared model, if there is one."""
    import os  # noqa: PLC0415 - with pathlib, only here
    from pathlib import Path  # noqa: PLC0415

    home = Path(os.environ.get("PERILUNE_HOME") or Path.home() / ".local/share/perilune")
    folder = home / "models" / "smollm2"
    return str(folder) if (folder / "tokenizer.json").exists() else None
