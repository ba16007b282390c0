"""Every operator's write leaves a row; a new write route without one fails here."""

from __future__ import annotations

import hashlib

from controlplane.jobs.service import Outcome

EXEMPT = {
    ("post", "/api/v1/nodes/{node_id}/heartbeat"): "agents report each second",
    ("post", "/api/v1/gateways/{gateway_id}/report"): "gateways report each second",
    ("post", "/api/v1/requests/{request_id}/cancel"): "its row is looked at beside its gateway",
}


async def _writes(api, bodies):
    """One real write a route: (method, template) -> response, in an order that works."""
    await api.heartbeat("n1", workers=[bodies["worker"]("p1")])
    await api.heartbeat("gone")
    await api.heartbeat("gone2")
    api.clock.advance(4)
    api.plane.sweep()
    await api.heartbeat("n1", workers=[bodies["worker"]("p1")])
    worker = {"id": "e1", "role": "both", "model": "m", "url": "http://h:1"}
    match = {"If-Match": '"1"'}
    yield "delete", "/api/v1/nodes/{node_id}", "/api/v1/nodes/gone", None, {}
    yield "post", "/api/v1/workers", "/api/v1/workers", worker, {}
    yield (
        "post",
        "/api/v1/workers/{worker_id}/actions",
        "/api/v1/workers/p1/actions",
        {"action": "drain"},
        {},
    )
    yield "delete", "/api/v1/workers/{worker_id}", "/api/v1/workers/e1", None, {}
    yield "put", "/api/v1/models/{model_id}", "/api/v1/models/m", {"path": "/m"}, {}
    yield "delete", "/api/v1/models/{model_id}", "/api/v1/models/m", None, {}
    yield (
        "put",
        "/api/v1/policies/{kind}/{scope}",
        "/api/v1/policies/slo/default",
        {"spec": {}},
        match,
    )
    yield (
        "post",
        "/api/v1/policies/{kind}/{scope}/revert",
        "/api/v1/policies/slo/default/revert",
        {"revision": 1},
        {},
    )
    for verb, body in (
        ("pin", {"tenant": "acme"}),
        ("unpin", {"name": "p"}),
        ("purge", {"node": "n1", "confirm": "n1"}),
        ("prefetch", {"key": "0" * 32}),
        ("replicate", {"source": "n1", "destination": "gone2", "tenant": "acme"}),
    ):
        yield "post", f"/api/v1/cache/{verb}", f"/api/v1/cache/{verb}", body, {}
    yield (
        "post",
        "/api/v1/cache/audit/resync",
        "/api/v1/cache/audit/resync",
        {"node_id": "n1"},
        {},
    )
    yield "post", "/api/v1/doctor", "/api/v1/doctor", {"probe": False}, {}
    yield "delete", "/api/v1/jobs/{job_id}", "/api/v1/jobs/1", None, {}
    await _end_job(api, 2)
    yield "post", "/api/v1/jobs/{job_id}/undo", "/api/v1/jobs/2/undo", {}, {}
    yield "post", "/api/v1/keys", "/api/v1/keys", {"tenant": "acme"}, {}
    yield "delete", "/api/v1/keys/{key_id}", "/api/v1/keys/1", None, {}


async def _end_job(api, job_id):
    """As if it had run, and could be taken back."""
    undo = {"kind": "pin", "spec": {"restore": []}, "how": "pin p again"}
    job = api.plane.jobs.live[job_id]
    await api.plane.jobs.finish(api.plane.db, job, "done", Outcome({"blocks": 1}, undo))


async def test_every_write_route_is_audited(both, bodies):
    routes = {
        (method, path)
        for path, methods in both.app.openapi()["paths"].items()
        for method in methods
        if method != "get"
    }
    audited = set()
    async for method, template, url, body, headers in _writes(both, bodies):
        rows = (await both.get("/audit"))["items"]
        headers = {**headers, "X-Request-ID": f"{method}-{len(rows)}", "X-Perilune-Actor": "ana"}
        response = await both.http.request(method.upper(), url, json=body, headers=headers)
        assert response.is_success, (method, url, response.text)
        after = (await both.get("/audit"))["items"]
        assert len(after) == len(rows) + 1, f"{method} {template} left no row"
        row = after[0]
        assert (row["actor"], row["request_id"]) == ("ana", headers["X-Request-ID"])
        assert row["verb"]
        assert row["target"]
        assert row["before"] or row["after"]
        audited.add((method, template))
    assert routes == audited | set(EXEMPT)


async def test_what_is_refused_leaves_no_row(both):
    refused = await both.http.put("/api/v1/policies/slo/default", json={"spec": {"mode": "off"}})
    assert refused.status_code == 428
    assert (await both.get("/audit"))["items"] == []


async def test_filters_and_pages(both):
    for index in range(7):
        headers = {"X-Perilune-Actor": "ana" if index % 2 else "ben"}
        await both.http.post("/api/v1/keys", json={"tenant": f"t{index}"}, headers=headers)
    assert len((await both.get("/audit", actor="ana"))["items"]) == 3
    assert len((await both.get("/audit", verb="key.create", target="key/1"))["items"]) == 1
    page = await both.get("/audit", limit=4)
    rest = await both.get("/audit", limit=4, cursor=page["next_cursor"])
    ids = [row["id"] for row in page["items"] + rest["items"]]
    assert ids == sorted(ids, reverse=True)
    assert (len(ids), rest["next_cursor"]) == (7, None)


async def test_a_key_is_shown_once_and_kept_as_a_digest(both, run_api):
    created = (await both.http.post("/api/v1/keys", json={"tenant": "acme"})).json()
    secret = created["secret"]
    listed = (await both.http.get("/api/v1/keys")).text
    audit = (await both.http.get("/api/v1/audit")).text
    assert secret not in listed + audit
    async with run_api(both.plane.settings) as second:
        view = (await second.http.get("/api/v1/view")).json()
        assert len(view["client_keys"]) == 1
        assert view["client_keys"][0]["key_sha256"] == hashlib.sha256(secret.encode()).hexdigest()
        await second.http.delete(f"/api/v1/keys/{created['id']}")
        assert (await second.http.get("/api/v1/view")).json()["client_keys"] == []


async def test_actor_must_be_a_name(api):
    response = await api.http.post(
        "/api/v1/keys", json={"tenant": "a"}, headers={"X-Perilune-Actor": "<script>"}
    )
    assert (response.status_code, response.json()["field"]) == (422, "X-Perilune-Actor")
