"""`up` and `down`: from settings to a running cluster, and back to nothing."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workers.core.errors import PeriluneError
from workers.engines.vllm import probe_engine
from workers.models.resolve import resolve_model
from workers.supervisor import preflight
from workers.supervisor.home import Home, ensure_token
from workers.supervisor.hub import fetch_model_files
from workers.supervisor.logs import MAX_LOG_BYTES
from workers.supervisor.plan import ClusterPlan, make_plan
from workers.supervisor.ports import choose_ports
from workers.supervisor.procfs import ProcessIdentity
from workers.supervisor.progress import Progress, make_progress
from workers.supervisor.session_end import end_sessions
from workers.supervisor.state_file import (
    SupervisorState,
    read_holder,
    read_state,
    write_holder,
)
from workers.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from workers.supervisor.settings import Settings

POLL_SECONDS = 0.1
OWN_ERROR = "perilune: "
LEFTOVER_GRACE_SECONDS = 10.0
DOWN_SECONDS = 90.0
"""Longer than any stage of an orderly end: after that, processes are killed."""


class AlreadyRunningError(PeriluneError):
    """Another supervisor holds this data folder; `state` is what it says."""

    def __init__(self, home: Home, state: SupervisorState | None) -> None:
        holder = read_holder(home.lock_file)
        who = f"process {holder.pid}, just starting" if holder else "it is just starting"
        if state is not None:
            who = f"process {state.pid}, {state.state}"
        super().__init__(
            f"a cluster of {home.data} is running already ({who}). "
            "perilune status shows it, perilune down ends it."
        )
        self.state = state


class BackgroundError(PeriluneError):
    """The process in the background failed; text and exit code are its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if exit_code > 0 else 1


def run_foreground(settings: Settings) -> None:
    """Run the cluster until SIGINT or SIGTERM. Raises PeriluneError where it does not come up."""
    settings.validate()
    home = settings.home
    home.create()
    with _only_one(home):
        end_leftovers(home)
        progress = make_progress()
        try:
            plan = prepare(settings, progress)
            asyncio.run(_supervise(plan, progress))
        finally:
            progress.close()
            home.state_file.unlink(missing_ok=True)


def prepare(settings: Settings, progress: Progress) -> ClusterPlan:
    """Every check that needs no process of ours, then the plan. Raises ConfigError."""
    if settings.engine == "vllm":
        facts = probe_engine(settings.engine_python)
        settings = replace(settings, device=facts.device, num_gpus=facts.num_gpus)
        preflight.check_compiler(facts.device)
    engine_block = preflight.engine_block_tokens(settings)
    preflight.check_block_tokens(settings.block_tokens, engine_block)
    ports = choose_ports(settings)
    preflight.check_disk(settings)
    model = resolve_model(settings.model, settings.data, progress=progress.say)
    preflight.check_shm(settings)
    for warning in (preflight.check_ssd(settings), preflight.check_gpus(settings)):
        if warning:
            progress.say(f"warning: {warning}")
    preflight.check_memory(settings, model)
    files = model.source
    if not model.is_local:
        progress.say(f"fetching the tokenizer of {model.source}")
        files = fetch_model_files(model.source, settings.engine_python)
    preflight.check_model_files(files)
    preflight.check_model_length(files, settings.max_model_len)
    return make_plan(settings, model, files, ports)


def run_detached(arguments: list[str], home: Home) -> None:
    """Run `perilune up ARGUMENTS` in the background; return once it is ready.

    Raises PeriluneError with its last line where it does not come up.
    """
    home.create()
    state = read_state(home.state_file)
    if state is not None and ProcessIdentity(state.pid, state.start_ticks).is_alive():
        raise AlreadyRunningError(home, state)
    log_file = home.log_file("supervisor")
    if log_file.exists() and log_file.stat().st_size > MAX_LOG_BYTES:
        log_file.replace(log_file.with_name(log_file.name + ".1"))
    offset = log_file.stat().st_size if log_file.exists() else 0
    with log_file.open("ab") as log:
        child = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-m", "console", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _follow_start(child, home, log_file, offset)


def end_cluster(home: Home, progress: Progress) -> bool:
    """End the cluster of a data folder; False where there was nothing to end."""
    state = read_state(home.state_file)
    supervisor = read_holder(home.lock_file)
    if supervisor is None:
        if state is None:
            return False
        supervisor = ProcessIdentity(state.pid, state.start_ticks)
    if supervisor.is_alive():
        os.kill(supervisor.pid, signal.SIGTERM)
        if not _until_gone(supervisor):
            progress.say(f"the supervisor did not end within {DOWN_SECONDS:.0f} s and is killed")
            os.kill(supervisor.pid, signal.SIGKILL)
            _until_gone(supervisor)
    try:
        with _only_one(home):
            end_leftovers(home)
    except AlreadyRunningError:
        pass  # another `up` has begun meanwhile: what it finds it ends, and what runs now is its own
    return True


def _until_gone(process: ProcessIdentity) -> bool:
    deadline = time.monotonic() + DOWN_SECONDS
    while process.is_alive() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return not process.is_alive()


def end_leftovers(home: Home) -> int:
    """End what a supervisor that is gone left behind; returns how many processes led a session."""
    state = read_state(home.state_file)
    if state is None:
        return 0
    left = {
        component.pid
        for component in state.components
        if component.pid and ProcessIdentity(component.pid, component.start_ticks).is_alive()
    }
    end_sessions(left, LEFTOVER_GRACE_SECONDS)
    for slab in state.slab_paths:
        Path(slab).unlink(missing_ok=True)
    home.state_file.unlink(missing_ok=True)
    return len(left)


@contextmanager
def _only_one(home: Home) -> Iterator[None]:
    """Hold the data folder; the kernel lets go of it when this process ends, however it ends."""
    with home.lock_file.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunningError(home, read_state(home.state_file)) from None
        write_holder(file)
        try:
            yield
        finally:
            file.truncate(0)


async def _supervise(plan: ClusterPlan, progress: Progress) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    supervisor = Supervisor(plan, ensure_token(plan.settings.home.token_file), progress)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.request_stop)
    await supervisor.run()


def _follow_start(child: subprocess.Popen[bytes], home: Home, log_file: Path, offset: int) -> None:
    """Pass the background process's lines on until it is ready or gone."""
    progress = make_progress()
    last = f"it ended without a word; look into {log_file}"
    own = ""  # of two that start at once both write to this file; errors are the loser's alone
    while True:
        ended = child.poll() is not None
        state = read_state(home.state_file)
        lines, offset = _new_lines(log_file, offset)
        for line in lines:
            last = line
            if line.startswith(OWN_ERROR):  # that one is raised
                own = line
            else:
                progress.say(line)
        if ended and child.returncode != 0:
            raise BackgroundError((own or last).removeprefix(OWN_ERROR), child.returncode)
        if ended or (state is not None and state.pid == child.pid and state.state == "ready"):
            return
        time.sleep(POLL_SECONDS)


def _new_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """Whole lines since `offset`, and where to read on."""
    with path.open("rb") as file:
        file.seek(offset)
        whole, newline, _ = file.read().rpartition(b"\n")
    return whole.decode(errors="replace").splitlines(), offset + len(whole) + len(newline)
