"""The event bus: resume, overflow, bounds."""

from __future__ import annotations

import pytest

from controlplane.events import bus as module
from controlplane.events.bus import EventBus


def drain(subscription):
    frames = []
    while not subscription.queue.empty():
        frames.append(subscription.queue.get_nowait())
    return frames


def ids(frames):
    return [frame.split(b"\n")[0].removeprefix(b"id: ").decode() for frame in frames if frame]


def test_resumes_after_the_last_id():
    bus = EventBus("boot")
    for number in range(5):
        bus.publish("audit", {"n": number})
    assert ids(drain(bus.subscribe("boot-3"))) == ["boot-4", "boot-5"]
    assert drain(bus.subscribe("boot-5")) == []
    assert drain(bus.subscribe(None)) == []


@pytest.mark.parametrize("last", ["other-3", "boot-99", "boot-x", "3", "", "boot-" + "9" * 40])
def test_an_id_that_cannot_be_resumed_is_a_reset(last):
    bus = EventBus("boot")
    bus.publish("audit", {})
    (frame,) = drain(bus.subscribe(last))
    assert b"event: reset" in frame


def test_the_ring_is_bounded_by_number_and_by_bytes(monkeypatch):
    monkeypatch.setattr(module, "RING_EVENTS", 3)
    bus = EventBus("boot")
    for _ in range(5):
        bus.publish("audit", {})
    assert ids(drain(bus.subscribe("boot-2"))) == ["boot-3", "boot-4", "boot-5"]
    assert b"reset" in drain(bus.subscribe("boot-1"))[0]
    monkeypatch.setattr(module, "RING_BYTES", 150)
    bus.publish("audit", {"x": "y" * 80})
    bus.publish("audit", {"x": "y" * 80})
    assert len(bus._ring) == 1


def test_a_slow_listener_is_reset_and_slows_nobody():
    bus = EventBus("boot")
    slow, quick = bus.subscribe(None), bus.subscribe(None)
    for number in range(module.QUEUE_EVENTS + 1):
        bus.publish("audit", {"n": number})
        if quick.queue.qsize() > 100:
            drain(quick)
    frames = drain(slow)
    assert b"event: reset" in frames[0]
    assert len(frames) == 1
    assert bus.resets_total == 1
    bus.publish("audit", {})
    assert len(drain(slow)) == 1, "it goes on after the reset"


def test_a_passing_event_is_not_kept_and_moves_no_id():
    bus = EventBus("boot")
    bus.publish("audit", {})
    listener = bus.subscribe(None)
    bus.publish_passing("tick", {})
    assert ids(drain(listener)) == ["boot-1"]
    assert drain(bus.subscribe("boot-1")) == []


def test_listeners_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_SUBSCRIBERS", 2)
    bus = EventBus()
    first = bus.subscribe(None)
    assert bus.subscribe(None) is not None
    assert bus.subscribe(None) is None
    bus.unsubscribe(first)
    assert bus.subscribe(None) is not None


def test_close_ends_streams_and_refuses_new_ones():
    bus = EventBus()
    listener = bus.subscribe(None)
    bus.publish("audit", {})
    bus.close()
    assert drain(listener) == [None]
    assert bus.subscribe(None) is None
