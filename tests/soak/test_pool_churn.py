"""The pool under churn while its agent and clients are killed and stopped: `make soak`, and a
minute of it in CI.

Blocks of 64 KiB, a working set of three times the memory tier, four writers, four readers. No byte
may be wrong; every slot is free or indexed at every check; the hit rate and the memory stay level.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import pool_churn
import pytest

from workers.client import AgentClient, make_hello
from workers.core.errors import AgentUnavailableError
from workers.core.stats_messages import PoolStats

SLAB_BYTES = 64 << 20
SSD_BYTES = 96 << 20
LEASE_SECONDS = 2.0
WINDOW_SECONDS = 2.0
KINDS = ["writer"] * 4 + ["reader"] * 4


class Churn:
    """An agent with eight clients, all processes of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "a.sock"
        self.slab_name = f"perilune-churn-{os.getpid()}.slab"
        self.rng = random.Random(7)
        self.clients: list[subprocess.Popen[bytes]] = []
        self.counts_files: list[Path] = []
        self.cli = AgentClient(f"unix:{self.socket}", make_hello("cli", "churn"), 10.0)
        self.agent = self._start_agent()
        self.until_agent_answers()
        for number in range(len(KINDS)):
            self.clients.append(self._start_client(number))
        deadline = time.monotonic() + 60
        while self.counts()["hit"] < 100:
            assert time.monotonic() < deadline, self.log("clients")
            time.sleep(0.2)

    def _start_agent(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "workers", "agent", "--node-id", "n1",
            "--socket", str(self.socket), "--slab-name", self.slab_name,
            "--slab-bytes", str(SLAB_BYTES), "--block-tokens", str(pool_churn.BLOCK_TOKENS),
            "--ssd-path", str(self.folder / "ssd"), "--ssd-bytes", str(SSD_BYTES),
            "--lease-seconds", str(LEASE_SECONDS), "--check-every-seconds", "1",
            "--touch-bytes-per-second", "1e9",
        ]  # fmt: skip
        with (self.folder / "agent.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _start_client(self, number: int) -> subprocess.Popen[bytes]:
        file = self.folder / f"counts-{number}-{len(self.counts_files)}.json"
        self.counts_files.append(file)
        seed = 1000 * number + len(self.counts_files)
        arguments = [KINDS[number], str(self.socket), str(file), str(seed)]
        with (self.folder / "clients.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, pool_churn.__file__, *arguments], stdout=log, stderr=log
            )

    def until_agent_answers(self, seconds: float = 30.0) -> PoolStats:
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.cli.connect()
                return self.cli.stats()
            except AgentUnavailableError:
                assert self.agent.poll() is None, f"the agent ended:\n{self.log('agent')}"
                assert time.monotonic() < deadline, f"no agent:\n{self.log('agent')}"
                time.sleep(0.05)

    def counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for file in self.counts_files:
            with suppress(OSError):
                total.update(json.loads(file.read_text()))
        return total

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text()[-4000:] if path.exists() else ""

    def disturb(self, number: int) -> str:
        """Kill or stop somebody."""
        match number % 4:
            case 0:
                self.agent.kill()
                self.agent.wait(timeout=30)
                self.agent = self._start_agent()
                self.until_agent_answers()
                return "agent killed"
            case 1:
                victim = self.rng.randrange(len(self.clients))
                self.clients[victim].kill()
                self.clients[victim].wait(timeout=30)
                self.clients[victim] = self._start_client(victim)
                return f"{KINDS[victim]} killed"
            case 2:
                victim = self.rng.randrange(len(self.clients))
                self._stop(self.clients[victim], LEASE_SECONDS + 1.5)
                return f"{KINDS[victim]} stopped for over its lease"
            case _:
                self._stop(self.agent, LEASE_SECONDS + 1.0)
                return "agent stopped for over every lease"

    @staticmethod
    def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    def check(self) -> PoolStats:
        stats = self.until_agent_answers()
        assert self.counts()["WRONG"] == 0
        for process in self.clients:
            assert process.poll() is None, f"a client ended:\n{self.log('clients')}"
        dram = stats.tiers[0]
        assert 0 <= dram.used_blocks <= dram.capacity_blocks
        return stats

    def close(self) -> None:
        for process in [*self.clients, self.agent]:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            if process.poll() is None:
                process.kill()
            process.wait(timeout=30)
        self.cli.close()
        for path in Path("/dev/shm").glob(f"{self.slab_name}*"):
            path.unlink(missing_ok=True)


@pytest.fixture
def churn(tmp_path: Path) -> Iterator[Churn]:
    made = Churn(tmp_path)
    yield made
    made.close()


def run_churn(churn: Churn, seconds: float, seconds_between_faults: float) -> dict[str, object]:
    """Figures of the run; AssertionError on anything wrong."""
    began = time.monotonic()
    next_fault, num_faults = began + seconds_between_faults, 0
    hit_rates: list[float] = []
    rss: list[int] = []
    before = churn.counts()
    faults: list[str] = []
    while time.monotonic() - began < seconds:
        time.sleep(WINDOW_SECONDS)
        stats = churn.check()
        rss.append(stats.rss_bytes)
        after = churn.counts()
        asked = after["asked"] - before["asked"]
        if asked > 100:
            hit_rates.append((after["hit"] - before["hit"]) / asked)
        before = after
        if time.monotonic() >= next_fault:
            faults.append(churn.disturb(num_faults))
            num_faults += 1
            next_fault = time.monotonic() + seconds_between_faults
    return _judged(churn, hit_rates, rss, faults)


def _judged(
    churn: Churn, hit_rates: list[float], rss: list[int], faults: list[str]
) -> dict[str, object]:
    stats, counts = churn.check(), churn.counts()
    third = max(1, len(hit_rates) // 3)
    early, late = median(hit_rates[third : 2 * third]), median(hit_rates[-third:])
    figures: dict[str, object] = {
        "counts": dict(counts), "faults": faults, "hit_rate_middle": early, "hit_rate_end": late,
        "rss_first": rss[0], "rss_last": rss[-1], "rss_most": max(rss),
        "evicted_by_reason": stats.eviction.evicted_by_reason, "tiers": str(stats.tiers),
    }  # fmt: skip
    print(json.dumps(figures, indent=2))
    log = (churn.folder / "agent.log").read_text()
    assert "Traceback" not in log, log[-4000:]
    assert counts["WRONG"] == 0
    assert counts["read"] > 1000, figures
    assert counts["on_disk"] > 0, "nothing was ever read from SSD"
    assert stats.tiers[1].read_blocks_total > 0, figures
    assert late > 0.6 * early, figures
    assert max(rss) < min(rss) + (60 << 20), figures
    return figures


@pytest.mark.heavy
@pytest.mark.xdist_group("soaks")
@pytest.mark.timeout(240)
def test_b09_churn_with_faults_for_a_minute(churn: Churn) -> None:
    run_churn(churn, 60.0, 7.0)


@pytest.mark.soak
def test_churn_with_faults_for_long(churn: Churn) -> None:
    """The script's figure: at least 3 million blocks read in 30 minutes."""
    seconds = float(os.environ.get("PERILUNE_SOAK_SECONDS", "1800"))
    figures = run_churn(churn, seconds, 60.0)
    if seconds >= 1800:
        counts = figures["counts"]
        assert isinstance(counts, dict)
        assert counts["read"] >= 3_000_000 * seconds / 1800
