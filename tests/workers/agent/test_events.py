from workers.agent import events
from workers.agent.events import EventLog, Subscriber
from workers.core.framing import FrameBuffer, decode_reply
from workers.core.hashing import block_hashes
from workers.core.ids import NodeId
from workers.core.messages import BlocksStored, EventBatch, LegReport, Snapshot
from workers.core.prefix_index import Applied, PrefixIndex

SPACE = b"s" * 32
CHAIN = block_hashes(b"root", range(200), 1)


class Reader:
    """A subscribed client whose socket fills and drains as the test says."""

    def __init__(self, log: EventLog, held: int = 0) -> None:
        self.held = held
        self.frames = FrameBuffer()
        self.messages: list[object] = []
        self.index = PrefixIndex()
        self.subscriber = Subscriber(log, self.runs, self.write)

    def runs(self) -> list[BlocksStored]:
        return [BlocksStored(SPACE, b"", list(CHAIN[: self.held]))] if self.held else []

    def write(self, frame: bytes) -> None:
        for document in self.frames.feed(frame):
            body = decode_reply(document).body
            self.messages.append(body)
            if isinstance(body, EventBatch | Snapshot):
                assert self.index.apply(body) is Applied.APPLIED

    @property
    def known(self) -> int:
        return self.index.held_lengths(SPACE, CHAIN)[NodeId("n1")]


def grow(log: EventLog, *readers: Reader, first: int, last: int) -> None:
    for i in range(first, last):
        parent = CHAIN[i - 1] if i else b""
        batch = log.append([BlocksStored(SPACE, parent, [CHAIN[i]])])
        for reader in readers:
            reader.held = i + 1
            reader.subscriber.offer(batch)


class TestEventLog:
    def test_goes_on_where_a_reader_was(self) -> None:
        log = EventLog("n1", 5)
        grow(log, first=0, last=4)
        assert [batch.sequence for batch in log.since(5, 2) or ()] == [3, 4]
        assert log.since(5, 4) == []

    def test_unknown_places_need_a_snapshot(self) -> None:
        log = EventLog("n1", 5)
        grow(log, first=0, last=4)
        assert log.since(4, 2) is None
        assert log.since(5, 5) is None
        assert log.since(0, 0) is None

    def test_forgets_the_oldest(self) -> None:
        log = EventLog("n1", 5)
        for _ in range(events.RING_BATCHES + 10):
            log.append([BlocksStored(SPACE, b"", [CHAIN[0]])])
        assert log.since(5, 9) is None
        assert len(log.since(5, 10) or ()) == events.RING_BATCHES

    def test_batch_that_straddles_a_place_is_given_whole(self) -> None:
        log = EventLog("n1", 5)
        log.append([BlocksStored(SPACE, b"", [CHAIN[0]]), BlocksStored(SPACE, b"", [CHAIN[1]])])
        assert [batch.sequence for batch in log.since(5, 1) or ()] == [2]


class TestSubscriber:
    def test_begins_with_a_snapshot_and_goes_on_with_events(self) -> None:
        log = EventLog("n1", 5)
        grow(log, first=0, last=3)
        reader = Reader(log, held=3)
        reader.subscriber.start(0, 0)
        assert reader.known == 3
        grow(log, reader, first=3, last=5)
        assert reader.known == 5
        assert reader.index.position(NodeId("n1")) == (5, 5)

    def test_empty_pool_has_a_snapshot_too(self) -> None:
        reader = Reader(EventLog("n1", 5))
        reader.subscriber.start(0, 0)
        assert reader.messages == [Snapshot("n1", 5, 0, True, True, [])]

    def test_resumes_without_a_snapshot(self) -> None:
        log = EventLog("n1", 5)
        reader = Reader(log)
        reader.subscriber.start(0, 0)
        grow(log, first=0, last=3)
        reader.subscriber.start(*reader.index.position(NodeId("n1")))
        assert reader.known == 3
        assert len([m for m in reader.messages if isinstance(m, Snapshot)]) == 1

    def test_slow_reader_gets_a_snapshot_instead_of_a_long_queue(self) -> None:
        log = EventLog("n1", 5)
        reader = Reader(log)
        reader.subscriber.start(0, 0)
        reader.subscriber.pause()
        for _ in range(events.QUEUE_MESSAGES // 100 + 1):
            grow(log, reader, first=0, last=100)
        assert len(reader.subscriber._batches) <= events.QUEUE_MESSAGES
        assert len(reader.messages) == 1
        reader.subscriber.resume()
        assert reader.subscriber.num_resyncs == 1
        assert reader.known == 100
        assert reader.index.position(NodeId("n1")) == (5, log.sequence)

    def test_big_snapshot_comes_in_parts_and_events_after_it(self) -> None:
        log = EventLog("n1", 5)
        grow(log, first=0, last=150)
        reader = Reader(log, held=150)
        events_part, events.SNAPSHOT_PART_BLOCKS = events.SNAPSHOT_PART_BLOCKS, 64  # type: ignore[misc]
        try:
            reader.subscriber.pause()
            reader.subscriber.start(0, 0)
            grow(log, reader, first=150, last=160)
            reader.subscriber.resume()
        finally:
            events.SNAPSHOT_PART_BLOCKS = events_part  # type: ignore[misc]
        parts = [m for m in reader.messages if isinstance(m, Snapshot)]
        assert [(p.first, p.last) for p in parts] == [(True, False), (False, False), (False, True)]
        assert reader.known == 160

    def test_leg_reports_are_bounded_and_the_newest_kept(self) -> None:
        reader = Reader(EventLog("n1", 5))
        reader.subscriber.start(0, 0)
        reader.subscriber.pause()
        for i in range(events.QUEUE_REPORTS + 5):
            reader.subscriber.offer(LegReport(str(i), "p1", "kv_producer"))
        reader.subscriber.resume()
        reports = [m for m in reader.messages if isinstance(m, LegReport)]
        assert [reports[0].transfer_id, len(reports)] == ["5", events.QUEUE_REPORTS]
