"""GET /api/v1/events: server-sent events with resume. A stream holds no database connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from controlplane.deps import PlaneDep
from controlplane.errors import UnavailableError
from controlplane.events.bus import EventBus, Subscription

KEEPALIVE_SECONDS = 5.0

router = APIRouter(tags=["events"])


class EventStream(StreamingResponse):
    media_type = "text/event-stream"


@router.get("/events", response_class=EventStream)
async def events(
    plane: PlaneDep,
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> EventStream:
    """Every change as it happens, and a tick each second; resumes after `Last-Event-ID`."""
    subscription = plane.bus.subscribe(last_event_id)
    if subscription is None:
        raise UnavailableError(
            "The control plane is stopping or has too many event streams open.",
            way_out="Close a console or page that is not needed, or try again.",
            headers={"Retry-After": "2"},
        )
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventStream(_frames(plane.bus, subscription), headers=headers)


async def _frames(bus: EventBus, subscription: Subscription) -> AsyncIterator[bytes]:
    try:
        # tells where the stream stands, so that a reader can resume before its first event
        if subscription.queue.empty():
            yield f"retry: 1000\nid: {bus.last_id}\n\n".encode()
        while True:
            try:
                sent = await asyncio.wait_for(subscription.queue.get(), KEEPALIVE_SECONDS)
            except TimeoutError:
                yield b": alive\n\n"
                continue
            if sent is None:
                return
            yield sent
    finally:
        bus.unsubscribe(subscription)
