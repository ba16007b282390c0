"""Each operation as an operator asks for it, on real agents."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.cache import copies

DAY = 86_400


async def _node(cluster, node_id="n1", name="w1", **changes):
    agent = await cluster.agent(node_id, **changes)
    worker = await agent.worker(name=name)
    await cluster.heartbeat(node_id)
    return worker


class TestReading:
    async def test_stat_is_what_the_heartbeats_said(self, cluster):
        worker = await _node(cluster)
        await worker.store(worker.chain("a", 4))
        await cluster.heartbeat()
        found = await cluster.api.get("/cache")
        [node] = found["nodes"]
        assert (node["node"], node["used_blocks"], node["block_bytes"]) == ("n1", 4, 16384)
        [space] = found["namespaces"]
        assert (space["model"], space["weights_version"], space["workers"]) == ("tiny", "1", ["w1"])
        assert space["namespace"] == worker.namespace.hex()

    async def test_chains_over_nodes_page_by_page(self, cluster):
        one = await _node(cluster)
        two = await _node(cluster, "n2")
        for name in ("a", "b", "c"):
            await one.store(one.chain(name, 2))
            await two.store(two.chain(name, 3))
        seen, cursor = [], None
        while True:
            params = {"limit": 2, **({"cursor": cursor} if cursor else {})}
            page = await cluster.api.get("/cache/chains", **params)
            seen += [(row["node"], row["key"], row["blocks"]) for row in page["items"]]
            assert len(page["items"]) <= 2
            cursor = page["next_cursor"]
            if cursor is None:
                break
        expected = [("n1", one.chain(n, 2)[-1].hex(), 2) for n in ("c", "b", "a")]
        expected += [("n2", two.chain(n, 3)[-1].hex(), 3) for n in ("c", "b", "a")]
        assert seen == expected

    async def test_the_hottest_first(self, cluster):
        worker = await _node(cluster)
        for name, uses in (("a", 1), ("b", 3), ("c", 2)):
            await worker.store(worker.chain(name, 2))
            for use in range(uses):
                await worker.hold(worker.chain(name, 2), f"load:w:{name}{use}")
        page = await cluster.api.get("/cache/chains", order="hits", limit=2)
        assert [row["key"] for row in page["items"]] == [
            worker.chain(name, 2)[-1].hex() for name in ("b", "c")
        ]
        assert page["complete"]

    async def test_a_node_that_does_not_answer_is_named(self, cluster):
        await _node(cluster)
        await cluster.api.heartbeat("gone")
        for path in ("/cache/chains", "/cache/pins"):
            found = await cluster.api.get(path)
            assert list(found["unreachable"]) == ["gone"]
            assert "node gone (unix:/run/gone.sock): no answer" in found["unreachable"]["gone"]

    @pytest.mark.parametrize(
        ("path", "params", "status", "field"),
        [
            ("/cache/chains", {"node": "nobody"}, 404, "node_id"),
            ("/cache/chains", {"key": "xyz"}, 422, "key"),
            ("/cache/chains", {"namespace": "abc"}, 422, "namespace"),
            ("/cache/chains", {"namespace": "0123456789"}, 404, "namespace"),
            ("/cache/chains", {"cursor": "7"}, 422, "cursor"),
            ("/cache/chains", {"cursor": "n1:-7"}, 422, "cursor"),
            ("/cache/chains", {"limit": 501}, 422, "limit"),
            ("/cache/chains", {"order": "size"}, 422, "order"),
            ("/cache/chains", {"colour": "red"}, 422, "colour"),
            ("/cache/pins", {"node": "nobody"}, 404, "node_id"),
        ],
    )
    async def test_bad_queries(self, cluster, path, params, status, field):
        reply = await cluster.api.http.get(f"/api/v1{path}", params=params)
        assert (reply.status_code, reply.json()["field"]) == (status, field)
        assert reply.json()["way_out"]


class TestPin:
    async def test_pin_and_unpin_undo_each_other(self, cluster):
        worker = await _node(cluster)
        keys = worker.chain("a", 4)
        await worker.store(keys)
        pinned = await cluster.run("pin", key=keys[-1].hex(), name="sys", reason="keep it")
        assert (pinned["state"], pinned["result"]["blocks"]) == ("done", 4)
        assert pinned["undo"] == {"possible": True, "how": "unpin sys", "job_id": None}
        [pin] = (await cluster.api.get("/cache/pins"))["items"]
        assert (pin["name"], pin["node"], pin["blocks"], pin["chains"]) == ("sys", "n1", 4, 1)
        assert pin["expires_at"] is None

        undo = (await cluster.api.http.post(f"/api/v1/jobs/{pinned['id']}/undo", json={})).json()
        unpinned = await cluster.finish(undo["id"])
        assert (unpinned["kind"], unpinned["state"]) == ("unpin", "done")
        assert (await cluster.api.get("/cache/pins"))["items"] == []

        again = (await cluster.api.http.post(f"/api/v1/jobs/{unpinned['id']}/undo", json={})).json()
        restored = await cluster.finish(again["id"])
        assert (restored["kind"], restored["state"], restored["result"]["blocks"]) == (
            "pin", "done", 4,
        )  # fmt: skip
        assert [p["name"] for p in (await cluster.api.get("/cache/pins"))["items"]] == ["sys"]
        twice = await cluster.api.http.post(f"/api/v1/jobs/{pinned['id']}/undo", json={})
        assert twice.status_code == 409
        assert f"was taken back by job {undo['id']}" in twice.json()["detail"]

    async def test_a_pin_ends_by_itself(self, cluster):
        worker = await _node(cluster)
        await worker.store(worker.chain("a", 4))
        await cluster.run("pin", tenant="default", name="short", for_seconds=DAY)
        [pin] = (await cluster.api.get("/cache/pins"))["items"]
        assert pin["expires_at"].startswith("2026-07-02T")

    async def test_over_the_share_nothing_stays_pinned_anywhere(self, cluster):
        one = await _node(cluster)
        two = await _node(cluster, "n2")
        await one.store(one.chain("a", 2))
        await two.store(two.chain("b", 20))
        job = await cluster.run("pin", tenant="default", name="all", max_share=0.2)
        assert job["state"] == "failed"
        assert "node n2" in job["error"]
        assert "max_share = 0.2" in job["error"]
        assert (await cluster.api.get("/cache/pins"))["items"] == []

    async def test_a_name_is_one_pins(self, cluster):
        worker = await _node(cluster)
        await worker.store(worker.chain("a", 2))
        await worker.store(worker.chain("b", 2))
        await cluster.run("pin", key=worker.chain("a", 2)[-1].hex(), name="p")
        job = await cluster.run("pin", key=worker.chain("b", 2)[-1].hex(), name="p")
        assert job["state"] == "failed"
        assert "perilune cache unpin --name p" in job["error"]
        [pin] = (await cluster.api.get("/cache/pins"))["items"]
        assert pin["keys"] == [worker.chain("a", 2)[-1].hex()]

    async def test_nothing_to_pin_or_unpin_fails(self, cluster):
        await _node(cluster)
        pin = await cluster.run("pin", key="0" * 32)
        assert (pin["state"], pin["error"][:7]) == ("failed", "No node")
        unpin = await cluster.run("unpin", name="nobody")
        assert unpin["state"] == "failed"
        assert "perilune cache pins" in unpin["error"]

    async def test_unpin_by_what_is_held(self, cluster):
        worker = await _node(cluster)
        for name in ("a", "b"):
            await worker.store(worker.chain(name, 2))
            await cluster.run("pin", key=worker.chain(name, 2)[-1].hex(), name=name)
        await cluster.run("unpin", key=worker.chain("a", 2)[0].hex())
        assert [p["name"] for p in (await cluster.api.get("/cache/pins"))["items"]] == ["b"]


class TestPurge:
    async def test_a_namespace_and_what_it_says(self, cluster):
        worker = await _node(cluster)
        await worker.store(worker.chain("a", 4))
        await worker.store(worker.chain("b", 5))
        digest = worker.namespace.hex()
        empty = await cluster.post("purge", 422, tenant="")
        assert "tenant" in str(empty)
        refused = await cluster.post("purge", 422, namespace=digest)
        assert refused["field"] == "confirm"
        assert "cannot be undone" in refused["detail"]
        assert refused["way_out"].endswith(f": {digest[:12]}")
        wrong = await cluster.post("purge", 422, namespace=digest, confirm="yes")
        assert wrong["value"] == "yes"
        job = await cluster.run("purge", namespace=digest[:10], confirm=digest[:12])
        assert (job["state"], job["result"]["blocks"]) == ("done", 9)
        assert job["result"]["confirmed"] is True
        assert job["progress"]["done"] == job["progress"]["total"] == 9
        assert not job["undo"]["possible"]
        assert (await worker.client.stats()).used_blocks == 0
        undo = await cluster.api.http.post(f"/api/v1/jobs/{job['id']}/undo", json={})
        assert undo.status_code == 409
        assert "cannot be undone" in undo.json()["detail"]

    async def test_one_chain_needs_no_confirmation_several_do(self, cluster):
        worker = await _node(cluster)
        head = worker.chain("a", 2)
        await worker.store(head)
        await worker.store(worker.branch(head[-1], "x", 2), head[-1])
        await worker.store(worker.branch(head[-1], "y", 2), head[-1])
        refused = await cluster.post("purge", 422, key=head[0].hex())
        assert refused["way_out"].endswith(head[0].hex())
        one = worker.branch(head[-1], "x", 2)[0]
        job = await cluster.run("purge", key=one.hex())
        assert job["result"]["blocks"] == 2
        job = await cluster.run("purge", key=head[0].hex(), confirm=head[0].hex())
        assert job["result"]["blocks"] == 4

    async def test_a_tenant_on_one_node(self, cluster):
        one = await _node(cluster)
        two = await _node(cluster, "n2")
        for worker in (one, two):
            await worker.store(worker.chain("a", 3, "acme"), tenant="acme")
            await worker.store(worker.chain("b", 2))
        job = await cluster.run("purge", node="n1", tenant="acme", confirm="n1/acme")
        assert (job["target"], job["result"]["blocks"]) == ("n1/acme", 3)
        assert job["progress"]["done"] == job["progress"]["total"] == 3
        assert await two.held(two.chain("a", 3, "acme")) == 3
        rest = await cluster.run("purge", tenant="default", confirm="default")
        assert rest["result"]["blocks"] == 4

    async def test_running_requests_keep_what_they_read(self, cluster):
        worker = await _node(cluster)
        keys = worker.chain("a", 4)
        await worker.store(keys)
        before = await worker.load(keys)
        job = await cluster.run("purge", node="n1", confirm="n1")
        assert (job["result"]["blocks"], job["result"]["in_use"]) == (4, 4)
        assert await worker.held(keys) == 0
        assert None not in before
        assert (await worker.client.stats()).pinned_blocks == 4
        await worker.client.release("load:w:1")
        stats = await worker.client.stats()
        assert (stats.pinned_blocks, stats.used_blocks) == (0, 0)

    async def test_pins_are_in_the_way_unless_told(self, cluster):
        worker = await _node(cluster)
        await worker.store(worker.chain("a", 4))
        await cluster.run("pin", tenant="default", name="keep")
        job = await cluster.run("purge", node="n1", confirm="n1")
        assert (job["result"]["blocks"], job["result"]["kept_by_pins"]) == (0, 4)
        assert job["result"]["confirmed"] is False
        job = await cluster.run("purge", node="n1", confirm="n1", include_pinned=True)
        assert (job["result"]["blocks"], job["result"]["confirmed"]) == (4, True)
        assert (await cluster.api.get("/cache/pins"))["items"] == []


class TestPrefetch:
    async def test_what_is_in_memory_stays_there(self, cluster):
        worker = await _node(cluster)
        keys = worker.chain("a", 4)
        await worker.store(keys)
        job = await cluster.run("prefetch", key=keys[-1].hex())
        assert (job["state"], job["result"]["in_memory"], job["result"]["promoted"]) == (
            "done", 4, 0,
        )  # fmt: skip
        assert (await worker.client.stats()).pinned_blocks == 0

    async def test_from_ssd_into_memory(self, cluster, eventually, block_content):
        folder = cluster.folder / "ssd"
        folder.mkdir()
        worker = await _node(
            cluster, slab_bytes=16 * 20480, ssd_path=folder, ssd_bytes=64 * 20480
        )  # fmt: skip
        keys = worker.chain("a", 8)
        fillers = (worker.chain(f"f{number:03}", 1) for number in range(1000))

        async def has_ssd():
            tiers = (await worker.client.stats()).tiers
            return [(tier.tier, tier.state) for tier in tiers[1:]] == [("ssd", "ok")]

        await eventually(has_ssd, 60)
        await worker.store(keys)

        async def left_memory():
            """Others come, one by one: the disk keeps up with what they push out."""
            await worker.store(next(fillers))
            found = await worker.client.lookup(worker.namespace, keys)
            return found.num_on_disk >= 4

        await eventually(left_memory, 60)
        listed = await cluster.api.get("/cache/chains", key=keys[-1].hex())
        assert listed["items"][0]["blocks_on_disk"] >= 4
        job = await cluster.run("prefetch", key=keys[-1].hex())
        assert (job["state"], job["result"]["left_on_disk"]) == ("done", 0), job
        assert job["result"]["promoted"] >= 4
        assert await worker.held(keys) == 8
        loaded = await worker.load(keys)
        assert loaded == [block_content(key, worker.spec.block_bytes) for key in keys]

    async def test_no_such_chain(self, cluster):
        await _node(cluster)
        job = await cluster.run("prefetch", tenant="nobody")
        assert (job["state"], job["error"][:7]) == ("failed", "No node")


class TestReplicate:
    async def test_a_chain_arrives_whole(self, cluster):
        here = await _node(cluster)
        there = await _node(cluster, "n2")
        keys = here.chain("a", 20, "acme")
        await here.store(keys, tenant="acme")
        job = await cluster.run("replicate", source="n1", destination="n2", key=keys[-1].hex())
        assert (job["state"], job["result"]["blocks"], job["error"]) == ("done", 20, "")
        assert job["result"]["bytes"] == 20 * 16384
        assert job["progress"]["done"] == job["progress"]["total"] == 20
        assert await there.load(keys) == await here.load(keys)
        [row] = (await cluster.api.get("/cache/chains", node="n2"))["items"]
        assert row["tenant"] == "acme"
        for worker in (here, there):
            await worker.client.release("load:w:1")
            stats = await worker.client.stats()
            assert (stats.pinned_blocks, stats.num_owners) == (0, 0)
        again = await cluster.run("replicate", source="n1", destination="n2", key=keys[-1].hex())
        assert (again["result"]["blocks"], again["result"]["held_already"]) == (0, 20)

    async def test_the_hottest_of_a_tenant_at_a_bounded_rate(self, cluster):
        here = await _node(cluster)
        there = await _node(cluster, "n2")
        for name, uses in (("a", 0), ("b", 3), ("c", 2)):
            await here.store(here.chain(name, 2))
            for use in range(uses):
                await here.hold(here.chain(name, 2), f"load:w:{name}{use}")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        job = await cluster.run(
            "replicate", source="n1", destination="n2", tenant="default", hottest=2,
            mib_per_second=0.25,
        )  # fmt: skip
        assert job["result"]["blocks"] == 4
        assert loop.time() - begun > 0.2  # 64 KiB at 256 KiB/s
        assert [await there.held(there.chain(name, 2)) for name in ("a", "b", "c")] == [0, 2, 2]

    async def test_a_destination_without_room_says_so(self, cluster, monkeypatch):
        monkeypatch.setattr(copies, "ROOM_SECONDS", 0.3)
        here = await _node(cluster)
        there = await _node(cluster, "n2", slab_bytes=4 * 20480)
        await there.store(there.chain("z", 2))
        await there.hold(there.chain("z", 2))
        keys = here.chain("a", 6)
        await here.store(keys)
        job = await cluster.run("replicate", source="n1", destination="n2", key=keys[-1].hex())
        assert (job["result"]["blocks"], job["result"]["no_room"]) == (2, 4)
        assert await there.held(keys) == 2

    async def test_a_destination_that_does_not_serve_the_model(self, cluster):
        here = await _node(cluster)
        keys = here.chain("a", 2)
        await here.store(keys)
        await cluster.agent("n2")
        await cluster.heartbeat("n2")
        job = await cluster.run("replicate", source="n1", destination="n2", key=keys[-1].hex())
        assert job["state"] == "failed"
        assert "no worker has brought it to this agent" in job["error"]

    async def test_damaged_bytes_are_not_copied(self, cluster):
        here = await _node(cluster)
        there = await _node(cluster, "n2")
        keys = here.chain("a", 4)
        await here.store(keys)
        for slot in range(here.slab.num_slots):
            header = here.slab.read_header(slot)
            if header is not None and header.key == keys[2]:
                here.slab.payload(slot)[0:1] = b"\xff"
        job = await cluster.run("replicate", source="n1", destination="n2", key=keys[-1].hex())
        assert (job["result"]["blocks"], job["result"]["missing"]) == (2, 2)
        assert await there.held(keys) == 2
        assert (await here.client.stats()).corrupt_total == 1


class TestUnreachable:
    async def test_the_job_names_node_endpoint_and_way_out(self, cluster):
        worker = await _node(cluster)
        await worker.store(worker.chain("a", 4))
        await cluster.api.heartbeat("gone")
        job = await cluster.run("purge", tenant="default", confirm="default")
        assert (job["state"], job["result"]["blocks"]) == ("failed", 4)
        assert "node gone (unix:/run/gone.sock): no answer" in job["error"]
        assert "perilune get nodes" in job["error"]
        pin = await cluster.run("pin", node="gone", tenant="default")
        assert "node gone" in pin["error"]

    async def test_an_agent_that_ends_in_the_middle(self, cluster):
        here = await _node(cluster)
        await _node(cluster, "n2")
        keys = here.chain("a", 30)
        await here.store(keys)
        asked = await cluster.post(
            "replicate", source="n1", destination="n2", key=keys[-1].hex(), mib_per_second=1
        )
        await cluster.runner.step()
        async with asyncio.timeout(20):
            while not (await cluster.job(asked["id"]))["progress"]["done"]:
                await asyncio.sleep(0.01)
        await cluster.agents.pop("n1").end()
        await asyncio.wait_for(cluster.runner.wait(), 30)
        job = await cluster.job(asked["id"])
        assert job["state"] == "failed"
        assert "node n1" in job["error"]
        assert 0 < job["result"]["blocks"] < 30


@pytest.mark.parametrize(
    ("verb", "body", "status", "field"),
    [
        ("pin", {}, 422, "body"),
        ("pin", {"key": "zz"}, 422, "key"),
        ("pin", {"key": "0" * 32, "max_share": 0.6}, 422, "max_share"),
        ("pin", {"key": "0" * 32, "max_share": 0}, 422, "max_share"),
        ("pin", {"key": "0" * 32, "for_seconds": 0.5}, 422, "for_seconds"),
        ("pin", {"key": "0" * 32, "name": "A b"}, 422, "name"),
        ("pin", {"key": "0" * 32, "node": "nobody"}, 404, "node_id"),
        ("pin", {"namespace": "deadbeef"}, 404, "namespace"),
        ("pin", {"tenant": "t", "colour": 1}, 422, "colour"),
        ("unpin", {"node": "n1"}, 422, "body"),
        ("purge", {}, 422, "body"),
        ("purge", {"node": "nobody"}, 404, "node_id"),
        ("purge", {"node": "n1"}, 422, "confirm"),
        ("prefetch", {"tenant": "t", "hottest": 0}, 422, "hottest"),
        ("replicate", {"source": "n1", "destination": "n1", "tenant": "t"}, 422, "body"),
        ("replicate", {"source": "n1", "destination": "n9", "tenant": "t"}, 404, "node_id"),
        ("replicate", {"source": "n1", "tenant": "t"}, 422, "destination"),
        (
            "replicate",
            {"source": "n1", "destination": "n2", "tenant": "t", "mib_per_second": 0},
            422,
            "mib_per_second",
        ),
    ],
)
async def test_what_cannot_be_asked_for(api, verb, body, status, field):
    await api.heartbeat("n1")
    await api.heartbeat("n2")
    reply = await api.http.post(f"/api/v1/cache/{verb}", json=body)
    assert (reply.status_code, reply.json().get("field", "")) == (status, field), reply.text
    assert reply.json()["way_out"]
    assert (await api.get("/jobs"))["items"] == []
    without = await api.anonymous.post(f"/api/v1/cache/{verb}", json=body)
    assert without.status_code == 401
