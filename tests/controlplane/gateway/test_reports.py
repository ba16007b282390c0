"""What the control plane gets, and what happens while it is away."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any

import msgspec
import pytest
import structlog
from reported import reported

from controlplane.decisions import schemas as decisions
from controlplane.gateway import reports, wire
from controlplane.gateway.recording import Recording
from controlplane.gateway.records import JOIN_SECONDS, MAX_BUFFERED, MAX_PER_REPORT, Records
from controlplane.gateway.reports import MOST_BREATHS, Reporter
from controlplane.gateway.stats import Stats
from controlplane.gateways import schemas as gateways
from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS, ClusterView, GatewayReport
from workers.core.messages import LegReport


async def test_reports_add_up(rig: Any, eventually: Any) -> None:
    await rig.start()
    for _ in range(3):
        await rig.complete(prompt="hello there", max_tokens=4, stream=True)
    await rig.complete(prompt="hello there", max_tokens=4)
    await rig.client.post("/v1/completions", content=b"{")

    def done() -> bool:
        reports = rig.control_plane.reports
        if not reports:
            return False
        stats = reports[-1].stats
        return (stats.requests_total, stats.client_errors_total, stats.in_flight) == (4, 1, 0)

    await eventually(done)
    await eventually(
        lambda: (
            [d.status for d in rig.control_plane.decisions().values()] == ["finished_length"] * 4
        )
    )
    last = rig.control_plane.reports[-1]
    assert last.url == rig.gateway.url
    assert last.view_revision == 1
    assert sum(last.stats.ttft.counts) == 3
    assert last.stats.client_errors_total == 1
    assert 0 <= last.stats.hit_tokens_total <= last.stats.prompt_tokens_total
    assert set(last.stats.workers) == {"p1", "p2", "d1", "d2"}
    assert sum(load.requests_total for load in last.stats.workers.values()) == 8
    assert "Bearer secret" in rig.control_plane.tokens


async def test_a_lost_control_plane_changes_nothing_for_clients(rig: Any, eventually: Any) -> None:
    await rig.start()
    await rig.control_plane.stop()
    for _ in range(5):
        assert (await rig.complete(prompt="hello", max_tokens=2)).status_code == 200
    await eventually(lambda: rig.gateway._follower.connected is False)
    rig.control_plane.view["revision"] = 0  # it counts anew
    rig.control_plane.publish(policies=[rig.policy("slo", 2, mode="enforce", max_ttft_ms=1)])
    await rig.control_plane.restart("second-life")
    await eventually(lambda: rig.gateway.cluster.view.boot_id == "second-life")
    assert (await rig.complete(prompt="hello")).status_code == 429
    finished = lambda: [  # noqa: E731
        d for d in rig.control_plane.decisions().values() if d.status == "finished_length"
    ]
    await eventually(lambda: len(finished()) == 5, "what was kept arrives")


async def test_refused_reports_are_kept_while_the_control_plane_fails(
    rig: Any, eventually: Any
) -> None:
    await rig.start()
    rig.control_plane.fail_reports = True
    await rig.complete(prompt="hello", max_tokens=2)
    await eventually(lambda: rig.gateway.records.num_buffered > 0)
    rig.control_plane.fail_reports = False
    assert (await rig.control_plane.ended()).status == "finished_length"


@pytest.mark.parametrize("status", [401, 409])
async def test_a_refused_gateway_says_so_and_keeps_its_records_until_it_is_accepted(
    rig: Any, eventually: Any, status: int
) -> None:
    await rig.start()
    way_out = "Two gateways use one id: " + "stop the older one. " * 30
    rig.control_plane.refusal = (status, {"detail": "known since noon", "way_out": way_out})
    with structlog.testing.capture_logs() as logs:
        await rig.complete(prompt="hello", max_tokens=2)

        async def said() -> bool:
            health = (await rig.client.get("/health")).json()
            return health["control_plane"] == f"reports refused: {status} known since noon"

        await eventually(said, "the refusal in /health")
        await eventually(lambda: rig.gateway.records.num_buffered > 0)
    (told,) = [row for row in logs if row["event"] == "report_refused"]
    assert (told["way_out"], told["records"]) == (way_out, "kept")
    rig.control_plane.refusal = None
    assert (await rig.control_plane.ended()).status == "finished_length"
    await eventually(lambda: not rig.gateway._reporter.refused)
    assert (await rig.client.get("/health")).json()["control_plane"] == "connected"


async def test_records_that_are_refused_themselves_are_not_sent_again() -> None:
    records, sink = Records(Stats()), Sink(422)
    records.once(decision("r"))
    told = reporter(records, sink)
    assert not await told.flush()
    assert (records.num_buffered, told.refused) == (0, "422")


def decision(name: str) -> wire.Decision:
    return wire.Decision(name, datetime.now(UTC), "g", "running", prefill_worker="p1")


def report(name: str, role: str, **fields: Any) -> LegReport:
    worker = {"kv_producer": "p1", "kv_consumer": "d1"}[role]
    return LegReport(name, worker, role, **fields)  # type: ignore[arg-type]


class TestRecords:
    def test_a_record_waits_for_its_legs(self) -> None:
        stats = Stats()
        records = Records(stats)
        entry = records.begin(decision("r1"))
        entry.expects_prefill = entry.expects_decode = True
        records.leg(report("r1", "kv_producer", prompt_tokens=100, pool_hit_tokens=64,
                           computed_tokens=36))  # fmt: skip
        entry.decision.status = "finished_stop"
        records.end(entry, 10.0)
        assert reported(records) == []
        records.leg(report("r1", "kv_consumer", prompt_tokens=100, pool_hit_tokens=64))
        (last,) = reported(records)
        assert (last.hit_tokens, last.prefill_leg.computed_tokens) == (64, 36)
        assert last.decode_leg.worker_id == "d1"
        assert (stats.prompt_tokens, stats.hit_tokens) == (100, 64)

    def test_a_report_quicker_than_the_reply_teaches_and_is_not_waited_for(self) -> None:
        records, learned = Records(Stats()), []
        entry = records.begin(decision("r1"))
        records.leg(report("r1", "kv_producer", prompt_tokens=100, computed_tokens=36))
        entry.expect_prefill("p1", lambda leg: learned.append(leg.computed_tokens))
        records.end(entry, 10.0)
        assert learned == [36]
        assert len(reported(records)) == 1

    def test_without_a_report_the_answer_teaches_once(self) -> None:
        """A node may be followed whose workers report to nobody."""
        records, learned = Records(Stats()), list[wire.Leg | None]()
        silent, failed = records.begin(decision("silent")), records.begin(decision("failed"))
        for entry in (silent, failed):
            entry.expect_prefill("p1", learned.append)
        failed.expects_prefill = False
        for entry in (silent, failed):
            records.end(entry, 10.0)
        records.sweep(10.0 + JOIN_SECONDS / 2)
        assert learned == []
        records.sweep(10.0 + JOIN_SECONDS)
        assert learned == [None]
        records.leg(report("silent", "kv_producer", prompt_tokens=100, computed_tokens=36))
        records.sweep(inf)
        assert learned == [None]

    def test_a_report_of_one_asked_in_vain_teaches_nothing_of_the_one_that_serves(self) -> None:
        records, learned = Records(Stats()), list[int]()
        entry = records.begin(decision("r1"))
        entry.decision.prefill_worker = "p2"
        entry.expect_prefill("p2", lambda leg: learned.append(leg.computed_tokens))
        records.leg(LegReport("r1", "p1", "kv_producer", computed_tokens=9))
        assert (learned, entry.is_whole) == ([], False)
        records.leg(LegReport("r1", "p2", "kv_producer", computed_tokens=64))
        assert (learned, entry.is_whole) == ([64], True)

    def test_a_report_of_a_worker_that_failed_is_not_the_next_ones(self) -> None:
        records, learned = Records(Stats()), []
        entry = records.begin(decision("r1"))
        records.leg(report("r1", "kv_producer", prompt_tokens=100, computed_tokens=36))
        entry.expect_prefill("p2", lambda leg: learned.append(leg.computed_tokens))
        assert learned == []
        entry.decision.prefill_worker = "p2"
        records.leg(LegReport("r1", "p2", "kv_producer", computed_tokens=64))
        records.leg(report("r1", "kv_producer", computed_tokens=9))  # late, of the first
        assert entry.decision.prefill_leg is not None
        assert (learned, entry.decision.prefill_leg.computed_tokens) == ([64], 64)

    def test_a_missing_report_is_not_waited_for_long(self) -> None:
        records = Records(Stats())
        entry = records.begin(decision("r1"))
        entry.expects_prefill = True
        records.end(entry, 10.0)
        reported(records)
        records.sweep(10.5)
        assert reported(records) == []
        records.sweep(11.1)
        assert len(reported(records)) == 1
        records.leg(report("r1", "kv_producer", prompt_tokens=9))  # late: sent again
        assert reported(records)[0].prefill_leg.prompt_tokens == 9
        records.sweep(30.0)
        assert records.num_joining == 0

    @pytest.mark.parametrize("reported", [True, False])
    def test_a_record_that_waits_for_late_reports_lets_its_request_go(self, reported: bool) -> None:
        """It stays for seconds, thousands of them at once; a request holds its body."""
        records = Records(Stats())
        entry = records.begin(decision("r1"))
        body = bytearray(10)
        held = sys.getrefcount(body)
        entry.expect_prefill("p1", lambda leg, body=body: None)
        assert sys.getrefcount(body) > held
        if reported:
            records.leg(report("r1", "kv_producer"))
        records.end(entry, 10.0)
        if not reported:
            records.sweep(11.1)
        assert sys.getrefcount(body) == held
        assert records.num_joining == 1

    def test_reports_of_one_leg_add_up(self) -> None:
        records = Records(Stats())
        entry = records.begin(decision("r1"))
        for seconds in (0.5, 0.25):
            records.leg(
                report("r1", "kv_producer", prompt_tokens=10, kv_wait_seconds=seconds,
                       kv_wait_by_stage_seconds={"queue": seconds})
            )  # fmt: skip
        leg = entry.decision.prefill_leg
        assert (leg.prompt_tokens, leg.kv_wait_seconds) == (20, 0.75)
        assert leg.kv_wait_by_stage_seconds == {"queue": 0.75}

    def test_the_buffer_is_bounded_and_says_what_it_dropped(self) -> None:
        stats = Stats()
        records = Records(stats)
        for i in range(MAX_BUFFERED + 10):
            records.once(decision(f"r{i}"))
        assert records.num_buffered == MAX_BUFFERED
        assert stats.decisions_dropped == 10
        batch = reported(records)
        assert len(batch) == MAX_PER_REPORT
        records.put_back(batch)
        assert reported(records)[0].request_id == "r10"


class TestWire:
    def test_twins_have_the_schemas_fields(self) -> None:
        pairs = [
            (wire.Decision, decisions.Decision), (wire.Leg, decisions.Leg),
            (wire.Phase, decisions.Phase), (wire.GatewayStats, gateways.GatewayStats),
            (wire.PrefillCandidate, decisions.PrefillCandidate),
            (wire.DecodeCandidate, decisions.DecodeCandidate),
            (wire.WorkerLoad, gateways.WorkerLoad), (wire.Histogram, gateways.Histogram),
            (wire.Report, GatewayReport),
        ]  # fmt: skip
        for ours, theirs in pairs:
            names = set(ours.__struct_fields__)
            assert names <= theirs.model_fields.keys(), ours
            required = {n for n, f in theirs.model_fields.items() if f.is_required()}
            assert required <= names, ours
        assert wire.HISTOGRAM_BOUNDS_SECONDS == HISTOGRAM_BOUNDS_SECONDS

    def test_a_full_report_is_valid_for_the_schema(self) -> None:
        stats = Stats().export({"p1": wire.WorkerLoad(running=1)}, 3, 100)
        row = decision("r")
        row.phases = [wire.Phase("queue", 0.1)]
        row.prefill_leg = wire.Leg("p1")
        text = msgspec.json.encode(wire.Report("http://x", 1, 2, stats, [row]))
        assert GatewayReport.model_validate_json(text).decisions[0].phases[0].name == "queue"

    def test_views_are_read(self) -> None:
        view = ClusterView(
            revision=3, boot_id="b", cluster="c", nodes=[], workers=[], models=[], policies=[]
        )
        ours = msgspec.json.decode(view.model_dump_json(), type=wire.View)
        assert ours.revision == 3


def made_stats() -> wire.GatewayStats:
    none = wire.Histogram([], 0.0)
    return wire.GatewayStats(datetime.now(UTC), none, none, none)


class Sink:
    """Takes what a reporter sends; `status` of its answers."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.bodies: list[Any] = []

    async def call(
        self, method: str, path: str, body: Sequence[bytes] = (), *, seconds: float
    ) -> tuple[int, bytes]:
        self.bodies.append(msgspec.json.decode(b"".join(body)))
        return self.status, b""


