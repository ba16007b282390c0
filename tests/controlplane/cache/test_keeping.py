"""Pins after their node's agent has restarted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from controlplane.cache.keeping import lost_pins
from controlplane.jobs.schemas import Job

START = datetime(2026, 7, 1, tzinfo=UTC)


def at(minutes):
    return START + timedelta(minutes=minutes)


def job(number, kind, minute, nodes=("n1",), state="done", **spec):
    figures = {"blocks": 4, **({"pins": [spec["name"]]} if kind == "unpin" else {})}
    return Job(
        id=number, kind=kind, target="t", spec=spec, state=state, author="ana",
        created_at=at(minute), finished_at=at(minute) if state == "done" else None,
        result={"nodes": dict.fromkeys(nodes, figures)},
    )  # fmt: skip


def names(*jobs, joined=10, now=20):
    newest_first = sorted(jobs, key=lambda job: -job.id)
    found = lost_pins(newest_first, {"n1": at(joined), "n2": at(0)}, at(now))
    return [(pin.name, pin.node) for pin in found]


class TestLostPins:
    def test_made_before_the_agents_new_life(self):
        assert names(job(1, "pin", 5, name="p", tenant="t")) == [("p", "n1")]
        assert names(job(1, "pin", 11, name="p", tenant="t")) == []

    def test_only_on_the_node_that_restarted(self):
        pinned = job(1, "pin", 5, nodes=("n1", "n2"), name="p", tenant="t")
        assert names(pinned) == [("p", "n1")]

    def test_unpinned_since(self):
        pinned = job(1, "pin", 5, name="p", tenant="t")
        assert names(pinned, job(2, "unpin", 6, name="p")) == []
        assert names(pinned, job(2, "unpin", 6, name="q")) == [("p", "n1")]
        again = job(3, "pin", 7, name="p", tenant="t")
        assert names(pinned, job(2, "unpin", 6, name="p"), again) == [("p", "n1")]

    def test_made_again_already_or_on_its_way(self):
        pinned = job(1, "pin", 5, name="p", tenant="t")
        assert names(pinned, job(2, "pin", 12, name="p", node="n1", tenant="t")) == []
        for state in ("queued", "running", "failed"):
            assert names(pinned, job(2, "pin", 12, (), state, name="p", node="n1")) == []

    def test_over_by_its_time(self):
        pinned = job(1, "pin", 5, name="p", tenant="t", expires_at=at(15).isoformat())
        assert names(pinned, now=14) == [("p", "n1")]
        assert names(pinned, now=16) == []

    def test_what_undo_restored(self):
        entry = {"node": "n1", "name": "p", "keys": ["00"], "expires_at": None, "whole": True}
        restored = job(2, "pin", 6, restore=[entry])
        assert names(job(1, "pin", 5, name="p"), restored) == [("p", "n1")]


async def test_a_pin_is_back_when_the_agent_is(cluster, eventually):
    agent = await cluster.agent()
    worker = await agent.worker()
    keys = worker.chain("a", 4)
    await worker.store(keys)
    await cluster.heartbeat()
    await cluster.run("pin", key=keys[-1].hex(), name="sys")
    await cluster.agents.pop("n1").end()

    cluster.api.clock.advance(1)
    agent = await cluster.agent()
    worker = await agent.worker()
    await worker.store(keys)
    await cluster.heartbeat()
    assert (await cluster.api.get("/cache/pins"))["items"] == []
    await cluster.runner.step()
    await cluster.runner.wait()
    [pin] = (await cluster.api.get("/cache/pins"))["items"]
    assert (pin["name"], pin["blocks"]) == ("sys", 4)
    newest = (await cluster.api.get("/jobs"))["items"][0]
    assert (newest["kind"], newest["automatic"], newest["state"]) == ("pin", True, "done")
    assert "restarted and forgot the pin sys" in newest["reason"]
    await cluster.runner.step()
    assert len((await cluster.api.get("/jobs"))["items"]) == 2
