"""Views of a control plane that is odd, or of another version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from controlplane.core.admission import Standing
from controlplane.gateway.api_client import ApiClient
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.settings import Settings
from controlplane.gateway.stats import Stats
from controlplane.gateway.view import ViewFollower
from controlplane.gateway.wire import View, ViewModel, ViewPolicy, ViewWorker
from workers.engines.emulated.http import Exchange, Server

VIEW = {"revision": 3, "boot_id": "b", "cluster": "c"}


@pytest.mark.parametrize("status", [200, 304])
async def test_a_control_plane_that_holds_no_poll_back_is_not_asked_without_end(
    eventually: Callable[..., Awaitable[Any]], status: int
) -> None:
    """Nor is one behind a cache, which answers at once that nothing is new."""
    calls = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal calls
        calls += 1
        if "after" in exchange.query and status == 304:
            exchange.send(304, b"")
        else:
            exchange.send(200, VIEW)

    server, views = Server(answer), list[View]()
    await server.start("127.0.0.1", 0)
    client = ApiClient(f"http://127.0.0.1:{server.port}", "")
    following = asyncio.create_task(ViewFollower(client, "gw-1", views.append).run())
    await eventually(lambda: calls >= 2)
    before, since = calls, time.monotonic()
    await asyncio.sleep(0.5)
    calls_a_second = (calls - before) / (time.monotonic() - since)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    client.close()
    await server.stop()
    assert [view.revision for view in views] == [3]
    assert calls_a_second < 20


@pytest.mark.parametrize(("name", "value"), [
    ("placement", "by_moonlight"),
    ("observe", "by_moonlight"),
    ("normalisation", ["spaces", "upside_down"]),
])  # fmt: skip
async def test_a_policy_with_a_word_that_is_unknown_here_leaves_the_last_view(
    name: str, value: object
) -> None:
    """Half of it would act, and the rest fail each request."""
    cluster = Cluster(Settings(), Stats())
    worker = ViewWorker("d1", "n1", "decode", "m", "http://127.0.0.1:9", "ready")
    cluster.apply(View(1, "b", "c", workers=[worker]))
    policy = ViewPolicy("scheduling", "default", 2, {name: value})
    with pytest.raises(ValueError, match=f"scheduling policy: {name} = '.*' is not among"):
        cluster.apply(View(2, "b", "c", workers=[worker], policies=[policy]))
    assert cluster.view.revision == 1
    assert cluster.policies("m").scheduling.rules.algorithm == "cost"
    kept = cluster.workers["d1"]
    moved = ViewWorker("d1", "n1", "decode", "m", "http://127.0.0.1:10", "ready")
    with pytest.raises(ValueError, match="is not among"):
        cluster.apply(View(2, "b", "c", workers=[moved], policies=[policy]))
    assert cluster.workers["d1"] is kept
    usual = ViewPolicy("scheduling", "default", 3, {"normalisation": ["spaces"], "observe": None})
    cluster.apply(View(3, "b", "c", workers=[worker], policies=[usual]))
    assert cluster.policies("m").scheduling.normalisation == ("spaces",)
    cluster.close()


async def test_policies_of_very_many_models_and_tenants_are_put_together_as_they_are_asked_for() -> (
    None
):
    """All together they were the product of both: seconds of every request's time, with each view."""
    cluster = Cluster(Settings(), Stats())
    models = [ViewModel(f"m{i}") for i in range(300)]
    slos = [
        ViewPolicy("slo", f"tenant:t{i}", i, {"max_ttft_ms": 1000 + i, "mode": "enforce"})
        for i in range(300)
    ]
    cluster.apply(View(1, "b", "c", models=models, policies=slos))
    assert not any(one._made for one in cluster._policies.values())
    policies = cluster.policies("m7")
    own = policies.of(Standing("t5"))
    assert (own.slo.max_ttft_seconds, own.revisions) == (1.005, {"slo/tenant:t5": 5})
    assert policies.of(Standing("t5")) is own
    assert policies.of(Standing("nobody")) is policies
    assert own.of(Standing("t6")) is own
    broken = ViewPolicy("slo", "tenant:t9", 9, {"max_ttft_ms": "soon"})
    with pytest.raises(TypeError):
        cluster.apply(View(2, "b", "c", models=models, policies=[broken]))
    assert cluster.policies("m7") == policies
    cluster.close()