def reporter(records: Records, sink: Sink) -> Reporter:
    made: Any = sink
    return Reporter(made, "g", "http://x", records, lambda: 1, made_stats)


async def test_requests_run_while_a_report_is_put_together() -> None:
    records, sink, turns = Records(Stats()), Sink(), 0
    for i in range(MAX_PER_REPORT):
        records.end(records.begin(decision(f"r{i}")), 1.0)

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not sink.bodies:
            asyncio.get_running_loop().call_soon(turn)

    turn()
    assert await reporter(records, sink).flush()
    assert turns >= 40
    (body,) = sink.bodies
    assert [d["request_id"] for d in body["decisions"]] == [f"r{i}" for i in range(MAX_PER_REPORT)]
    assert records.num_buffered == 0


async def test_a_full_report_does_not_wait_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "NEWS_SECONDS", 3600.0)
    records, sink = Records(Stats()), Sink()
    for i in range(3 * MAX_PER_REPORT + 1):
        records.once(decision(f"r{i}"))
    running = asyncio.create_task(reporter(records, sink).run())
    try:
        async with asyncio.timeout(20):
            while len(sink.bodies) < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    finally:
        running.cancel()
    assert [len(body["decisions"]) for body in sink.bodies] == [MAX_PER_REPORT] * 3
    assert records.num_buffered == 1


