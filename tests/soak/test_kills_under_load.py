"""Traffic while processes are killed, on emulated engines: `make soak`, and a minute of it in CI.

Emulated engines answer a prompt always alike, so every answer can be checked; their pool traffic
is real. What a client may see: the right answer, an HTTP error, or a stream that says it broke.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from live_cluster import LiveCluster, wait_for

from workers.bench.acceptance import find_target
from workers.bench.cluster import own_cluster
from workers.supervisor.home import Home

CLIENTS = 3
SECONDS_BETWEEN_KILLS = 8.0
OPTIONS = ("--engine", "emulated", "--prefill", "2", "--decode", "2", "--slab-gib", "0.03125")
LIMITS_BYTES = {"controlplane": 180e6, "gateway": 150e6, "agent": 120e6}


class Client(threading.Thread):
    """Asks one of a few prompts again and again and checks the answer."""

    def __init__(self, live: LiveCluster, number: int, expected: dict[str, str]) -> None:
        super().__init__(daemon=True, name=f"client-{number}")
        self.live, self.rng, self.expected = live, random.Random(number), expected
        self.stop = threading.Event()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx2.Client(timeout=30, trust_env=False) as http:
            while not self.stop.is_set():
                prompt = self.rng.choice(list(self.expected))
                try:
                    said = self._ask(http, prompt, stream=self.rng.random() < 0.5)
                except httpx2.HTTPError as error:
                    said = f"!{type(error).__name__}"
                self._judge(prompt, said)
                self.stop.wait(0.02 if not said.startswith("!") else 0.2)

    def _judge(self, prompt: str, said: str) -> None:
        if said.startswith("!"):
            self.seen[said] += 1
        elif said == self.expected[prompt]:
            self.seen["right"] += 1
        else:
            self.wrong.append(said[:200])

    def _ask(self, http: httpx2.Client, prompt: str, *, stream: bool) -> str:
        body = {"model": self.live.model, "prompt": prompt, "max_tokens": 12, "stream": stream}
        with http.stream("POST", f"{self.live.gateway}/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                return f"!{reply.status_code}"
            if not stream:
                text: str = json.loads(reply.read())["choices"][0]["text"]
                return text
            return _text_of([line for line in reply.iter_lines() if line.startswith("data: ")])


def _text_of(lines: list[str]) -> str:
    if lines[-1:] != ["data: [DONE]"]:
        broke = lines and "error" in json.loads(lines[-1][6:])
        return "!said that it broke" if broke else "broke off without a word"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    text: str = "".join(c["text"] for event in events for c in event.get("choices", ()))
    return text


def _expected(live: LiveCluster) -> dict[str, str]:
    prompts = [f"Story {number}. " + f"word{number} and more " * 120 for number in range(12)]
    texts = {}
    for prompt in prompts:
        reply = live.client.post(
            f"{live.gateway}/v1/completions",
            json={"model": live.model, "prompt": prompt, "max_tokens": 12},
        )
        assert reply.status_code == 200, reply.text
        texts[prompt] = reply.json()["choices"][0]["text"]
    return texts


def _kill_one(live: LiveCluster, rng: random.Random) -> str:
    alive = [c for c in live.state().components if c.pid and c.state == "ready"]
    victim = rng.choice(alive)
    os.kill(victim.pid, signal.SIGKILL)
    return victim.kind


def _all_ready(live: LiveCluster) -> bool:
    return all(c.state == "ready" for c in live.state().components) and all(
        row["state"] == "ready" for row in live.items("/workers")
    )


def run_soak(folder: Path, model_folder: Path, seconds: float) -> None:
    """Up, load, a kill every few seconds, then quiet: nothing wrong, nothing left."""
    with (
        httpx2.Client(timeout=30, trust_env=False) as http,
        own_cluster(folder, model_folder, "auto", 64, *OPTIONS) as state,
    ):
        target = find_target(http, state.gateway_url, state.control_plane_url)
        live = LiveCluster(Home(folder), model_folder, http, target)
        clients = [Client(live, number, _expected(live)) for number in range(CLIENTS)]
        killed: Counter[str] = Counter()
        rng = random.Random(5)
        for client in clients:
            client.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(SECONDS_BETWEEN_KILLS)
            killed[_kill_one(live, rng)] += 1
        wait_for(lambda: _all_ready(live), 90, "all ready again")
        for client in clients:
            client.stop.set()
        for client in clients:
            client.join(timeout=35)
        _judge(live, clients, killed)


def _judge(live: LiveCluster, clients: list[Client], killed: Counter[str]) -> None:
    seen: Counter[str] = sum((client.seen for client in clients), Counter())
    assert not [text for client in clients for text in client.wrong]
    assert seen["right"] > 10 * len(clients), (seen, killed)
    wait_for(lambda: live.pinned_blocks() == 0, 45, "no pinned block (leases are 30 s)")
    assert len(live.items("/nodes")) == 1
    found = {c["kind"]: c["rss_bytes"] for c in live.status()["components"]}
    assert all(found[kind] < limit for kind, limit in LIMITS_BYTES.items()), found


@pytest.mark.heavy
@pytest.mark.xdist_group("soaks")
@pytest.mark.timeout(300)
def test_kills_under_load_for_a_while(tmp_path: Path, model_folder: Path) -> None:
    run_soak(tmp_path, model_folder, 26.0)


@pytest.mark.soak
def test_kills_under_load_for_long(tmp_path: Path, model_folder: Path) -> None:
    run_soak(tmp_path, model_folder, float(os.environ.get("PERILUNE_SOAK_SECONDS", "3600")))
