"""Jobs: their life, their bounds, and what a restart of the control plane makes of them."""

from __future__ import annotations

import asyncio
import json

import pytest
from cutting import cut

from controlplane.cache import operations
from controlplane.cache.context import OperationError
from controlplane.jobs import service
from controlplane.jobs.service import NewJob, Outcome
from controlplane.loops import jobs as loop
from controlplane.loops.jobs import MAX_RUNNING, JobRunner


def new_job(kind="purge", **changes):
    values = {"kind": kind, "target": "t", "spec": {"tenant": "t"}, "author": "ana", **changes}
    return NewJob(**values)


async def queue(api, count=1, **changes):
    jobs = []
    for _ in range(count):
        async with api.plane.db.write() as tx:
            jobs.append(await api.plane.jobs.create(tx, new_job(**changes)))
    return jobs


@pytest.fixture
async def runner(both):
    made = JobRunner(both.plane)
    yield made
    await made.close()


@pytest.fixture
def operation(monkeypatch):
    """Jobs that do what the test says: `steps` are awaited one after another."""

    class Stub:
        def __init__(self):
            self.gate = asyncio.Event()
            self.running = 0
            self.most = 0
            self.contexts = []

        async def __call__(self, context):
            self.contexts.append(context)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                context.expect(10)
                context.progress(4, "node n1")
                context.by_node["n1"] = {"blocks": 4}
                await self.gate.wait()
                return Outcome({"blocks": 10}, {"how": "no way back"})
            finally:
                self.running -= 1

    stub = Stub()
    monkeypatch.setitem(operations.OPERATIONS, "purge", stub)
    return stub


class TestLife:
    async def test_queued_running_done(self, both, runner, operation):
        [job] = await queue(both, reason="tidy up")
        assert (job.id, job.state) == (1, "queued")
        await runner.step()
        await asyncio.sleep(0)
        shown = await both.get("/jobs/1")
        assert shown["state"] == "running"
        assert shown["progress"] == {"done": 4, "total": 10, "unit": "blocks", "note": "node n1"}
        operation.gate.set()
        await runner.wait()
        shown = await both.get("/jobs/1")
        assert (shown["state"], shown["result"]) == ("done", {"blocks": 10})
        assert shown["undo"] == {"possible": False, "how": "no way back", "job_id": None}
        assert shown["finished_at"]
        verbs = [(row["verb"], row["target"]) for row in (await both.get("/audit"))["items"]]
        assert verbs == [("job.done", "job/1"), ("cache.purge", "t")]

    async def test_a_few_run_at_a_time_the_oldest_first(self, both, runner, operation):
        await queue(both, MAX_RUNNING + 3)
        for _ in range(3):
            await runner.step()
            await asyncio.sleep(0)
        assert operation.running == MAX_RUNNING
        operation.gate.set()
        while both.plane.jobs.live:
            await runner.step()
            await asyncio.sleep(0)
        assert operation.most == MAX_RUNNING
        assert [c.job_id for c in operation.contexts] == list(range(1, MAX_RUNNING + 4))

    async def test_what_goes_wrong_is_said(self, both, runner, monkeypatch):
        async def fails(context):
            context.by_node["n1"] = {"blocks": 1}
            raise OperationError("No such thing. Look elsewhere.")

        async def breaks(context):
            raise ZeroDivisionError("oops")

        for operation, words in ((fails, "No such thing."), (breaks, "ZeroDivisionError: oops")):
            monkeypatch.setitem(operations.OPERATIONS, "purge", operation)
            [job] = await queue(both)
            await runner.step()
            await runner.wait()
            shown = await both.get(f"/jobs/{job.id}")
            assert shown["state"] == "failed"
            assert words in shown["error"]

    async def test_a_job_that_takes_too_long_is_ended(self, both, operation):
        runner = JobRunner(both.plane, job_seconds=0.05)
        await queue(both)
        await runner.step()
        await runner.wait()
        shown = await both.get("/jobs/1")
        assert (shown["state"], shown["result"]) == ("failed", {"nodes": {"n1": {"blocks": 4}}})
        assert "Select less at once" in shown["error"]

    async def test_listeners_are_told(self, both, runner, operation):
        subscription = both.plane.bus.subscribe(None)
        operation.gate.set()
        await queue(both)
        await runner.step()
        await runner.wait()
        frames = []
        while not subscription.queue.empty():
            frames.append(subscription.queue.get_nowait().decode())
        jobs = [
            json.loads(frame.split("data: ")[1]) for frame in frames if "\nevent: job\n" in frame
        ]
        assert [job["state"] for job in jobs] == ["queued", "running", "running", "done"]

    async def test_its_end_is_written_once_the_database_is_back(
        self, both, runner, operation, monkeypatch
    ):
        monkeypatch.setattr(loop, "RECORD_PAUSES_SECONDS", (0.01, 0.01, 0.01))
        operation.gate.set()
        await queue(both)
        finish, failures = both.plane.jobs.finish, [TimeoutError(), OSError("gone")]

        async def finish_later(*arguments):
            if failures:
                raise failures.pop()
            await finish(*arguments)

        monkeypatch.setattr(both.plane.jobs, "finish", finish_later)
        await runner.step()
        await runner.wait()
        shown = await both.get("/jobs/1")
        assert (shown["state"], shown["attempts"]) == ("done", 1)


