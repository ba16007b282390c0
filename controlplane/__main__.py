"""`python -m controlplane`: one process, one database, one port."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

import structlog

from controlplane.logs import configure_log
from controlplane.settings import Settings, make_settings
from workers.core.errors import ConfigError
from workers.data_dir import default_data_dir
from workers.listening import is_hosts_fault

BACKLOG = 1024
EXIT_FAILED = 1
EXIT_USAGE = 2

log = structlog.get_logger("controlplane")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 2: a setting that cannot work; 1: it can, but not now (port, database)."""
    options = _parser().parse_args(arguments)
    _die_with_launcher()
    try:
        settings = make_settings(
            host=options.host,
            port=options.port,
            database_url=options.database_url,
            token_file=options.token_file,
            cluster=options.cluster,
            directory=options.directory,
            data=options.data,
        )
        listener = _listen(settings)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except OSError as error:
        address = f"{options.host}:{options.port}"
        reason = (error.strerror or str(error)).lower()
        way_out = "Another control plane may run there; stop it or choose --port."
        if is_hosts_fault(error):
            way_out = "Choose an address of this machine: --host."
        return _fail(f"cannot listen on {address}: {reason}. {way_out}", EXIT_FAILED)
    with listener:
        return _serve(settings, listener)


def _serve(settings: Settings, listener: socket.socket) -> int:
    # what is heavy comes once the settings are known to work
    from controlplane.db.migrate import migrate  # noqa: PLC0415
    from controlplane.server import serve  # noqa: PLC0415

    try:
        migrate(settings.database_url)
    except ConfigError as error:
        return _fail(str(error), EXIT_FAILED)
    configure_log()
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("control plane ready", url=url, cluster=settings.cluster, pid=os.getpid())
    return 0 if serve(settings, listener) else EXIT_FAILED


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _die_with_launcher() -> None:
    """Under a supervisor, end when it ends; started by hand, outlive the shell if told to."""
    from workers.process import PARENT_PID_VARIABLE, die_with_parent  # noqa: PLC0415

    if os.environ.get(PARENT_PID_VARIABLE):
        die_with_parent(signal.SIGTERM)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"perilune control plane: {message}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m controlplane", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7700, help="0 takes any free one")
    parser.add_argument(
        "--database-url",
        default=os.environ.get("PERILUNE_DATABASE_URL"),
        help="default: SQLite in the data folder",
    )
    parser.add_argument("--token-file", type=Path, help="default: token in the data folder")
    parser.add_argument("--cluster", default="perilune", help="name of the cluster")
    parser.add_argument("--directory", default="", help="etcd://HOST:PORT,...; by default none")
    parser.add_argument("--data", type=Path, default=default_data_dir(), help="data folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
