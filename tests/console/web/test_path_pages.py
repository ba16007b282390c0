"""Transfers of nodes, one pair of them, and the doctor, as pages."""

from __future__ import annotations

import csv
import io
import re
from html import unescape
from types import SimpleNamespace
from typing import Any

import httpx2

from console.web.pages.doctor import MAX_GROUPS
from controlplane.doctor.schemas import DoctorNode, DoctorReport


def words(text: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", text)))


class TestTransfers:
    async def test_nodes_first_and_workers_as_the_other_view(
        self, browser: httpx2.AsyncClient
    ) -> None:
        nodes = (await browser.get("/transfers")).text
        assert "transfer P99, 5 min" in words(nodes)
        assert "no transfers with n1 by rdma: retry exceeded" in words(nodes)
        workers = (await browser.get("/transfers?view=workers")).text
        assert "transfer P95, 5 min" in words(workers)
        assert 'href="/transfers/n1/n2"' in nodes
        assert 'href="/transfers/n1/n2"' not in workers

    async def test_one_node_begins_with_workers(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        recorded.nodes = recorded.nodes[:1]
        assert "transfer P95" in words((await browser.get("/transfers")).text)

    async def test_cells_of_the_table_twin_are_links(self, browser: httpx2.AsyncClient) -> None:
        text = (await browser.get("/transfers?as=table")).text
        cell = re.search(r'<a href="/transfers/n1/n2" aria-label="([^"]+)">', text)
        assert cell
        assert "P99 2.61 s" in cell[1]

    async def test_csv_and_figure_of_nodes(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/figures/node-transfers?as=csv&value=bytes")
        rows = {(r["source"], r["destination"]): r for r in csv.DictReader(io.StringIO(reply.text))}
        assert float(rows["n1", "n2"]["moved_bytes_per_second"]) == 32_000_000
        assert rows["n1", "n1"]["state"] == "absent"
        figure = (await browser.get("/figures/node-transfers")).json()
        signs = {(note["x"], note["y"]): note["text"] for note in figure["layout"]["annotations"]}
        assert signs[0, 1] == "-"  # n2 -> n1: no traffic is written, not hatched like missing data
        assert (0, 0) not in signs

    async def test_an_unknown_view_or_value_still_opens(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/transfers?view=other&value=p95")
        assert "transfer P99" in words(reply.text)


class TestPair:
    async def test_everything_that_agents_say_of_it(self, browser: httpx2.AsyncClient) -> None:
        text = words((await browser.get("/transfers/n1/n2")).text)
        for part in (
            "P99 2.61 s!, 3 pieces missing!", "2 timeout, 1 corrupt!", "97.7 %", "set by hand", "open!",
            "pulls took less of late", "timed out after 3 tries", "Compare `ip link` at both ends", "Probe this pair",
        ):  # fmt: skip
            assert part in text, part

    async def test_its_requests_are_those_between_its_workers(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/transfers/n1/n2")).text
        assert text.count('href="/requests/') == 20
        assert "No recent request went this way." in (await browser.get("/transfers/n2/n1")).text

    async def test_a_node_with_itself(self, browser: httpx2.AsyncClient) -> None:
        reply = await browser.get("/transfers/n2/n2")
        assert "read in place: nothing travels" in words(reply.text)
        assert "Probe this pair" not in reply.text

    async def test_a_pair_of_workers_is_as_before(self, browser: httpx2.AsyncClient) -> None:
        text = words((await browser.get("/transfers/p1/d1")).text)
        assert "p95 2.84 s!" in text


class TestDoctor:
    async def test_findings_worst_first_with_the_way_out(self, browser: httpx2.AsyncClient) -> None:
        text = words((await browser.get("/doctor")).text)
        assert "Run 3 by ana" in text
        assert "1 fail 2 warn 0 unknown 10 ok" in text
        assert "the slowest pair, n1 -> n2, has 12 Gbps!" in text
        assert text.index("tcp.large") < text.index("hugepages")
        assert "Compare `ip link` at both ends and the switch." in text
        assert "incarnation 4" not in text

    async def test_by_node_by_pair_and_filtered(self, browser: httpx2.AsyncClient) -> None:
        nodes = (await browser.get("/doctor?view=nodes")).text
        assert nodes.count('<section class="panel dims" data-key="node/') == 4
        pairs = words((await browser.get("/doctor?view=pairs")).text)
        assert pairs.index("FAIL n1 -> n2 1 fail, 1 warn, 1 ok, moves 1.5 GB/s") < pairs.index("ok n2 -> n1")  # fmt: skip
        found = await browser.get("/doctor", params={"view": "nodes", "filter": "node=n3"})
        assert "2 of 9" in words(found.text)

    async def test_a_run_under_way_shows_progress_and_no_button(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        recorded.doctor = recorded.doctor.model_copy(update={"state": "running", "done": 3})
        text = (await browser.get("/doctor")).text
        assert "3 of 6 answers are in" in words(text)
        assert "50 %" in words(text)
        assert 'data-act="doctor"' not in text
        assert 'data-act="doctor"' not in (await browser.get("/transfers/n1/n2")).text

    async def test_never_run_and_failed(self, recorded: Any, browser: httpx2.AsyncClient) -> None:
        recorded.doctor = DoctorReport()
        text = (await browser.get("/doctor")).text
        assert "has not run since the control plane started" in words(text)
        assert 'data-act="doctor"' in text
        recorded.doctor = DoctorReport(number=1, state="failed", error="It took more than 300 s.")
        assert "did not come to its end" in words((await browser.get("/doctor")).text)

    async def test_many_nodes_are_cut_and_counted(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        checks = recorded.doctor.nodes[1].checks
        nodes = [DoctorNode(node_id=f"n{i:03}", state="ok", checks=checks) for i in range(100)]
        recorded.doctor = recorded.doctor.model_copy(update={"nodes": nodes})
        text = (await browser.get("/doctor?view=nodes")).text
        assert text.count('data-key="node/n') >= MAX_GROUPS
        assert text.count('<section class="panel dims"') == MAX_GROUPS
        assert "76 more, none of them worse" in words(text)

    async def test_what_a_run_would_do_and_the_request_that_does_it(
        self, browser: httpx2.AsyncClient
    ) -> None:
        act = (await browser.get("/acts/doctor?target=all")).json()
        assert (act["method"], act["path"], act["typed"]) == ("POST", "/api/v1/doctor", "")
        assert act["body"]["probe"] is True
        assert "4 nodes are asked for facts; 12 pairs" in act["lines"][0]["text"]
        pair = (await browser.get("/acts/doctor", params={"target": "pair/n1>n2"})).json()
        assert pair["body"]["pair"] == "n1:n2"
        wrong = await browser.get("/acts/doctor", params={"target": "pair/n1>elsewhere"})
        assert wrong.status_code == 409
        assert "no two nodes of this cluster" in wrong.json()["detail"]

    async def test_no_run_where_nobody_has_joined(self, made: SimpleNamespace) -> None:
        transport = httpx2.ASGITransport(app=made.with_pages(made.empty()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://pages") as browser:
            reply = await browser.get("/acts/doctor?target=all")
        assert reply.status_code == 409
        assert "No node has joined" in reply.json()["detail"]
