"""A real node agent as a process of a test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from shared_memory import remove_slab

from workers.client import AgentClient, make_hello
from workers.core.errors import AgentUnavailableError
from workers.core.stats_messages import PoolStats


class AgentProcess:
    """A real agent process of the test's own."""

    def __init__(
        self, folder: Path, slab_bytes: int = 4 << 20, node_id: str = "n1",
        more: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """`more` are further options of the agent's."""
        self.slab_bytes = slab_bytes
        self.node_id, self._more = node_id, more
        self.socket = folder / "a.sock"
        self.slab = f"perilune-test-{uuid.uuid4().hex[:12]}.slab"
        self._log = (folder / "agent.log").open("wb")
        self.process: subprocess.Popen[bytes] | None = None
        self.client = AgentClient(f"unix:{self.socket}", make_hello("cli", "t"), 20.0)

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workers", "agent", "--node-id", self.node_id, "--socket",
             str(self.socket), "--slab-name", self.slab, "--slab-bytes", str(self.slab_bytes),
             "--block-tokens", "64", "--check-when-idle", *self._more],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip
        deadline = time.monotonic() + 90
        while True:
            try:
                self.client.connect()
            except AgentUnavailableError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return

    def stats(self) -> PoolStats:
        return self.client.stats()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signum)
            self.process.wait(15)

    def close(self) -> None:
        self.client.close()
        self.stop()
        self._log.close()
        remove_slab(self.slab)
