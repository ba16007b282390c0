"""Statistics from reports to series, on both databases; CASES E06, E07 and E32."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import timedelta

import pytest

from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS
from controlplane.stats import repository
from controlplane.stats import service as stats_service
from controlplane.stats.bucket import new_bucket
from controlplane.stats.repository import Point

NONE = [0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1)


def histogram(**counts):
    values = list(NONE)
    for index, count in counts.items():
        values[int(index[1:])] = count
    return {"counts": values, "sum_seconds": 1.0}


async def second(api, **stats):
    await api.report(**stats)
    api.second()


async def test_reports_become_series(both):
    for requests in (0, 2, 5, 5):
        await second(both, requests_total=requests, ttft=histogram(b3=requests), in_flight=requests)
    reply = await both.get(
        "/stats/series", metric="requests,running,ttft_p95_seconds", window=4, step=1
    )
    values = {s["metric"]: s["values"] for s in reply["series"]}
    assert values["requests"] == [2.0, 3.0, 0.0, None] or values["requests"][-3:-1] == [3.0, 0.0]
    assert values["ttft_p95_seconds"][-2] is None, "no observation is no percentile"
    gateway = await both.get(
        "/stats/series", metric="running", source="gateway:*", window=4, step=1
    )
    assert gateway["series"][0]["source"] == "gateway:gw-1"


async def test_what_is_written_reads_the_same(both):
    for requests in range(12):
        await second(both, requests_total=requests)
    query = {"metric": "requests", "window": 30, "step": 10}
    before = await both.get("/stats/series", **query)
    await both.plane.save()
    assert await both.get("/stats/series", **query) == before
    fine = {"metric": "requests", "window": 60, "step": 1}
    total = sum(v for v in (await both.get("/stats/series", **fine))["series"][0]["values"] if v)
    assert total == 11


async def test_a_restart_of_the_control_plane_keeps_the_window(both, run_api):
    for requests in range(15):
        await second(both, requests_total=requests, prompt_tokens_total=10 * requests)
    await both.plane.save()
    before = await both.get("/overview")
    async with run_api(both.plane.settings) as again:
        again.clock.advance(15)
        again.plane.stats.window = type(again.plane.stats.window)()
        async with again.plane.db.read() as session:
            await again.plane.stats.load(session)
        after = await again.get("/overview")
        assert after["prompt_tokens"] == before["prompt_tokens"] == 140


async def test_e06_a_restarted_gateway_gives_a_marked_gap(api):
    start = api.clock.now()
    for requests in (0, 100):
        await second(api, requests_total=requests)
    later = start + timedelta(seconds=2)
    for requests in (150, 151):  # the new life is already past the old value
        await second(api, requests_total=requests, started_at=later)
    reply = await api.get(
        "/stats/series", metric="requests", source="gateway:gw-1", window=5, step=1
    )
    row = reply["series"][0]
    assert all(value is None or value >= 0 for value in row["values"])
    assert row["values"][2:4] == [None, 1.0] or row["values"][1:3] == [None, 1.0]
    assert "R" in row["marks"]


async def test_e07_no_traffic_is_null_and_no_alarm(api):
    for _ in range(3):
        await second(api)
    overview = await api.get("/overview")
    assert overview["hit_ratio"] is None
    assert overview["rejected_ratio"] is None
    assert overview["slo_attainment_ratio"] is None
    assert overview["requests_per_minute"] == 0
    assert [a for a in overview["attention"] if "reject" in a["text"] or "hit" in a["text"]] == []


async def test_e32_a_sample_that_is_no_number_is_refused(api, bodies):
    await second(api, requests_total=100)
    body = {"url": "u", "pid": 1, "view_revision": 0, "stats": bodies["gateway"](requests_total=1)}
    text = __import__("json").dumps(body).replace('"requests_total": 1', '"requests_total": NaN')
    refused = await api.http.post(
        "/api/v1/gateways/gw-1/report", content=text, headers={"Content-Type": "application/json"}
    )
    assert refused.status_code in {400, 422}
    await second(api, requests_total=105)
    reply = await api.get(
        "/stats/series", metric="requests", source="gateway:gw-1", window=3, step=1
    )
    assert 5.0 in reply["series"][0]["values"]


async def test_e34_one_request_is_one(api):
    await second(api, requests_total=0)
    await second(api, requests_total=1)
    for _ in range(58):
        await second(api, requests_total=1)
    overview = await api.get("/overview", window=60)
    assert overview["requests_per_minute"] == 1
    assert overview["window_seconds"] == 60


async def test_nodes_make_the_cluster(api, bodies):
    incarnation = int(api.clock.now().timestamp() * 1000)
    for step in range(3):
        for node in ("n1", "n2"):
            await api.heartbeat(
                node,
                incarnation,
                prompt_tokens_total=100 * step,
                hit_tokens_total=60 * step,
                evicted_by_cause={"capacity": 4 * step},
                shm_bytes_by_pair={"p1>d1": 1000 * step} if node == "n1" else {},
                shm_seconds_by_pair={"p1>d1": 0.1 * step} if node == "n1" else {},
            )
        api.second()
    overview = await api.get("/overview")
    assert (overview["prompt_tokens"], overview["hit_tokens"]) == (400, 240)
    assert overview["hit_ratio"] == pytest.approx(0.6)
    assert (overview["used_bytes"], overview["capacity_bytes"]) == (2 * 10_240, 2 * 102_400)
    cache = await api.get("/cache/stats", window=60)
    totals = {
        (s["source"], s["metric"]): sum(v for v in s["values"] if v is not None)
        for s in cache["series"]
    }
    assert totals["node:n1", "hit_tokens"] == 120
    assert totals["cluster", "evicted_capacity"] == 16
    matrix = await api.get("/transfers/matrix")
    assert [(p["source"], p["destination"], p["bytes"]) for p in matrix["pairs"]] == [
        ("p1", "d1", 2000)
    ]


async def test_a_silent_node_is_a_gap_not_a_zero(api):
    incarnation = int(api.clock.now().timestamp() * 1000)
    await api.heartbeat("n1", incarnation)
    for _ in range(6):
        api.second()
    reply = await api.get("/stats/series", metric="used_blocks", source="node:n1", window=6, step=1)
    values = reply["series"][0]["values"]
    assert 10.0 in values
    assert values[-2] is None


async def test_histograms_of_another_shape_are_refused(api):
    refused = await api.report(ttft={"counts": [1, 2], "sum_seconds": 0.1})
    assert (refused.status_code, refused.json()["field"]) == (422, "stats.ttft.counts")
    assert (await api.get("/gateways"))["items"] == []


async def test_an_older_gateway_of_the_same_name_is_refused(api):
    await api.report()
    refused = await api.report(started_at=api.clock.now() - timedelta(hours=1))
    assert (refused.status_code, refused.json()["field"]) == (409, "stats.started_at")


async def test_an_id_that_another_gateway_took_is_given_back_when_that_one_is_gone(api):
    older = api.clock.now() - timedelta(hours=1)
    assert (await api.report(started_at=older, requests_total=5)).status_code == 200
    assert (await api.report(started_at=api.clock.now())).status_code == 200
    api.clock.advance(2.9)  # it may still report
    assert (await api.report(started_at=older)).status_code == 409
    api.clock.advance(0.2)
    again = await api.report(started_at=older, requests_total=6)
    assert again.status_code == 200, again.text
    (row,) = (await api.get("/gateways"))["items"]
    assert (row["state"], row["stats"]["requests_total"]) == ("ready", 6)
    assert (await api.report(started_at=api.clock.now())).status_code == 200  # a restart, at once


async def test_gateways_go_stale_and_lost_and_lose_their_workers_load(api, bodies):
    await api.heartbeat("n1", workers=[bodies["worker"]("p1")])
    await api.report(workers={"p1": {"running": 3, "waiting": 1}})
    worker = await api.get("/workers/p1")
    assert (worker["running"], worker["waiting"]) == (3, 1)
    for _ in range(12):
        api.second()
        await api.heartbeat("n1", workers=[bodies["worker"]("p1")])
    assert (await api.get("/gateways/gw-1"))["state"] == "lost"
    assert (await api.get("/workers/p1"))["running"] is None


async def test_old_statistics_are_pruned(both):
    await second(both, requests_total=1)
    await both.plane.save()
    both.clock.advance(2 * 86_400)
    await both.plane.prune()
    reply = await both.get(
        "/stats/series",
        metric="requests",
        window=60,
        step=1,
        end=both.clock.now().timestamp() - 2 * 86_400,
    )
    assert reply["series"] == []


async def test_overview_says_what_changed_and_since_when(api):
    await api.heartbeat("n1")
    await api.http.put(
        "/api/v1/policies/slo/default",
        json={"spec": {"max_ttft_ms": 1}, "reason": "tighter"},
        headers={"If-Match": '"1"', "X-Perilune-Actor": "ana"},
    )
    overview = await api.get("/overview")
    texts = [change["text"] for change in overview["changes"]]
    assert "policy slo/default r1 -> r2" in texts
    assert "n1 joined" in texts
    assert overview["slo_max_ttft_seconds"] == 0.001
    for _ in range(5):
        api.second()
    first = (await api.get("/overview"))["attention"][0]
    api.second()
    second_look = (await api.get("/overview"))["attention"][0]
    assert first["opens"] == second_look["opens"] == "node/n1"
    assert first["since"] == second_look["since"]
    api.clock.advance(3600)
    assert (await api.get("/overview"))["changes"] == []


class TestBacklog:
    """The database was away for a while: what waits is written a piece at a time."""

    @pytest.fixture
    def service(self, both, monkeypatch):
        monkeypatch.setattr(stats_service, "POINTS_A_WRITE", 10)
        made = stats_service.StatsService(both.clock)
        made._waiting = deque(self.points(0, 45), maxlen=45)
        return made

    @staticmethod
    def points(first, number):
        return [Point(1, "cluster", at, new_bucket()) for at in range(first, first + number)]

    @staticmethod
    async def written(api):
        async with api.plane.db.read() as session:
            return [p.at for p in await repository.between(session, 1, None, 0, 1000)]

    async def test_a_pass_that_is_cut_short_has_done_its_part(self, both, service, eventually):
        task = asyncio.create_task(service.flush(both.plane.db))
        async with asyncio.timeout(20):
            while len(service._waiting) == 45:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await eventually(lambda: not both.plane.db._ending)
        assert 0 < len(service._waiting) < 45
        await service.flush(both.plane.db)
        assert not service._waiting
        assert await self.written(both) == list(range(45))

    async def test_what_comes_meanwhile_is_not_taken_for_written(self, both, service, monkeypatch):
        save = repository.save

        async def slow_save(session, points):
            monkeypatch.setattr(repository, "save", save)
            service._waiting.extend(self.points(45, 15))  # 0 to 14 make room
            await save(session, points)

        monkeypatch.setattr(repository, "save", slow_save)
        while service._waiting:
            await service.flush(both.plane.db)
        assert await self.written(both) == [*range(10), *range(15, 60)]
