"""Sessions of real processes that are ended: what they leave, and in which order they go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.supervisor.home import SHM
from workers.supervisor.procfs import is_resource_tracker, session_members
from workers.supervisor.session_end import end_sessions

# As an engine: shared memory and a lock, both known to the one tracker of the session.
ENGINE = """
import multiprocessing, signal, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(memory.name, lock._semlock.name.removeprefix("/"), flush=True)
time.sleep(600)
"""
Start = Callable[..., tuple[int, list[Path]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts such an engine: its session, and its files in /dev/shm."""
    started = []

    def begin(*words: str) -> tuple[int, list[Path]]:
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, *words], stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        memory, lock = process.stdout.readline().split()
        return process.pid, [SHM / memory, SHM / f"sem.{lock}"]

    yield begin
    for process in started:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def tracker_of(session: int) -> int:
    return next(pid for pid in session_members(session) if is_resource_tracker(pid))


@pytest.mark.parametrize("words", [(), ("stubborn",)])
def test_nothing_of_an_engine_stays_in_shared_memory(start: Start, words: tuple[str, ...]) -> None:
    session, files = start(*words)
    assert all(path.exists() for path in files)
    assert end_sessions({session}, 0.5) == len(words)
    assert session_members(session) == []
    assert not any(path.exists() for path in files)


def test_a_tracker_on_a_busy_machine_gets_the_time_that_it_needs(start: Start) -> None:
    session, files = start()
    tracker = tracker_of(session)
    os.kill(tracker, signal.SIGSTOP)
    os.kill(session, signal.SIGKILL)
    timer = threading.Timer(2.5, os.kill, (tracker, signal.SIGCONT))
    timer.start()
    end_sessions({session}, 0.1)
    timer.join()
    assert not any(path.exists() for path in files)


def test_several_end_together(start: Start) -> None:
    sessions = [start("stubborn")[0] for _ in range(3)]
    began = time.monotonic()
    assert end_sessions(sessions, 1.0) == 3
    assert time.monotonic() - began < 20.0
    assert not any(session_members(session) for session in sessions)
