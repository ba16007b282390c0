"""One client of the agent, after its handshake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workers.agent.events import Subscriber
from workers.core.messages import Hello
from workers.core.pool_state import ClientRef


@dataclass(slots=True, eq=False)
class Session:
    """One connection after its handshake."""

    connection: int
    hello: Hello
    subscribe: Callable[[], Subscriber]
    namespace: bytes = b""
    subscriber: Subscriber | None = None
    client: ClientRef = field(init=False)

    def __post_init__(self) -> None:
        worker = self.hello.client_id if self.hello.role == "worker" else ""
        self.client = ClientRef(self.connection, worker)
