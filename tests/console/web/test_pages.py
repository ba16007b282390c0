"""Pages as HTML: every state, unknown values, headers, links."""

from __future__ import annotations

import csv
import io
import re
from datetime import timedelta
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from console.viewmodel import numbers
from console.web.links import page_of

PAGES = [
    "/", "/topology", "/nodes/n1", "/nodes/n3", "/nodes/n4", "/workers/p1", "/workers/d2",
    "/cache/hit-rate", "/cache/evictions", "/cache/hit-rate?as=table", "/cache/tiers",
    "/cache/tenants", "/cache/what-if", "/cache/pins", "/jobs", "/transfers",
    "/transfers?value=bytes", "/transfers?as=table", "/transfers/p1/d1", "/requests",
    "/requests/000000040123456789abcdef01234567", "/rejections", "/in-flight", "/policies",
    "/policies/slo/default", "/policies/slo/default?compare=1", "/audit",
    "/transfers?view=workers", "/transfers?view=workers&as=table", "/transfers/n1/n2", "/transfers/n2/n2",
    "/doctor", "/doctor?view=nodes", "/doctor?view=pairs", "/doctor?filter=state%3Dfail",
]  # fmt: skip
LATER = ["kv-wait", "explain", "alerts", "bundle"]


class Outline(HTMLParser):
    """What a reader without eyes meets: landmarks, headings, tables, links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def words(text: str) -> str:
    """The text of a page without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def row_of(text: str, key: str) -> str:
    """The words of one row."""
    found = re.search(rf'<tr data-key="{re.escape(key)}"[^>]*>(.*?)</tr>', text, re.DOTALL)
    assert found, key
    return words(found[1])


