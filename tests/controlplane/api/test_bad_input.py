"""Bad input: the right status, field, value and way out; nothing half-applied."""

from __future__ import annotations

import json

import httpx2
import pytest

API = "/api/v1"
TABLE = [
    # method, path, body, status, field, value
    ("GET", "/nope", None, 404, None, None),
    ("GET", "/nodes/none", None, 404, "node_id", "none"),
    ("GET", "/workers/none", None, 404, "worker_id", "none"),
    ("GET", "/models/none", None, 404, "model_id", "none"),
    ("GET", "/gateways/none", None, 404, "gateway_id", "none"),
    ("GET", "/decisions/none", None, 404, "request_id", "none"),
    ("GET", "/policies/slo/none", None, 404, "scope", "slo/none"),
    ("GET", "/policies/price/default", None, 422, "kind", "price"),
    ("GET", "/policies/slo/default/revisions/0", None, 422, "revision", "0"),
    ("GET", "/policies/slo/default/revisions/9", None, 404, "revision", 9),
    ("DELETE", "/nodes/none", None, 404, "node_id", "none"),
    ("DELETE", "/keys/77", None, 404, "key_id", 77),
    ("DELETE", "/keys/x", None, 422, "key_id", "x"),
    ("PATCH", "/nodes", None, 405, None, None),
    ("GET", "/decisions?status=lost", None, 422, "status", "lost"),
    ("GET", "/decisions?stauts=failed", None, 422, "stauts", "failed"),
    ("GET", "/decisions?limit=0", None, 422, "limit", "0"),
    ("GET", "/decisions?cursor=%21", None, 422, "cursor", "!"),
    ("GET", "/decisions?since=yesterday", None, 422, "since", "yesterday"),
    ("GET", "/decisions?since=0001-01-01T00:00:00%2B10:00", None, 422, "since", "0001-01-01T00:00:00+10:00"),
    ("GET", "/stats/series?metric=speed", None, 422, "metric", "speed"),
    ("GET", "/stats/series?metric=requests&source=moon", None, 422, "source", "moon"),
    ("GET", "/stats/series?metric=requests&step=15", None, 422, "step", 15),
    ("GET", "/stats/series?metric=requests&step=1&window=86400", None, 422, "window", 86400),
    ("GET", "/stats/series", None, 422, "metric", None),
    ("GET", "/overview?window=-1", None, 422, "window", "-1"),
    ("GET", "/view?after=-1", None, 422, "after", "-1"),
    ("GET", "/view?wait=1e9", None, 422, "wait", "1e9"),
    ("POST", "/keys", {"tenant": "Not A Tenant"}, 422, "tenant", "Not A Tenant"),
    ("POST", "/keys", {}, 422, "tenant", None),
    ("POST", "/keys", {"tenant": "a", "colour": "red"}, 422, "colour", "red"),
    ("POST", "/keys", [], 422, "body", []),
    ("PUT", "/models/m", {"path": 5}, 422, "path", 5),
    ("POST", "/workers", {"id": "w", "role": "cook", "model": "m", "url": "u"}, 422, "role", "cook"),
    ("POST", "/workers", {"id": "", "role": "both", "model": "m", "url": "http://u"}, 422, "id", ""),
    ("POST", "/workers", {"id": "a b", "role": "both", "model": "m", "url": "http://u"}, 422, "id", "a b"),
    ("POST", "/workers", {"id": "w", "role": "both", "model": "", "url": "http://u"}, 422, "model", ""),
    ("POST", "/workers", {"id": "w", "role": "both", "model": "m", "url": "u"}, 422, "url", "u"),
    ("POST", "/workers", {"id": "w", "role": "both", "model": "m", "url": "http://x:99999"}, 422, "url", "http://x:99999"),
    ("POST", "/workers", {"id": "w", "role": "both", "model": "m", "url": "http://[::1"}, 422, "url", "http://[::1"),
    ("POST", "/workers", {"id": "w", "role": "both", "model": "m", "url": "http://u", "max_concurrent_requests": 0}, 422, "max_concurrent_requests", 0),
    ("PUT", "/models/m", {"path": "p", "max_model_len": 0}, 422, "max_model_len", 0),
    ("PUT", "/models/m", {"path": "p", "max_model_len": 10**30}, 422, "max_model_len", 10**30),
    ("PUT", "/models/m", {"path": "p", "kv_bytes_per_token": -1}, 422, "kv_bytes_per_token", -1),
    ("POST", "/nodes/n1/heartbeat", {"incarnation": 10**30}, 422, "incarnation", 10**30),
    ("POST", "/workers/none/actions", {"action": "drain"}, 404, "worker_id", "none"),
    ("POST", "/workers/none/actions", {"action": "kill"}, 422, "action", "kill"),
    ("POST", "/nodes/n1/heartbeat", {"incarnation": "new"}, 422, "incarnation", "new"),
    ("POST", "/nodes/n1/heartbeat", {"incarnation": 1, "pool_stats": {"node_id": "n1"}}, 422, "pool_stats", {"node_id": "n1", "namespaces": []}),
    ("POST", "/nodes/n1/heartbeat", {"incarnation": 1, "leg_reports": [{"worker_id": 1}]}, 422, "leg_reports.0.worker_id", None),
    ("POST", "/gateways/g/report", {"url": "u"}, 422, "pid", None),
    ("PUT", "/policies/slo/default", {"spec": {"max_ttft_ms": -1}}, 422, "spec.max_ttft_ms", -1),
    ("PUT", "/policies/slo/default", {"spec": {"max_ttft_ms": True}}, 422, "spec.max_ttft_ms", True),
    ("PUT", "/policies/slo/default", {"spec": {"max_ttft_ms": "5"}}, 422, "spec.max_ttft_ms", "5"),
    ("PUT", "/policies/slo/default", {"spec": {"retry_after_max_s": 2.0}}, 422, "spec.retry_after_max_s", 2.0),
    ("PUT", "/policies/cache/default", {"spec": {"store_generated": "no"}}, 422, "spec.store_generated", "no"),
    ("POST", "/policies/slo/default/revert", {"revision": True}, 422, "revision", True),
    ("PUT", "/policies/slo/default", {"spec": []}, 422, "spec", []),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "field", "value"), TABLE)