async def test_a_report_of_large_records_is_full_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "NEWS_SECONDS", 3600.0)
    records, sink = Records(Stats()), Sink()
    for i in range(40):
        large = decision(f"r{i}")
        large.model = "m" * 10_000
        records.once(large)
    running = asyncio.create_task(reporter(records, sink).run())
    try:
        async with asyncio.timeout(20):
            while records.num_buffered or len(sink.bodies) < 4:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
    sizes = [len(body["decisions"]) for body in sink.bodies]
    assert sizes == [10, 10, 10, 10]
    names = [d["request_id"] for body in sink.bodies for d in body["decisions"]]
    assert names == [f"r{i}" for i in range(40)]


async def test_statistics_are_put_together_now_and_then_and_for_the_last_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0

    def stats() -> wire.GatewayStats:
        nonlocal made
        made += 1
        return msgspec.structs.replace(made_stats(), requests_total=made)

    sink: Any = Sink()
    reporter = Reporter(sink, "g", "http://x", Records(Stats()), lambda: 1, stats)
    monkeypatch.setattr(reports, "STATISTICS_SECONDS", 3600.0)
    assert await reporter.flush()
    assert await reporter.flush()
    assert await reporter.flush(last=True)
    monkeypatch.setattr(reports, "STATISTICS_SECONDS", 0.0)
    assert await reporter.flush()
    assert [body["stats"]["requests_total"] for body in sink.bodies] == [1, 1, 2, 3]


