"""What the control plane is told: the model, and what a declared file changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from workers.models.resolve import ResolvedModel
from workers.supervisor.plan import ClusterPlan, make_plan
from workers.supervisor.ports import Ports
from workers.supervisor.registration import register_cluster, wait_until_routable
from workers.supervisor.settings import Settings

MODEL = ResolvedModel("org/m", "org/m", "/nowhere", "1", is_local=True)
PORTS = Ports(7700, 8000, (7710,), (8101, 8102))


class ControlPlane:
    """Policies behind REST, as far as a declared file needs them."""

    def __init__(self) -> None:
        self.specs: dict[str, dict[str, Any]] = {"slo": {"max_ttft_ms": 10000, "percentile": 95}}
        self.revision = 1
        self.requests: list[tuple[str, str]] = []

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        assert request.headers["authorization"] == "Bearer secret"
        self.requests.append((request.method, request.url.raw_path.decode()))
        kind = request.url.path.split("/")[-2]
        if request.method == "PUT" and kind in self.specs:
            assert request.headers["if-match"] == f'"{self.revision}"'
            self.specs[kind] = json.loads(request.content)["spec"]
            self.revision += 1
        return httpx2.Response(200, json={"spec": self.specs.get(kind), "revision": self.revision})


@pytest.fixture
def plan_with(tmp_path: Path) -> Callable[..., ClusterPlan]:
    def make(**slo: object) -> ClusterPlan:
        settings = Settings(data=tmp_path, engine="emulated", policies={"slo": slo} if slo else {})
        settings.home.create()
        return make_plan(settings, MODEL, "/nowhere", PORTS)

    return make


async def register(plan: ClusterPlan, control_plane: ControlPlane) -> bool:
    transport = httpx2.MockTransport(control_plane.answer)
    async with httpx2.AsyncClient(transport=transport) as http:
        return await register_cluster(plan, "secret", http)


async def test_a_models_name_may_hold_a_slash(plan_with: Callable[..., ClusterPlan]) -> None:
    control_plane = ControlPlane()
    assert await register(plan_with(), control_plane)
    assert control_plane.requests == [("PUT", "/api/v1/models/org%2Fm")]


async def test_a_live_change_is_kept_and_a_changed_field_of_the_file_is_put(
    plan_with: Callable[..., ClusterPlan],
) -> None:
    control_plane = ControlPlane()
    await register(plan_with(max_ttft_ms=700, mode="enforce"), control_plane)
    assert control_plane.specs["slo"] == {"max_ttft_ms": 700, "percentile": 95, "mode": "enforce"}
    control_plane.specs["slo"]["max_ttft_ms"] = 555  # an operator, live
    await register(plan_with(max_ttft_ms=700, mode="enforce"), control_plane)
    assert control_plane.revision == 2
    await register(plan_with(max_ttft_ms=700, mode="observe"), control_plane)
    assert control_plane.specs["slo"] == {"max_ttft_ms": 555, "percentile": 95, "mode": "observe"}


@pytest.mark.parametrize("content", ["[]", '{"slo": 5}', '{"slo"', ""])
async def test_a_broken_memory_of_what_was_applied_costs_nothing_but_a_put(
    plan_with: Callable[..., ClusterPlan], content: str
) -> None:
    plan = plan_with(max_ttft_ms=700)
    memory = plan.settings.home.run / "applied-policies.json"
    memory.write_text(content)
    control_plane = ControlPlane()
    control_plane.revision = 2
    assert await register(plan, control_plane)
    assert control_plane.specs["slo"]["max_ttft_ms"] == 700
    assert json.loads(memory.read_text()) == {"slo": {"max_ttft_ms": 700}}


async def test_a_memory_that_cannot_be_written_ends_nothing(
    plan_with: Callable[..., ClusterPlan],
) -> None:
    plan = plan_with(max_ttft_ms=700)
    (plan.settings.home.run / "applied-policies.tmp").mkdir()
    assert await register(plan, ControlPlane())


async def test_an_answer_that_is_no_json_is_tried_again_later(
    plan_with: Callable[..., ClusterPlan],
) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, text="<html>"))
    async with httpx2.AsyncClient(transport=transport) as http:
        assert not await register_cluster(plan_with(), "secret", http)


async def test_an_error_is_tried_again_later(plan_with: Callable[..., ClusterPlan]) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(503))
    async with httpx2.AsyncClient(transport=transport) as http:
        assert not await register_cluster(plan_with(), "secret", http)


@pytest.mark.parametrize(
    ("workers", "models", "gateways", "expected"),
    [
        (["p1"], ["org/m"], [("ready", 5)], "the control plane does not list d1 as ready"),
        (["p1", "d1"], [], [("ready", 5)], "the control plane does not list the model org/m"),
        (["p1", "d1"], ["org/m"], [("lost", 5)], "no gateway reports to the control plane"),
        (["p1", "d1"], ["org/m"], [("ready", 4)], "gateway gw does not act on the newest view"),
        (["p1", "d1"], ["org/m"], [("ready", 5)], ""),
    ],
)
async def test_what_is_missing_is_said(
    plan_with: Callable[..., ClusterPlan],
    monkeypatch: pytest.MonkeyPatch,
    workers: list[str],
    models: list[str],
    gateways: list[tuple[str, int]],
    expected: str,
) -> None:
    view = {
        "revision": 5,
        "workers": [{"id": name, "state": "ready"} for name in workers],
        "models": [{"id": name} for name in models],
    }
    items = [{"id": "gw", "state": state, "view_revision": at} for state, at in gateways]

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=view if "view" in request.url.path else {"items": items})

    monkeypatch.setattr("workers.supervisor.registration.ROUTABLE_SECONDS", 0.3)
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http:
        assert await wait_until_routable(plan_with(), "secret", http) == expected