async def test_says_what_is_wrong_and_the_way_out(api, method, path, body, status, field, value):
    content = None if body is None else json.dumps(body)
    headers = {"If-Match": '"1"', "Content-Type": "application/json"}
    response = await api.http.request(method, API + path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem.get("field") == field
    assert problem.get("value") == value
    assert problem.get("way_out"), problem
    assert problem["detail"]
    assert (await api.get("/audit"))["items"] == [], "nothing was applied"


@pytest.mark.parametrize("content", [b'{"tenant": ', b"\xff\xfe", b"tenant=acme"])
async def test_malformed_json_is_400(api, content):
    headers = {"Content-Type": "application/json"}
    response = await api.http.post(f"{API}/keys", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["field"] == "body"


async def test_a_body_over_the_limit_is_413_with_or_without_a_length(api):
    limit = api.plane.settings.max_body_bytes
    body = b'{"tenant": "' + b"a" * limit + b'"}'

    async def pieces():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    headers = {"Content-Type": "application/json"}
    for content in (body, pieces()):
        response = await api.http.post(f"{API}/keys", content=content, headers=headers)
        assert response.status_code == 413
        problem = response.json()
        assert problem["field"] == "body"
        assert str(limit) in problem["detail"]
    assert (await api.get("/keys"))["items"] == []


async def test_an_error_of_ours_shows_no_inside(api, monkeypatch):
    def broken():
        raise RuntimeError("secret detail")

    monkeypatch.setattr(api.plane.nodes, "list", broken)
    response = await api.http.get(f"{API}/nodes", headers={"X-Request-ID": "abc-1"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc-1"
    assert "abc-1" in response.json()["detail"]
    assert "secret" not in response.text
    assert "Traceback" not in response.text


async def test_text_that_the_database_cannot_hold(both):
    response = await both.http.get(f"{API}/audit", params={"actor": "a\x00b"})
    assert response.status_code in {200, 422}
    body = {"tenant": "acme", "note": "a\x00b"}
    response = await both.http.post(f"{API}/keys", json=body)
    assert response.status_code in {201, 422}, response.text


class TestToken:
    @pytest.mark.parametrize(
        ("headers", "words"),
        [
            ({}, "no bearer token"),
            ({"Authorization": "Bearer wrong"}, "not this cluster's"),
            ({"Authorization": "Basic dXNlcjpwYXNz"}, "no bearer token"),
            ({"Cookie": "perilune_token=test-token-0123456789"}, "no bearer token"),
        ],
    )
    async def test_every_write_needs_it(self, api, headers, words):
        paths = api.app.openapi()["paths"]
        checked = 0
        for path, methods in paths.items():
            for method in set(methods) - {"get"}:
                url = path.format(**dict.fromkeys(
                    ("node_id", "worker_id", "model_id", "gateway_id", "request_id", "scope"), "x"
                ), kind="slo", key_id=1, job_id=1)  # fmt: skip
                response = await api.anonymous.request(method.upper(), url, headers=headers)
                assert response.status_code == 401, (method, url)
                problem = response.json()
                assert words in problem["detail"].replace("that is not", "not")
                assert "token" in problem["way_out"]
                assert str(api.plane.settings.token_file) in problem["way_out"]
                assert response.headers["www-authenticate"].startswith("Bearer")
                checked += 1
        assert checked >= 12

    async def test_reads_are_open_on_loopback(self, api):
        for path in (f"{API}/nodes", f"{API}/overview", "/metrics", "/health"):
            assert (await api.anonymous.get(path)).status_code == 200

    async def test_elsewhere_reads_need_it_too(
        self, sqlite_url, tmp_path, make_settings_for, run_api
    ):
        settings = make_settings_for(sqlite_url, tmp_path, host="0.0.0.0")
        async with run_api(settings) as api:
            for path in (f"{API}/nodes", "/metrics", "/openapi.json"):
                assert (await api.anonymous.get(path)).status_code == 401
                assert (await api.http.get(path)).status_code == 200
                cookie = {"Cookie": f"perilune_token={settings.token}"}
                assert (await api.anonymous.get(path, headers=cookie)).status_code == 200
            assert (await api.anonymous.get("/health")).status_code == 200

    async def test_it_is_never_logged_or_shown(self, api, capfd):
        responses = [
            await api.http.get(path)
            for path in (f"{API}/nodes", "/metrics", "/health", "/openapi.json", f"{API}/nope")
        ]
        assert isinstance(responses[0], httpx2.Response)
        token = api.plane.settings.token
        assert not any(token in response.text for response in responses)
        assert token not in "".join(capfd.readouterr())
