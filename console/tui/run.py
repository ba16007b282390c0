"""Starts the console that fits what it is started on."""

from __future__ import annotations

import getpass
import os
import select
import shutil
import sys
from datetime import UTC, datetime
from time import monotonic
from typing import TypeVar

from console import calls
from console.tui.caps import Caps, is_utf8
from console.tui.context import Context
from console.tui.feed import (
    CLUSTER_METRICS,
    LEDGER_ROWS,
    NODE_METRICS,
    NOT_FOUND,
    SNAPSHOT_ROWS,
)
from console.tui.localtime import LocalZone
from console.tui.plain import screen_text, screens
from console.viewmodel.freshness import freshness
from console.viewmodel.ledger import WINDOW_SECONDS as LEDGER_WINDOW_SECONDS
from console.viewmodel.overview import headline, overview
from console.viewmodel.state import ConsoleState, LedgerReport, OpenedRequest, PairTransfers
from controlplane.calls import Call
from controlplane.client import AsyncClient, Client, ClientError, find_token
from controlplane.client_http import UnreachableError
from controlplane.doctor import calls as doctor_calls
from controlplane.gateways import calls as running_calls
from controlplane.ledger import calls as ledger_calls
from controlplane.transfers import calls as transfer_calls
from workers.core.errors import ConfigError

T = TypeVar("T")
SPOKEN_SECONDS = 5.0
MIN_COLUMNS = 40
EXIT_HANGUP = 129
"""As shells give it to what SIGHUP ended."""


def console(url: str | None, *, plain: bool, ascii_only: bool, light: bool, screen: str) -> int:
    """The exit code. Raises `ConfigError` for a screen that does not exist."""
    noun, _, name = screen.partition("/")
    if noun not in screens() and not name:
        raise ConfigError("--screen", screen, "no such screen", f"One of: {', '.join(screens())}.")
    if not is_terminal():
        return print_once(url, noun, name)
    if plain:
        return speak(url, noun, name)
    return full_screen(url, ascii_only=ascii_only, light=light, screen=screen)


def is_terminal() -> bool:
    """A person at a screen that can be addressed; the toolkit draws on stderr."""
    dumb = os.environ.get("TERM", "") in ("", "dumb")
    return not dumb and all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def actor_name() -> str:
    """Who the audit trail says it was."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "operator"


def full_screen(url: str | None, *, ascii_only: bool, light: bool, screen: str) -> int:
    """The app, until it is quit."""
    from console.tui.app import ConsoleApp  # noqa: PLC0415 - plain text must not pay for the toolkit

    token = find_token()
    client = AsyncClient(url, token, actor=actor_name())
    app = ConsoleApp(
        client,
        clock=monotonic,
        can_act=token is not None,
        actor=actor_name(),
        ascii_only=ascii_only,
        light=light,
        start=screen,
    )
    try:
        app.run()
    finally:
        if not sys.stdin.isatty():
            # The terminal is gone, and the toolkit's reading thread with it in an endless loop.
            os._exit(app.return_code or EXIT_HANGUP)
    return app.return_code or 0


def print_once(url: str | None, noun: str, name: str = "") -> int:
    """One screen on stdout."""
    with Client(url) as client:
        print(screen_text(read_context(client, noun, name), noun, name, actor_name()))  # noqa: T201 - this is the product
    return 0


def top(url: str | None, *, as_json: bool) -> int:
    """Overview once."""
    if not as_json:
        return print_once(url, "overview")
    with Client(url) as client:
        print(client.overview().model_dump_json())  # noqa: T201 - this is the product
    return 0


def read_context(client: Client, noun: str = "", name: str = "") -> Context:
    """Everything by REST, as of now, with what one screen needs besides. Raises `ClientError`."""
    state = ConsoleState()
    state.load(
        monotonic(),
        overview=client.overview(),
        nodes=client.nodes(),
        workers=client.workers(),
        gateways=client.gateways(),
        policies=client.policies(),
        decisions=client.decisions(limit=SNAPSHOT_ROWS).items,
        audit=client.audit(limit=SNAPSHOT_ROWS).items,
        matrix=client.matrix(),
        series=client.series(CLUSTER_METRICS, "cluster"),
    )
    state.load(monotonic(), series=client.series(NODE_METRICS, "node:*"))
    found = _where_offered(client, calls.jobs())
    state.load(
        monotonic(),
        pool=_where_offered(client, calls.pool()),
        jobs=found.items if found else None,
    )
    _read_paths(client, state, noun, name)
    _read_requests(client, state, noun)
    if noun == "request":
        _read_request(client, state, name)
    snapshot = state.snapshot()
    now = monotonic()
    size = shutil.get_terminal_size((120, 40))
    age = snapshot.overview.sample_age_seconds if snapshot.overview else None
    return Context(
        snapshot=snapshot,
        history=state.history,
        now=now,
        server_now=snapshot.server_now(now) or datetime.now(UTC).timestamp(),
        tz=LocalZone(),
        fresh=freshness(now=now, received=snapshot.received, sample_age=age),
        caps=Caps("none", ascii_only=not is_utf8(os.environ)),
        is_operator=find_token() is not None,
        width=max(MIN_COLUMNS, size.columns),
        height=size.lines,
    )


def _read_paths(client: Client, state: ConsoleState, noun: str, name: str) -> None:
    """The doctor's report, alarms of paths, and the pair that is asked for."""
    if noun in ("doctor", "pair"):
        state.load(monotonic(), doctor=_where_offered(client, doctor_calls.last()))
    if noun == "transfers":
        call = transfer_calls.nodes(limit=0, links=False)
        state.load(monotonic(), alarms=_where_offered(client, call))
    if noun == "pair":
        source, _, target = name.partition("/")
        found = _where_offered(client, transfer_calls.nodes(source, target))
        if found is not None:
            state.load(monotonic(), pair=PairTransfers(source, target, found))


