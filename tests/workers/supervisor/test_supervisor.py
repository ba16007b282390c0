"""The whole supervisor over small real processes; its control plane is a page of http.server."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workers.core.supervision import Limits
from workers.models.resolve import ResolvedModel
from workers.supervisor.component import Component, WorkerIdentity
from workers.supervisor.launch import end_cluster
from workers.supervisor.plan import ClusterPlan
from workers.supervisor.procfs import session_members
from workers.supervisor.progress import Line, PlainProgress
from workers.supervisor.settings import Settings
from workers.supervisor.state_file import SupervisorState, read_state
from workers.supervisor.supervisor import StartupError, Supervisor

Bench = Any
CONTROL_PLANE = """
import http.server, json, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})
    def do_GET(self):
        worker = {"id": "p1", "state": "ready"}
        if "/view" in self.path:
            return self.answer({"revision": 3, "workers": [worker], "models": [{"id": "m"}]})
        if "/gateways" in self.path:
            return self.answer([{"state": "ready", "view_revision": 3}])
        self.answer({})
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


class Words:
    """Collects what an operator would read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, line: Line) -> None:
        self.lines.append(f"{line.name}: {line.words()}")

    def say(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        pass


def control_plane(folder: Path, port: int) -> Component:
    return Component(
        name="control-plane",
        kind="controlplane",
        command=(sys.executable, "-c", CONTROL_PLANE, str(port)),
        probe=f"http://127.0.0.1:{port}/health",
        log_file=folder / "control-plane.log",
        limits=Limits(grace_seconds=2),
        stop_stage=2,
    )


@pytest.fixture
def make_plan(bench: Bench, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Any]:
    def make(*words: str) -> ClusterPlan:
        settings = Settings(data=tmp_path / "data", engine="emulated")
        settings.home.create()
        port = free_port()
        worker = replace(
            bench.component("worker-p1", *words, after=("control-plane",)),
            worker=WorkerIdentity("p1", "prefill", "m", "emulated", tmp_path / "agent.sock"),
        )
        slab = tmp_path / "test.slab"
        slab.write_bytes(b"slab")
        return ClusterPlan(
            settings=settings,
            model=ResolvedModel("m", "m", str(tmp_path), "1", is_local=True),
            model_path=str(tmp_path),
            control_plane_url=f"http://127.0.0.1:{port}",
            gateway_url="http://127.0.0.1:1",
            slab_paths=(slab,),
            components=(control_plane(tmp_path, port), worker),
        )

    return make


@pytest.fixture
async def running(make_plan: Callable[..., Any]) -> AsyncIterator[tuple[Supervisor, Words]]:
    words = Words()
    supervisor = Supervisor(make_plan(), "token", words)
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(30):
        while supervisor.state != "ready":
            await asyncio.sleep(0.02)
    yield supervisor, words
    supervisor.request_stop()
    await task


async def test_starts_in_order_and_says_so(running: tuple[Supervisor, Words]) -> None:
    lines = running[1].lines
    assert lines[:2] == ["control-plane: waiting", "worker-p1: waiting"]
    ready = next(index for index, line in enumerate(lines) if line.startswith("control-plane: rea"))
    assert lines.index("worker-p1: starting") > ready
    assert any(line.startswith("worker-p1: ready in ") for line in lines)
    assert lines[-4].startswith("ready in ")
    assert "curl http://127.0.0.1:1/v1/chat/completions" in lines[-3]
    assert f"perilune console --url {running[0].snapshot().control_plane_url}" in lines[-2]


async def test_the_state_file_tells_the_same(running: tuple[Supervisor, Words]) -> None:
    state = read_state(running[0].snapshot_path)
    assert state is not None
    assert (state.pid, state.state) == (os.getpid(), "ready")
    assert [(each.name, each.state) for each in state.components] == [
        ("control-plane", "ready"),
        ("worker-p1", "ready"),
    ]
    assert all(session_members(each.pid) for each in state.components)


async def test_a_killed_process_comes_back_while_the_others_stay(
    running: tuple[Supervisor, Words],
) -> None:
    before = {each.name: each.pid for each in running[0].snapshot().components}
    os.kill(before["control-plane"], signal.SIGKILL)
    async with asyncio.timeout(30):
        while not _is_new(running[0].snapshot(), "control-plane", before["control-plane"]):
            await asyncio.sleep(0.02)
    after = {each.name: each.pid for each in running[0].snapshot().components}
    assert after["worker-p1"] == before["worker-p1"]
    assert any("control-plane: failed because killed by SIGKILL" in x for x in running[1].lines)


async def test_the_end_leaves_nothing(make_plan: Callable[..., Any]) -> None:
    plan = make_plan("grandchild")
    supervisor = Supervisor(plan, "token", Words())
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(30):
        while supervisor.state != "ready":
            await asyncio.sleep(0.02)
    sessions = [each.pid for each in supervisor.snapshot().components]
    supervisor.request_stop()
    await task
    assert [session_members(session) for session in sessions] == [[], []]
    assert not plan.slab_paths[0].exists()


async def test_a_crash_at_the_start_is_reported_with_cause_and_log(
    make_plan: Callable[..., Any],
) -> None:
    plan = make_plan("crash")
    with pytest.raises(StartupError) as caught:
        await Supervisor(plan, "token", Words()).run()
    assert "worker-p1 failed because exit status 3: ValueError: boom" in str(caught.value)
    assert f"(log: {plan.components[1].log_file})" in str(caught.value)


SUPERVISE = """
import asyncio, pickle, sys
from workers.supervisor.progress import PlainProgress
from workers.supervisor.supervisor import Supervisor
plan = pickle.load(open(sys.argv[1], "rb"))
asyncio.run(Supervisor(plan, "token", PlainProgress(sys.stdout)).run())
"""


async def test_a_killed_supervisor_takes_everything_along(
    make_plan: Callable[..., Any], bench: Bench, tmp_path: Path
) -> None:
    plan = make_plan("grandchild", "stubborn")
    recipe = tmp_path / "plan.pickle"
    recipe.write_bytes(pickle.dumps(plan))
    parent = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(recipe)], stdout=subprocess.DEVNULL
    )
    home = plan.settings.home
    await bench.until(lambda: (state := read_state(home.state_file)) and state.state == "ready")
    state = read_state(home.state_file)
    assert state is not None
    parent.kill()
    parent.wait()
    sessions = [each.pid for each in state.components]
    await bench.until(lambda: not any(session_members(session) for session in sessions))
    await bench.until(lambda: not plan.slab_paths[0].exists())
    assert end_cluster(home, PlainProgress(sys.stdout))
    assert read_state(home.state_file) is None


def _is_new(state: SupervisorState, name: str, old_pid: int) -> bool:
    return any(
        each.name == name and each.state == "ready" and each.pid != old_pid
        for each in state.components
    )


def test_state_is_json_for_others(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none.json") is None
    (tmp_path / "broken.json").write_text(json.dumps({"pid": "x"}))
    assert read_state(tmp_path / "broken.json") is None
