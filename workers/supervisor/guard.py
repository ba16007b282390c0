"""The supervisor's side of the guardian: starts it, tells it what runs, replaces it if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import sys

CLOSE_SECONDS = 15.0
RESTART_PAUSE_SECONDS = 1.0


class Guard:
    """Owns one guardian process and the pipe whose end tells it that the supervisor is gone."""

    def __init__(self, slab_paths: list[str]) -> None:
        self._slab_paths = slab_paths
        self._sessions: set[int] = set()
        self._child: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name="guardian")

    def note(self, session: int, begins: bool) -> None:
        """A supervised process began or ended."""
        if begins:
            self._sessions.add(session)
        else:
            self._sessions.discard(session)
        self._write(f"{'+' if begins else '-'}{session}\n")

    async def close(self) -> None:
        """End of file: the guardian ends what is left (nothing, as a rule) and itself."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._child is None or self._child.stdin is None:
            return
        self._child.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()

    async def _keep(self) -> None:
        while True:
            assert self._child is not None
            await self._child.wait()
            await asyncio.sleep(RESTART_PAUSE_SECONDS)
            await self._spawn()

    async def _spawn(self) -> None:
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.supervisor.guardian",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        for path in self._slab_paths:
            self._write(f"slab {path}\n")
        for session in self._sessions:
            self._write(f"+{session}\n")

    def _write(self, line: str) -> None:
        if self._child is not None and self._child.stdin is not None:
            # A dead guardian is replaced, and told everything, by `_keep`.
            with contextlib.suppress(OSError):
                self._child.stdin.write(line.encode())
