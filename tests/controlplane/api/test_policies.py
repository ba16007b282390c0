"""Policies: revisions, If-Match, acknowledgement, and every way to say it wrong."""

from __future__ import annotations

import asyncio

import pytest

SLO = "/api/v1/policies/slo/default"


def put(api, spec, revision=1, **more):
    headers = {} if revision is None else {"If-Match": f'"{revision}"'}
    return api.http.put(SLO, json={"spec": spec, **more}, headers=headers)


async def test_first_start_writes_revision_one_of_each_kind(both):
    items = (await both.get("/policies"))["items"]
    assert [(p["kind"], p["scope"], p["revision"]) for p in items] == [
        ("admission", "default", 1),
        ("cache", "default", 1),
        ("records", "default", 1),
        ("scheduling", "default", 1),
        ("slo", "default", 1),
        ("transfer", "default", 1),
    ]
    assert items[4]["spec"]["mode"] == "observe"


async def test_a_put_is_a_new_revision_and_audited(both):
    reply = await put(both, {"mode": "enforce", "max_ttft_ms": 1}, reason="try it")
    assert reply.status_code == 200, reply.text
    assert reply.headers["etag"] == '"2"'
    assert reply.json()["active"]["spec"]["max_tbt_ms"] == 500, "defaults are filled in"
    read = await both.http.get(SLO)
    assert read.headers["etag"] == '"2"'
    revisions = (await both.get("/policies/slo/default/revisions"))["items"]
    assert [(p["revision"], p["active"]) for p in revisions] == [(2, True), (1, False)]
    first = await both.get("/policies/slo/default/revisions/1")
    assert first["spec"]["mode"] == "observe", "a revision never changes"
    row = (await both.get("/audit"))["items"][0]
    assert (row["verb"], row["target"], row["reason"]) == ("policy.put", "slo/default", "try it")
    assert '"revision": 1' in row["before"]
    assert '"revision": 2' in row["after"]


async def test_revert_is_a_new_revision_with_the_old_values(both):
    await put(both, {"mode": "off"})
    reply = await both.http.post(f"{SLO}/revert", json={"revision": 1})
    assert reply.status_code == 200, reply.text
    active = reply.json()["active"]
    assert (active["revision"], active["spec"]["mode"]) == (3, "observe")
    assert active["reason"] == "back to revision 1"
    missing = await both.http.post(f"{SLO}/revert", json={"revision": 99})
    assert (missing.status_code, missing.json()["field"]) == (404, "revision")


async def test_it_outlives_a_restart(both, run_api):
    await put(both, {"mode": "enforce"})
    async with run_api(both.plane.settings) as second:
        assert (await second.get("/policies/slo/default"))["spec"]["mode"] == "enforce"


@pytest.mark.parametrize(
    ("revision", "status", "words"),
    [
        (None, 428, 'If-Match: "1"'),
        (7, 412, "7"),
    ],
)
async def test_a_change_names_what_it_changes(api, revision, status, words):
    refused = await put(api, {"mode": "off"}, revision)
    problem = refused.json()
    assert refused.status_code == status
    assert problem["field"] == "If-Match"
    assert words in problem["detail"] + problem["way_out"]
    assert "1" in problem["detail"] + problem["way_out"], "the active revision is named"
    assert (await api.get("/policies/slo/default"))["revision"] == 1
    assert (await api.get("/audit"))["items"] == []


async def test_of_two_writers_with_one_etag_one_wins(both):
    replies = await asyncio.gather(*(put(both, {"max_ttft_ms": 100 + i}) for i in range(5)))
    assert sorted(reply.status_code for reply in replies) == [200, 412, 412, 412, 412]
    assert (await both.get("/policies/slo/default"))["revision"] == 2


@pytest.mark.parametrize(
    ("spec", "field", "value", "way_out"),
    [
        ({"max_ttft_ms": -5}, "spec.max_ttft_ms", -5, "1 to 600000"),
        ({"max_ttft_ms": 1e12}, "spec.max_ttft_ms", 1e12, "1 to 600000"),
        ({"max_tbt_ms": "fast"}, "spec.max_tbt_ms", "fast", "1 to 60000"),
        ({"percentile": 100}, "spec.percentile", 100, "50 to 99.9"),
        ({"mode": "strict"}, "spec.mode", "strict", "off, observe, enforce"),
        ({"max_ttf_ms": 5}, "spec.max_ttf_ms", 5, "max_ttft_ms"),
        ({"retry_after_max_s": 1.5}, "spec.retry_after_max_s", 1.5, "1 to 600"),
    ],
)
async def test_a_value_that_cannot_work_is_named_with_its_range(api, spec, field, value, way_out):
    refused = await put(api, spec)
    problem = refused.json()
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    assert (problem["field"], problem["value"]) == (field, value)
    assert field in problem["detail"]
    assert way_out in problem["way_out"]
    assert (await api.get("/policies/slo/default"))["revision"] == 1


async def test_a_new_scope_needs_no_if_match_and_an_old_one_does(api):
    url = "/api/v1/policies/slo/batch"
    made = await api.http.put(url, json={"spec": {"mode": "off"}})
    assert (made.status_code, made.json()["active"]["revision"]) == (200, 1)
    assert (await api.http.put(url, json={"spec": {}})).status_code == 428
    early = await api.http.put(
        "/api/v1/policies/slo/other", json={"spec": {}}, headers={"If-Match": '"1"'}
    )
    assert early.status_code == 412
    assert "none" in early.json()["detail"]


