"""Who holds a data folder is known from its lock, whatever became of supervisor.json."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.status import collect, render
from workers.supervisor.home import Home
from workers.supervisor.launch import AlreadyRunningError, end_cluster, run_foreground
from workers.supervisor.progress import make_progress
from workers.supervisor.settings import Settings
from workers.supervisor.state_file import read_holder

HOLD = """
import sys, time
from pathlib import Path
from workers.supervisor.home import Home
from workers.supervisor.launch import _only_one
with _only_one(Home(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    made.create()
    return made


@pytest.fixture
def holder(home: Home) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(home.data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": 1}'])
def test_down_ends_a_cluster_whose_state_file_is_lost(
    home: Home, holder: subprocess.Popen[str], content: str | None
) -> None:
    if content is not None:
        home.state_file.write_text(content)
    found = collect(home)
    assert (found["state"], found["supervisor"]["pid"]) == ("unknown", holder.pid)
    assert "perilune down ends it" in render(found)
    with pytest.raises(AlreadyRunningError, match=f"process {holder.pid}"):
        run_foreground(Settings(data=home.data, engine="emulated"))
    assert end_cluster(home, make_progress())
    assert holder.wait(timeout=20) != 0
    assert read_holder(home.lock_file) is None
    assert not end_cluster(home, make_progress())
    assert collect(home)["state"] == "down"


@pytest.mark.parametrize("content", ["", "x y", "1", "1 1", "-5 0"])
def test_an_old_lock_file_holds_nothing(home: Home, content: str) -> None:
    home.lock_file.write_text(content)
    assert read_holder(home.lock_file) is None
    assert not end_cluster(home, make_progress())
