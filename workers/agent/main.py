"""`python -m workers agent`: arguments, log, signals."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from workers.agent.server import serve
from workers.agent.settings import AgentSettings, parse_tcp, parse_transports
from workers.clock import SystemClock
from workers.cluster_secret import load_secret
from workers.core.errors import ConfigError
from workers.process import die_with_parent
from workers.transfer_tls import PARTS, find_tls, tls_files


def main(arguments: Sequence[str]) -> int:
    """Runs an agent until SIGTERM or SIGINT; 0, or 2 for settings that cannot work."""
    die_with_parent(signal.SIGTERM)
    configure_log()
    try:
        settings = parse_arguments(arguments)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except ConfigError as error:
        print(f"perilune agent: {error}", file=sys.stderr)  # noqa: T201  for people, not for logs
        return 2
    return 0


def parse_arguments(arguments: Sequence[str]) -> AgentSettings:
    """ConfigError on values that cannot work; argparse exits on unknown ones."""
    parser = argparse.ArgumentParser(prog="python -m workers agent", description=__doc__)
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--socket", required=True, type=Path, help="Unix socket to listen on")
    parser.add_argument("--tcp", default="", help="host:port to listen on as well")
    parser.add_argument("--slab-name", required=True, help="file name under /dev/shm")
    parser.add_argument("--slab-bytes", required=True, type=int)
    parser.add_argument("--block-tokens", required=True, type=int)
    parser.add_argument("--control-plane", default="", help="its URL; '' for none")
    parser.add_argument("--token-file", type=Path, help="the bearer token for the control plane")
    parser.add_argument("--heartbeat-seconds", type=float, default=1.0)
    parser.add_argument("--lease-seconds", type=float, default=30.0)
    parser.add_argument("--write-queue-blocks", type=int, default=500)
    parser.add_argument("--touch-bytes-per-second", type=float, default=float(1 << 30))
    parser.add_argument("--ssd-path", type=Path, help="a folder on an SSD for the second tier")
    parser.add_argument(
        "--ssd-bytes", type=int, default=0, help="its cap; 0: a tenth of what is free at the start"
    )
    parser.add_argument("--directory", default="", help="etcd://host:port,... ; '' for none")
    parser.add_argument("--cluster", default="perilune", help="its name in the directory")
    parser.add_argument("--check-when-idle", action="store_true", help="look for own faults")
    parser.add_argument("--check-every-seconds", type=float, default=0.0, help="also when busy")
    parser.add_argument(
        "--secret-folder", type=Path, help="data folder with the cluster secret; none: no transfers"
    )
    parser.add_argument(
        "--transports",
        default="shm,tcp",
        help="between nodes, of shm, tcp and rdma, or auto; rdma without tcp: the node is not ready "
        "where there is no RDMA; '' for none",
    )
    for part, what in (
        ("cert", "PEM certificate for TLS with other nodes; with -key and -ca, or not at all"),
        ("key", "its key"),
        ("ca", "the authority that every node's certificate is from"),
    ):
        parser.add_argument(f"--transfer-tls-{part}", type=Path, help=what)
    given = vars(parser.parse_args(arguments))
    tls = tls_files(*(given.pop(f"transfer_tls_{part}") for part in PARTS))
    host, port = parse_tcp(given.pop("tcp"))
    folder, transports = given.pop("secret_folder"), given.pop("transports")
    return AgentSettings(
        **given,
        tcp_host=host,
        tcp_port=port,
        secret=None if folder is None else load_secret(folder),
        tls=tls if tls is not None or folder is None else find_tls(folder),
        transports=parse_transports(transports),
    )


def configure_log() -> None:
    """One line an event on stderr: `2026-01-01T00:00:00Z INFO agent_ready node=n1 ...`.

    The standard library's, because structlog with rich beside it doubles the time to start.
    """
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx2").setLevel(logging.WARNING)


async def _run(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await serve(settings, SystemClock(), stop)
