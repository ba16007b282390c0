"""The command line: words, exit codes, and errors of one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import typer

from console import cli
from controlplane.client_http import UnreachableError, make_headers
from workers.core.errors import ConfigError, PeriluneError
from workers.verbs import register_verbs


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """An app whose verbs the test adds; the real ones are left out."""
    app = typer.Typer()
    app.callback()(lambda: None)
    monkeypatch.setattr(cli, "build_app", lambda: (app, []))
    return app


def run(*argv: str) -> int:
    return cli.run(list(argv))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out == "0.1.0\n"


def test_a_locale_without_the_character_is_no_traceback() -> None:
    code = (
        "from console import cli\n"
        "cli.run = lambda argv: print('w\\u00e4rmer \\U0001f680 \\u65e5') or 0\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("latin-1").strip() == "w\u00e4rmer ? ?"


def test_without_a_verb_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    assert [word for word in ("up", "down", "status", "logs", "model") if word not in text] == []


def test_an_unknown_verb_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("frobnicate") == 2
    assert capsys.readouterr().err.startswith("perilune: No such command 'frobnicate'.")


def test_a_value_of_the_wrong_type_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up", "--prefill", "two") == 2
    error = capsys.readouterr().err
    assert error.startswith("perilune: Invalid value for '--prefill': ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["http://[::1", "127.0.0.1:7700", "http://x:99999", "http://\0"])
def test_a_url_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run("get", "nodes", "--url", url) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"perilune: url = {url!r}: is no http address")
    assert error.count("\n") == 1


def test_a_token_that_is_none_is_one_line_without_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in ("two\nlines", "ü"):
        monkeypatch.setenv("PERILUNE_TOKEN", token)
        assert run("get", "nodes", "--url", "http://127.0.0.1:1") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "no token has" in error
        assert token not in error


def test_any_login_name_may_be_an_actor() -> None:
    names = {
        name: make_headers(None, name)["X-Perilune-Actor"] for name in ("jörg", "D\\x", "a" * 99)
    }
    assert names == {"jörg": "j_rg", "D\\x": "D_x", "a" * 99: "a" * 64}


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("--x", 1, "is odd", "Say 2."), 2), (PeriluneError("it broke"), 1)],
)
def test_our_errors_are_one_line(
    verb: typer.Typer, capsys: pytest.CaptureFixture[str], error: PeriluneError, code: int
) -> None:
    @verb.command("fail")
    def fail() -> None:
        raise error

    assert run("fail") == code
    assert capsys.readouterr().err == f"perilune: {error}\n"


def test_what_the_system_refuses_is_one_line(
    verb: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    @verb.command("write")
    def write() -> None:
        Path("/proc/nothing").write_text("")

    assert run("write") == 1
    assert capsys.readouterr().err == "perilune: /proc/nothing: No such file or directory\n"


def test_a_verb_decides_its_exit_code(verb: typer.Typer) -> None:
    @verb.command("leave")
    def leave() -> None:
        raise typer.Exit(7)

    assert run("leave") == 7


def test_a_missing_package_names_its_extra(
    verb: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    @verb.command("serve")
    def serve() -> None:
        raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy")

    assert run("serve") == 1
    assert "pip install 'perilune[controlplane]'" in capsys.readouterr().err


def test_verbs_whose_package_is_missing_say_so(
    verb: typer.Typer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "needy_verbs.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    register_verbs(verb, "needy_verbs", verb="model", extra="workers")
    assert run("model", "prepare", "--check") == 1
    assert capsys.readouterr().err == (
        "perilune: perilune model needs the Python module a_package_that_is_not_there, "
        "which is not installed here. pip install 'perilune[workers]'\n"
    )


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["up", "--prefill", "0"], "--prefill = 0"),
        (["up", "--port-gateway", "99999"], "--port-gateway = 99999"),
        (["up", "--file", "/nowhere/cluster.toml"], "--file = '/nowhere/cluster.toml'"),
        (["up", "--engine", "emulated", "--block-tokens", "50"], "--block-tokens = 50"),
        (["up", "--engine-python", "/nowhere/python"], "engine_python = '/nowhere/python'"),
        (["up", "--engine", "emulated", "--model", "/nowhere"], "model = '/nowhere'"),
        (["logs", "nobody"], "component = 'nobody'"),
    ],
)
def test_bad_configuration_exits_2_and_starts_nothing(
    argv: list[str], field: str, tmp_path: Path
) -> None:
    ports = [
        word for name in ("control-plane", "agent", "workers") for word in (f"--port-{name}", "0")
    ]
    if argv[0] == "up":
        argv = [*argv, *ports, *([] if "--port-gateway" in argv else ["--port-gateway", "0"])]
    reply = subprocess.run(
        [sys.executable, "-m", "console", *argv, "--data", str(tmp_path / "d")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (reply.returncode, reply.stdout) == (2, "")
    assert reply.stderr.count("\n") == 1
    assert reply.stderr.startswith("perilune: ")
    assert field in reply.stderr
    assert not (tmp_path / "d" / "run" / "supervisor.json").exists()


def test_status_and_down_where_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(tmp_path)]
    assert run("status", *data) == 1
    assert run("down", *data) == 0
    assert capsys.readouterr().out.split("\n") == [
        f"no cluster of {tmp_path} is running (perilune up starts one)",
        f"no cluster of {tmp_path} is running",
        "",
    ]


def test_a_broken_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "console", "version"]
    reply = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert "Traceback" not in reply.stderr


def test_silence_and_refusal_are_told_apart() -> None:
    silent = str(UnreachableError("http://h:1", httpx2.ReadTimeout("timed out")))
    assert "timed out. It may hang or be overloaded (perilune logs control-plane)." in silent
    refused = str(UnreachableError("http://h:1", ConnectionRefusedError("Connection refused")))
    assert "overloaded" not in refused
    assert "perilune status" in refused
