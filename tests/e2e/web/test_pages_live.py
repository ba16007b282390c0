"""The pages in a browser, against a control plane that a scripted cluster reports to."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from controlplane.decisions.schemas import Verdict
from controlplane.policies.schemas import PolicyPut

pytestmark = [pytest.mark.chromium, pytest.mark.xdist_group("chromium")]

Visit = Callable[..., Any]
PATHS = [
    "/", "/topology", "/nodes/n1", "/workers/d1", "/cache/hit-rate", "/cache/evictions",
    "/cache/tiers", "/cache/tenants", "/cache/what-if", "/cache/pins", "/jobs",
    "/transfers", "/transfers/p1/d1", "/requests", "/rejections", "/in-flight", "/policies",
    "/policies/slo/default", "/audit", "/transfers?view=workers", "/transfers?as=table", "/transfers/n1/n2",
    "/doctor", "/doctor?view=nodes",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _ready(feed: Any, client: Any, tools: Any) -> None:
    """Both nodes have joined and some requests were served."""
    feed.serve(20, 0.5)
    feed.record(tools.decision("seed" + secrets.token_hex(12)))
    tools.wait_until(lambda: len(client.workers()) == 2, "two workers")
    tools.wait_until(lambda: client.decisions().items, "a decision")


class TestLive:
    def test_overview_changes_without_a_reload(self, visit: Visit, feed: Any, tools: Any) -> None:
        page = visit().open("/")
        page.evaluate("window.notReloaded = true")
        clock = page.locator(".timemark .mark")
        before = clock.inner_text()
        rpm = page.locator('tr[data-key="requests"] td').first
        first = rpm.inner_text()
        feed.serve(200, 0.9)
        tools.wait_until(lambda: rpm.inner_text() != first, "requests/min moved")
        tools.wait_until(lambda: clock.inner_text() != before, "the clock moved")
        assert page.evaluate("window.notReloaded") is True
        assert clock.inner_text().startswith("LIVE ")

    def test_a_rejection_shows_within_two_seconds(
        self, visit: Visit, feed: Any, tools: Any
    ) -> None:
        page = visit().open("/requests")
        expect(page.locator("#requests")).to_be_visible()
        page.wait_for_timeout(1200)
        name = secrets.token_hex(16)
        started = time.monotonic()
        feed.record(
            tools.decision(
                name,
                status="rejected",
                http_status=429,
                decode_worker="",
                hit_tokens=None,
                ttft_seconds=None,
                retry_after_seconds=3,
                error="predicted TTFT 2.31 s > 2.00 s",
                admission=Verdict(gate="ttft", predicted_seconds=2.31, limit_seconds=2.0),
            )
        )
        row = page.locator(f'tr[data-key="{name}"]')
        expect(row).to_contain_text("TTFT 2.31 s > 2.00 s", timeout=15_000)
        took = time.monotonic() - started
        # 2 s are promised; a busy machine of 2 cores is given more before the test calls it broken
        assert took < 6, f"{took:.1f} s"
        page.goto(page.url.replace("/requests", "/rejections"))
        expect(page.locator(f'tr[data-key="{name}"]')).to_contain_text("2.31 s!")

    def test_rows_wait_behind_a_button_while_one_reads(
        self, visit: Visit, feed: Any, tools: Any
    ) -> None:
        page = visit().open("/requests")
        page.locator("#requests tr a").first.focus()
        name = secrets.token_hex(16)
        feed.record(tools.decision(name))
        button = page.get_by_role("button", name=re.compile(r"^\d+ new$"))
        expect(button).to_be_visible()
        assert page.locator(f'tr[data-key="{name}"]').count() == 0
        button.click()
        expect(page.locator(f'tr[data-key="{name}"]')).to_be_visible()
        expect(button).to_be_hidden()

    def test_a_hidden_tab_asks_for_nothing(self, visit: Visit) -> None:
        page = visit().open("/")
        page.wait_for_timeout(500)
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        page.wait_for_timeout(700)
        asked: list[str] = []
        page.on("request", lambda r: asked.append(r.url))
        page.wait_for_timeout(1800)
        assert asked == []

    def test_a_lost_node_is_marked_and_its_row_stays(
        self, visit: Visit, feed: Any, client: Any, tools: Any
    ) -> None:
        page = visit().open("/topology")
        row = page.locator('#nodes tr[data-key="n2/d1"]')
        expect(row).to_contain_text("ready")
        feed.script.lost.add("n2")
        try:
            expect(row).to_contain_text("stale", timeout=15_000)
            expect(page.locator('#nodes tr[data-key="n1/p1"]')).to_contain_text("ready")
        finally:
            feed.script.lost.discard("n2")
        expect(row).to_contain_text("ready", timeout=15_000)


class TestPolicy:
    def edit(self, page: Page, value: str) -> None:
        page.keyboard.press("E")
        page.locator("#f-max_ttft_ms").fill(value)
        page.get_by_role("button", name="Review").click()

    def test_an_edit_acts_and_is_audited(
        self, visit: Visit, plane: Any, client: Any, tools: Any
    ) -> None:
        before = client.policy("slo", "default")
        page = visit().open("/policies/slo/default")
        self.edit(page, "1234")
        expect(page.locator("#policy-form")).to_contain_text("Paste the operator's token first.")
        page.locator("#f-token").fill(plane.token)
        page.locator("#f-reason").fill("tried from the page")
        page.get_by_role("button", name="Review").click()
        dialog = page.locator("#agree")
        expect(dialog).to_contain_text("1234")
        expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        page.wait_for_timeout(1500)  # an update of the page leaves the question as it was asked
        expect(dialog).to_contain_text("1234")
        dialog.get_by_role("button", name="Put slo/default").click()
        expect(page.locator(".outcome")).to_contain_text(f"r{before.revision + 1} is active")
        expect(page.get_by_role("heading", name=f"Active: r{before.revision + 1}")).to_be_visible()
        assert client.policy("slo", "default").spec["max_ttft_ms"] == 1234
        assert page.evaluate("Object.keys(sessionStorage)") == ["perilune.token"]
        assert plane.token not in page.content()
        assert plane.token not in str(
            page.evaluate("JSON.stringify(localStorage) + document.cookie")
        )
        page.goto(f"{plane.url}/audit")
        row = page.locator("#audit tr", has_text="tried from the page").first
        expect(row).to_contain_text("slo/default")

    def test_a_wrong_value_is_named_on_its_line(
        self, visit: Visit, plane: Any, client: Any
    ) -> None:
        before = client.policy("slo", "default")
        page = visit().open("/policies/slo/default")
        page.keyboard.press("E")
        page.locator("#f-token").fill(plane.token)
        self.fill_and_review(page, "0")
        line = page.locator('[data-line="max_ttft_ms"]')
        expect(line.locator(".error")).to_contain_text("1 to 600,000")
        expect(line.locator("input")).to_have_attribute("aria-invalid", "true")
        expect(page.locator("#agree")).to_be_hidden()
        assert client.policy("slo", "default").revision == before.revision

    def fill_and_review(self, page: Page, value: str) -> None:
        page.locator("#f-max_ttft_ms").fill(value)
        page.get_by_role("button", name="Review").click()

    def test_someone_else_was_first(self, visit: Visit, plane: Any, client: Any) -> None:
        watched = visit()
        watched.allowed = re.compile("412")
        page = watched.open("/policies/slo/default")
        page.keyboard.press("E")
        page.locator("#f-token").fill(plane.token)
        self.fill_and_review(page, "777")
        expect(page.locator("#agree")).to_be_visible()
        active = client.policy("slo", "default")
        other = {**active.spec, "percentile": 90}
        put = client.put_policy("slo", "default", _put(other, "first"), active.revision)
        page.locator("#agree").get_by_role("button", name="Put slo/default").click()
        expect(page.locator(".outcome")).to_contain_text(f"r{put.active.revision} was taken by")
        expect(page.locator("#f-max_ttft_ms")).to_have_value("777")
        page.get_by_role("button", name="Rebase").click()
        expect(page.locator("#f-percentile")).to_have_value("90")
        page.get_by_role("button", name="Review").click()
        page.locator("#agree").get_by_role("button", name="Put slo/default").click()
        expect(page.locator(".outcome")).to_contain_text("is active")
        spec = client.policy("slo", "default").spec
        assert (spec["max_ttft_ms"], spec["percentile"]) == (777, 90)

    def test_a_wrong_token_is_refused_and_forgotten(self, visit: Visit, client: Any) -> None:
        watched = visit()
        watched.allowed = re.compile("401")
        before = client.policy("slo", "default")
        page = watched.open("/policies/slo/default")
        page.keyboard.press("E")
        page.locator("#f-token").fill("not-the-token-of-this-cluster")
        self.fill_and_review(page, "888")
        page.locator("#agree").get_by_role("button", name="Put slo/default").click()
        expect(page.locator('[data-line-extra="token"] .error')).not_to_be_empty()
        assert page.evaluate("Object.keys(sessionStorage)") == []
        assert client.policy("slo", "default").revision == before.revision


class TestEveryPage:
    @pytest.mark.parametrize("scheme", ["dark", "light"])
    def test_no_message_no_foreign_request_no_overflow(self, visit: Visit, scheme: str) -> None:
        """At 1440 and at 390; the context's own watch fails the test on any complaint."""
        watched = visit(color_scheme=scheme)
        page = watched.open("/")
        for path in PATHS:
            page.set_viewport_size({"width": 1440, "height": 900})
            page.goto(watched.url + path)
            plots = page.locator(".plot:visible")
            if plots.count():
                expect(plots.first.locator(".main-svg").first).to_be_visible()
            page.set_viewport_size({"width": 390, "height": 800})
            page.wait_for_timeout(150)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, f"{path}: {width}"

    def test_the_phones_drawer_and_figure_sheet(self, visit: Visit) -> None:
        page = visit(390, 800, has_touch=True).open("/cache/hit-rate")
        assert page.locator(".worst li").first.is_visible()
        assert not page.locator(".plot").is_visible()
        page.get_by_role("button", name="Figure", exact=True).click()
        expect(page.locator(".plot .main-svg").first).to_be_visible()
        clock = page.locator(".timemark .mark").inner_text()
        expect(page.locator(".timemark .mark")).not_to_have_text(clock)
        expect(page.locator(".plot .main-svg").first).to_be_visible()  # an update leaves it open
        page.get_by_role("button", name="Pages").click()
        expect(page.locator("#nav")).to_be_visible()
        page.locator("#nav").get_by_role("link", name="Topology").click()
        expect(page.get_by_role("heading", name="Topology")).to_be_visible()

    def test_targets_on_a_phone_are_large_enough(self, visit: Visit) -> None:
        page = visit(390, 800, has_touch=True).open("/policies/slo/default")
        page.locator("#edit summary").click()
        small = page.evaluate(
            "[...document.querySelectorAll('button, input:not([type=checkbox]), select')]"
            ".filter(e => e.offsetParent && e.getBoundingClientRect().height < 44)"
            ".map(e => e.outerHTML)"
        )
        assert small == []


