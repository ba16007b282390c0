"""The gateway as a process: start, memory, drain, exit codes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from controlplane.deps import ID_PATTERN
from controlplane.gateway.__main__ import main, settings_from
from workers.core.errors import ConfigError

MAX_RSS_BYTES = 150 * 1024 * 1024


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "controlplane.gateway", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


WORKER = '[[worker]]\nurl = "http://127.0.0.1:9"\nrole = "both"\nmodel = "{model}"\n'


def test_sighup_rereads_the_static_file_and_a_fault_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "workers.toml"
    file.write_text(WORKER.format(model="first"))
    port = free_port()
    process = start("--port", str(port), "--static", str(file))
    assert process.stderr is not None

    def models() -> list[str]:
        try:
            reply = httpx2.get(f"http://127.0.0.1:{port}/v1/models").json()
        except httpx2.TransportError:
            return []
        return [row["id"] for row in reply["data"]]

    def until(wanted: list[str]) -> None:
        deadline = time.monotonic() + 60
        while models() != wanted:
            assert time.monotonic() < deadline, models()
            time.sleep(0.05)

    try:
        until(["first"])
        file.write_text("[[worker]]\nurl = 1\n")
        process.send_signal(signal.SIGHUP)
        while b"static_not_reread" not in process.stderr.readline():
            assert process.poll() is None
        assert models() == ["first"]
        file.write_text(WORKER.format(model="second"))
        process.send_signal(signal.SIGHUP)
        until(["second"])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        process.stderr.close()


def test_it_serves_within_its_memory_and_drains(tmp_path: Path, tokenizer_folder: Path) -> None:
    home = Path.home() / ".local/share/perilune/models/smollm2"  # the real one if it is here
    folder = home if (home / "tokenizer.json").exists() else tokenizer_folder
    worker = {"id": "d1", "node_id": "n1", "role": "decode", "model": "m", "state": "ready",
              "url": "http://127.0.0.1:9"}  # fmt: skip
    view = tmp_path / "view.json"
    models = [{"id": "m", "path": str(folder)}]
    view.write_text(json.dumps({"workers": [worker], "models": models}))
    port = free_port()
    process = start("--port", str(port), "--static", str(view))
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + 60
        rss = 0
        while not rss:
            assert time.monotonic() < deadline
            try:
                text = httpx2.get(f"http://127.0.0.1:{port}/metrics").text
            except httpx2.TransportError:
                time.sleep(0.1)
                continue
            rss = int(text.split("\nperilune_gateway_rss_bytes ")[1].split("\n")[0])
        time.sleep(0.5)  # the tokenizer loads in a thread
        body = {"model": "m", "prompt": "hello"}
        response = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        assert response.status_code in (502, 503)
        text = httpx2.get(f"http://127.0.0.1:{port}/metrics").text
        rss = int(text.split("\nperilune_gateway_rss_bytes ")[1].split("\n")[0])
        assert rss < MAX_RSS_BYTES
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        process.stderr.close()


@pytest.mark.parametrize(("arguments", "says"), [
    (["--static", "/nowhere.json"], "--static = '/nowhere.json': cannot be read"),
    (["--token-file", "/nowhere"], "--token-file = '/nowhere': cannot be read"),
    (["--model", "m"], "Write --model name=/folder."),
    (["--port", "99999"], "--port = 99999: is not between 0 and 65535"),
    (["--idle-timeout", "nan"], "--idle-timeout = nan: is not between"),
    (["--max-body-bytes", "-5"], "--max-body-bytes = -5: is not between"),
    (["--max-connections", "0"], "--max-connections = 0: is not between 1 and"),
    (["--max-connections", "1000000"], "clients' connections, 1000000 are needed. Raise it (ulimit -n"),
    (["--control-plane", "http://x:99999"], "--control-plane = 'http://x:99999': is no http address"),
])  # fmt: skip
def test_settings_that_cannot_work_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("controlplane.gateway.__main__.die_with_parent", lambda: None)
    for acts_on_the_process in (
        "configure_log",
        "calm_collector",
        "raise_limit",
        "give_large_blocks_back",
    ):
        monkeypatch.setattr(f"controlplane.gateway.__main__.{acts_on_the_process}", lambda *_: None)
    assert main(["--port", "0", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_gateway_that_nobody_tells_of_workers_does_not_start() -> None:
    with pytest.raises(ConfigError, match="--static FILE"):
        settings_from([])
    assert settings_from(["--agent", "unix:/tmp/n1.sock"])[0].agents == ("unix:/tmp/n1.sock",)


def test_gateways_that_are_given_no_id_do_not_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*arguments: str) -> str:
        return settings_from(["--agent", "unix:/tmp/n1.sock", *arguments])[0].gateway_id

    monkeypatch.setattr("socket.gethostname", lambda: "box_1.example")
    assert named() == named("--host", "0.0.0.0") == "gw-box_1.example-8000"
    assert named("--port", "8000") == named(), "a restarted one is the same"
    assert named("--port", "8001") == "gw-box_1.example-8001"
    assert named("--host", "fd00::5") == "gw-box_1.example-fd00--5-8000"
    assert named("--port", "0") != named("--port", "0")
    assert named("--id", "gw-1", "--port", "8001") == "gw-1"
    monkeypatch.setattr("socket.gethostname", lambda: "ü" * 300)
    assert re.match(ID_PATTERN, named("--host", "h" * 300))


def test_a_static_file_beside_a_control_plane_is_not_passed_over() -> None:
    both = ["--static", "workers.toml", "--control-plane", "http://a:1"]
    with pytest.raises(ConfigError, match=r"--static = 'workers.toml'.*--control-plane") as refused:
        settings_from(both)
    assert "Give one of them" in str(refused.value)
    assert "POST /api/v1/workers" in str(refused.value)
    for alone in (both[:2], both[2:]):
        assert settings_from(alone)


@pytest.mark.parametrize("content", [b"\xff\xfe", "ü".encode(), b"two\nlines"])
def test_a_token_file_that_holds_none_exits_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--token-file"):
        settings_from(["--control-plane", "http://a:1", "--token-file", str(path)])


def test_a_taken_port_exits_1_and_names_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--port", str(taken.getsockname()[1]), "--agent", "unix:/nowhere")
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "choose another: --port" in error.decode()


@pytest.mark.parametrize("host", ["192.0.2.1", "nosuch.invalid"])
def test_an_address_of_another_machine_exits_1_and_names_the_option(host: str) -> None:
    process = start("--host", host, "--port", "0", "--agent", "unix:/nowhere")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Choose an address of this machine: --host" in error.decode()
    assert "--port" not in error.decode()
