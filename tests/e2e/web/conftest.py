"""A real control plane on SQLite, a scripted cluster that reports to it, one Chromium."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from browser import running_chromium
from playwright.sync_api import Browser, BrowserContext, Page

from controlplane.client import Client
from controlplane.client_http import ClientError
from controlplane.decisions.schemas import Decision, Leg, PrefillCandidate
from controlplane.gateways.schemas import (
    HISTOGRAM_BOUNDS_SECONDS,
    GatewayReport,
    GatewayStats,
    Histogram,
    WorkerLoad,
)
from controlplane.nodes.schemas import Heartbeat
from workers.core.transfer_stats import BUCKET_SECONDS, STAGES

T = TypeVar("T")
START_SECONDS = 60.0
REPORT_SECONDS = 0.5


@dataclass
class Plane:
    """A running control plane."""

    url: str
    token: str
    process: subprocess.Popen[str]


@dataclass
class Script:
    """What the cluster reports; tests change it while it runs."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    rejected: int = 0
    evicted: int = 0
    engine: str = "vllm"
    lost: set[str] = field(default_factory=set)
    decisions: list[Decision] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def _tier(name: str, used: int, capacity: int) -> dict[str, Any]:
    return {
        "tier": name, "used_blocks": used, "capacity_blocks": capacity,
        "used_bytes": used * 2**20, "capacity_bytes": capacity * 2**20,
    }  # fmt: skip


def _transfers(num: int) -> dict[str, Any]:
    """What n2 pulled from n1: one transfer of 8 MiB a request, 5 ms each."""
    counts = [0] * (len(BUCKET_SECONDS) + 1)
    counts[6] = num
    stages = [{"stage": s, "counts": counts, "sum_seconds": 0.005 * num} for s in STAGES]
    pair = {
        "source": "n1", "destination": "n2", "transport": "tcp", "priority": "first_token",
        "transfers_total": num, "bytes_total": num * 8 * 2**20, "pieces_total": num * 8,
        "retries_total": 1, "missing_by_cause": {"timeout": 2}, "seconds": stages, "slowest": [],
    }  # fmt: skip
    alarm = "no transfers with n1 by rdma: retry exceeded"
    return {"pairs": [pair], "links": [], "alarms": [alarm], "at": 1.0}


class Feed:
    """Sends heartbeats of two nodes and a gateway's reports, as agents and gateways do."""

    def __init__(self, plane: Plane) -> None:
        self.script = Script()
        self.revision = 0
        self._lock = threading.Lock()
        self._plane = plane
        self._started = datetime.now(UTC)
        self._incarnation = int(time.time_ns() // 1_000_000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def serve(self, num: int, hit_ratio: float) -> None:
        """Say that `num` requests were answered."""
        with self._lock:
            self.script.requests += num
            self.script.prompt_tokens += num * 1000
            self.script.hit_tokens += int(num * 1000 * hit_ratio)

    def record(self, decision: Decision) -> None:
        """Send a decision record with the next report."""
        with self._lock:
            self.script.decisions.append(decision)
            self.script.requests += 1
            self.script.rejected += decision.status == "rejected"

    def _run(self) -> None:
        with Client(self._plane.url, self._plane.token, timeout_seconds=10) as client:
            while not self._stop.wait(REPORT_SECONDS):
                try:
                    self._send(client)
                except ClientError as error:
                    self.script.errors.append(str(error))

    def _send(self, client: Client) -> None:
        with self._lock:
            script = self.script
            decisions, script.decisions = script.decisions, []
        for name, share in (("n1", 1.0), ("n2", 0.0)):
            if name not in script.lost:
                client.heartbeat(name, self._heartbeat(name, share))
        view = client.view("g1", self.revision or None)
        self.revision = view.revision if view else self.revision
        client.report("g1", self._report(decisions))

    def _heartbeat(self, name: str, share: float) -> Heartbeat:
        role, worker = ("prefill", "p1") if name == "n1" else ("decode", "d1")
        stats = {
            "node_id": name, "incarnation": self._incarnation, "uptime_seconds": 5.0,
            "capacity_blocks": 1000, "used_blocks": 400, "pinned_blocks": 2, "pending_blocks": 0,
            "block_bytes": 2**20, "slab_bytes": 1000 * 2**20, "rss_bytes": 50 * 2**20,
            "write_queue_blocks": 3, "write_queue_bound": 500,
            "prompt_tokens_total": int(self.script.prompt_tokens * share),
            "hit_tokens_total": int(self.script.hit_tokens * share),
            "evicted_blocks_total": self.script.evicted,
            "evicted_by_cause": {"capacity": self.script.evicted},
            "shm_bytes_by_pair": {"p1>d1": self.script.requests * 10_000_000},
            "shm_seconds_by_pair": {"p1>d1": self.script.requests * 0.01},
            "tiers": [_tier("dram", 400, 1000), _tier("ssd", 900, 4000)],
            "groups": [
                {"kind": "tenant", "name": "acme", "used_blocks": 300, "used_bytes": 300 * 2**20, "quota_bytes": 310 * 2**20},
                {"kind": "tenant", "name": "default", "used_blocks": 100, "used_bytes": 100 * 2**20},
            ],
            "whatif": [
                {"capacity_factor": f, "capacity_blocks": int(f * 5000), "hit_rate": 0.5 + f / 20}
                for f in (0.25, 0.5, 1.0, 2.0, 4.0)
            ],
            "eviction": {"policy": "decay", "policy_revision": 1, "age_p50_seconds": 31.0},
            "workers": [{
                "worker_id": worker, "role": role, "model": "smollm2", "state": "ready",
                "url": "http://127.0.0.1:9", "engine": self.script.engine, "pid": 1,
            }],
        }  # fmt: skip
        if name == "n2":
            stats["transfers"] = _transfers(self.script.requests)
        return Heartbeat(incarnation=self._incarnation, pool_stats=stats)

    def _report(self, decisions: list[Decision]) -> GatewayReport:
        script = self.script
        fast = [0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1)
        fast[6] = script.requests
        times = Histogram(counts=fast, sum_seconds=script.requests * 0.09)
        stats = GatewayStats(
            started_at=self._started, requests_total=script.requests,
            rejected_total=script.rejected, prompt_tokens_total=script.prompt_tokens,
            hit_tokens_total=script.hit_tokens, slo_met_total=script.requests,
            ttft=times, tbt=times, queue=times,
            workers={"p1": WorkerLoad(running=1), "d1": WorkerLoad(running=2, waiting=1)},
        )  # fmt: skip
        return GatewayReport(
            url="http://127.0.0.1:8000",
            pid=1,
            view_revision=self.revision,
            stats=stats,
            decisions=decisions,
        )


def decision(request_id: str, **changes: Any) -> Decision:
    """A finished request of the scripted gateway."""
    candidate = PrefillCandidate(
        worker_id="p1", node_id="n1", own_prefix_tokens=0, used_prefix_tokens=512,
        queue_seconds=0.01, transfer_seconds=0.0, prefill_seconds=0.05, ttft_seconds=0.06,
        verdict="chosen",
    )  # fmt: skip
    fields: dict[str, Any] = {
        "request_id": request_id, "at": datetime.now(UTC), "gateway_id": "g1",
        "model": "smollm2", "status": "finished_stop", "prompt_tokens": 1000, "hit_tokens": 512,
        "prefill_worker": "p1", "decode_worker": "d1", "ttft_seconds": 0.09,
        "predicted_ttft_seconds": 0.06, "http_status": 200, "prefill_candidates": [candidate],
        "decode_leg": Leg(worker_id="d1", prompt_tokens=1000, loaded_blocks=8, loaded_bytes=8 * 2**20,
                          kv_wait_seconds=0.004, kv_wait_by_stage_seconds={"wire": 0.004}),
        "e2e_seconds": 1.0,
    }  # fmt: skip
    return Decision(**{**fields, **changes})


def wait_until(ask: Callable[[], T | None], what: str, seconds: float = 20.0) -> T:
    """Poll until `ask` gives something true."""
    end = time.monotonic() + seconds
    while True:
        found = ask()
        if found:
            return found
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="package")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """`python -m controlplane` in a folder of its own, on a port of its own choice."""
    home = tmp_path_factory.mktemp("plane")
    log = home / "log"
    env = {**os.environ, "PERILUNE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "controlplane", "--port", "0", "--data", str(home),
               "--cluster", "e2e"]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=env)
    try:
        url = _url_of(process, log)
        token = (home / "token").read_text().strip()
        wait_until(lambda: _answers(url), "the control plane answers", START_SECONDS)
        yield Plane(url, token, process)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


