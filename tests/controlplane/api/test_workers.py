"""Workers: commands through heartbeats, drains that show at once, engines from elsewhere."""

from __future__ import annotations


async def joined(api, bodies, **changes):
    workers = [bodies["worker"]("p1", **changes), bodies["worker"]("d1", "decode")]
    return await api.heartbeat("n1", workers=workers)


async def test_a_drain_shows_at_once_and_travels_until_acknowledged(both, bodies):
    await joined(both, bodies)
    before = both.plane.view.revision
    reply = await both.http.post("/api/v1/workers/p1/actions", json={"action": "drain"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["worker"]["state"] == "draining"
    assert both.plane.view.revision > before
    command_id = reply.json()["command_id"]
    for _ in range(2):
        commands = (await joined(both, bodies)).json()["commands"]
        assert commands == [{"worker_id": "p1", "action": "drain", "command_id": command_id}]
    view = (await both.http.get("/api/v1/view")).json()
    assert {w["id"]: w["state"] for w in view["workers"]} == {"p1": "draining", "d1": "ready"}
    acknowledged = await both.heartbeat(
        "n1", workers=[bodies["worker"]("p1")], acknowledged_commands=[command_id]
    )
    assert acknowledged.json()["commands"] == []
    assert (await both.get("/workers/p1"))["state"] == "draining"
    resumed = await both.http.post("/api/v1/workers/p1/actions", json={"action": "resume"})
    assert resumed.json()["worker"]["state"] == "ready"


async def test_commands_and_drains_outlive_a_restart(both, bodies, run_api):
    await joined(both, bodies)
    await both.plane.save()
    await both.http.post("/api/v1/workers/p1/actions", json={"action": "drain"})
    await both.http.post("/api/v1/workers/p1/actions", json={"action": "restart"})
    async with run_api(both.plane.settings) as second:
        commands = (await joined(second, bodies)).json()["commands"]
        assert [c["action"] for c in commands] == ["drain", "restart"]
        assert (await second.get("/workers/p1"))["state"] == "draining"


async def test_a_later_command_takes_the_earlier_ones_place(api, bodies):
    await joined(api, bodies)
    for action in ("drain", "resume", "drain"):
        await api.http.post("/api/v1/workers/p1/actions", json={"action": action})
    commands = (await joined(api, bodies)).json()["commands"]
    assert [c["action"] for c in commands] == ["drain"]


async def test_every_action_is_audited(api, bodies):
    await joined(api, bodies)
    body = {"action": "restart", "reason": "leak"}
    await api.http.post(
        "/api/v1/workers/p1/actions", json=body, headers={"X-Perilune-Actor": "ana"}
    )
    row = (await api.get("/audit"))["items"][0]
    assert (row["actor"], row["verb"], row["target"], row["reason"]) == (
        "ana",
        "worker.restart",
        "p1",
        "leak",
    )


async def test_a_worker_missing_for_a_moment_is_not_gone(api, bodies):
    await joined(api, bodies)
    await api.heartbeat("n1")
    assert (await api.get("/workers/p1"))["state"] == "ready", "an agent that restarts knows none"
    for _ in range(12):
        api.clock.advance(1)
        await api.heartbeat("n1")
    assert (await api.get("/workers/p1"))["state"] == "stopped"


async def test_an_agent_that_was_away_for_long_takes_no_worker_with_it(api, bodies):
    """Its successor does not know them until their supervisor lists them again."""
    await api.heartbeat("n1", workers=[bodies["worker"]("p1")])
    for _ in range(14):
        api.clock.advance(1)
        api.plane.sweep()
    assert (await api.get("/workers/p1"))["state"] == "lost"
    await api.heartbeat("n1", 2)
    for _ in range(9):
        assert (await api.get("/workers/p1"))["state"] == "ready"
        api.clock.advance(1)
        await api.heartbeat("n1", 2)
    for _ in range(3):
        api.clock.advance(1)
        await api.heartbeat("n1", 2)
    assert (await api.get("/workers/p1"))["state"] == "stopped"


async def test_an_engine_from_elsewhere(both, run_api):
    body = {"id": "e1", "role": "both", "model": "m", "url": "http://h:1", "engine": "emulated"}
    made = await both.http.post("/api/v1/workers", json=body)
    assert made.status_code == 201, made.text
    again = await both.http.post("/api/v1/workers", json=body)
    assert again.status_code == 201
    assert len((await both.get("/audit"))["items"]) == 1, "the same again is no change"
    restart = await both.http.post("/api/v1/workers/e1/actions", json={"action": "restart"})
    assert restart.status_code == 409
    drained = await both.http.post("/api/v1/workers/e1/actions", json={"action": "drain"})
    assert drained.json() == {**drained.json(), "command_id": None}
    assert (await both.get("/overview"))["emulated"] is True
    async with run_api(both.plane.settings) as second:
        assert (await second.get("/workers/e1"))["state"] == "draining"
        assert (await second.http.delete("/api/v1/workers/e1")).status_code == 204
        assert (await second.get("/workers"))["items"] == []


async def test_two_nodes_do_not_share_a_worker(api, bodies):
    await joined(api, bodies)
    await api.heartbeat("n2", workers=[bodies["worker"]("p1", state="failed")])
    assert (await api.get("/workers/p1"))["node_id"] == "n1"
    assert (await api.get("/workers/p1"))["state"] == "ready"


async def test_models_list_their_workers(both, bodies, run_api):
    await joined(both, bodies)
    url = "/api/v1/models/org/m"
    made = await both.http.put(url, json={"path": "/models/m", "max_model_len": 2048})
    assert made.status_code == 200, made.text
    await both.http.put("/api/v1/models/m", json={"path": "/models/m"})
    models = (await both.get("/models"))["items"]
    assert [(m["id"], m["workers"]) for m in models] == [("m", ["d1", "p1"]), ("org/m", [])]
    assert len((await both.get("/audit"))["items"]) == 2
    async with run_api(both.plane.settings) as second:
        assert (await second.get("/models/org/m"))["max_model_len"] == 2048
        assert (await second.http.delete(url)).status_code == 204
        assert (await second.http.get(url)).status_code == 404


async def test_a49_what_requests_meet_stands_beside_the_probed_state(api, bodies):
    await joined(api, bodies)
    note = "probe ok, requests failing: answered 502: bad"
    revision = api.plane.view.revision
    await api.report("gw-1", workers={"p1": {"data_path": "ok"}, "d1": {}})
    await api.report("gw-2", workers={"p1": {"data_path": "ejected", "data_path_note": note}})
    worker = await api.get("/workers/p1")
    assert (worker["state"], worker["data_path"], worker["data_path_note"]) == (
        "ready", "ejected", note,
    )  # fmt: skip
    assert (await api.get("/workers/d1"))["data_path"] == "ok"
    assert api.plane.view.revision == revision  # gateways know it by themselves
    await api.report("gw-2", workers={"p1": {"data_path": "ok"}})
    assert (await api.get("/workers/p1"))["data_path"] == "ok"
