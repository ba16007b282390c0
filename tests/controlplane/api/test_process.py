"""`python -m controlplane` as a process: its token, its end, its memory, what it refuses to start
with; and the verbs against it."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from console.cli import run
from controlplane.__main__ import main

RSS_BOUND = 180 * 1024 * 1024
START_SECONDS = 60


def start(folder, *more):
    process = subprocess.Popen(
        [sys.executable, "-m", "controlplane", "--port", "0", "--data", str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("PERILUNE")},
    )
    guard = threading.Timer(START_SECONDS, process.kill)
    guard.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"url=(http://\S+)", line):
                return process, found[1], lines
    finally:
        guard.cancel()
    process.wait()
    raise AssertionError("".join(lines))


def stop(process):
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.stdout.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cp")
    process, url, _ = start(folder)
    yield folder, url, process
    stop(process)


def fetch(url, timeout=20):
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return response.read().decode()


def test_the_token_is_made_once_and_private(running):
    folder, _, _ = running
    path = folder / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().strip()) >= 40
    assert [p for p in folder.iterdir() if p.name.startswith(".token")] == []


def test_memory_at_rest(running):
    _, url, process = running
    fetch(f"{url}/api/v1/overview")
    status = Path(f"/proc/{process.pid}/status").read_text()
    rss = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024
    assert rss <= RSS_BOUND, f"{rss / 1e6:.0f} MB"
    shown = re.search(
        r"^perilune_controlplane_rss_bytes (\S+)", fetch(f"{url}/metrics"), re.MULTILINE
    )
    assert float(shown[1]) == pytest.approx(rss, rel=0.3)


def test_it_stops_at_once_with_streams_and_long_polls_open(tmp_path):
    process, url, lines = start(tmp_path)
    try:
        answers = []

        def stream():
            try:
                answers.append(fetch(f"{url}/api/v1/events", timeout=30))
            except OSError as error:
                answers.append(error)

        def poll():
            revision = json.loads(fetch(f"{url}/api/v1/view?wait=0"))["revision"]
            try:
                answers.append(fetch(f"{url}/api/v1/view?after={revision}&wait=30", timeout=40))
            except urllib.error.HTTPError as error:  # 304 is an error to urllib
                error.close()
                answers.append(error.code)
            except OSError as error:
                answers.append(error)

        threads = [threading.Thread(target=target) for target in (stream, stream, poll)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            text = fetch(f"{url}/metrics")
            if "perilune_controlplane_event_streams 2.0" in text:
                break
            time.sleep(0.1)
        begun = time.monotonic()
        process.terminate()
        assert process.wait(20) == 0
        assert time.monotonic() - begun < 15
        for thread in threads:
            thread.join(20)
        assert len(answers) == 3
        token = (tmp_path / "token").read_text().strip()
        assert token not in "".join([*lines, process.stdout.read()])
    finally:
        stop(process)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--database-url", "mysql://h/db"], 2, "--database-url = 'mysql://h/db'"),
        (["--database-url", "sqlite+aiosqlite:////no/such/x.db"], 2, "mkdir -p /no/such"),
        (["--database-url", "postgresql+psycopg://u@127.0.0.1:1/db"], 1, "refused"),
        (["--cluster", "My Cluster"], 2, "--cluster = 'My Cluster'"),
        (["--token-file", "/proc/1/nothing/token"], 2, "--token-file"),
        (["--port", "99999"], 2, "--port = 99999"),
        (["--host", "256.1.1.1"], 1, "cannot listen on 256.1.1.1"),
        (["--host", "192.0.2.1"], 1, "Choose an address of this machine: --host."),
    ],
)
def test_what_cannot_work_is_one_line_and_a_code(tmp_path, capsys, arguments, code, words):
    _refused(tmp_path, capsys, arguments, code, words)


def test_a_port_in_use(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _refused(tmp_path, capsys, ["--port", port], 1, f"cannot listen on 127.0.0.1:{port}")


def _refused(folder, capsys, arguments, code, words):
    assert main(["--port", "0", "--data", str(folder), *arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 1, captured.err


class TestVerbs:
    @pytest.fixture
    def perilune(self, running, monkeypatch):
        folder, url, _ = running
        monkeypatch.setenv("PERILUNE_URL", url)
        monkeypatch.setenv("PERILUNE_HOME", str(folder))
        monkeypatch.delenv("PERILUNE_TOKEN", raising=False)
        return run

    def test_a_policy_is_changed_compared_and_reverted(self, perilune, capsys):
        assert (
            perilune(
                [
                    "policy",
                    "put",
                    "slo/default",
                    "--set",
                    "max_ttft_ms=1",
                    "--set",
                    "mode=enforce",
                    "--reason",
                    "try",
                ]
            )
            == 0
        )
        out = capsys.readouterr().out
        assert "max_ttft_ms: 10000.0 -> 1.0" in out
        assert "mode: observe -> enforce" in out
        assert perilune(["policy", "diff", "slo/default"]) == 0
        assert "r1 -> r2" in capsys.readouterr().out
        assert perilune(["policy", "revert", "slo/default", "r1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["active"]["revision"] == 3
        assert perilune(["policy", "show", "slo", "--history", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["items"]) == 3
        assert perilune(["audit", "--verb", "policy.put", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["items"][0]["reason"] == "try"

    @pytest.mark.parametrize("noun", ["nodes", "workers", "requests", "rejections", "transfers"])
    def test_every_list_has_text_and_json(self, perilune, capsys, noun):
        assert perilune(["get", noun]) == 0
        assert capsys.readouterr().out.strip().endswith(".")
        assert perilune(["get", noun, "--json"]) == 0
        assert isinstance(json.loads(capsys.readouterr().out), dict)

    def test_keys(self, perilune, capsys):
        assert perilune(["key", "create", "acme", "--json"]) == 0
        created = json.loads(capsys.readouterr().out)
        assert created["secret"].startswith("plk_")
        assert perilune(["key", "list"]) == 0
        assert "acme" in capsys.readouterr().out
        assert perilune(["key", "delete", str(created["id"])]) == 0

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["policy", "put", "slo/default", "--set", "max_ttft_ms=-5"], 2, "1 to 600000"),
            (["policy", "put", "price/default", "--set", "a=1"], 2, "Kinds: slo"),
            (["policy", "put", "slo/default", "--set", "a"], 2, "NAME=VALUE"),
            (["policy", "put", "slo/default"], 2, "nothing to change"),
            (["policy", "put", "slo/default", "--set", "mode=off", "--if-match", "77"], 1, "77"),
            (["policy", "revert", "slo/default", "rx"], 2, "not a revision"),
            (["get", "requests", "--status", "lost"], 2, "status"),
            (["describe", "request", "none"], 1, "No request 'none'"),
            (["node", "remove", "none"], 1, "No node 'none'"),
            (["worker", "drain", "none"], 1, "No worker 'none'"),
            (["key", "create", "Not A Tenant"], 2, "Tenants"),
            (["get", "nodes", "--url", "http://127.0.0.1:1"], 1, "no answer"),
        ],
    )
    def test_errors_are_one_line_and_a_code(self, perilune, capsys, arguments, code, words):
        assert perilune(arguments) == code
        captured = capsys.readouterr()
        assert words in captured.err
        assert len(captured.err.strip().splitlines()) == 1
        assert captured.out == ""

    def test_a_wrong_token(self, perilune, capsys, monkeypatch):
        monkeypatch.setenv("PERILUNE_TOKEN", "wrong")
        assert perilune(["key", "create", "acme"]) == 1
        assert "token" in capsys.readouterr().err


def test_the_client_brings_no_server_and_the_verbs_no_client():
    """A laptop's install has neither; and `perilune --help` must not pay for them."""
    check = (
        "import sys, controlplane.{0}; "
        "found = [m for m in ('fastapi', 'sqlalchemy', 'uvicorn', 'alembic', {1}) if m in sys.modules]; "
        "assert not found, found"
    )
    for module, more in (("client", ""), ("commands", "'httpx2', 'pydantic'")):
        code = check.format(module, more)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
