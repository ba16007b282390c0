"""Kill -9 of each process under load: what clients see, how long it takes, what is left.

Last in the folder: each test leaves a working cluster, but its workers are other processes then.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest
from live_cluster import LiveCluster, engine_processes, wait_for

from workers.bench.prompts import make_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE_START_SECONDS = 400.0
"""Half a minute on an idle machine."""
PROMPTS = [prompt.text for prompt in make_prompts(8, seed=31, num_families=8)]


@dataclass
class Load:
    """What the clients of a background load saw."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        self.refused[what] = self.refused.get(what, 0) + 1


@contextmanager
def background_load(live: LiveCluster, prompt: str, expected: str) -> Iterator[Load]:
    """Two clients that ask the same thing again and again and compare what they get."""
    load = Load()
    stop = threading.Event()
    lock = threading.Lock()

    def run() -> None:
        with httpx2.Client(timeout=120) as client:
            while not stop.is_set():
                said = _ask(client, live, prompt)
                with lock:
                    if said == expected:
                        load.right += 1
                    elif said.startswith("!"):
                        load.note(said)
                    else:
                        load.wrong.append(said)
                stop.wait(0.05 if said == expected else 0.5)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=125)
    assert not load.wrong, f"wrong text: {load.wrong[:2]}"


def _ask(client: httpx2.Client, live: LiveCluster, prompt: str) -> str:
    body = {"model": live.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    try:
        reply = client.post(f"{live.gateway}/v1/completions", json=body)
    except httpx2.HTTPError as error:
        return f"!{type(error).__name__}"
    if reply.status_code != 200:
        return f"!{reply.status_code}"
    text: str = reply.json()["choices"][0]["text"]
    return text


def _answer(live: LiveCluster, prompt: str) -> str:
    reply = live.complete(prompt, max_tokens=8)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def _no_pins(live: LiveCluster) -> None:
    wait_for(lambda: live.pinned_blocks() == 0, 45, "no pinned block (leases are 30 s)")


def _gone(processes: list[psutil.Process], seconds: float = 15) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, f"left behind: {[p.cmdline()[:4] for p in alive]}"


def _shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """What an engine's own processes talk through; their resource tracker removes it."""
    lines = [
        line
        for process in processes
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    ]
    return {name for line in lines if (name := line.rpartition("/")[2]).startswith("psm_")}


def test_decode_worker_killed_mid_stream(live: LiveCluster) -> None:
    expected = _answer(live, PROMPTS[0])
    name = live.target.decode_workers[0]
    before = live.component(f"worker-{name}")
    family = engine_processes(before.pid)
    shared = _shared_memory_of(family)
    assert shared
    body = {
        "model": live.model, "prompt": PROMPTS[0], "max_tokens": 400, "stream": True,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    events: list[str] = []
    killed_at = 0.0
    with live.client.stream("POST", f"{live.gateway}/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
            if len(events) == 3 and not killed_at:
                killed_at = time.monotonic()
                os.kill(before.pid, signal.SIGKILL)
    assert time.monotonic() - killed_at < 30
    assert events[-1] != "[DONE]", "a broken stream must not look complete"
    assert "error" in json.loads(events[-1]), events[-1]
    _gone(family)
    live.wait_ready(f"worker-{name}", before.pid, seconds=ENGINE_START_SECONDS)
    assert not shared & set(os.listdir("/dev/shm"))
    live.wait_routed(name)
    assert wait_for(lambda: _answer(live, PROMPTS[0]), 30, "an answer") == expected
    _no_pins(live)


def test_prefill_worker_killed_mid_prefill(live: LiveCluster) -> None:
    name = live.target.prefill_workers[0]
    before = live.component(f"worker-{name}")
    family = engine_processes(before.pid)
    timer = threading.Timer(0.7, os.kill, (before.pid, signal.SIGKILL))
    timer.start()
    reply = live.complete(PROMPTS[1], max_tokens=8)
    timer.join()
    assert reply.status_code == 200, reply.text  # the decode worker prefilled by itself
    record = live.decision(reply.headers["x-request-id"])
    assert record["failed_leg"] == "prefill"
    _gone(family)
    live.wait_ready(f"worker-{name}", before.pid, seconds=ENGINE_START_SECONDS)
    live.wait_routed(name)
    again = wait_for(lambda: _answer(live, PROMPTS[1]), 30, "an answer")
    assert again == reply.json()["choices"][0]["text"]
    _no_pins(live)


def test_node_agent_killed_under_load(live: LiveCluster) -> None:
    expected = _answer(live, PROMPTS[2])
    before = live.component("agent-n1")
    incarnation = live.items("/nodes")[0]["incarnation"]
    with background_load(live, PROMPTS[2], expected) as load:
        wait_for(lambda: load.right >= 2, 60, "the load to run")
        os.kill(before.pid, signal.SIGKILL)
        live.wait_ready("agent-n1", before.pid, seconds=30)
        seen = load.right
        wait_for(lambda: load.right >= seen + 4, 60, "right answers after the restart")
    assert not load.refused, f"a dead agent must not cost a client its answer: {load.refused}"
    node = wait_for(
        lambda: next((n for n in live.items("/nodes") if n["incarnation"] > incarnation), None),
        15, "the node's new incarnation",
    )  # fmt: skip
    assert len(live.items("/nodes")) == 1
    assert node["restarts"] >= 1

    def hit_again() -> bool:
        reply = live.complete(PROMPTS[2], max_tokens=8)
        record = live.decision(reply.headers["x-request-id"])
        return bool(
            record["decode_leg"]["pool_hit_tokens"] or record["decode_leg"]["loaded_blocks"]
        )

    for url in live.target.worker_urls.values():
        live.client.post(f"{url}/reset_prefix_cache").raise_for_status()
    wait_for(hit_again, 60, "hits from the new slab")
    _no_pins(live)


def test_control_plane_killed_under_load(live: LiveCluster) -> None:
    expected = _answer(live, PROMPTS[3])
    before = live.component("control-plane")
    with background_load(live, PROMPTS[3], expected) as load:
        wait_for(lambda: load.right >= 2, 60, "the load to run")
        os.kill(before.pid, signal.SIGKILL)
        live.wait_ready("control-plane", before.pid, seconds=60)
        seen = load.right
        wait_for(lambda: load.right >= seen + 4, 60, "right answers after the restart")
    assert not load.refused, load.refused
    wait_for(
        lambda: all(row["state"] == "ready" for row in live.items("/workers")),
        30, "workers ready in the new control plane",
    )  # fmt: skip
    reply = live.complete(PROMPTS[3], max_tokens=8)
    assert live.decision(reply.headers["x-request-id"])["http_status"] == 200
    _no_pins(live)


def test_gateway_killed_comes_back(live: LiveCluster) -> None:
    expected = _answer(live, PROMPTS[4])
    before = live.component("gateway")
    os.kill(before.pid, signal.SIGKILL)
    live.wait_ready("gateway", before.pid, seconds=60)
    assert wait_for(lambda: _answer(live, PROMPTS[4]), 60, "an answer") == expected
    _no_pins(live)


def test_down_ends_everything_and_nothing_else(live: LiveCluster) -> None:
    state = live.state()
    processes = [psutil.Process(state.pid)]
    for component in state.components:
        processes += engine_processes(component.pid)
    bystander = psutil.Process(os.getpid())
    done = live.cli("down")
    assert done.returncode == 0, done.stderr
    _gone(processes, seconds=5)
    assert bystander.is_running()
    assert state.slab_paths
    assert not [path for path in state.slab_paths if os.path.exists(path)]
