"""The doctor over REST and from a terminal, against real agents."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from console import cli
from controlplane.doctor.plan import MAX_PAIRS, nodes_of, pairs_of
from controlplane.doctor.schemas import DoctorRun
from workers.agent.heartbeat import to_jsonable
from workers.client import AsyncAgentClient, make_hello


async def join(api: Any, settings: Any) -> None:
    """What the agent would report of itself."""
    client = AsyncAgentClient(settings.endpoint, make_hello("cli", "test"), 20.0)
    stats = await client.stats()
    await client.close()
    body = {
        "incarnation": stats.incarnation,
        "events_endpoint": settings.endpoint,
        "pool_stats": to_jsonable(stats),
    }
    reply = await api.http.post(f"/api/v1/nodes/{settings.node_id}/heartbeat", json=body)
    assert reply.status_code == 200, reply.text


async def run(api: Any, **body: Any) -> Any:
    reply = await api.http.post("/api/v1/doctor", json=body)
    assert reply.status_code == 202, reply.text
    assert reply.json()["state"] == "running"
    async with asyncio.timeout(90):
        while (report := await api.get("/doctor"))["state"] == "running":
            await asyncio.sleep(0.05)
    return report


def check(part: Any, name: str) -> Any:
    (found,) = [check for check in part["checks"] if check["name"] == name]
    return found


class TestRun:
    async def test_nodes_and_pairs_of_a_cluster(self, api, make_agents):
        assert (await api.get("/doctor"))["state"] == "none"
        for settings in await make_agents():
            await join(api, settings)
        report = await run(api, prefill_tokens_per_second=1000, reason="new rack")
        assert (report["state"], report["error"]) == ("done", "")
        assert (report["done"], report["total"], report["number"]) == (4, 4, 1)
        assert {node["node_id"] for node in report["nodes"]} == {"n1", "n2"}
        assert report["bound"]["bytes_per_second"] == 8192 * 1000
        pairs = {(pair["source"], pair["destination"]): pair for pair in report["pairs"]}
        assert set(pairs) == {("n1", "n2"), ("n2", "n1")}
        for pair in pairs.values():
            assert check(pair, "tcp.reach")["state"] == "ok"
            assert check(pair, "shm.reach")["state"] == "ok"
            assert check(pair, "disaggregation")["state"] == "ok"
            assert {found["transport"] for found in pair["transports"]} == {"shm", "tcp"}
            assert all(found["bytes_per_second"] > 0 for found in pair["transports"])
        # the control plane's clock stands still in this test, and the doctor sees it
        node = report["nodes"][0]
        assert (node["state"], check(node, "clock")["state"]) == ("fail", "fail")
        assert node["checks"][0]["name"] == "clock"
        assert report["counts"]["fail"] == 2
        [row] = (await api.get("/audit", verb="doctor.run"))["items"]
        assert (row["target"], row["reason"]) == ("all", "new rack")

    async def test_a_node_that_does_not_answer(self, api, make_agents):
        for settings in await make_agents():
            await join(api, settings)
        await api.heartbeat("n3")  # at a socket that is not there
        report = await run(api)
        [silent] = [node for node in report["nodes"] if node["node_id"] == "n3"]
        assert silent["state"] == "fail"
        assert "no answer" in silent["checks"][0]["value"]
        assert silent["checks"][0]["what_to_do"]
        skipped = [p for p in report["pairs"] if "not probed: n3" in p["checks"][0]["value"]]
        assert len(skipped) == 4
        assert {pair["state"] for pair in skipped} == {"unknown"}
        assert report["bound"] is None

    async def test_one_node_without_probes(self, api, make_agents):
        for settings in await make_agents():
            await join(api, settings)
        report = await run(api, node="n2", probe=False)
        assert [node["node_id"] for node in report["nodes"]] == ["n2"]
        assert report["pairs"] == []

    async def test_an_agent_that_others_cannot_reach(self, api, make_agents):
        one, two = await make_agents(tcp_host="", tcp_port=0)
        await join(api, one)
        await join(api, two)
        report = await run(api, pair="n1:n2")
        assert check(report["pairs"][0], "control")["state"] == "fail"
        assert "cannot reach" in check(report["pairs"][0], "control")["value"]

    @pytest.mark.parametrize(
        ("body", "status", "field"),
        [
            ({"node": "n9"}, 404, "node_id"),
            ({"pair": "n1"}, 422, "pair"),
            ({"pair": "n1:n2", "node": "n1"}, 422, "pair"),
            ({"flops": 1e15}, 422, "flops"),
            ({"max_bytes": 1}, 422, "max_bytes"),
        ],
    )
    async def test_what_cannot_be_asked(self, api, body, status, field):
        reply = await api.http.post("/api/v1/doctor", json=body)
        assert (reply.status_code, reply.json()["field"]) == (status, field)
        assert reply.json()["way_out"]
        assert (await api.get("/doctor"))["state"] == "none"

    async def test_only_one_at_a_time_and_only_with_the_token(self, api, make_agents):
        for settings in await make_agents():
            await join(api, settings)
        assert (await api.anonymous.post("/api/v1/doctor", json={})).status_code == 401
        first = await api.http.post("/api/v1/doctor", json={})
        second = await api.http.post("/api/v1/doctor", json={})
        assert (first.status_code, second.status_code) == (202, 409)


class TestPlan:
    def test_every_node_takes_part_before_any_has_all(self):
        nodes = [f"n{i}" for i in range(100)]
        pairs, left_out = pairs_of(DoctorRun(), nodes)
        assert len(pairs) == MAX_PAIRS
        assert left_out == 100 * 99 - MAX_PAIRS
        assert {source for source, _ in pairs} == set(nodes)

    def test_one_node_means_its_pairs_both_ways(self):
        pairs, _ = pairs_of(DoctorRun(node="b"), ["a", "b", "c"])
        assert set(pairs) == {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")}
        assert nodes_of(DoctorRun(node="b"), ["a", "b", "c"]) == ["a", "b", "c"]
        assert nodes_of(DoctorRun(pair="c:a"), ["a", "b", "c"]) == ["c", "a"]


class TestTerminal:
    async def test_text_json_and_exit_code(
        self, serve, make_settings_for, sqlite_url, tmp_path, make_agents, capsys, monkeypatch,
        eventually,
    ):  # fmt: skip
        async with serve(make_settings_for(sqlite_url, tmp_path)) as server:
            monkeypatch.setenv("PERILUNE_TOKEN", server.token)
            (tmp_path / "token").write_text(server.token)
            await make_agents(control_plane=server.url, token_file=tmp_path / "token")
            nodes = server.plane.nodes
            await eventually(lambda: sum(bool(node.namespaces) for node in nodes.list()) == 2)

            async def perilune(*argv: str) -> tuple[int, str]:
                capsys.readouterr()
                code = await asyncio.to_thread(cli.run, ["doctor", *argv])
                return code, capsys.readouterr().out

            code, text = await perilune("--url", server.url)
            assert code == 0, text
            assert "n1 > n2" in text
            assert "0 fail" in text
            code, text = await perilune("--url", server.url, "--last", "--json")
            assert json.loads(text.splitlines()[-1])["number"] == 1
            code, text = await perilune("--local")
            assert code == 0, text
            assert "n1" in text
            (tmp_path / "run" / "n9.sock").touch()
            code, text = await perilune("--local")
            assert code == 1
            assert "n9" in text.splitlines()[0]
