"""Models from a hub: a stand-in for the engine's interpreter plays the hub's client."""

from pathlib import Path

import pytest

from workers.core.errors import ConfigError
from workers.supervisor.hub import fetch_model_files


def interpreter(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_last_line_is_the_folder(tmp_path: Path) -> None:
    python = interpreter(tmp_path, 'echo fetching; echo "/cache/$3"')
    assert fetch_model_files("org/name", python) == "/cache/org/name"


@pytest.mark.parametrize("script", ["echo 'OfflineError: no network' >&2; exit 1"])
def test_a_failure_is_one_line(tmp_path: Path, script: str) -> None:
    python = interpreter(tmp_path, script)
    with pytest.raises(ConfigError) as caught:
        fetch_model_files("org/name", python)
    assert str(caught.value) == (
        "model = 'org/name': cannot be had from the hub: OfflineError: no network. "
        "Check the id and the network, or give a folder."
    )


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be had"):
        fetch_model_files("org/name", str(tmp_path / "none"))
