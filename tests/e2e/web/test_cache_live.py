"""The cache pages in a browser: the curve is drawn and read out, an act asks before it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.chromium, pytest.mark.xdist_group("chromium")]

Visit = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def _ready(feed: Any, client: Any, tools: Any) -> None:
    tools.wait_until(lambda: len(client.nodes()) == 2, "two nodes")


def test_the_curve_is_drawn_and_walked_by_keys(visit: Visit) -> None:
    page = visit().open("/cache/what-if")
    expect(page.locator(".plot.js-plotly-plot")).to_be_visible(timeout=20_000)
    expect(page.locator("#points tr")).to_have_count(5)
    page.locator(".plot").focus()
    page.keyboard.press("End")
    expect(page.locator(".readout")).to_contain_text("4x, 39.1 GiB: 70.0 %")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".readout")).to_contain_text("2x, ")


def test_a_purge_is_asked_for_by_name_and_becomes_a_job(visit: Visit, plane: Any) -> None:
    page = visit().open("/cache/tenants")
    page.get_by_role("button", name="Purge tenant/acme").click()
    dialog = page.locator("#act")
    expect(dialog).to_contain_text("600 blocks, 600 MiB on 2 nodes")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_role("button", name="Purge acme").click()
    expect(dialog).to_contain_text("Type acme first.")
    dialog.locator("#act-typed").fill("acme")
    dialog.get_by_role("button", name="Purge acme").click()
    expect(dialog).to_contain_text("Paste the operator's token first.")
    dialog.locator("#act-token").fill(plane.token)
    dialog.locator("#act-reason").fill("from a page")
    dialog.get_by_role("button", name="Purge acme").click()
    expect(dialog.locator(".outcome")).to_contain_text("purge is queued.")
    dialog.get_by_role("button", name="Close").click()
    page.goto(page.url.replace("/cache/tenants", "/jobs"))
    # the scripted nodes have no agent to ask: the job says so, and what to wait for
    row = page.locator("#jobs tr").first
    expect(row).to_contain_text("has not said where its agent listens", timeout=15_000)


def test_the_parameters_follow_the_eviction_policy(visit: Visit) -> None:
    page = visit().open("/policies/cache/default")
    page.keyboard.press("E")
    expect(page.locator('[data-line="decay.half_life_seconds"]')).to_be_visible()
    page.locator("#f-eviction").select_option("credit")
    expect(page.locator('[data-line="decay.half_life_seconds"]')).to_be_hidden()
    expect(page.locator('[data-line="credit.credit_seconds"]')).to_be_visible()
