"""Transfers between nodes and the doctor in a browser: down to a pair by keys, a run from its button."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.chromium, pytest.mark.xdist_group("chromium")]

Visit = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def _ready(feed: Any, client: Any, tools: Any) -> None:
    feed.serve(5, 0.5)
    tools.wait_until(lambda: len(client.nodes()) == 2, "two nodes")


def test_from_the_matrix_to_a_pair_by_keys(
    visit: Visit, feed: Any, client: Any, tools: Any
) -> None:
    def moved() -> bool:
        feed.serve(1, 0.5)
        return any(pair.kind == "node" and pair.bytes for pair in client.matrix().pairs)

    tools.wait_until(moved, "blocks moved between the nodes")
    page = visit().open("/transfers")
    expect(page.locator("main")).to_contain_text("no transfers with n1 by rdma")
    plot = page.locator(".plot")
    expect(plot.locator(".main-svg").first).to_be_visible()
    plot.focus()
    page.keyboard.press("End")
    expect(page.locator(".readout")).to_contain_text("n1 -> n2  P50")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/transfers/n1/n2$"))
    expect(page.locator("#kinds")).to_contain_text("2 timeout!")
    expect(page.locator("#stages tr")).to_have_count(3)


def test_the_doctor_is_run_and_what_it_found_shows(visit: Visit, plane: Any, client: Any) -> None:
    page = visit().open("/doctor")
    page.keyboard.press("T")
    dialog = page.locator("#act")
    expect(dialog).to_contain_text("2 nodes are asked for facts; 2 pairs probe each other")
    dialog.locator("#act-token").fill(plane.token)
    dialog.locator("#act-reason").fill("looked at from a page")
    dialog.get_by_role("button", name="Run the doctor").click()
    expect(dialog.locator(".outcome")).to_contain_text("of the doctor has begun")
    dialog.get_by_role("button", name="Close").click()
    # the scripted nodes have no agent that answers: that is a finding, with what to do
    expect(page.locator("main")).to_contain_text("ended less than a minute ago", timeout=30_000)
    rows = [row for row in client.audit().items if row.verb == "doctor.run"]
    assert rows[0].reason == "looked at from a page"
