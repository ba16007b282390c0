"""Supervising real, small processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from workers.core.liveness import Sign
from workers.core.supervision import PATIENCE, Limits, ProcessState
from workers.supervisor.procfs import session_members

Bench = Any  # conftest.Bench: helpers of a conftest cannot be imported


def grandchild_of(log: str) -> int:
    return int(log.split("grandchild ")[1].split(maxsplit=1)[0])


async def test_it_becomes_ready_by_way_of_loading(bench: Bench) -> None:
    runner = await bench.started(bench.component("a"))
    assert bench.changes[-3:] == [("a", "launching"), ("a", "loading"), ("a", "ready")]
    assert runner.seconds_to_ready is not None
    assert runner.seconds_to_ready > 0
    snapshot = runner.snapshot()
    assert (snapshot.pid, snapshot.state, snapshot.restarts) == (runner.pid, "ready", 0)
    assert bench.sessions == {runner.pid}


async def test_killed_it_comes_back_with_a_new_pid(bench: Bench) -> None:
    runner = await bench.started(bench.component("a"))
    first = runner.pid
    os.kill(first, signal.SIGKILL)
    await bench.until(lambda: runner.state is ProcessState.READY and runner.pid != first)
    assert runner.process.restarts == 1
    assert "killed by SIGKILL" in runner.process.last_error


async def test_a_crash_shows_its_last_error_and_waits_longer_each_time(bench: Bench) -> None:
    runner = bench.run(bench.component("a", "crash"))
    runner.start()
    await bench.until(lambda: runner.process.failures >= 2)
    assert runner.process.last_error == "exit status 3: ValueError: boom"
    assert runner.process.restarts >= 1
    assert runner.pid == 0


async def test_a_program_that_does_not_exist_is_named(bench: Bench) -> None:
    component = replace(bench.component("a"), command=("/nowhere/python", "-c", "1"))
    runner = bench.run(component)
    runner.start()
    await bench.until(lambda: runner.state is ProcessState.FAILED)
    assert "cannot start /nowhere/python: No such file or directory" in runner.process.last_error


async def test_its_own_children_end_with_it(bench: Bench) -> None:
    """An engine's API process killed must not leave the engine's core behind."""
    runner = await bench.started(bench.component("a", "grandchild"))
    session = runner.pid
    grandchild = grandchild_of(runner.component.log_file.read_text())
    assert grandchild in session_members(session)
    os.kill(session, signal.SIGKILL)
    await bench.until(lambda: session_members(session) == [])
    await bench.until(lambda: runner.process.restarts == 1)


async def test_stop_ends_it_in_order(bench: Bench) -> None:
    runner = await bench.started(bench.component("a"))
    session = runner.pid
    runner.stop()
    await bench.until(lambda: runner.state is ProcessState.STOPPED)
    assert session_members(session) == []
    assert bench.sessions == set()


async def test_a_stubborn_one_is_killed(bench: Bench) -> None:
    component = bench.component("a", "stubborn", limits=Limits(grace_seconds=0.3))
    runner = await bench.started(component)
    session = runner.pid
    runner.stop()
    await bench.until(lambda: runner.state is ProcessState.STOPPED)
    assert session_members(session) == []


async def test_one_that_never_answers_is_killed_and_says_so(bench: Bench) -> None:
    runner = bench.run(bench.component("a", "silent", limits=Limits(start_seconds=1.0)))
    runner.start()
    await bench.until(lambda: runner.state is ProcessState.FAILED)
    # On a starved machine it gets more time, and what was seen meanwhile is said too.
    assert re.match(r"not ready within [1-5] s($|: )", runner.process.last_error)


async def test_one_that_does_nothing_any_more_is_replaced(bench: Bench) -> None:
    runner = await bench.started(bench.component("a", "dead", limits=Limits(hang_seconds=1.0)))
    await bench.until(lambda: runner.process.restarts)
    assert runner.process.last_error.startswith("no answer to health probes for ")


async def test_one_that_is_stopped_is_replaced_though_its_socket_takes_connections(
    bench: Bench,
) -> None:
    runner = await bench.started(bench.component("a", limits=Limits(hang_seconds=1.0)))
    os.kill(runner.pid, signal.SIGSTOP)
    await bench.until(lambda: runner.process.restarts)
    assert "it is stopped (state T" in runner.process.last_error


async def test_one_that_is_at_work_has_more_time_which_is_seen_and_said(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await bench.started(bench.component("a", "busy", limits=Limits(hang_seconds=1.5)))
    began, first = time.monotonic(), runner.pid
    os.setpriority(os.PRIO_PROCESS, first, 19)
    await bench.until(lambda: runner.snapshot().note)
    assert bench.changes[-1] == ("a", "ready")
    note = runner.snapshot().note
    assert "it computes" in note or "it waits for CPU" in note
    assert "a: no answer for" in caplog.text
    await bench.until(lambda: runner.process.restarts)
    assert time.monotonic() - began >= 1.5 * PATIENCE - 2
    assert runner.snapshot().note == ""


async def test_one_that_is_kept_from_the_cpu_is_told_from_one_that_is_stuck(bench: Bench) -> None:
    runner = await bench.started(bench.component("a", "busy", limits=Limits(hang_seconds=60.0)))
    core = min(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(5)]
    try:
        for pid in (runner.pid, *(other.pid for other in others)):
            os.setpriority(os.PRIO_PROCESS, pid, 19)
            os.sched_setaffinity(pid, {core})
        await bench.until(lambda: runner.process.sign is Sign.STARVED)
    finally:
        for other in others:
            other.kill()
            other.wait()


async def test_an_operators_restart(bench: Bench) -> None:
    runner = await bench.started(bench.component("a"))
    first = runner.pid
    runner.act("restart")
    assert runner.snapshot().state == "draining"
    await bench.until(lambda: runner.state is ProcessState.READY and runner.pid != first)
    assert (runner.process.restarts, runner.process.failures) == (1, 0)


async def test_drain_and_resume_keep_the_process(bench: Bench) -> None:
    runner = await bench.started(bench.component("a"))
    pid = runner.pid
    runner.act("drain")
    assert runner.snapshot().state == "draining"
    runner.act("resume")
    assert (runner.snapshot().state, runner.pid) == ("ready", pid)


async def test_cancelling_the_runner_ends_the_process(bench: Bench) -> None:
    runner = await bench.started(bench.component("a", "stubborn", "grandchild"))
    session = runner.pid
    await bench.close()
    await bench.until(lambda: session_members(session) == [])
