"""Ten minutes of faults under load (`make soak`), and a minute of it with the other tests.

Emulated workers, everything else real. Workers are killed, stopped, slowed and cut off, so is the
agent, the gateway is restarted, clients leave. Every other request must end within its bound, with the right answer or
an error that says so, and in the end nothing may be held: no pin, no slot, no counter.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_cluster import LiveCluster, wait_for

from workers.bench.acceptance import find_target
from workers.bench.cluster import own_cluster
from workers.supervisor.home import Home

CLIENTS = 4
REST_SECONDS = 3.0
BOUND_SECONDS = 45.0
"""A hung worker is given up after about twelve seconds, and a request may meet three of them."""
TOKENS = 12
HONEST = {"429", "502", "503", "504", "error event", "left"}
"""The first word of an outcome; of a status the error's code follows."""
AWAY = {"ConnectError", "RemoteProtocolError", "ReadError", "WriteError"}
"""What a client sees of a gateway that is restarted, and of no other."""
OPTIONS = ("--engine", "emulated", "--prefill", "2", "--decode", "2", "--slab-gib", "0.03125")


@dataclass
class Seen:
    """What the clients met. Lists hold violations."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    away: list[tuple[float, float, str]] = field(default_factory=list)  # start, end, what
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, outcome: str, start: float, detail: str) -> None:
        now = time.monotonic()
        with self.lock:
            self.outcomes[outcome] += 1
            if outcome in AWAY:
                self.away.append((start, now, f"{outcome}: {detail}"))
            elif outcome != "right" and outcome.partition(":")[0] not in HONEST:
                self.wrong.append(f"{outcome}: {detail[:300]}")
            if now - start > BOUND_SECONDS:
                self.late.append(f"{outcome} after {now - start:.1f} s")

    def unexplained(self, restarts: list[tuple[float, float]]) -> list[str]:
        """Connections that broke although the gateway was there."""
        return [
            what
            for start, end, what in self.away
            if not any(start < back and end > gone for gone, back in restarts)
        ]


class Client(threading.Thread):
    """Asks again and again, plain or streamed; now and then it leaves in the middle."""

    def __init__(self, live: LiveCluster, number: int, texts: dict[str, str], seen: Seen) -> None:
        super().__init__(daemon=True, name=f"client-{number}")
        self.live, self.rng, self.texts, self.seen = live, random.Random(number), texts, seen
        self.stop = threading.Event()

    def run(self) -> None:
        with httpx2.Client(timeout=BOUND_SECONDS + 15, trust_env=False) as http:
            while not self.stop.is_set():
                prompt = self.rng.choice(list(self.texts))
                start = time.monotonic()
                try:
                    outcome, detail = self._ask(http, prompt)
                except httpx2.HTTPError as error:
                    outcome, detail = type(error).__name__, str(error)
                self.seen.note(outcome, start, detail)
                self.stop.wait(0.02 if outcome == "right" else 0.2)

    def _ask(self, http: httpx2.Client, prompt: str) -> tuple[str, str]:
        stream, leaves = self.rng.random() < 0.6, self.rng.random() < 0.1
        body = {"model": self.live.model, "prompt": prompt, "max_tokens": TOKENS, "stream": stream}
        with http.stream("POST", f"{self.live.gateway}/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                return self._judge_error(reply.status_code, reply.read())
            if leaves:
                return "left", ""
            if not stream:
                return self._judge(prompt, json.loads(reply.read())["choices"][0]["text"])
            return self._judge_stream(
                prompt, [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
            )

    @staticmethod
    def _judge_error(status: int, body: bytes) -> tuple[str, str]:
        """An honest one is an OpenAI error object with a code and a message."""
        try:
            error = json.loads(body)["error"]
            kind = f"{status}: {error['code']}" if error["message"] else "no message"
        except (ValueError, LookupError, TypeError):
            kind = "no error object"
        return kind, body.decode(errors="replace")

    def _judge_stream(self, prompt: str, events: list[str]) -> tuple[str, str]:
        if events[-1:] != ["[DONE]"]:
            said = bool(events) and "error" in json.loads(events[-1])
            return ("error event" if said else "broke off without a word"), str(events[-1:])
        payloads = [json.loads(event) for event in events[:-1]]
        return self._judge(prompt, "".join(c["text"] for p in payloads for c in p["choices"]))

    def _judge(self, prompt: str, text: str) -> tuple[str, str]:
        return ("right" if text == self.texts[prompt] else "wrong answer"), text


class Chaos:
    """One fault after the other, each undone after a while."""

    def __init__(self, live: LiveCluster, rng: random.Random) -> None:
        self._live, self._rng = live, rng
        self.done: Counter[str] = Counter()
        self.restarts: list[tuple[float, float]] = []  # of the gateway: killed, ready again
        self._faults: list[Callable[[], str]] = [
            self._kill_worker, self._stop_worker, self._slow_worker, self._cut_worker,
            self._reset_worker, self._stop_agent, self._kill_agent, self._restart_gateway,
        ]  # fmt: skip

        self._first = rng.sample(self._faults, len(self._faults))  # each kind once, then at random

    def step(self) -> None:
        fault = self._first.pop() if self._first else self._rng.choice(self._faults)
        with suppress(ProcessLookupError, httpx2.HTTPError):  # it has gone by itself meanwhile
            self.done[fault()] += 1

    def _pid(self, kind: str) -> int:
        ready = [c for c in self._live.state().components if c.kind == kind and c.pid]
        return int(self._rng.choice(ready).pid) if ready else 0

    def _signal(self, kind: str, number: signal.Signals) -> int:
        pid = self._pid(kind)
        if not pid:
            raise ProcessLookupError
        os.kill(pid, number)
        return pid

    def _kill_worker(self) -> str:
        self._signal("worker", signal.SIGKILL)
        return "killed"

    def _stop_worker(self) -> str:
        pid = self._signal("worker", signal.SIGSTOP)
        time.sleep(self._rng.uniform(1.0, 14.0))
        os.kill(pid, signal.SIGCONT)
        return "stopped"

    def _stop_agent(self) -> str:
        pid = self._signal("agent", signal.SIGSTOP)
        time.sleep(self._rng.choice([0.5, 3.0, 14.0]))  # the last: its node counts as lost
        os.kill(pid, signal.SIGCONT)
        return "agent stopped"

    def _kill_agent(self) -> str:
        self._signal("agent", signal.SIGKILL)
        return "agent killed"

    def _restart_gateway(self) -> str:
        gone = time.monotonic()
        pid = self._signal("gateway", self._rng.choice([signal.SIGTERM, signal.SIGKILL]))
        self._live.wait_ready("gateway", pid)
        self.restarts.append((gone, time.monotonic()))
        return "gateway restarted"

    def _slow_worker(self) -> str:
        self._with_faults(delay_seconds=1.0)
        return "slowed"

    def _cut_worker(self) -> str:
        """Connections stand, but what is asked is answered only when the cut is over."""
        self._with_faults(delay_seconds=self._rng.uniform(3.0, 20.0), hang_health=True)
        return "cut"

    def _reset_worker(self) -> str:
        self._with_faults(reset=True)
        return "reset"

    def _with_faults(self, **faults: Any) -> None:
        row = self._rng.choice([r for r in self._live.items("/workers") if r["url"]])
        url = f"{row['url']}/debug/faults"
        self._live.client.post(url, json=faults, timeout=5).raise_for_status()
        time.sleep(self._rng.uniform(2.0, 8.0))
        self._live.client.post(url, json={}, timeout=5)


def texts_of(live: LiveCluster) -> dict[str, str]:
    """Prompts, each with the answer that an undisturbed cluster gives."""
    texts = {}
    for number in range(10):
        prompt = f"Story {number}. " + f"word{number} and more " * 120
        reply = live.complete(prompt, TOKENS)
        assert reply.status_code == 200, reply.text
        texts[prompt] = reply.json()["choices"][0]["text"]
    return texts


def run_chaos(folder: Path, model_folder: Path, seconds: float) -> None:
    with (
        httpx2.Client(timeout=30, trust_env=False) as http,
        own_cluster(folder, model_folder, "auto", 64, *OPTIONS) as state,
    ):
        live = LiveCluster(
            Home(folder), model_folder, http,
            find_target(http, state.gateway_url, state.control_plane_url),
        )  # fmt: skip
        seen, texts = Seen(), texts_of(live)
        clients = [Client(live, number, texts, seen) for number in range(CLIENTS)]
        chaos = Chaos(live, random.Random(11))
        for client in clients:
            client.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            chaos.step()
            time.sleep(REST_SECONDS)
        try:
            wait_for(lambda: all_ready(live), 240, "all ready again")
            right = seen.outcomes["right"]
            wait_for(lambda: seen.outcomes["right"] > right + 20, 60, "served again")
        finally:
            for client in clients:
                client.stop.set()
            for client in clients:
                client.join(timeout=BOUND_SECONDS + 20)
        judge(live, seen, chaos)


def all_ready(live: LiveCluster) -> bool:
    return all(c.state == "ready" for c in live.state().components) and all(
        row["state"] == "ready" for row in live.items("/workers")
    )


def judge(live: LiveCluster, seen: Seen, chaos: Chaos) -> None:
    print(json.dumps({"faults": chaos.done, "outcomes": seen.outcomes}, indent=1))
    assert not seen.wrong, (seen.wrong[:5], seen.outcomes, chaos.done)
    assert not seen.late, (seen.late[:5], seen.outcomes, chaos.done)
    unexplained = seen.unexplained(chaos.restarts)
    assert not unexplained, (unexplained[:5], seen.outcomes, chaos.restarts)
    assert seen.outcomes["right"] > 20 * CLIENTS, (seen.outcomes, chaos.done)
    wait_for(lambda: live.pinned_blocks() == 0, 45, "no pinned block (leases are 30 s)")
    wait_for(lambda: not held_by_gateway(live), 20, "the gateway holds nothing")
    wait_for(lambda: not running_on_workers(live), 20, "no request runs on a worker")


def held_by_gateway(live: LiveCluster) -> dict[str, Any]:
    """Requests, slots and queue places that the gateway still counts."""
    headers = {"authorization": f"Bearer {live.token}"}
    listing = live.client.get(f"{live.gateway}/debug/requests", headers=headers).json()
    held = {"requests": listing["requests"]} if listing["requests"] else {}
    for line in live.client.get(f"{live.gateway}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        gauges = ("in_flight", "requests_by_state", "worker_running", "worker_waiting",
                  "worker_queued_tokens")  # fmt: skip
        if name.startswith(tuple(f"perilune_gateway_{gauge}" for gauge in gauges)) and float(value):
            held[name] = float(value)
    return held


def running_on_workers(live: LiveCluster) -> dict[str, int]:
    states = {
        row["id"]: live.client.get(f"{row['url']}/debug/state").json()
        for row in live.items("/workers")
    }
    return {name: s["running"] for name, s in states.items() if s["running"] or s["waiting"]}


@pytest.mark.heavy
@pytest.mark.xdist_group("soaks")
@pytest.mark.timeout(600)
def test_chaos_for_a_minute(tmp_path: Path, model_folder: Path) -> None:
    run_chaos(tmp_path, model_folder, 60.0)


@pytest.mark.soak
def test_chaos_for_ten_minutes(tmp_path: Path, model_folder: Path) -> None:
    seconds = float(os.environ.get("PERILUNE_SOAK_SECONDS", "600"))
    run_chaos(tmp_path, model_folder, min(seconds, 600.0))