class TestAcknowledgement:
    async def test_names_who_acts_and_who_does_not(self, api):
        await api.report("gw-a")
        await api.report("gw-b")
        revision = api.plane.view.revision

        async def gateway():
            view = await api.http.get(
                "/api/v1/view", params={"gateway": "gw-a", "after": revision, "wait": 20}
            )
            newest = view.json()["revision"]
            polled = await api.http.get(
                "/api/v1/view", params={"gateway": "gw-a", "after": newest, "wait": 0.01}
            )
            assert polled.status_code == 304
            return view.json()

        polling = asyncio.create_task(gateway())
        await asyncio.sleep(0.05)
        reply = (await put(api, {"mode": "enforce", "max_ttft_ms": 1})).json()
        view = await polling
        assert reply["acknowledged_gateways"] == ["gw-a"]
        assert reply["pending_gateways"] == ["gw-b"]
        slo = next(p for p in view["policies"] if p["kind"] == "slo")
        assert slo["spec"]["max_ttft_ms"] == 1

    async def test_a_silent_gateway_is_not_waited_for(self, api):
        await api.report("gw-a")
        api.clock.advance(5)
        reply = (await put(api, {"mode": "off"})).json()
        assert (reply["acknowledged_gateways"], reply["pending_gateways"]) == ([], [])


@pytest.mark.parametrize(
    "scope", ["tiny", "tenant:acme", "priority:batch", "tenant:a.b+priority:x"]
)
async def test_slo_scopes(api, scope):
    path = f"/policies/slo/{scope}"
    reply = await api.http.put(f"/api/v1{path}", json={"spec": {"max_ttft_ms": 700}})
    assert reply.status_code == 200, reply.text
    assert (await api.get(path))["spec"]["max_ttft_ms"] == 700


@pytest.mark.parametrize(
    "scope", ["tenant:", "model:x", "priority:batch+tenant:a", "tenant:A", "x:y"]
)
async def test_scopes_that_are_none(api, scope):
    reply = await api.http.put(f"/api/v1/policies/slo/{scope}", json={"spec": {}})
    assert reply.status_code == 422
    assert reply.headers["content-type"] == "application/problem+json"


async def test_only_slo_policies_are_for_tenants(api):
    reply = await api.http.put("/api/v1/policies/admission/tenant:acme", json={"spec": {}})
    assert reply.status_code == 422
    assert reply.json()["field"] == "scope"


@pytest.mark.parametrize(("spec", "field"), [
    ({"priorities": ["a", "a"]}, "spec.priorities"),
    ({"priorities": []}, "spec.priorities"),
    ({"priorities": ["a", "b"]}, "spec.default_priority"),
    ({"priorities": ["a"], "default_priority": "b"}, "spec.default_priority"),
    ({"hit_share": 1}, "spec.hit_share"),
    ({"tenant_weights": {"acme": 0}}, "spec.tenant_weights"),
    ({"probe_share": 0.6}, "spec.probe_share"),
])  # fmt: skip
async def test_admission_specs_that_cannot_work(api, spec, field):
    path = "/api/v1/policies/admission/default"
    reply = await api.http.put(path, json={"spec": spec}, headers={"If-Match": '"1"'})
    assert reply.status_code == 422, reply.text
    assert reply.json()["field"].startswith(field), reply.text


async def test_admission_classes_of_ones_own(api):
    spec = {"priorities": ["gold", "lead"], "default_priority": "lead", "tenant_weights": {"a": 2}}
    path = "/api/v1/policies/admission/default"
    reply = await api.http.put(path, json={"spec": spec}, headers={"If-Match": '"1"'})
    assert reply.status_code == 200, reply.text
    assert reply.json()["active"]["spec"]["window_tokens"] == 8192


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"prefill_tflops": 1e-300}, "Allowed: a number from 0.001 to 1000000, null."),
        ({"observe": "odd"}, "round_robin, null."),
        ({"normalisation": ["odd"]}, "Allowed: a list of line_ends, spaces, system_first."),
    ],
)
async def test_what_a_field_may_hold_is_said_in_words(api, spec, says):
    reply = await api.http.put(
        "/api/v1/policies/scheduling/default", json={"spec": spec}, headers={"If-Match": '"1"'}
    )
    assert reply.status_code == 422
    assert says in reply.json()["way_out"]


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "Llama-3"])
async def test_a_model_has_policies_of_its_own_whatever_it_is_called(both, model):
    path = f"/api/v1/policies/slo/{model}"
    made = await both.http.put(path, json={"spec": {"mode": "enforce"}})
    assert made.status_code == 200, made.text
    again = await both.http.put(path, json={"spec": {}}, headers={"If-Match": '"1"'})
    assert again.status_code == 200, again.text
    assert (await both.http.get(path)).json()["scope"] == model
    assert (await both.http.get(path.replace("Qwen/", "Qwen%2F"))).status_code == 200
    revisions = (await both.get(f"/policies/slo/{model}/revisions"))["items"]
    assert [row["revision"] for row in revisions] == [2, 1]
    assert (await both.get(f"/policies/slo/{model}/revisions/1"))["spec"]["mode"] == "enforce"
    back = await both.http.post(f"{path}/revert", json={"revision": 1})
    assert back.status_code == 200, back.text
