"""A connection to the node agent that is there or not, and never makes a request wait for it.

One background thread connects, shakes hands, notices a dead agent and sends what nobody waits for.
A call while no agent answers returns None at once; a call that runs into its bound ends the
connection, so that the next requests miss without waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from workers.client import AgentClient, OnLate
from workers.connector.affinity import leave_engine_cores
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.messages import (
    Done,
    Hello,
    LookupReply,
    Promote,
    Renew,
    ReplyBody,
    RequestBody,
    Welcome,
)

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 0.5
_PING_SECONDS = 1.0
_PATIENT_TIMEOUT_SECONDS = 2.0  # of what no request waits for
_POST_QUEUE = 1024
_MAX_RENEWED = 4096  # owners in one message

OnConnect = Callable[[Welcome], None]
R = TypeVar("R", bound=ReplyBody)
Answer = TypeVar("Answer")


class AgentSession:
    """Thread-safe. `start` begins, `close` ends the thread and the connection."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        call_timeout_seconds: float,
        on_connect: OnConnect = lambda _: None,
        owners: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`on_connect` runs in the session's thread before calls go out to a new agent.

        `owners`, asked in that thread too, names those whose leases are renewed at each ping.
        """
        self._address = address
        self._hello = hello
        self._call_timeout = call_timeout_seconds
        self._on_connect = on_connect
        self._owners = owners
        self._pinged = 0.0
        # A client is used for one connection only: it must not reconnect within a request.
        self._client: AgentClient | None = None
        self._welcome: Welcome | None = None
        self._refusal: RefusedError | None = None
        self._posts: deque[RequestBody] = deque(maxlen=_POST_QUEUE)
        self._wake = threading.Event()
        self._settled = threading.Event()  # an agent said yes or no
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="perilune-agent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, sending what is still queued; bounded."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=2 * _PATIENT_TIMEOUT_SECONDS)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def wait_settled(self, timeout: float) -> bool:
        """Wait for the first answer of an agent. Raises RefusedError if it was a no."""
        settled = self._settled.wait(timeout)
        if self._refusal is not None:
            raise self._refusal
        return settled

    @property
    def welcome(self) -> Welcome | None:
        """The agent's side of the handshake; None while none answers."""
        return self._welcome if self._client is not None else None

    def call(self, body: RequestBody, expected: type[R], timeout: float | None = None) -> R | None:
        """The agent's answer, or None where there is none within the bound or it was a no."""
        return self._ask(
            lambda client: client.call(body, expected, timeout or self._call_timeout), body
        )

    def call_many(self, bodies: Sequence[RequestBody], expected: type[R]) -> list[R] | None:
        """Several questions in one round trip; None where one of them has no answer."""
        return self._ask(
            lambda client: client.call_many(bodies, expected, self._call_timeout), bodies[0]
        )

    def try_many(
        self, bodies: Sequence[RequestBody], expected: type[R], timeout: float, on_late: OnLate
    ) -> list[R | None] | None:
        """See `AgentClient.try_many`; None where nothing was asked."""
        return self._ask(
            lambda client: client.try_many(bodies, expected, timeout, on_late), bodies[0]
        )

    def _ask(self, question: Callable[[AgentClient], Answer], body: RequestBody) -> Answer | None:
        client = self._client
        if client is None:
            return None
        try:
            return question(client)
        except RefusedError as error:
            logger.warning("node agent refused %s: %s", type(body).__name__, error)
        except (AgentUnavailableError, ProtocolError) as error:
            if not client.connected:
                self._lost(client, error)
        return None

    def post(self, body: RequestBody) -> None:
        """Send when possible, in order; the oldest gives way where an agent is gone for long."""
        self._posts.append(body)
        self._wake.set()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        leave_engine_cores()
        pause = _FIRST_RETRY_SECONDS
        while not self._closing:
            if self._client is not None or self._connect():
                pause = _FIRST_RETRY_SECONDS
                self._serve()
            else:
                self._sleep(pause)
                pause = min(2 * pause, _LAST_RETRY_SECONDS)
        self._flush()

    def _serve(self) -> None:
        """Send posts; ping now and then, so that leases last and a dead agent is noticed."""
        pause = _PING_SECONDS
        if self._welcome is not None:
            pause = min(pause, self._welcome.lease_seconds / 3)
        if not self._posts:
            self._sleep(pause)
        self._flush()
        now = time.monotonic()
        if not self._closing and now - self._pinged >= pause:
            self._pinged = now
            owners = list(self._owners())[:_MAX_RENEWED]
            self.call(Renew(owners), Done, _PATIENT_TIMEOUT_SECONDS)

    def _sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _flush(self) -> None:
        """What is queued now; what comes meanwhile waits, so that pings are not put off."""
        for _ in range(len(self._posts)):
            if self._client is None or not self._posts:
                return
            body = self._posts.popleft()
            expected: type[ReplyBody] = LookupReply if isinstance(body, Promote) else Done
            self.call(body, expected, _PATIENT_TIMEOUT_SECONDS)

    def _connect(self) -> bool:
        client = AgentClient(self._address, self._hello, _PATIENT_TIMEOUT_SECONDS)
        try:
            welcome = client.connect()
        except RefusedError as error:
            if self._refusal is None:
                logger.warning("node agent %s refused this worker: %s", self._address, error)
            self._refusal = error
            self._settled.set()
            return False
        except (AgentUnavailableError, ProtocolError) as error:
            logger.debug("no node agent: %s", error)
            return False
        self._on_connect(welcome)
        self._refusal = None
        self._welcome, self._client = welcome, client
        self._settled.set()
        return True

    def _lost(self, client: AgentClient, error: Exception) -> None:
        """The first who notices drops the connection; the thread makes a new one."""
        if self._client is client:
            self._client = None
            logger.warning("lost the node agent: %s", error)
        client.close()
        self._wake.set()