class TestCancel:
    async def test_one_that_waits_ends_at_once(self, both, runner, operation):
        await queue(both)
        reply = await both.http.delete("/api/v1/jobs/1", params={"reason": "wrong one"})
        assert (reply.status_code, reply.json()["state"]) == (202, "cancelled")
        await runner.step()
        assert operation.contexts == []
        [cancel, _] = (await both.get("/audit"))["items"]
        assert (cancel["verb"], cancel["target"], cancel["reason"]) == (
            "job.cancel", "job/1", "wrong one",
        )  # fmt: skip

    async def test_one_that_runs_stops_and_shows_what_it_did(self, both, runner, operation):
        await queue(both)
        await runner.step()
        await asyncio.sleep(0)
        reply = await both.http.delete("/api/v1/jobs/1")
        assert (reply.status_code, reply.json()["cancelling"]) == (202, True)
        await asyncio.wait_for(runner.wait(), 20)
        shown = await both.get("/jobs/1")
        assert (shown["state"], shown["result"]) == ("cancelled", {"nodes": {"n1": {"blocks": 4}}})
        again = await both.http.delete("/api/v1/jobs/1")
        assert again.status_code == 409
        assert "is cancelled already" in again.json()["detail"]

    async def test_unknown_and_impossible_ids(self, both):
        for path, status in (("7", 404), ("0", 422), ("x", 422), (str(2**40), 422)):
            assert (await both.http.get(f"/api/v1/jobs/{path}")).status_code == status
            assert (await both.http.delete(f"/api/v1/jobs/{path}")).status_code == status
            undo = await both.http.post(f"/api/v1/jobs/{path}/undo", json={})
            assert undo.status_code == status

    async def test_a_job_that_runs_cannot_be_taken_back(self, both, runner, operation):
        await queue(both)
        await runner.step()
        reply = await both.http.post("/api/v1/jobs/1/undo", json={})
        assert (reply.status_code, reply.json()["way_out"]) == (409, "Cancel it.")


class TestRestart:
    async def test_it_is_queued_again_and_begins_anew(self, both, run_api, operation):
        await queue(both)
        runner = JobRunner(both.plane)
        await runner.step()
        await asyncio.sleep(0)
        await runner.close()  # the control plane ends: nobody cancelled the job
        async with run_api(both.plane.settings) as second:
            shown = await second.get("/jobs/1")
            assert (shown["state"], shown["attempts"]) == ("queued", 1)
            runner = JobRunner(second.plane)
            operation.gate.set()
            await runner.step()
            await runner.wait()
            shown = await second.get("/jobs/1")
            assert (shown["state"], shown["attempts"]) == ("done", 2)
            assert operation.contexts[-1].attempts == 2

    async def test_after_a_few_attempts_it_fails_honestly(self, both, run_api, operation):
        await queue(both)
        for _ in range(service.MAX_ATTEMPTS):
            async with run_api(both.plane.settings) as life:
                runner = JobRunner(life.plane)
                await runner.step()
                await asyncio.sleep(0)
                await runner.close()
        async with run_api(both.plane.settings) as last:
            runner = JobRunner(last.plane)
            await runner.step()
            assert len(operation.contexts) == service.MAX_ATTEMPTS
            shown = await last.get("/jobs/1")
            assert shown["state"] == "failed"
            assert "ended 3 times while it ran" in shown["error"]

    async def test_ended_jobs_stay(self, both, run_api, runner, operation):
        operation.gate.set()
        await queue(both)
        await runner.step()
        await runner.wait()
        before = await both.get("/jobs/1")
        async with run_api(both.plane.settings) as second:
            assert await second.get("/jobs/1") == before
            assert second.plane.jobs.live == {}


