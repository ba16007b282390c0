"""Cache views of the pool, jobs, and what an act would do, as HTML and JSON."""

from __future__ import annotations

import csv
import io
import re
from types import SimpleNamespace
from typing import Any

import httpx2
import plotly.graph_objects as go
import pytest

from console.viewmodel.curve import curve
from console.web.curve_chart import curve_figure

VIEWS = ["hit-rate", "evictions", "tiers", "tenants", "what-if", "pins"]


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


@pytest.fixture
def recorded(made: SimpleNamespace, world: Any) -> Any:
    """The busy cluster with a pool of two tiers, pins and jobs."""
    found = made.busy()
    found.pool, found.pins, found.jobs = world.pool, world.pins.items, world.jobs
    return found


class TestViews:
    @pytest.mark.parametrize("view", VIEWS)
    async def test_every_view_has_the_head_and_its_tabs(
        self, view: str, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get(f"/cache/{view}")).text
        shown = words(text)
        assert "118 / 500, 23.6 %, fullest of 12: node-01" in shown
        assert "0.1 % of 49,200 checked" in shown
        assert "running: purge batch 62.0 %" in shown
        assert text.count('aria-current="page"') >= 2
        assert 'href="/policies/cache/default#edit"' in text
        assert " style=" not in text

    async def test_tiers_with_state_rates_and_the_device(self, browser: httpx2.AsyncClient) -> None:
        shown = words((await browser.get("/cache/tiers")).text)
        assert "0.6/1.95 TiB" in shown
        assert "2.1 GB/s" in shown
        assert "900 GiB" in shown

    async def test_a_tier_that_stopped_is_critical(
        self, recorded: Any, world: Any, browser: httpx2.AsyncClient
    ) -> None:
        broken = world.tier("node-01", "ssd", state="write failed: EIO")
        node = world.pool_node("node-01", tiers=[world.tier("node-01", "dram"), broken])
        recorded.pool = recorded.pool.model_copy(update={"nodes": [node]})
        text = (await browser.get("/cache/tiers")).text
        assert 'tone-critical">write failed: EIO' in text

    async def test_quotas_are_bars_and_rows(self, browser: httpx2.AsyncClient) -> None:
        text = (await browser.get("/cache/tenants")).text
        assert text.count('<li data-key="tenant/') == 2  # those with a quota
        assert "97.0 % of 2.93 TiB !" in words(text)
        assert "4f09c1d2e3aa" in text
        assert text.count('data-act="purge"') == 4

    async def test_the_curve_has_its_numbers_and_a_verdict(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/cache/what-if")).text
        assert "2x the capacity (3.75 TiB) would add +7.1 pp of hits." in text
        assert "Measured today: 58.1 %" in words(text)
        assert "plotly-cartesian.min.js" in text
        rows = list(csv.DictReader(io.StringIO((await browser.get("/figures/what-if?as=csv")).text)))  # fmt: skip
        assert [row["capacity_factor"] for row in rows] == ["0.25", "0.5", "1", "2", "4"]
        assert [row["measured_hit_ratio"] for row in rows] == ["", "", "0.581", "", ""]

    async def test_pins_and_nodes_that_did_not_answer(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        recorded.unreachable = {"node-09": "timed out"}
        shown = words((await browser.get("/cache/pins")).text)
        assert "system-prompt" in shown
        assert "No answer from node-09: timed out" in shown

    @pytest.mark.parametrize("view", VIEWS)
    async def test_nothing_reported_is_no_data_and_not_zero(
        self, view: str, made: SimpleNamespace
    ) -> None:
        transport = httpx2.ASGITransport(app=made.with_pages(made.empty()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://pages") as browser:
            shown = words((await browser.get(f"/cache/{view}")).text)
        assert "no node says what it runs" in shown
        assert "write queue no data" in shown
        assert "None" not in shown
        if view == "what-if":
            assert "not a hit rate of 0" in shown


class TestCurve:
    @pytest.mark.parametrize("palette", ["dark", "light"])
    def test_plotly_accepts_the_figure(self, palette: Any, world: Any) -> None:
        drawn = curve_figure(curve(world.pool), palette)
        go.Figure({"data": drawn["traces"], "layout": drawn["layout"]})
        assert len(drawn["points"]) == 5
        assert drawn["traces"][1]["x"] == [1.0]

    async def test_the_figure_is_served(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/figures/what-if?theme=light")
        assert reply.json()["points"][2].startswith("1x, 1.88 TiB: 57.9 %")


class TestJobs:
    async def test_the_list_has_progress_and_what_can_be_done(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/jobs")).text
        assert "620 / 1,000 blocks" in words(text)
        assert 'data-act="cancel" data-target="118"' in text
        assert 'data-act="undo" data-target="117"' in text

    async def test_one_job(self, browser: httpx2.AsyncClient) -> None:
        shown = words((await browser.get("/jobs/118")).text)
        assert "62.0 % done" in shown
        assert "asked tenant batch" in shown
        assert (await browser.get("/jobs/9")).status_code == 404


class TestActs:
    async def test_a_purge_says_what_it_does_and_what_to_type(
        self, browser: httpx2.AsyncClient
    ) -> None:
        act = (await browser.get("/acts/purge", params={"target": "tenant/acme"})).json()
        assert (act["method"], act["path"]) == ("POST", "/api/v1/cache/purge")
        assert act["typed"] == "acme"
        assert act["body"]["tenant"] == act["body"]["confirm"] == "acme"
        assert any("cannot be undone" in line["text"] for line in act["lines"])

    @pytest.mark.parametrize(
        ("kind", "target", "path"),
        [
            ("pin", "tenant/acme", "/api/v1/cache/pin"),
            ("prefetch", "tenant/batch", "/api/v1/cache/prefetch"),
            ("purge", "node-01/dram", "/api/v1/cache/purge"),
            ("unpin", "system-prompt/node-01", "/api/v1/cache/unpin"),
            ("cancel", "118", "/api/v1/jobs/118"),
            ("undo", "117", "/api/v1/jobs/117/undo"),
        ],
    )
    async def test_each_names_its_request(
        self, kind: str, target: str, path: str, browser: httpx2.AsyncClient
    ) -> None:
        act = (await browser.get(f"/acts/{kind}", params={"target": target})).json()
        assert act["path"] == path
        assert act["lines"]

    @pytest.mark.parametrize(
        ("kind", "target", "words_in"),
        [
            ("cancel", "117", "nothing to cancel"),
            ("undo", "118", "cannot be taken back"),
            ("pin", "tenant/gone", "holds nothing any more"),
            ("unpin", "gone/n1", "This pin is gone"),
        ],
    )
    async def test_what_cannot_be_done_is_a_problem(
        self, kind: str, target: str, words_in: str, browser: httpx2.AsyncClient
    ) -> None:
        reply = await browser.get(f"/acts/{kind}", params={"target": target})
        assert reply.status_code == 409
        assert words_in in reply.json()["detail"]