async def test_what_a_failing_control_plane_did_not_take_keeps_its_order() -> None:
    records = Records(Stats())
    for i in range(50):
        records.end(records.begin(decision(f"r{i}")), 1.0)
    assert not await reporter(records, Sink(503)).flush()
    assert [d.request_id for d in reported(records)] == [f"r{i}" for i in range(50)]


async def test_a_request_that_ends_while_a_report_is_on_its_way_keeps_its_prompt() -> None:
    """That report has told of it as running."""
    records, record = Records(Stats()), decision("r")
    entry = records.begin(record)

    class Slow(Sink):
        async def call(self, *arguments: Any, **options: Any) -> tuple[int, bytes]:
            if not self.bodies:
                record.status = "finished_stop"
                keys, tokens = [bytes(16)], list(range(16))
                records.sampler.add_prompt(record, Recording(), bytes(32), 16, keys, tokens)
                records.end(entry, 1.0)
            return await super().call(*arguments, **options)

    sink = Slow()
    assert await reporter(records, sink).flush()
    assert await reporter(records, sink).flush()
    first, second = (body["decisions"][0] for body in sink.bodies)
    assert (first["status"], second["status"]) == ("running", "finished_stop")
    assert second["prompt"]["num_tokens"] == 16
    assert record.prompt is None  # it has arrived


async def test_the_last_report_has_all_records_that_are_there(rig: Any) -> None:
    """Those too that wait for a leg's report, which nobody will join any more."""
    await rig.start()
    records = rig.gateway.records
    entry = records.begin(decision("waits"))
    entry.expects_prefill = entry.has_agent = True
    entry.decision.status = "finished_stop"
    records.end(entry, time.monotonic())
    for i in range(MAX_PER_REPORT + 100):
        records.once(decision(f"r{i}"))
    await rig.gateway.stop(drain_seconds=1.0)
    told = rig.control_plane.decisions()
    assert told["waits"].status == "finished_stop"
    assert len(told) == MAX_PER_REPORT + 101


async def test_very_many_records_are_told_in_few_breaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes long while the machine is busy: records would come faster than they are told."""
    records, sink, breaths = Records(Stats()), Sink(), 0
    for i in range(MAX_BUFFERED):
        records.end(records.begin(decision(f"r{i}")), 1.0)
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        nonlocal breaths
        breaths += 1
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", counted)
    told = reporter(records, sink)
    while records.num_buffered:
        assert await told.flush()
    assert sum(len(body["decisions"]) for body in sink.bodies) == MAX_BUFFERED
    assert len(sink.bodies) < 15  # the control plane takes its time for each
    assert breaths < 5 * MOST_BREATHS  # as fewer wait, they are told in smaller parts again