class TestBounds:
    async def test_too_many_wait(self, both, monkeypatch):
        monkeypatch.setattr(service, "MAX_LIVE", 3)
        await queue(both, 3)
        reply = await both.http.post("/api/v1/cache/unpin", json={"name": "p"})
        assert reply.status_code == 503
        assert "perilune jobs cancel" in reply.json()["way_out"]
        assert len((await both.get("/jobs"))["items"]) == 3

    async def test_old_ones_are_forgotten_but_not_while_they_live(
        self, both, runner, operation, monkeypatch
    ):
        monkeypatch.setattr(service, "KEEP_JOBS", 2)
        await queue(both)
        await runner.step()  # the first runs on
        await asyncio.sleep(0)
        monkeypatch.setitem(operations.OPERATIONS, "pin", _ends_at_once)
        await queue(both, 4, kind="pin")
        while len(both.plane.jobs.live) > 1:
            await runner.step()
            await asyncio.sleep(0)
        await both.plane.prune()
        assert [job["id"] for job in (await both.get("/jobs"))["items"]] == [5, 4, 1]

    async def test_pages_and_filters(self, both):
        await queue(both, 3)
        await queue(both, 2, kind="pin")
        page = await both.get("/jobs", limit=2)
        rest = await both.get("/jobs", limit=5, cursor=page["next_cursor"])
        assert [job["id"] for job in page["items"] + rest["items"]] == [5, 4, 3, 2, 1]
        assert rest["next_cursor"] is None
        assert len((await both.get("/jobs", kind="pin"))["items"]) == 2
        assert (await both.get("/jobs", state="failed"))["items"] == []
        assert (await both.http.get("/api/v1/jobs?state=odd")).status_code == 422


async def _ends_at_once(context):
    return Outcome()


class TestCutShort:
    async def test_a_pass_that_is_cut_short_anywhere_loses_no_job(self, both, runner, operation):
        for at in range(1, 100):
            [job] = await queue(both)
            went_on = await cut(runner.step(), at)
            async with asyncio.timeout(20):
                while operation.running == 0:
                    await runner.step()
                    await asyncio.sleep(0.01)
            operation.gate.set()
            await runner.wait()
            operation.gate.clear()
            assert (await both.get(f"/jobs/{job.id}"))["state"] == "done", f"cut at wait {at}"
            if not went_on:
                break
        assert at > 4, "it was cut at hardly any place"

    async def test_cancelled_while_its_end_is_written(self, api, operation):
        """Too late: it is recorded as it ended, and is not cancelling for ever."""
        runner = JobRunner(api.plane)
        [job] = await queue(api)
        await runner.step()
        async with api.plane.db.write() as tx:
            operation.gate.set()
            async with asyncio.timeout(20):
                while operation.running or api.plane.jobs.live[job.id].stop is not None:
                    await asyncio.sleep(0.01)
            await api.plane.jobs.cancel(tx, job.id, actor="ana", request_id="", reason="")
        await runner.wait()
        assert (await api.get(f"/jobs/{job.id}"))["state"] == "done"
        assert not api.plane.jobs.live

    async def test_cancelled_before_its_first_step(self, both, runner, operation):
        [job] = await queue(both)
        await runner.step()
        async with both.plane.db.write() as tx:
            await both.plane.jobs.cancel(tx, job.id, actor="ana", request_id="", reason="")
        await runner.wait()
        assert (await both.get(f"/jobs/{job.id}"))["state"] == "cancelled"