class TestKeyboard:
    def test_letters_go_filter_and_help_but_not_while_typing(self, visit: Visit) -> None:
        page = visit().open("/")
        page.keyboard.press("6")
        expect(page).to_have_url(re.compile(r"/requests$"))
        page.keyboard.press("/")
        expect(page.locator("#filter")).to_be_focused()
        page.keyboard.type("status=rejected 2?")
        expect(page).to_have_url(re.compile(r"/requests$"))
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_be_hidden()
        page.keyboard.press("]")
        expect(page).to_have_url(re.compile(r"/in-flight$"))
        page.keyboard.press("]")
        expect(page).to_have_url(re.compile(r"/rejections$"))

    def test_letters_can_be_switched_off(self, visit: Visit) -> None:
        page = visit().open("/")
        page.keyboard.press("?")
        page.get_by_label("Letters act as keys").uncheck()
        page.keyboard.press("Escape")
        page.keyboard.press("6")
        page.wait_for_timeout(300)
        assert page.url.rstrip("/").count("/") == 2

    def test_skip_link_comes_first_and_focus_is_visible(self, visit: Visit) -> None:
        page = visit().open("/")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert outline == "2px"

    def test_cells_are_walked_by_arrows_and_read_out(self, visit: Visit) -> None:
        page = visit().open("/cache/hit-rate")
        plot = page.locator(".plot")
        expect(plot.locator(".main-svg").first).to_be_visible()
        plot.focus()
        page.keyboard.press("ArrowLeft")
        readout = page.locator(".readout")
        expect(readout).to_contain_text("n1")
        page.keyboard.press("ArrowDown")
        expect(readout).to_contain_text("n2")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(r"/nodes/n2$"))


