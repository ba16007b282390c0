"""Verbs that measure: `perilune acceptance`, `perilune bench ...`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

GROUP = "bench"
EXIT_BAD_INPUT = 2
EXIT_NO_PEER = 3
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this package; the group `bench` may be another package's already."""
    app.command()(acceptance)
    group = _bench_group(app)
    group.command("evict")(bench_evict)
    group.command("index")(bench_index)
    group.command("pool")(bench_pool)
    group.command("transfer")(bench_transfer)


def _bench_group(app: typer.Typer) -> typer.Typer:
    for info in app.registered_groups:
        if info.name == GROUP and info.typer_instance is not None:
            return info.typer_instance
    group = typer.Typer(name=GROUP, help="Measure parts of the product.", no_args_is_help=True)
    group.callback()(_bench)
    app.add_typer(group, name=GROUP)
    return group


def _bench() -> None:
    """Measure parts of the product."""


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


def bench_evict(
    trace: Annotated[
        Path, typer.Option(help="Requests as JSON lines, gzipped or not, of 512-token blocks.")
    ],
    as_json: JsonOption = False,
    policy: Annotated[list[str] | None, typer.Option(help="Several may be given; all.")] = None,
    capacity: Annotated[
        list[int] | None, typer.Option(help="In blocks; several may be given; 1,000 to 30,000.")
    ] = None,
    whatif: Annotated[
        bool, typer.Option("--whatif", help="The sampled curve beside the exact hit rates, too.")
    ] = False,
) -> None:
    """Hit ratios of the eviction policies on a trace, beside LRU and the offline optimum, and
    their processor time a block.

    Exits 2 when an option or the trace cannot be used.
    """
    from workers.bench.evict import run_evict_bench, table  # noqa: PLC0415 - heavy
    from workers.core.errors import ConfigError  # noqa: PLC0415 - with the rest

    try:
        result = run_evict_bench(trace, policy or (), capacity or (), with_whatif=whatif)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    if as_json:
        _show(result, as_json=True)
    else:
        typer.echo(table(result))


def bench_index(
    as_json: JsonOption = False,
    blocks: Annotated[int, typer.Option(min=10_000, max=20_000_000, help="Known.")] = 1_000_000,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="That hold them.")] = 64,
    query_blocks: Annotated[int, typer.Option(min=16, max=2000, help="A query.")] = 500,
    queries: Annotated[int, typer.Option(min=10, help="A round, of three.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the made chains.")] = 7,
    peer: Annotated[
        bool | None, typer.Option("--peer/--no-peer", help="By default where it is installed.")
    ] = None,
) -> None:
    """Prefix index: held lengths of all nodes for a query, and taking in events, beside a peer.

    Exits 3 when the peer is asked for and not installed (make peers).
    """
    from workers.bench.index import PeerMissingError, run_index_bench  # noqa: PLC0415 - heavy

    try:
        result = run_index_bench(
            num_blocks=blocks, num_nodes=nodes, query_blocks=query_blocks, num_queries=queries,
            seed=seed, peer=peer,
        )  # fmt: skip
    except PeerMissingError:
        typer.echo("ai-dynamo-runtime is not installed in .venv-peers: make peers", err=True)
        raise typer.Exit(EXIT_NO_PEER) from None
    _show(result, as_json=as_json)


def bench_pool(
    as_json: JsonOption = False,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="More is steadier.")] = 20,
    ssd_dir: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure; this one by default.")
    ] = None,
) -> None:
    """KV pool: reads from shared memory beside memcpy, latencies through an agent, the SSD tier
    beside raw file I/O, lookups. Shares are of the same run: 1 is as fast."""
    from workers.bench.pool import run_pool_bench  # noqa: PLC0415 - heavy

    _show(run_pool_bench(rounds, ssd_dir), as_json=as_json)


def bench_transfer(
    as_json: JsonOption = False,
    transport: Annotated[str, typer.Option(help="tcp, shm or rdma.")] = "tcp",
    runs: Annotated[int, typer.Option(min=1, max=99, help="Alternating; medians count.")] = 7,
    peer: Annotated[
        bool | None, typer.Option("--peer/--no-peer", help="By default where it is installed.")
    ] = None,
) -> None:
    """Read blocks of 64 KiB, 1 MiB and 16 MiB from another node's slab, beside Mooncake Store.

    shm: also 8 MiB, beside memcpy, and into slots of first use.

    rdma: up to 4 MiB, beside perftest; in a VM with Soft-RoCE where there is no device here.
    Exits 3 when the peer is asked for and not installed (make peers).
    """
    from workers.bench.transfer import TRANSPORTS, run_transfer_bench  # noqa: PLC0415 - heavy
    from workers.bench.transfer_mooncake import (  # noqa: PLC0415 - heavy
        PeerFailedError,
        PeerMissingError,
    )

    if transport == "rdma":
        _show(_rdma_bench(runs), as_json=as_json)
        return
    if transport not in TRANSPORTS:
        raise typer.BadParameter(f"{transport!r}: take one of {', '.join(TRANSPORTS)}, rdma")
    try:
        result = run_transfer_bench(transport, runs, peer=peer)
    except PeerMissingError as error:
        typer.echo(f"{error}: make peers", err=True)
        raise typer.Exit(EXIT_NO_PEER) from None
    except PeerFailedError as error:
        typer.echo(f"{error}. Try again on a quieter machine, or with --no-peer.", err=True)
        raise typer.Exit(1) from None
    _show(result, as_json=as_json)


def _rdma_bench(runs: int) -> dict[str, Any]:
    from workers.bench.transfer_rdma import run_rdma_bench  # noqa: PLC0415 - heavy
    from workers.core.errors import ConfigError  # noqa: PLC0415 - heavy

    try:
        return run_rdma_bench(runs)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_NO_PEER) from None


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    from workers.bench.cluster import write_json  # noqa: PLC0415 - heavy

    if as_json:
        write_json(result)
        return
    width = max(map(len, result))
    for name, value in result.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:<{width}}  {shown}")
