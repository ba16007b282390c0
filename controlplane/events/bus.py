"""The event bus: a bounded ring to resume from, bounded queues to those who listen.

A slow listener does not slow anyone: its queue is emptied and it gets `reset`. Events are encoded
once, whoever listens. No database, no locks: one event loop owns it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from dataclasses import dataclass, field

from controlplane.events.schemas import EventType
from controlplane.schema_base import Schema

RING_EVENTS = 4096
RING_BYTES = 8 * 1024 * 1024
QUEUE_EVENTS = 512
MAX_SUBSCRIBERS = 256


def frame(event_id: str, event_type: EventType, data: str) -> bytes:
    """One SSE event as bytes."""
    return f"id: {event_id}\nevent: {event_type}\ndata: {data}\n\n".encode()


@dataclass(eq=False, slots=True)
class Subscription:
    """Frames for one listener, oldest first. `None` ends the stream."""

    queue: asyncio.Queue[bytes | None]


@dataclass(slots=True)
class EventBus:
    """Ids are `<boot>-<n>`; another boot id means another life of the control plane."""

    boot_id: str = field(default_factory=lambda: secrets.token_hex(4))
    resets_total: int = 0
    published_total: int = 0
    closed: bool = False
    _number: int = 0
    _ring: deque[tuple[int, bytes]] = field(default_factory=deque)
    _ring_bytes: int = 0
    _subscriptions: set[Subscription] = field(default_factory=set)

    @property
    def num_subscribers(self) -> int:
        return len(self._subscriptions)

    @property
    def last_id(self) -> str:
        return f"{self.boot_id}-{self._number}"

    def publish(self, event_type: EventType, data: Schema | dict[str, object]) -> None:
        """Send to all and keep for those who resume."""
        text = data.model_dump_json() if isinstance(data, Schema) else json.dumps(data)
        self._number += 1
        self.published_total += 1
        sent = frame(self.last_id, event_type, text)
        self._ring.append((self._number, sent))
        self._ring_bytes += len(sent)
        while len(self._ring) > RING_EVENTS or self._ring_bytes > RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft()[1])
        self._send(sent)

    def publish_passing(self, event_type: EventType, data: Schema | dict[str, object]) -> None:
        """Send to those who listen now; it is not kept, a later one replaces it (ticks)."""
        if not self._subscriptions:
            return
        text = data.model_dump_json() if isinstance(data, Schema) else json.dumps(data)
        self._send(frame(self.last_id, event_type, text))

    def _send(self, sent: bytes) -> None:
        for subscription in self._subscriptions:
            try:
                subscription.queue.put_nowait(sent)
            except asyncio.QueueFull:
                self._reset(subscription)

    def _reset(self, subscription: Subscription) -> None:
        while not subscription.queue.empty():
            subscription.queue.get_nowait()
        self.resets_total += 1
        subscription.queue.put_nowait(frame(self.last_id, "reset", "{}"))

    def subscribe(self, last_event_id: str | None) -> Subscription | None:
        """A subscription that continues after `last_event_id`; None if there are too many."""
        if self.closed or len(self._subscriptions) >= MAX_SUBSCRIBERS:
            return None
        missed = self._missed(last_event_id)
        room = QUEUE_EVENTS + (len(missed) if missed else 0)
        subscription = Subscription(asyncio.Queue(room))
        if missed is None:
            subscription.queue.put_nowait(frame(self.last_id, "reset", "{}"))
        else:
            for sent in missed:
                subscription.queue.put_nowait(sent)
        self._subscriptions.add(subscription)
        return subscription

    def _missed(self, last_event_id: str | None) -> list[bytes] | None:
        """Frames after that id; None if the ring no longer has them all."""
        if last_event_id is None:
            return []
        boot, _, text = last_event_id.rpartition("-")
        if boot != self.boot_id or not text.isdecimal() or len(text) > 18:
            return None
        number = int(text)
        oldest = self._ring[0][0] if self._ring else self._number + 1
        if number > self._number or number < oldest - 1:
            return None
        return [sent for n, sent in self._ring if n > number]

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End every stream; later subscriptions are refused."""
        self.closed = True
        for subscription in self._subscriptions:
            while not subscription.queue.empty():
                subscription.queue.get_nowait()
            subscription.queue.put_nowait(None)