class TestTruth:
    def test_emulated_workers_are_labelled(self, visit: Visit, feed: Any) -> None:
        page = visit().open("/requests")
        assert page.locator(".badge.emulated").count() == 0
        feed.script.engine = "emulated"
        try:
            expect(page.locator(".badge.emulated")).to_be_visible()
        finally:
            feed.script.engine = "vllm"
        expect(page.locator(".badge.emulated")).to_have_count(0)

    def test_bytes_of_a_quiet_second_stay_within_the_budget(self, visit: Visit) -> None:
        """One console at rest: what the page fetches and what the stream carries, 12 kB/s in all."""
        page = visit().open("/cache/hit-rate")
        expect(page.locator(".plot .main-svg").first).to_be_visible()
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        received: list[int] = []
        session.on("Network.dataReceived", lambda e: received.append(e["encodedDataLength"]))
        page.wait_for_timeout(3000)
        assert sum(received) < 3 * 12_000

    def test_no_answer_turns_into_stale(self, visit: Visit) -> None:
        watched = visit()
        watched.allowed = re.compile("ERR_INTERNET_DISCONNECTED")
        page = watched.open("/")
        watched.context.set_offline(True)
        mark = page.locator(".timemark")
        expect(mark).to_contain_text(
            re.compile(r"^STALE 1\d s, (retry in \d+ s|trying now)$"), timeout=25_000
        )
        expect(page.locator("#unanswered")).to_have_text(
            re.compile(r"^No answer from the control plane since \d\d:\d\d:\d\d\.")
        )
        expect(page.locator("#unanswered")).to_be_visible()
        assert "lost" in (page.locator("body").get_attribute("class") or "")
        watched.context.set_offline(False)
        expect(mark).to_contain_text("LIVE", timeout=20_000)
        expect(page.locator("#unanswered")).to_be_hidden()
        assert "lost" not in (page.locator("body").get_attribute("class") or "")


def _put(spec: dict[str, object], reason: str) -> PolicyPut:
    return PolicyPut(spec=spec, reason=reason)
