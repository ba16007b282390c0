"""The static file, read again on SIGHUP: in a thread, however fast the signals come."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from controlplane.gateway.static import load_static
from controlplane.gateway.wire import View
from workers.core.errors import ConfigError

log = structlog.get_logger(__name__)

PAUSE_SECONDS: Final = 0.1
"""Between two readings: signals in between make one. The last signal is followed by a reading."""


class Rereading:
    """`wanted` when a signal has come; `close` ends what is under way."""

    def __init__(
        self, path: str, current: Callable[[], View], apply: Callable[[View], None]
    ) -> None:
        self._path = path
        self._current = current
        self._apply = apply
        self._is_wanted = False
        self._task: asyncio.Task[None] | None = None

    def wanted(self) -> None:
        self._is_wanted = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._is_wanted:
                self._is_wanted = False
                await self._read()
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._task = None

    async def _read(self) -> None:
        """One with a fault changes nothing."""
        try:
            view = await asyncio.to_thread(self._load, self._current().revision + 1)
            self._apply(view)
        except ConfigError as error:
            log.error("static_not_reread", error=str(error), effect="the last one is kept")  # noqa: TRY400 - the trace says nothing
        except Exception:  # a bug must not end the gateway's reading for good
            log.exception("static_not_reread", file=self._path, effect="the last one is kept")
        else:
            log.info("static_reread", workers=len(view.workers), revision=view.revision)

    def _load(self, revision: int) -> View:
        path = Path(self._path)
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise ConfigError(
                "--static", self._path, "is no regular file, and so cannot be read twice",
                "Start the gateway with a file for SIGHUP to read again.",
            )  # fmt: skip
        return load_static(self._path, revision)
