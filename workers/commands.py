"""Verbs of the package `workers`: `up`, `down`, `model ...` and what measures them."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from workers.verbs import register_verbs

PARTS = {
    "workers.models.commands": "model",
    "workers.bench.commands": "bench",
}


class Engine(StrEnum):
    """What computes."""

    VLLM = "vllm"
    EMULATED = "emulated"


DataOption = Annotated[Path | None, typer.Option(help="Data folder; by default $PERILUNE_HOME.")]
FileOption = Annotated[Path | None, typer.Option(help="A declared cluster (TOML); options win.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return once it is ready.")]
ModelOption = Annotated[str | None, typer.Option(help="smollm2, a folder, or a hub id.")]
EngineOption = Annotated[Engine | None, typer.Option(help="What computes.")]
PythonOption = Annotated[str | None, typer.Option(help="Python of the environment with vLLM.")]
CountOption = Annotated[int | None, typer.Option(help="Number of such workers.")]
PortOption = Annotated[int | None, typer.Option(help="0 takes a free one.")]
WorkerPortsOption = Annotated[int | None, typer.Option(help="The first; 0 takes free ones.")]
SlabOption = Annotated[float | None, typer.Option(help="Size of the pool.")]
SsdPathOption = Annotated[
    Path | None, typer.Option(help="A folder on an SSD for the pool's second tier.")
]
SsdOption = Annotated[
    float | None, typer.Option(help="Its cap; by default a tenth of what is free there.")
]
KvCacheOption = Annotated[int | None, typer.Option(help="Each CPU worker's own KV cache.")]
BlockOption = Annotated[int | None, typer.Option(help="Tokens of one pool block.")]
LengthOption = Annotated[int | None, typer.Option(help="Longest context in tokens.")]
DirectoryOption = Annotated[str | None, typer.Option(help="etcd://HOST:PORT,... of the cluster.")]
DevModeOption = Annotated[
    bool | None, typer.Option("--dev-mode", help="Open the engine's development endpoints.")
]


def register(app: typer.Typer) -> None:
    """Add the verbs of this package; each imports its heavy modules when it runs."""
    app.command()(up)
    app.command()(down)
    for module, verb in PARTS.items():
        if find_spec(module) is not None:
            register_verbs(app, module, verb=verb, extra="workers")


def up(
    detach: DetachOption = False,
    data: DataOption = None,
    file: FileOption = None,
    cluster: Annotated[str | None, typer.Option(help="Name of the cluster.")] = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    engine_python: PythonOption = None,
    prefill: CountOption = None,
    decode: CountOption = None,
    port_control_plane: PortOption = None,
    port_gateway: PortOption = None,
    port_agent: PortOption = None,
    port_workers: WorkerPortsOption = None,
    slab_gib: SlabOption = None,
    ssd_path: SsdPathOption = None,
    ssd_gib: SsdOption = None,
    directory: DirectoryOption = None,
    kv_cache_gib: KvCacheOption = None,
    block_tokens: BlockOption = None,
    dtype: Annotated[str | None, typer.Option(help="The engine's dtype.")] = None,
    max_model_len: LengthOption = None,
    nodes: Annotated[int | None, typer.Option(help="Number of node agents.")] = None,
    dev_mode: DevModeOption = None,
) -> None:
    """Start a whole cluster on this machine and run it until Ctrl-C."""
    given = {name: value for name, value in locals().items() if value is not None}
    del given["detach"]
    if data is not None:
        given["data"] = data.expanduser().absolute()
    if ssd_path is not None:
        given["ssd_path"] = ssd_path.expanduser().absolute()
    if engine is not None:
        given["engine"] = engine.value
    _up(given, detach=detach)


def _up(options: dict[str, Any], *, detach: bool) -> None:
    from workers.supervisor.cluster_file import merge_settings  # noqa: PLC0415 - heavy
    from workers.supervisor.launch import (  # noqa: PLC0415 - heavy
        AlreadyRunningError,
        run_detached,
        run_foreground,
    )

    settings = merge_settings(options)
    settings.validate()
    try:
        if detach:
            run_detached(_as_arguments(options), settings.home)
        else:
            run_foreground(settings)
    except AlreadyRunningError as error:
        if error.state is None or error.state.state != "ready":
            raise
        print(error)


def down(data: DataOption = None) -> None:
    """End what `perilune up` started, and nothing else."""
    from workers.data_dir import default_data_dir  # noqa: PLC0415 - heavy
    from workers.supervisor.home import Home  # noqa: PLC0415 - heavy
    from workers.supervisor.launch import end_cluster  # noqa: PLC0415 - heavy
    from workers.supervisor.progress import make_progress  # noqa: PLC0415 - heavy

    home = Home(data.expanduser().absolute() if data else default_data_dir())
    if end_cluster(home, make_progress()):
        print("all processes have ended")
    else:
        print(f"no cluster of {home.data} is running")


def _as_arguments(options: dict[str, Any]) -> list[str]:
    """The same options again, for the process in the background."""
    arguments = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag] if value is True else [flag, str(value)]
    return arguments
