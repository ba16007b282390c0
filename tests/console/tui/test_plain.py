"""Text for pipes and dumb terminals; when the full screen is not taken."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from console.tui import caps, run
from console.tui.context import Context
from console.tui.localtime import LocalZone
from console.tui.plain import screen_text, screens
from console.viewmodel.freshness import freshness
from console.viewmodel.history import History
from console.viewmodel.state import ConsoleState, LedgerReport, PairTransfers
from workers.core.errors import ConfigError


def context_of(world: Any, history: History | None = None) -> Context:
    state = ConsoleState()
    state.load(
        0.0, overview=world.overview, nodes=world.nodes, workers=world.workers,
        policies=world.policies, decisions=world.decisions, audit=world.audit,
        doctor=world.doctor, pair=PairTransfers("node-02", "node-09", world.transfers), alarms=world.transfers,
        matrix=world.matrix, series=world.series(world.now), pool=world.pool, jobs=world.jobs,
        gateways=world.gateways, running=world.running, ledger=LedgerReport(world.ledger, world.summary),
    )  # fmt: skip
    fresh = freshness(now=0.0, received=0.0)
    zone = ZoneInfo("UTC")
    return Context(state.snapshot(), state.history, 0.0, world.now, zone, fresh, caps.Caps("none"))


@pytest.mark.parametrize("noun", screens())
def test_every_screen_as_text(noun: str, world: Any) -> None:
    text = screen_text(context_of(world), noun)
    assert "prod-eu1  LIVE" in text
    assert "\x1b" not in text
    assert len(text.splitlines()) > 5


def test_figures_become_their_worst_cells(world: Any) -> None:
    text = screen_text(context_of(world), "cache")
    assert "worst 10" in text
    assert "node-12 d8" in text


def test_the_pool_in_full_as_text(world: Any) -> None:
    text = screen_text(context_of(world), "cache")
    for words in (
        "policy decay", "write queue ##........ 118 / 500", "TENANTS AND NAMESPACES", "acme",
        "HEALTH OF EVICTION", "measured now 58.1 %", "would add +7.1 pp",
    ):  # fmt: skip
        assert words in text
    assert "118" in screen_text(context_of(world), "job", "118")


def test_what_the_gateways_know_as_text(world: Any) -> None:
    shown = {noun: screen_text(context_of(world), noun) for noun in ("in-flight", "rejections")}
    assert "1 stuck: 00000001 waits 5 min 40 s for p3: prefill leg" in shown["in-flight"]
    assert "12.1 % of 58 probes" in shown["rejections"]
    assert "likely no, 1 of 20" in shown["rejections"]
    topology = screen_text(context_of(world), "topology")
    assert "left out after failures: d5 at gw-1" in topology
    assert "ejected, trial in 4.2 s" in screen_text(context_of(world), "worker", "d5")


def test_one_thing_in_full(world: Any) -> None:
    text = screen_text(context_of(world), "request", world.decisions[-1].request_id)
    assert "handover" in text
    assert "OUTCOME  TTFT 4.47 s, predicted 402 ms, 11x" in text


def test_a_pair_with_what_it_handed_over(world: Any) -> None:
    text = screen_text(context_of(world), "pair", "p3/d5")
    assert "p3 -> d5, last 5 min" in text
    assert "27" in text
    assert "1.61 GB" in text
    gone = screen_text(context_of(world), "pair", "p3/gone")
    assert "No KV has travelled between these two." in gone
    assert "No request among the last ones went this way." in gone


def test_transfers_of_nodes_and_of_workers_with_what_carries_nothing(world: Any) -> None:
    text = screen_text(context_of(world), "transfers")
    assert "ALARM node-09: no transfers with node-02 by rdma" in text
    assert text.index("NODES, transfer P99") < text.index("WORKERS, transfer P95")


def test_a_pair_of_nodes_in_full(world: Any) -> None:
    text = screen_text(context_of(world), "pair", "node-02/node-09")
    for words in (
        "2 timeout, 1 corrupt", "WHERE THE TIME WENT", "set by hand", "open!", "DOCTOR  FAIL",
    ):  # fmt: skip
        assert words in text


def test_the_doctor_as_text_says_what_to_do_first(world: Any) -> None:
    text = screen_text(context_of(world), "doctor")
    assert "1 fail   2 warn" in text
    assert text.index("Compare `ip link`") < text.index("NODES") < text.index("PAIRS")


def test_what_is_cut_on_a_screen_is_whole_as_text(world: Any) -> None:
    """A pipe has no way to open a row."""
    text = screen_text(context_of(world), "request", world.decisions[-1].request_id)
    assert "~" not in text
    assert "24 ms slower:" in text


def test_an_unknown_screen_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="overview, topology"):
        run.console(None, plain=True, ascii_only=False, light=False, screen="nonsense")


def test_e25_a_pipe_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert not run.is_terminal()


class TestCaps:
    @pytest.mark.parametrize(
        ("environ", "system", "depth"),
        [
            ({}, "truecolor", "truecolor"),
            ({}, "256", "256"),
            ({}, "standard", "16"),
            ({}, None, "none"),
            ({"NO_COLOR": ""}, "truecolor", "none"),
        ],
    )
    def test_e22_depth(self, environ: dict[str, str], system: str | None, depth: str) -> None:
        assert caps.detect(environ, system, ascii_only=False, light=False).color == depth

    def test_a_locale_without_utf8_is_ascii(self) -> None:
        assert caps.detect({"LANG": "C"}, "256", ascii_only=False, light=False).ascii_only
        assert not caps.detect(
            {"LANG": "C", "LC_ALL": "C.UTF-8"}, "256", ascii_only=False, light=False
        ).ascii_only


def test_e10_the_zone_follows_summer_time() -> None:
    """In a process of its own: the C library reads TZ once."""
    code = (
        "from datetime import datetime, UTC; from console.tui.localtime import LocalZone;"
        "print(datetime(2026,7,1,12,tzinfo=UTC).astimezone(LocalZone()).isoformat(),"
        "datetime(2026,12,1,12,tzinfo=UTC).astimezone(LocalZone()).isoformat())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"TZ": "America/New_York"}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["2026-07-01T08:00:00-04:00", "2026-12-01T07:00:00-05:00"]


def test_local_times_of_one_zone() -> None:
    zone = LocalZone()
    at = datetime.fromtimestamp(1_796_130_450, zone)
    assert at.timestamp() == 1_796_130_450