def _read_requests(client: Client, state: ConsoleState, noun: str) -> None:
    """What the gateways say of what runs, or the ledger."""
    if noun == "in-flight":
        state.load(monotonic(), running=_where_offered(client, running_calls.running()))
    if noun == "rejections":
        page = _where_offered(client, ledger_calls.ledger(limit=LEDGER_ROWS))
        summary = _where_offered(client, ledger_calls.summary(LEDGER_WINDOW_SECONDS))
        if page is not None and summary is not None:
            state.load(monotonic(), ledger=LedgerReport(page, summary))


def _read_request(client: Client, state: ConsoleState, request_id: str) -> None:
    """By its id, where it is none of the last ones."""
    if state.snapshot().decision(request_id) is not None:
        return
    try:
        found = client.decision(request_id)
    except ClientError as error:
        if error.status != NOT_FOUND:
            raise
        state.load(monotonic(), opened=OpenedRequest(request_id, None))
    else:
        state.load(monotonic(), opened=OpenedRequest(request_id, found))


def _where_offered(client: Client, call: Call[T]) -> T | None:
    """None from an older control plane, which has no such thing."""
    try:
        return client.send(call)
    except UnreachableError:
        raise
    except ClientError:
        return None


def speak(url: str | None, noun: str, name: str) -> int:
    """Screens on request; in between, one line when what needs attention changes."""
    keys = {str(i): s for i, s in zip((1, 2, 3, 4, 6, 7, 8, 0), screens(), strict=False)}
    said = ""
    with Client(url) as client:
        print_screen(client, noun, name)
        print("Type a screen's name or number and Enter; q quits.")  # noqa: T201 - this is the product
        while True:
            ready = select.select([sys.stdin], [], [], SPOKEN_SECONDS)[0]
            if ready:
                typed = sys.stdin.readline()
                wanted = keys.get(typed.strip(), typed.strip().lstrip(":"))
                if not typed or wanted in ("q", "quit"):
                    return 0
                noun, _, name = (wanted or noun).partition("/")
                print_screen(client, noun, name)
                continue
            said = say_changes(client, said)


def print_screen(client: Client, noun: str, name: str) -> None:
    """One screen, or why it cannot be had."""
    try:
        text = screen_text(read_context(client, noun, name), noun, name, actor_name())
    except KeyError:
        text = f'"{noun}" is not available: {", ".join(screens())}.'
    except ClientError as error:
        text = str(error)
    print(text, flush=True)  # noqa: T201 - this is the product


def say_changes(client: Client, said: str) -> str:
    """Prints one line when the alarms differ from what was said last."""
    try:
        context = read_context(client)
    except ClientError as error:
        line = str(error)
    else:
        view = overview(context.snapshot, context.history, now=context.server_now, tz=context.tz)
        worst = context.snapshot.overview.attention[:1] if context.snapshot.overview else []
        line = "; ".join(
            [headline(view) or "nothing needs attention", *(item.text for item in worst)]
        )
    if line != said:
        print(line, flush=True)  # noqa: T201 - this is the product
    return line
