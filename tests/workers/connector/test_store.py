from __future__ import annotations

import threading
import time

import pytest

from workers.connector.affinity import bound_cpus
from workers.connector.store import Publisher, Written
from workers.core.messages import SlotRef

WAIT = 10.0


class Agent:
    """Collects completions; `gate` holds them back, `answers` False is an agent that is gone."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.answers = True
        self.messages = []

    def complete(self, message):
        assert self.gate.wait(WAIT)
        self.messages.append(message)
        return self.answers


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    agent.gate.set()


@pytest.fixture
def make_publisher(agent):
    made = []

    def make(bound_blocks=4, **changes):
        publisher = Publisher(agent.complete, bound_blocks=bound_blocks, **changes)
        publisher.start()
        made.append(publisher)
        return publisher

    yield make
    agent.gate.set()
    for publisher in made:
        publisher.close()
        assert not publisher._thread.is_alive()


def written(*slots, seal=lambda ref: ref.slot * 10):
    return Written("owner", tuple(SlotRef(slot, 1) for slot in slots), seal)


class TestPublisher:
    def test_seals_and_completes(self, agent, make_publisher):
        publisher = make_publisher()
        publisher.put(written(1, 2))
        assert publisher.wait_idle(WAIT)
        (message,) = agent.messages
        assert [(slot.slot, slot.checksum) for slot in message.stored] == [(1, 10), (2, 20)]
        assert publisher.counts.published == 2

    def test_slots_that_are_no_longer_ours_are_said_to_have_failed(self, agent, make_publisher):
        publisher = make_publisher()
        publisher.put(written(1, 2, seal=lambda ref: None if ref.slot == 1 else 7))
        assert publisher.wait_idle(WAIT)
        (message,) = agent.messages
        assert message.failed == [SlotRef(1, 1)]
        assert publisher.counts.failed == 1

    def test_a_full_queue_refuses_at_once(self, agent, make_publisher):
        publisher = make_publisher(bound_blocks=2)
        agent.gate.clear()
        assert publisher.put(written(1, 2))
        began = time.monotonic()
        assert not publisher.put(written(3))
        assert time.monotonic() - began < WAIT / 2  # the queue stays full until the gate opens
        agent.gate.set()
        assert publisher.wait_idle(WAIT)
        assert publisher.put(written(3))
        assert publisher.wait_idle(WAIT)
        assert publisher.counts.refused == 1
        assert publisher.counts.published == 3

    def test_retries_until_nothing_is_left(self, make_publisher):
        answers = [False, True, False, True, None]
        ended = threading.Event()

        def retry():
            answer = answers.pop(0)
            if answer is None:
                ended.set()
            return answer

        publisher = make_publisher(retry=retry)
        publisher.start_retrying()
        publisher.start_retrying()
        assert ended.wait(WAIT)
        assert not answers

    def test_a_retry_that_raises_is_tried_again(self, make_publisher):
        ended = threading.Event()
        faults = [OSError("slab is gone")]

        def retry():
            if faults:
                raise faults.pop()
            ended.set()

        publisher = make_publisher(retry=retry)
        publisher.start_retrying()
        assert ended.wait(WAIT)

    def test_owners_are_those_of_what_is_queued(self, agent, make_publisher):
        publisher = make_publisher()
        agent.gate.clear()
        publisher.put(written(1))
        publisher.put(written(2))
        assert publisher.owners() == {"owner"}
        agent.gate.set()
        assert publisher.wait_idle(WAIT)
        assert publisher.owners() == set()

    def test_an_agent_that_is_gone_is_counted(self, agent, make_publisher):
        agent.answers = False
        publisher = make_publisher()
        publisher.put(written(1, 2))
        assert publisher.wait_idle(WAIT)
        assert publisher.counts.failed == 2

    def test_one_bad_batch_does_not_end_the_thread(self, agent, make_publisher):
        def explode(ref):
            raise OSError("slab is gone")

        publisher = make_publisher()
        publisher.put(written(1, seal=explode))
        publisher.put(written(2))
        assert publisher.wait_idle(WAIT)
        assert publisher.counts.failed == 1
        assert publisher.counts.published == 1

    def test_closing_publishes_what_is_queued(self, agent, make_publisher):
        publisher = make_publisher(bound_blocks=100)
        for slot in range(20):
            publisher.put(written(slot))
        publisher.close()
        assert publisher.counts.published == 20


@pytest.mark.parametrize(
    ("binding", "cpus"),
    [("", set()), ("0-2", {0, 1, 2}), ("0,3", {0, 3}), ("0-1|4-5", {0, 1, 4, 5}), ("auto", set())],
)
def test_bound_cpus(binding, cpus):
    assert bound_cpus(binding) == cpus