class TestEveryPage:
    @pytest.mark.parametrize("path", PAGES)
    async def test_reads_well_without_scripts(self, path: str, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get(path)
        assert reply.status_code == 200, reply.text[-2000:]
        outline = Outline(reply.text)
        assert len(outline.all("h1")) == 1
        assert [len(outline.all(tag)) for tag in ("header", "main")] == [1, 1]
        tables = outline.all("table")
        assert len(outline.all("caption")) == len(tables)
        assert all(cell.get("scope") for cell in outline.all("th"))
        assert "nan" not in words(reply.text).lower().split()
        assert "None" not in words(reply.text)

    @pytest.mark.parametrize("path", PAGES)
    async def test_names_nothing_outside_and_nothing_inline(
        self, path: str, browser: httpx2.AsyncClient
    ) -> None:
        outline = Outline((await browser.get(path)).text)
        sources = [a.get("src") or a.get("href") or "" for _, a in outline.tags]
        assert not [s for s in sources if s.startswith(("http:", "https:", "//"))]
        assert not [tag for tag, attrs in outline.tags if "style" in attrs]
        assert all(script.get("src") for script in outline.all("script"))

    @pytest.mark.parametrize("path", PAGES)
    async def test_stands_while_nothing_has_happened(
        self, path: str, made: SimpleNamespace
    ) -> None:
        transport = httpx2.ASGITransport(app=made.with_pages(made.empty()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://pages") as browser:
            reply = await browser.get(path)
        named = re.match(r"/(nodes|workers|requests/|policies/slo/default\?)", path)
        assert reply.status_code == (404 if named and "slo" not in path else 200)
        assert "None" not in words(reply.text)

    async def test_navigation_has_no_page_that_is_not_there(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/")).text
        nav = text[text.index('<nav id="nav"') : text.index("<main")]
        links = [attrs["href"] for attrs in Outline(nav).all("a")]
        assert links == ["/", "/topology", "/cache/hit-rate", "/transfers", "/requests",
                         "/policies", "/jobs", "/doctor", "/audit"]  # fmt: skip
        for link in links:
            assert (await browser.get(str(link))).status_code == 200
        assert not [noun for noun in LATER if noun in nav.lower()]

    async def test_every_link_on_overview_and_topology_leads_somewhere(
        self, browser: httpx2.AsyncClient
    ) -> None:
        links: set[str] = set()
        for path in (
            "/", "/topology", "/transfers", "/transfers?as=table", "/transfers?view=workers", "/transfers/n1/n2",
            "/doctor", "/doctor?view=pairs", "/requests", "/policies", "/audit",
        ):  # fmt: skip
            found = Outline((await browser.get(path)).text).all("a")
            links |= {str(a["href"]) for a in found if not str(a["href"]).startswith("#")}
        dead = [link for link in sorted(links) if (await browser.get(link)).status_code != 200]
        assert not dead


class TestHeaders:
    async def test_policy_is_strict(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/")
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"

    async def test_an_unchanged_page_is_not_sent_again(self, browser: httpx2.AsyncClient) -> None:
        first = await browser.get("/")
        assert first.headers["cache-control"] == "no-cache"
        again = await browser.get("/", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")

    async def test_static_files_live_for_ever_under_their_hash(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/cache/hit-rate")).text
        links = re.findall(r'"(/static/[^"]+)"', text)
        assert any(link.endswith("plotly-cartesian.min.js") for link in links)
        for link in links:
            reply = await browser.get(link)
            assert "immutable" in reply.headers["cache-control"]
        gone = await browser.get(re.sub(r"/static/[0-9a-f]+/", "/static/0000/", links[0]))
        assert gone.status_code == 404

    @pytest.mark.parametrize("name", ["..%2froutes.py", "%2e%2e/routes.py", "nothing.js"])
    async def test_static_never_leaves_its_folder(
        self, name: str, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/")).text
        folder = re.findall(r'"(/static/[0-9a-f]+)/', text)[0]
        assert (await browser.get(f"{folder}/{name}")).status_code == 404


class TestUnknown:
    async def test_a_node_without_fields_says_so_and_harms_nobody(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/topology")).text
        assert row_of(text, "n3").count("--") >= 4
        assert "128/160 GiB" in row_of(text, "n1/p1")

    async def test_unknown_numbers_are_not_zero(
        self, recorded: Any, made: SimpleNamespace, browser: httpx2.AsyncClient
    ) -> None:
        recorded.overview = made.overview_of(hit_ratio=None, used_bytes=None, capacity_bytes=None)
        header = (await browser.get("/")).text.partition("<main")[0]
        assert "hit --" in words(header)
        assert "cache --" in words(header)

    async def test_no_traffic_is_a_dash_and_no_alarm(
        self, recorded: Any, made: SimpleNamespace, browser: httpx2.AsyncClient
    ) -> None:
        recorded.overview = made.overview_of(
            requests_per_minute=0.0, prompt_tokens=0, hit_tokens=0, hit_ratio=None,
            ttft_p95_seconds=None, tbt_p95_seconds=None, kv_wait_ratio=None, rejected_ratio=None,
            slo_attainment_ratio=None, attention=[],
        )  # fmt: skip
        text = (await browser.get("/")).text
        assert "No requests in the last 15 min." in text
        assert "curl http://127.0.0.1:8000/v1/chat/completions" in text
        assert " - " in row_of(text, "ttft")
        assert 'class="breach"' not in text
        assert "tone-critical" not in text

    async def test_an_unknown_name_says_which_there_are(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/nodes/n9")
        assert reply.status_code == 404
        assert "knows no node n9" in reply.text
        assert "n1, n2, n3, n4" in reply.text

    async def test_a_control_plane_that_cannot_answer_is_explained(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        recorded.overview = None
        reply = await browser.get("/")
        assert reply.status_code == 503
        assert "The database is being opened. Wait 5 s." in words(reply.text)

    async def test_names_from_outside_stay_text(
        self, recorded: Any, made: SimpleNamespace, browser: httpx2.AsyncClient
    ) -> None:
        name = '<img src=x onerror=alert(1)>"'
        recorded.nodes.append(made.node(name))
        recorded.workers.append(made.worker("w&<b>", "decode", name, last_error="</script>"))
        for path in ("/topology", "/cache/hit-rate", "/cache/hit-rate?as=table"):
            text = (await browser.get(path)).text
            assert "<img" not in text
            assert "<b>" not in text


class TestStale:
    async def test_a_lost_node_is_dimmed_dated_and_left_marked(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/topology")).text
        lost = row_of(text, "n4/d2")
        assert "lost 38 s" in lost
        assert "~128/160 GiB" in lost
        assert text.count("tone-stale") > 5

    async def test_stale_data_is_never_called_live(
        self, recorded: Any, made: SimpleNamespace, browser: httpx2.AsyncClient
    ) -> None:
        recorded.overview = made.overview_of(sample_age_seconds=14.2)
        text = (await browser.get("/")).text
        assert "STALE 14 s" in words(text)
        assert "LIVE" not in text
        assert '<main id="main" tabindex="-1" class="stale">' in text

    async def test_gaps_of_a_lost_node_are_stale_and_not_zero(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        lost = next(node for node in recorded.nodes if node.id == "n4")
        assert lost.last_heartbeat_at + timedelta(seconds=38)
        reply = await browser.get("/figures/hit-rate?as=csv")
        rows = list(csv.DictReader(io.StringIO(reply.text)))
        last = [row for row in rows if row["row"] == "n4"][-1]
        assert (last["state"], last["hit_ratio"]) == ("stale", "")


class TestSameText:
    async def test_the_header_draws_the_view_models_numbers(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        seen = recorded.overview
        text = words((await browser.get("/audit")).text)
        assert f"hit {numbers.percent(seen.hit_ratio)}" in text
        assert f"cache {numbers.used_of(seen.used_bytes, seen.capacity_bytes)}" in text
        assert f"moved {numbers.moved_rate(seen.moved_bytes_per_second)}" in text

    async def test_times_are_in_the_viewers_zone(self, browser: httpx2.AsyncClient) -> None:
        utc = words((await browser.get("/")).text)
        assert "LIVE 14:13:20 +00:00" in utc
        browser.cookies.set("perilune_tz", "America/New_York")
        there = words((await browser.get("/")).text)
        assert "LIVE 10:13:20 -04:00" in there
        browser.cookies.set("perilune_tz", "../../etc/passwd")
        assert "LIVE 14:13:20 +00:00" in words((await browser.get("/")).text)

    async def test_emulated_is_written_on_every_page(
        self, recorded: Any, made: SimpleNamespace, browser: httpx2.AsyncClient
    ) -> None:
        assert "EMULATED" not in (await browser.get("/topology")).text
        recorded.workers[0] = made.worker("p1", "prefill", "n1", engine="emulated")
        for path in PAGES:
            assert "EMULATED" in (await browser.get(path)).text, path
        csv_reply = await browser.get("/figures/hit-rate?as=csv")
        assert "EMULATED" in csv_reply.headers["content-disposition"]


class TestFilter:
    async def test_keeps_what_matches_and_says_how_many(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/requests", params={"filter": "status=rejected tenant=batch"})
        assert "24 of 120" in words(reply.text)
        assert "finished_stop" not in reply.text

    async def test_a_bad_filter_leaves_the_table_and_points_at_it(
        self, browser: httpx2.AsyncClient
    ) -> None:
        reply = await browser.get("/requests", params={"filter": "ttft>2x"})
        assert reply.status_code == 200
        assert "expected a time such as 2s or 800ms, at character 6" in words(reply.text)
        assert reply.text.count("<tr data-key=") == 50

    async def test_nothing_matches(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/audit", params={"filter": "actor=nobody"})
        assert "Nothing matches actor=nobody. 8 without the filter." in words(reply.text)


class TestLists:
    async def test_pages_of_fifty_with_a_way_on(
        self, recorded: Any, made: SimpleNamespace, browser: httpx2.AsyncClient
    ) -> None:
        recorded.decisions = [made.decision(i) for i in range(5_000)]
        first = await browser.get("/requests")
        assert first.text.count("<tr data-key=") == 50
        assert len(first.content) < 200_000
        older = re.search(r'href="(/requests\?[^"]*cursor=50[^"]*)"', first.text)
        assert older
        second = await browser.get(older[1].replace("&amp;", "&"))
        assert second.text.count("<tr data-key=") == 50
        assert recorded.decisions[0].request_id not in second.text
        assert recorded.decisions[50].request_id in second.text

    async def test_a_thousand_nodes_fit_a_budget_on_the_wire(
        self, recorded: Any, made: SimpleNamespace, browser: httpx2.AsyncClient
    ) -> None:
        recorded.nodes = [made.node(f"n{i:03}") for i in range(100)]
        recorded.workers = [made.worker(f"w{i:03}", "decode", f"n{i:03}") for i in range(100)]
        async with browser.stream("GET", "/topology", headers={"Accept-Encoding": "gzip"}) as reply:
            size = sum([len(chunk) async for chunk in reply.aiter_raw()])
        assert size < 16_000


class TestPolicy:
    async def test_a_draft_is_checked_line_by_line(self, browser: httpx2.AsyncClient) -> None:
        draft = {"max_ttft_ms": "0", "mode": "maybe", "base": "2"}
        reply = await browser.get("/policies/slo/default/check", params=draft)
        body = reply.json()
        assert set(body["errors"]) == {"max_ttft_ms", "mode"}
        assert "1 to 600,000" in body["errors"]["max_ttft_ms"]
        assert body["spec"] is None

    async def test_a_good_draft_says_what_it_does(self, browser: httpx2.AsyncClient) -> None:
        draft = {"max_ttft_ms": "1", "base": "2"}
        body = (await browser.get("/policies/slo/default/check", params=draft)).json()
        assert body["errors"] == {}
        assert body["spec"]["max_ttft_ms"] == 1
        assert "2000" in body["changes"][0]["text"]
        assert any("429" in line["text"] for line in body["effects"])
        assert body["conflict"] == ""

    async def test_a_draft_on_an_old_revision_is_told_so(self, browser: httpx2.AsyncClient) -> None:
        params = {"max_ttft_ms": "1", "base": "1"}
        body = (await browser.get("/policies/slo/default/check", params=params)).json()
        assert "r2 was taken by ana" in body["conflict"]
        assert body["active"]["texts"]["max_ttft_ms"] == "2000"

    async def test_any_revision_is_compared_with_the_active_one(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = words((await browser.get("/policies/slo/default?compare=1")).text)
        assert "r1 against r2" in text
        assert re.search(r"max_ttft_ms 10000 -&gt; 2000", text)

    async def test_an_unknown_policy_is_a_page_too(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/policies/slo/nobody")
        assert reply.status_code == 404
        assert "No such policy" in reply.text


class TestFigures:
    async def test_only_the_open_column_travels_again(self, browser: httpx2.AsyncClient) -> None:
        first = (await browser.get("/figures/hit-rate")).json()
        again = (await browser.get(f"/figures/hit-rate?have={first['closed_key']}")).json()
        assert set(again) == {"closed_key", "open"}

    async def test_csv_is_raw_and_names_its_units(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/figures/transfers?as=csv")
        rows = list(csv.DictReader(io.StringIO(reply.text)))
        assert rows[0]["source"] == "p1"
        assert float(rows[0]["p95_seconds"]) == 2.84
        idle = [row for row in rows if row["state"] == "no_traffic"]
        assert idle
        assert idle[0]["p95_seconds"] == ""

    async def test_the_table_twin_has_every_cell(self, browser: httpx2.AsyncClient) -> None:
        figure = (await browser.get("/figures/evictions")).json()
        cells = sum(len(row) for trace in figure["traces"] for row in trace["z"])
        text = (await browser.get("/cache/evictions?as=table")).text
        assert text.count('<td class="cell"') == cells

    async def test_an_unknown_figure_is_refused(self, browser: httpx2.AsyncClient) -> None:
        assert (await browser.get("/figures/other")).status_code == 422


def test_a_policy_of_a_model_with_slashes_has_its_page() -> None:
    assert page_of("policy/slo/Qwen/Qwen2.5-7B") == "/policies/slo/Qwen%2FQwen2.5-7B"
    assert page_of("policy/slo/default") == "/policies/slo/default"
    assert page_of("policies") == "/policies"


def test_slow_requests_are_linked_with_the_limit_that_they_broke() -> None:
    assert page_of("requests/slow?ttft>2000ms") == "/requests?filter=ttft%3E2000ms"
    assert page_of("requests/slow") == "/requests"
