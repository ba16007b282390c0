"""One reply of a worker, as it arrives: waiting for it, reading and relaying it.

UpstreamError       the worker did not answer as it must; `kind` says how
    connect         refused, unreachable, or no connection in time
    reset           the connection ended before the reply did
    timeout         no head, or no next piece, in time
    protocol        no HTTP
    too_large       a whole reply over the bound
    hung            it took the connection, but answers nothing, not even a probe
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Literal

from workers.core.errors import PeriluneError

if TYPE_CHECKING:
    from controlplane.gateway.worker_connection import WorkerConnection

_BUFFER_BYTES = 256 * 1024
"""Body bytes taken in before a reader is attached; then reading pauses."""

Kind = Literal["connect", "reset", "timeout", "protocol", "too_large", "hung"]


def _nowhere(_: bytes) -> None:
    """What comes after a relay's end has no reader."""


class UpstreamError(PeriluneError):
    """See the module's head. `was_sent`: the worker may have got the request."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.was_sent = kind != "connect"

    def anew(self) -> "UpstreamError":
        """To be raised, where this is kept: the traceback of what is raised holds who keeps it, and
        with it the request's body, which only the collector would find."""
        return UpstreamError(self.kind, str(self))


class Reply:
    """A reply as it arrives. Either `whole()` or `relay()` reads the body; `abort()` gives up."""

    __slots__ = (
        "_buffered", "_connection", "_error", "_full", "_held", "_paused", "_pieces", "_sink",
        "_waiter", "_waiting_for", "complete", "deadline", "head_complete", "headers",
        "last_byte_at", "patience", "status", "waiting_since", "wants_piece",
    )  # fmt: skip

    patience: float
    """Seconds that the present wait may last; like `waiting_since` and `deadline` of a wait only."""
    waiting_since: float
    deadline: float

    def __init__(self, connection: "WorkerConnection", *, wants_piece: bool = False) -> None:
        """`wants_piece`: who waits for a 200 is woken by its first piece only, not by its head."""
        self._connection = connection
        self.wants_piece = wants_piece
        self.headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self.status = self._buffered = 0
        self.last_byte_at = 0.0
        self.head_complete = self.complete = self._held = self._full = self._paused = False
        self._sink: Callable[[bytes], None] | None = None
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def whole(self, limit: int, first_seconds: float, idle_seconds: float) -> bytes:
        """The whole body. Bounds: `limit` bytes, seconds to the first and to each next piece."""
        while not self.complete:
            if self._buffered > limit:
                self.abort()
                raise UpstreamError("too_large", f"the reply has over {limit} bytes")
            self._full = False
            self._apply_pause()
            await self.wait(idle_seconds if self._pieces else first_seconds, "no next piece")
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def body_if_one_piece(self) -> bytes | None:
        """The usual case of `whole`: nothing is left to wait for."""
        return self._pieces[0] if self.complete and len(self._pieces) == 1 else None

    async def first_piece(self, seconds: float, hold: float | None = None) -> bytes:
        """Body bytes that have come; waits for some. b"" for an empty body, or what is left of it;
        and after `hold` seconds, which ends this wait but not the reply."""
        while not self._pieces and not self.complete:
            self._full = False
            self._apply_pause()
            if hold is None:
                await self.wait(seconds, "no first byte")
                continue
            timer = self._connection.loop.call_later(hold, self._wake)
            try:
                await self.wait(seconds, "no first byte")
            finally:
                timer.cancel()
            break
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def relay(
        self,
        sink: Callable[[bytes], None],
        idle_seconds: float,
        splice: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Give every further piece to `sink`, until the reply is complete.

        Time during which the reader itself has paused does not count as idle. `splice` is offered
        each packet that begins with a chunk; it takes it (True, and sets `last_byte_at`) only if
        the packet is exactly one HTTP chunk, which then is not parsed.
        """
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            sink(b"".join(pieces))
        self._full = False
        self._apply_pause()
        if self.complete:
            return
        self._sink = sink
        self._connection.splice_by(splice)
        try:
            await self.wait(idle_seconds, "no next piece")
        finally:
            self._sink = _nowhere  # its owner holds this: only the collector would find both

    def pause(self) -> None:
        """Backpressure: stop reading from the worker."""
        self._held = True
        self._apply_pause()

    def resume(self) -> None:
        self._held = False
        self._apply_pause()

    def _apply_pause(self) -> None:
        """Read unless the reader has paused or the buffer is full."""
        wanted = self._held or self._full
        if self.complete or wanted == self._paused:
            return
        self._paused = wanted
        if wanted:
            self._connection.pause_reading()
        else:
            self.last_byte_at = monotonic()
            self._connection.resume_reading()

    @property
    def has_begun(self) -> bool:
        """Whether anything of it has come."""
        return self._connection.got_bytes

    def abort(self) -> None:
        """Give up; the worker sees its client leave. Idempotent, nothing after completion."""
        if not self.complete:
            self._connection.abort()

    # --- called by the connection ---

    def take(self, pieces: list[bytes]) -> None:
        """A packet's part of the body, which may be none, and the news that the packet is."""
        sink = self._sink
        if pieces:
            self.last_byte_at = monotonic()
            if sink is not None:
                sink(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            else:
                self._pieces += pieces
                if not self.complete:
                    self._buffered += sum(map(len, pieces))
                    if self._buffered > _BUFFER_BYTES:
                        self._full = True
                        self._apply_pause()
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self.complete or (
            sink is None and (pieces or not self.wants_piece or self.status != 200)
        ):
            waiter.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: UpstreamError) -> None:
        if self.complete or self._error is not None:
            return
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error.anew())

    # --- waiting ---

    async def wait(self, seconds: float, what: str) -> None:
        """For whatever comes next: parts of the head, or of the body. Raises `UpstreamError`; then
        the reply is aborted."""
        if self._error is not None:
            self.abort()
            raise self._error.anew()
        connection = self._connection
        waiter = self._waiter = connection.loop.create_future()
        self._waiting_for, self.patience = what, seconds
        now = self.waiting_since = monotonic()
        self.deadline = now + seconds
        pool = connection.pool
        pool.waiting.add(self)
        if not pool.is_ticking:
            pool.start_ticking()
        try:
            await waiter
        except BaseException:
            self.abort()
            raise
        finally:
            pool.waiting.discard(self)
            self._waiter = None
            del waiter  # it keeps its error

    def check_time(self, now: float) -> None:
        """Fail the wait when it has lasted too long; while relaying, since the last byte."""
        if now < self.deadline or self._paused:
            return
        if self._sink is not None:
            self.deadline = self.last_byte_at + self.patience
        if now >= self.deadline:
            is_begun = self.wants_piece and self.head_complete and self._sink is None
            what = "no first byte" if is_begun else self._waiting_for
            self.fail(UpstreamError("timeout", f"{what} within {self.patience:g} s"))
