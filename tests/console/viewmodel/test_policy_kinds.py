"""Each kind of policy can be looked at, changed, and says who acts on it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

import pytest

from console.tui.actions import put_words
from console.viewmodel.policies import Draft, check, consequences
from controlplane import cli_text
from controlplane.policies.schemas import PolicyKind, PolicyPutReply, PolicyRevision
from controlplane.policies.service import validated


def active(kind: PolicyKind) -> PolicyRevision:
    return PolicyRevision(
        kind=kind, scope="default", revision=3, spec=validated(kind, {}), author="ann",
        created_at=datetime(2026, 1, 1, tzinfo=UTC), active=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", get_args(PolicyKind))
def test_what_a_change_does_is_said_for_each(kind: PolicyKind) -> None:
    draft = Draft(active(kind))
    first, *_ = consequences(draft, check(draft), None)
    assert first.text.startswith("ok    acts on ")


@pytest.mark.parametrize(
    ("kind", "who"), [("slo", "gw-1"), ("transfer", "each node"), ("cache", "each node")]
)
def test_who_acts_on_it(kind: PolicyKind, who: str) -> None:
    """Gateways acknowledge every kind; agents are who acts on some."""
    reply = PolicyPutReply(active=active(kind), acknowledged_gateways=["gw-1"])
    assert f"acts on: {who}" in cli_text.policy_put(reply, None)
    assert ("each node acts on it" in put_words(reply)) == (who == "each node")


def test_an_empty_list_is_said_and_read_back() -> None:
    draft = Draft(active("scheduling"))
    lines = {view.name: view for view in check(draft).fields}
    assert lines["normalisation"].was == "none"
    for typed in ("none", ""):
        checked = check(draft.with_value("normalisation", typed))
        assert checked.spec is not None
        assert checked.spec["normalisation"] == []
