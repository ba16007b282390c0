"""`perilune`: a typer app whose verbs come from the packages' entry points."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, requires
from io import TextIOWrapper
from typing import TYPE_CHECKING

import typer
from typer.exceptions import TyperException

from workers.core.errors import ConfigError, PeriluneError
from workers.verbs import MissingExtraError, is_own_module

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS_GROUP = "perilune.commands"
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point: exit 0, 1 (it failed), 2 (what was asked cannot work) or 130 (interrupted)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A reason may hold what a locale has no character for: `?` then, never a traceback.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line; every error of ours becomes one line on stderr."""
    app, missing = build_app()
    try:
        result = typer.main.get_command(app).main(
            args=argv or ["--help"], prog_name="perilune", standalone_mode=False
        )
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except PeriluneError as error:
        return _fail(str(error), getattr(error, "exit_code", EXIT_FAILURE))
    except TyperException as error:
        return _fail_usage(error, missing)
    except ModuleNotFoundError as error:
        if is_own_module(error.name):
            raise
        return _fail(str(_missing_extra(error)), EXIT_FAILURE)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILURE
    except OSError as error:  # a full disk, a folder without rights
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", EXIT_FAILURE)
    return result if isinstance(result, int) else 0


def build_app() -> tuple[typer.Typer, list[str]]:
    """The app with every verb that can be had, and a line for each package that cannot load."""
    app = typer.Typer(
        name="perilune",
        help="Run and operate prefill/decode-disaggregated vLLM clusters with one KV pool.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    missing: list[str] = []
    for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda found: found.name):
        try:
            register: Callable[[typer.Typer], None] = entry.load()
        except ModuleNotFoundError as error:
            if is_own_module(error.name):
                raise
            missing.append(
                f"The verbs of {entry.name} need the Python module {error.name}: "
                f"pip install 'perilune[{entry.name}]'"
            )
            continue
        register(app)
    return app, missing


def _root() -> None:
    """Keeps verbs verbs, even when only one is registered."""


def _fail(message: str, code: int) -> int:
    print(f"perilune: {message}", file=sys.stderr)
    return code


def _fail_usage(error: TyperException, missing: list[str]) -> int:
    # A group called without a verb has printed its help already and has no message.
    message = error.format_message()
    if message:
        unknown_verb = message.startswith("No such command")
        _fail(" ".join([message, *(missing if unknown_verb else [])]), error.exit_code)
    return error.exit_code


def _missing_extra(error: ModuleNotFoundError) -> MissingExtraError:
    module = (error.name or "?").partition(".")[0]
    for line in requires("perilune") or []:
        name, _, marker = line.partition(";")
        if name.replace("-", "_").lower().startswith(module.lower()) and "extra" in marker:
            extra = marker.partition("==")[2].strip(" '\"")
            return MissingExtraError("this verb", module, extra)
    return MissingExtraError("this verb", module, "workers,controlplane")
