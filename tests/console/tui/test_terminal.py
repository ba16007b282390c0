"""The console in a real terminal, against a real control plane fed over HTTP."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from terminal import Terminal, wait

from controlplane.client import Client, ClientError
from controlplane.decisions.schemas import Decision, PrefillCandidate, Verdict
from controlplane.gateways.schemas import (
    HISTOGRAM_BOUNDS_SECONDS,
    GatewayReport,
    GatewayStats,
    Histogram,
    WorkerLoad,
)
from controlplane.nodes.schemas import Heartbeat

pytestmark = [pytest.mark.tmux, pytest.mark.xdist_group("tmux"), pytest.mark.timeout(180)]

MIB = 2**20


@dataclass
class Traffic:
    """A node, two workers and a gateway, as a control plane hears of them."""

    client: Client
    num: int = 0
    rejected: int = 0
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def step(self) -> None:
        """One heartbeat and one report: one more request, 60 % of it from the pool."""
        self.num += 1
        self.client.heartbeat("n1", Heartbeat(incarnation=1, pool_stats=self._pool()))
        self.client.report("gw-1", self._report(self._request()))

    def reject(self) -> None:
        """A request that admission turned away."""
        self.rejected += 1
        candidate = PrefillCandidate(
            worker_id="p1", node_id="n1", own_prefix_tokens=0, used_prefix_tokens=0, queue_seconds=0,
            transfer_seconds=0, prefill_seconds=0.3, ttft_seconds=0.3, verdict="breaks TTFT SLO",
        )  # fmt: skip
        decision = Decision(
            request_id=f"beef{self.rejected:04d}cafe", at=datetime.now(UTC), gateway_id="gw-1",
            status="rejected", http_status=429, error="predicted TTFT 300 ms > 1 ms",
            retry_after_seconds=3, prompt_tokens=3000, prefill_candidates=[candidate],
            admission=Verdict(gate="ttft", predicted_seconds=0.3, limit_seconds=0.001),
        )  # fmt: skip
        self.client.report("gw-1", self._report(decision))

    def _pool(self) -> dict[str, object]:
        n = self.num
        workers = [
            {
                "worker_id": w,
                "role": role,
                "model": "smollm2",
                "url": f"http://127.0.0.1:1/{w}",
                "state": "ready",
            }
            for w, role in (("p1", "prefill"), ("d1", "decode"))
        ]
        return {
            "node_id": "n1", "incarnation": 1, "uptime_seconds": float(n), "capacity_blocks": 1000,
            "used_blocks": 480, "pinned_blocks": 3, "pending_blocks": 0, "block_bytes": MIB,
            "slab_bytes": 1000 * MIB, "rss_bytes": 60 * MIB, "write_queue_blocks": 5,
            "write_queue_bound": 500, "prompt_tokens_total": 3000 * n, "hit_tokens_total": 1800 * n,
            "stored_blocks_total": n, "loaded_blocks_total": n, "evicted_blocks_total": n,
            "evicted_by_cause": {"capacity": n}, "shm_bytes_by_pair": {"p1>d1": 10_000_000 * n},
            "shm_seconds_by_pair": {"p1>d1": 0.05 * n}, "workers": workers,
        }  # fmt: skip

    def _request(self) -> Decision:
        return Decision(
            request_id=f"{self.num:08x}feedf00d", at=datetime.now(UTC), gateway_id="gw-1",
            model="smollm2", status="finished_stop", prompt_tokens=3000, hit_tokens=1800,
            prefill_worker="p1", decode_worker="d1", predicted_ttft_seconds=0.3, ttft_seconds=0.25,
        )  # fmt: skip

    def _report(self, decision: Decision) -> GatewayReport:
        n = self.num
        counts = [0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1)
        counts[8] = n
        zero = Histogram(counts=[0] * len(counts))
        stats = GatewayStats(
            started_at=self.started, requests_total=n + self.rejected, rejected_total=self.rejected,
            prompt_tokens_total=3000 * n, hit_tokens_total=1800 * n, slo_met_total=n,
            ttft=Histogram(counts=counts, sum_seconds=0.25 * n), tbt=zero, queue=zero,
            workers={"p1": WorkerLoad(running=1), "d1": WorkerLoad(running=2)},
        )  # fmt: skip
        return GatewayReport(
            url="http://127.0.0.1:1", pid=1, view_revision=1, stats=stats, decisions=[decision]
        )


@dataclass
class Plane:
    """A control plane of our own and the traffic that it hears of."""

    url: str
    home: Path
    client: Client
    traffic: Traffic


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    home = tmp_path_factory.mktemp("home")
    log = (home / "log").open("w")
    command = [
        sys.executable,
        "-m",
        "controlplane",
        "--port",
        "0",
        "--data",
        str(home),
        "--cluster",
        "demo",
    ]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    stop = threading.Event()
    try:
        wait(lambda: "url=http" in (home / "log").read_text(), "no control plane")
        url = (home / "log").read_text().split("url=")[1].split()[0]
        client = Client(url, (home / "token").read_text().strip())
        traffic = Traffic(client)
        wait(lambda: _answers(client), "the control plane does not answer")
        thread = threading.Thread(target=_drive, args=(traffic, stop), daemon=True)
        thread.start()
        yield Plane(url, home, client, traffic)
        stop.set()
        thread.join(10)
        client.close()
    finally:
        stop.set()
        process.terminate()
        process.wait(20)
        log.close()


def _answers(client: Client) -> bool:
    try:
        client.health()
    except ClientError:
        return False
    return True


def _drive(traffic: Traffic, stop: threading.Event) -> None:
    while not stop.wait(0.4):
        traffic.step()


@pytest.fixture
def terminal(plane: Plane, tmp_path: Path) -> Iterator[Terminal]:
    environ = {"PERILUNE_HOME": str(plane.home), "PERILUNE_URL": plane.url}
    made = Terminal(tmp_path, environ)
    try:
        made.send(
            "PS1='prom''pt> '; clear", "Enter"
        )  # a root shell takes none from its environment
        made.until("prompt>")
        yield made
    finally:
        made.close()


CONSOLE = f"{Path(sys.executable).parent}/perilune console"


def test_three_sizes_a_policy_and_a_rejection(plane: Plane, terminal: Terminal) -> None:
    terminal.send(CONSOLE, "Enter")
    for columns, rows in ((80, 24), (120, 40), (200, 60)):
        terminal.size(columns, rows)
        # Drawn for this size, before the next one comes.
        wait(
            lambda columns=columns: columns - 41 < max(map(len, terminal.text().splitlines())),
            lambda: f"not drawn anew:\n{terminal.text()}",
        )
        shown = terminal.until(
            "demo  LIVE", "hit 60.0 %", "480/1,000 MiB", "requests, last min", "1 / 1"
        )
        assert all(len(line) <= columns for line in shown.splitlines())
    terminal.until("local hit rate, % of prompt tokens requested", "p1 -> d1", "LAST REQUESTS")
    terminal.size(100, 30)
    terminal.send("2")
    terminal.until("prefill p1", "decode  d1", "1 / 16")
    terminal.send("7")
    terminal.until("slo/default")
    terminal.send("/", "kind=slo", "Enter")
    terminal.until("1 of ")
    terminal.send("E", "Enter", "C-u", "enforce", "Enter", "Down", "Enter", "C-u", "1", "Enter")
    terminal.until("max_ttft_ms    10000  ->  1", "observe  ->  enforce")
    terminal.send("S")
    terminal.until("PUT slo/default, on top of r1", "[ Cancel ]")
    time.sleep(0.5)  # a held key does not agree
    terminal.send("Tab", "Tab", "from the terminal", "Enter", "y")
    terminal.until("slo/default r2 is active")
    active = plane.client.policy("slo", "default")
    assert (active.revision, active.spec["max_ttft_ms"], active.reason) == (
        2,
        1.0,
        "from the terminal",
    )
    terminal.send(":audit", "Enter")
    terminal.until("policy.put", "from the terminal")
    plane.traffic.reject()
    terminal.send(":rejections", "Enter")
    terminal.until("beef0001", "rejected", "300 ms!", "rejected wrongly: --")
    child = terminal.child()
    assert child.memory_info().rss < 120 * MIB
    terminal.send("q")
    terminal.until("prompt>")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_e20_a_signal_leaves_the_terminal_as_it_was(number: int, terminal: Terminal) -> None:
    terminal.send(CONSOLE, "Enter")
    terminal.until("demo  LIVE")
    assert terminal.flags() != "001"
    terminal.child().send_signal(number)
    wait(lambda: terminal.flags() == "001", f"the terminal is left as {terminal.flags()}")
    terminal.send("stty -a", "Enter")
    shown = terminal.until(" echo ", "icanon")
    assert "-icanon" not in shown


def test_e20_a_terminal_that_is_gone_takes_the_console_along(plane: Plane, tmp_path: Path) -> None:
    """An ssh session that breaks: nothing may go on reading from nowhere."""
    environ = {"PERILUNE_HOME": str(plane.home), "PERILUNE_URL": plane.url}
    terminal = Terminal(tmp_path, environ)
    try:
        terminal.send(CONSOLE, "Enter")
        terminal.until("demo  LIVE")
        console = terminal.child()
    finally:
        terminal.close()
    wait(lambda: not console.is_running(), "the console runs on without a terminal")


def test_e25_no_width_and_no_terminal(terminal: Terminal) -> None:
    terminal.send(
        f"{CONSOLE} --screen policies | grep -m2 -e POLICIES -e slo/default; TERM=dumb {CONSOLE} --screen audit; echo code $?",
        "Enter",
    )
    terminal.until("POLICIES", "slo/default", "AUDIT", "code 0")
    terminal.send("clear; stty cols 0", "Enter", CONSOLE, "Enter")
    terminal.until("LIVE")
    terminal.send("q")
