"""`python -m controlplane.gateway`: the OpenAI-compatible front of the cluster."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

import structlog
import uvloop

from controlplane.gateway.address import own_id
from controlplane.gateway.app import Gateway
from controlplane.gateway.descriptors import connections_for, open_files, raise_limit
from controlplane.gateway.memory import calm_collector, give_large_blocks_back
from controlplane.gateway.settings import Limits, Settings, Timeouts
from controlplane.gateway.upstream import check_url
from controlplane.logs import configure_log
from workers.core.errors import ConfigError
from workers.core.hosts import is_anywhere
from workers.listening import is_hosts_fault
from workers.process import die_with_parent

log = structlog.get_logger(__name__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perilune gateway", description="The OpenAI-compatible front of the cluster."
    )
    add = parser.add_argument
    add("--id", default="",
        help="unique among the gateways of a cluster (default: by the machine's name and the port)")  # fmt: skip
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--advertise", default="", metavar="URL",
        help="how the control plane reaches this gateway, where that is not its host and port")  # fmt: skip
    add("--control-plane", default="", metavar="URL")
    add("--token-file", default="", metavar="FILE", help="bearer token for the control plane")
    add("--agent", action="append", default=[], metavar="ADDRESS",
        help="follow this node agent (unix:/path, tcp:host:port) besides the view's; repeatable")  # fmt: skip
    add("--model", action="append", default=[], metavar="NAME=PATH",
        help="a model's tokenizer folder, where no control plane says; repeatable")  # fmt: skip
    add("--static", default="", metavar="FILE",
        help="workers in TOML (or a ClusterView in JSON), without a control plane; SIGHUP rereads it")  # fmt: skip
    add("--otlp-endpoint", default="", metavar="URL",
        help="send spans to this OpenTelemetry collector, e.g. http://127.0.0.1:4318")  # fmt: skip
    add("--max-body-bytes", type=int, default=Limits().max_body_bytes)
    add("--max-connections", type=int, default=None, metavar="N",
        help=f"clients' (default {Limits().max_connections}, or what `ulimit -n` has room for)")  # fmt: skip
    add("--prefill-timeout", type=float, default=Timeouts().prefill, metavar="SECONDS")
    add("--first-byte-timeout", type=float, default=Timeouts().first_byte, metavar="SECONDS")
    add("--idle-timeout", type=float, default=Timeouts().idle, metavar="SECONDS")
    add("--drain", type=float, default=Timeouts().drain, metavar="SECONDS")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def settings_from(argv: list[str]) -> tuple[Settings, str]:
    """Settings and log level. Raises `ConfigError`."""
    args = _parser().parse_args(argv)
    _check_numbers(args)
    models: dict[str, str] = {}
    for entry in args.model:
        name, equals, path = entry.partition("=")
        if not equals or not path:
            raise ConfigError("--model", entry, "is no NAME=PATH", "Write --model name=/folder.")
        models[name] = path
    if args.static and args.control_plane:
        problem = f"stands beside --control-plane {args.control_plane}, whose view would replace it"
        way_out = (
            "Give one of them: workers of other engines join a control plane's by POST"
            " /api/v1/workers."
        )
        raise ConfigError("--static", args.static, problem, way_out)
    settings = Settings(
        gateway_id=args.id or own_id(args.host, args.port),
        host=args.host,
        port=args.port,
        advertise=_advertised(args.advertise),
        control_plane=_http_url("--control-plane", args.control_plane, "http://127.0.0.1:7700"),
        token=_token(args.token_file),
        agents=tuple(args.agent),
        models=models,
        static_view=args.static,
        otlp_endpoint=_http_url("--otlp-endpoint", args.otlp_endpoint, "http://127.0.0.1:4318"),
        limits=Limits(max_body_bytes=args.max_body_bytes, max_connections=_connections(args)),
        timeouts=Timeouts(
            prefill=args.prefill_timeout,
            first_byte=args.first_byte_timeout,
            idle=args.idle_timeout,
            drain=args.drain,
        ),
    )
    if not (args.control_plane or args.static or args.agent):
        way_out = "Give --control-plane URL, --static FILE or --agent ADDRESS."
        raise ConfigError("--control-plane", "", "is missing: nobody names workers", way_out)
    return settings, args.log_level


def _connections(args: argparse.Namespace) -> int:
    asked, usual = args.max_connections, Limits().max_connections
    wanted = usual if asked is None else asked
    return connections_for(open_files(), wanted, asked=asked is not None)


def _check_numbers(args: argparse.Namespace) -> None:
    longest = 86_400.0
    for option, value, least, most in (
        ("--port", args.port, 0, 65_535),
        ("--max-body-bytes", args.max_body_bytes, 1, 2**31),
        (
            "--max-connections",
            1 if args.max_connections is None else args.max_connections,
            1,
            1_000_000,
        ),
        ("--prefill-timeout", args.prefill_timeout, 0.001, longest),
        ("--first-byte-timeout", args.first_byte_timeout, 0.001, longest),
        ("--idle-timeout", args.idle_timeout, 0.001, longest),
        ("--drain", args.drain, 0, longest),
    ):
        if not least <= value <= most:
            problem = f"is not between {least:g} and {most:g}"
            raise ConfigError(option, value, problem, "Choose one in range.")


def _http_url(option: str, url: str, example: str) -> str:
    try:
        if url:
            check_url(url)
    except ValueError:
        raise ConfigError(option, url, "is no http address", f"Write it as {example}.") from None
    return url


def _advertised(url: str) -> str:
    example = "http://10.0.0.5:8000"
    if url and is_anywhere(urlsplit(_http_url("--advertise", url, example)).hostname or ""):
        problem = "names no machine: that is an address to be bound to"
        raise ConfigError("--advertise", url, problem, f"Write it as {example}.")
    return url


def _token(path: str) -> str:
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        way_out = "Start the control plane first, which makes it, or name another file."
        raise ConfigError("--token-file", path, f"cannot be read ({error})", way_out) from None
    if not token.isprintable():
        way_out = "Copy it again, or remove it: the control plane makes a new one at its start."
        raise ConfigError("--token-file", path, "holds no token", way_out)
    return token


async def _serve(settings: Settings) -> None:
    gateway = Gateway(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, gateway.reload_static)
    try:
        await gateway.start()
        log.info(
            "gateway_ready", url=gateway.url, announced=gateway.announced, id=settings.gateway_id, open_files=open_files(),
            max_connections=settings.limits.max_connections,
        )  # fmt: skip
        await stop.wait()
        log.info("gateway_draining", in_flight=gateway.stats.in_flight)
    finally:
        await gateway.stop()


def main(argv: list[str] | None = None) -> int:
    """Exit code 2: a setting cannot work; 1: the address is taken."""
    raise_limit()
    give_large_blocks_back()
    try:
        settings, level = settings_from(sys.argv[1:] if argv is None else argv)
        configure_log(level, sys.stderr)
        calm_collector()
        uvloop.run(_serve(settings))
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a CLI's error
        return 2
    except OSError as error:
        way_out = "Free the port or choose another: --port"
        if is_hosts_fault(error):
            way_out = "Choose an address of this machine: --host"
        print(f"cannot listen: {error}. {way_out}", file=sys.stderr)  # noqa: T201 - a CLI's error
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
