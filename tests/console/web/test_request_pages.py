"""In flight, rejections, worker health and a decision's remarks, as pages."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import httpx2

from controlplane.decisions.schemas import ObservedPlacement, Verdict
from controlplane.gateways.running_schemas import RunningList

STUCK = "gw-1/00000001cafe4711"


def words(text: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", text)))


class TestInFlight:
    async def test_the_stuck_one_stands_first_and_can_be_cancelled(
        self, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get("/in-flight")).text
        shown = words(text)
        assert shown.index("1 stuck: 00000001 waits 5 min 40 s") < shown.index("stuck: prefilling")
        assert shown.index("stuck: prefilling") < shown.index("reported only")
        assert "~ gw-2 (lost) has not answered since" in shown
        assert text.count('data-act="cancel_request"') == 3, "one is of a silent gateway"
        assert f'data-target="{STUCK}"' in text
        assert 'href="/requests/00000001cafe4711"' in text

    async def test_what_a_cancel_would_do_and_its_one_request(
        self, browser: httpx2.AsyncClient
    ) -> None:
        reply = await browser.get("/acts/cancel_request", params={"target": STUCK})
        found = reply.json()
        assert (found["method"], found["path"]) == (
            "POST",
            "/api/v1/requests/00000001cafe4711/cancel",
        )
        assert found["body"] == {"gateway": "gw-1", "reason": ""}
        assert any("503 cancelled_by_operator" in line["text"] for line in found["lines"])
        mute = await browser.get("/acts/cancel_request", params={"target": "gw-2/00000004cafe4711"})
        assert "Gateway gw-2 does not answer" in mute.json()["title"]
        gone = await browser.get("/acts/cancel_request", params={"target": "gw-1/other"})
        assert (gone.status_code, gone.json()["title"][:22]) == (409, "This request has ended")

    async def test_a_filter_and_a_bad_one(self, browser: httpx2.AsyncClient) -> None:
        some = words((await browser.get("/in-flight?filter=worker=p3")).text)
        assert "1 of 4" in some
        bad = await browser.get("/in-flight?filter=left<2x")
        assert "expected a time such as 2s" in words(bad.text)

    async def test_nothing_runs(self, recorded: Any, browser: httpx2.AsyncClient) -> None:
        recorded.running = RunningList(items=[])
        assert "No gateway has joined" in words((await browser.get("/in-flight")).text)


class TestRejections:
    async def test_the_estimate_with_its_samples_then_the_entries(
        self, browser: httpx2.AsyncClient
    ) -> None:
        shown = words((await browser.get("/rejections")).text)
        for part in (
            "1,204 rejected, 31 shed", "12.1 % of 58 probes (95 %: 6.0 to 22.9 %)",
            "likely no, 1 of 20", "yes, it was let in", "slo r41", "no longer in force", "3.00 s",
        ):  # fmt: skip
            assert part in shown, part
        assert shown.index("12.1 %") < shown.index("likely no")

    async def test_nobody_was_turned_away(self, recorded: Any, browser: httpx2.AsyncClient) -> None:
        recorded.ledger = recorded.summary = None
        shown = words((await browser.get("/rejections")).text)
        assert "Nobody was turned away" in shown
        assert "rejected wrongly: - (nobody was)" in shown


class TestHealth:
    async def test_topology_and_the_worker_itself(self, browser: httpx2.AsyncClient) -> None:
        shown = words((await browser.get("/topology")).text)
        assert "left out after failures: d1 at gw-1" in shown
        assert "ejected, trial in 4.2 s" in shown
        assert "~ gw-2 is stale: its last report is 14 s old" in shown
        one = words((await browser.get("/workers/d1")).text)
        assert "As gateways meet it" in one
        assert "10 of 20" in one
        assert "answered 502" in one


class TestRequest:
    async def test_admission_and_observe_stand_under_the_outcome(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        verdict = Verdict(gate="ttft", predicted_seconds=2.31, limit_seconds=2.0, percentile=95, probe=True, met=True)  # fmt: skip
        other = ObservedPlacement(
            algorithm="cache_aware", worker_id="p2", predicted_ttft_seconds=0.5
        )
        first = recorded.decisions[0].model_copy(
            update={"admission": verdict, "observed_placement": other, "priority": "batch"}
        )
        recorded.decisions[0] = first
        text = (await browser.get(f"/requests/{first.request_id}")).text
        shown = words(text)
        said = "predicted TTFT 2.31 s at P95 > 2.00 s: it kept the SLO"
        assert f"let in as a probe of slo/default r1 though {said}" in shown
        assert shown.index(said) < shown.index("Where the time went")
        assert "cache_aware would have chosen p2: predicted 500 ms, 287 ms later than p1" in shown
        assert "class batch" in shown
        assert "data-act" not in text

    async def test_a_running_one_can_be_cancelled(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        runs = next(d for d in recorded.decisions if d.status == "running")
        text = (await browser.get(f"/requests/{runs.request_id}")).text
        assert f'data-target="g1/{runs.request_id}"' in text


class TestMarkup:
    """What styles would change or blanks would swallow."""

    async def test_values_keep_their_case_and_facts_stay_apart(
        self, recorded: Any, browser: httpx2.AsyncClient
    ) -> None:
        text = (await browser.get(f"/requests/{recorded.decisions[-1].request_id}")).text
        assert '<h2 class="as-is spaced">DECISION' in text, "MS is not ms"
        assert re.search(r'<span class="as-is">[\d.]+ m?s</span> in all', text)
        assert '<p class="spaced"><span' in text
        css = re.search(r'href="(/static/[^"]*base\.css)"', text)
        assert css is not None
        rules = (await browser.get(css[1])).text
        assert ".as-is { text-transform: none; }" in rules
        assert ".spaced { white-space: pre-wrap; }" in rules

    async def test_a_nodes_second_worker_has_a_name_on_a_phone(
        self, browser: httpx2.AsyncClient, recorded: Any
    ) -> None:
        first = recorded.workers[0]
        recorded.workers.append(first.model_copy(update={"id": "z77"}))
        text = (await browser.get("/topology")).text
        assert f'<span class="ditto">{first.node_id}/z77</span>' in text

    async def test_the_button_that_leaves_a_request_alone_does_not_say_cancel(
        self, browser: httpx2.AsyncClient
    ) -> None:
        found = (await browser.get("/acts/cancel_request", params={"target": STUCK})).json()
        assert (found["leave"], found["button"]) == ("Let it run", "End 00000001")