def _url_of(process: subprocess.Popen[str], log: Path) -> str:
    def find() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        return found[0] if found else None

    return wait_until(find, "the control plane names its address", START_SECONDS)


def _answers(url: str) -> bool:
    try:
        with Client(url, "", timeout_seconds=2) as client:
            client.health()
    except ClientError:
        return False
    return True


@pytest.fixture(scope="package")
def feed(plane: Plane) -> Iterator[Feed]:
    """The scripted cluster, reporting while tests run."""
    running = Feed(plane)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="package")
def client(plane: Plane) -> Iterator[Client]:
    """The operator's own access, to set things back."""
    with Client(plane.url, plane.token) as opened:
        yield opened


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser a file. It has an event loop running in this thread for as long as it is open,
    which no async test after it could stand."""
    with running_chromium() as browser:
        yield browser


class Watched:
    """A browser's context whose pages are held to: no message, no error, no foreign request."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.url = url
        self.complaints: list[str] = []
        self.bytes_in = 0
        self.allowed = re.compile(r"^$")

    def open(self, path: str) -> Page:
        """A new page, watched."""
        page = self.context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: self._complain(f"console {m.type}: {m.text}"))
        page.on("pageerror", lambda e: self._complain(f"error: {e}"))
        page.on("request", lambda r: self._check(r.url))
        page.goto(self.url + path, wait_until="load")
        return page

    def _complain(self, text: str) -> None:
        if not self.allowed.search(text):
            self.complaints.append(text)

    def _check(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self._complain(f"foreign request: {url}")


@pytest.fixture
def visit(chromium: Browser, plane: Plane) -> Iterator[Callable[..., Watched]]:
    """Opens a fresh context; whatever it complained about fails the test."""
    opened: list[Watched] = []

    def start(width: int = 1440, height: int = 900, **options: Any) -> Watched:
        fields = {"color_scheme": "dark", "timezone_id": "Europe/Berlin", **options}
        context = chromium.new_context(viewport={"width": width, "height": height}, **fields)
        opened.append(Watched(context, plane.url))
        return opened[-1]

    yield start
    for watched in opened:
        watched.context.close()
        assert not watched.complaints


@pytest.fixture(scope="session")
def tools() -> Any:
    """Helpers that tests call."""

    class Tools:
        wait_until = staticmethod(wait_until)
        decision = staticmethod(decision)

    return Tools
