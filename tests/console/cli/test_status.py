"""`perilune status` and `logs` over a state file of this very process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from console import cli
from console.follow import follow, tail
from console.status import _is_console, collect, render
from workers.supervisor.home import Home
from workers.supervisor.procfs import identify
from workers.supervisor.state_file import ComponentState, SupervisorState, write_state

COMPONENT_KEYS = {
    "name", "kind", "pid", "state", "rss_bytes", "restarts", "age_seconds", "url", "log_file",
    "last_error", "note",
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    made.create()
    return made


def state_of(*components: ComponentState) -> SupervisorState:
    identity = identify(os.getpid())
    assert identity is not None
    return SupervisorState(
        pid=os.getpid(),
        start_ticks=identity.start_ticks,
        cluster="demo",
        state="ready",
        started_at=100.0,
        control_plane_url="http://127.0.0.1:1",
        gateway_url="http://127.0.0.1:2",
        model="m",
        engine="emulated",
        components=list(components),
    )


READY = ComponentState("gateway", "gateway", "ready", since=1.0, url="http://127.0.0.1:2")
FAILED = ComponentState(
    "worker-p1", "worker", "failed", restarts=3, last_error="boom", log_file="/x/p1.log"
)


def test_open_consoles_are_measured(home: Home) -> None:
    write_state(home.state_file, state_of(READY))
    # The arguments are what counts; this one waits where a console would draw.
    code = "import time; time.sleep(60)"
    command = [sys.executable, "-c", code, "-m", "console", "console", "--url", "http://x"]
    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + 10
            while not (found := [c for c in collect(home)["consoles"] if c["pid"] == process.pid]):
                assert time.monotonic() < deadline
            assert found[0]["rss_bytes"] > 1_000_000
        finally:
            process.kill()


def test_what_is_no_console_is_not_counted() -> None:
    assert _is_console(["/venv/bin/python", "/venv/bin/perilune", "console", "--url", "u"])
    assert _is_console(["python", "-m", "console", "console"])
    assert not _is_console(["python", "-m", "console", "up"])
    assert not _is_console(["perilune", "status"])
    assert not _is_console(["tmux", "attach", "console"])


def test_json_has_stable_keys(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write_state(home.state_file, state_of(READY))
    assert cli.run(["status", "--json", "--data", str(home.data)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["components"][0]) == COMPONENT_KEYS
    assert (found["state"], found["emulated"], found["control_plane"]) == ("ready", True, None)
    assert found["supervisor"]["rss_bytes"] > 1_000_000
    assert found["components"][0]["rss_bytes"] is None


def test_a_failed_component_shows_cause_and_log_and_exits_1(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(home.state_file, state_of(READY, FAILED))
    assert cli.run(["status", "--data", str(home.data)]) == 1
    text = capsys.readouterr().out
    assert "demo: ready, model m, emulated engine" in text
    assert "boom (log: /x/p1.log)" in text


def test_one_that_does_not_answer_says_what_it_does_instead(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "no answer for 75 s: it waits for CPU, memory or disk"
    write_state(home.state_file, state_of(msgspec.structs.replace(READY, note=note)))
    assert cli.run(["status", "--data", str(home.data)]) == 1
    assert note in capsys.readouterr().out


def test_a_control_plane_that_hangs_is_not_just_ready(home: Home) -> None:
    """It takes connections, as a stopped process does, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        plane = ComponentState("control-plane", "controlplane", "ready", since=1.0, url=url)
        state = msgspec.structs.replace(state_of(plane, READY), control_plane_url=url)
        write_state(home.state_file, state)
        found = collect(home)
        assert cli.run(["status", "--data", str(home.data)]) == 1
    text = render(found)
    assert "no answer within 2 s (perilune logs control-plane)" in text
    assert found["pool"] is None
    assert [each["note"] for each in found["components"]][1] == ""


def test_the_state_of_a_dead_supervisor_is_not_shown_as_current(home: Home) -> None:
    state = state_of(READY)
    write_state(home.state_file, msgspec.structs.replace(state, start_ticks=1))
    assert collect(home)["state"] == "down"


def test_table() -> None:
    status = {
        "cluster": "demo",
        "state": "ready",
        "model": "m",
        "emulated": False,
        "components": [row(), row(name="worker-p1", pid=None, rss_bytes=None, age_seconds=None)],
    }
    assert render(status).splitlines() == [
        "demo: ready, model m",
        "component  state    pid   memory  restarts         for  address or error",
        "gateway    ready  12345  100 MiB         0  2 min 00 s  http://127.0.0.1:2",
        "worker-p1  ready      -       --         0          --  http://127.0.0.1:2",
    ]


def test_a_long_address_keeps_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    url = "unix:/a/rather/long/folder/for/the/state/of/one/cluster/run/node-01.sock"
    status = {"cluster": "demo", "state": "ready", "model": "m", "emulated": False}
    lines = render(status | {"components": [row(url=url)]}).splitlines()
    assert len(lines) == 3
    assert lines[2].endswith(url)


def row(**changes: object) -> dict[str, object]:
    return {
        "name": "gateway", "kind": "gateway", "pid": 12345, "state": "ready",
        "rss_bytes": 100 * 1024**2, "restarts": 0, "age_seconds": 120.0,
        "url": "http://127.0.0.1:2", "log_file": "", "last_error": "", "note": "",
        **changes,
    }  # fmt: skip


class TestLogs:
    def test_shows_the_end(self, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
        home.log_file("gateway").write_text("".join(f"line {n}\n" for n in range(100)))
        assert cli.run(["logs", "gateway", "-n", "2", "--data", str(home.data)]) == 0
        assert capsys.readouterr().out == "line 98\nline 99\n"

    def test_an_unknown_name_lists_the_known(
        self, home: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        home.log_file("gateway").write_text("")
        assert cli.run(["logs", "gatway", "--data", str(home.data)]) == 2
        assert "There are: gateway." in capsys.readouterr().err

    def test_reads_only_the_end_of_a_large_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.log"
        path.write_text("x" * 1_000_000 + "\nend\n")
        assert tail(path, 1) == ["end"]

    def test_follows_across_rotation(self, tmp_path: Path) -> None:
        path = tmp_path / "a.log"
        path.write_text("old\n")
        chunks = follow(path, from_start=True)
        assert next(chunks) == "old\n"
        os.rename(path, tmp_path / "a.log.1")
        path.write_text("two\n")
        assert next(chunks) == "two\n"
        path.write_text("")
        path.write_text("3\n")
        assert next(chunks) == "3\n"
        chunks.close()
