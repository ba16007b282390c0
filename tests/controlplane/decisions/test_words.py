"""A rejection says what decided, by which revision; a route says who might have served it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from controlplane import cli_text
from controlplane.decisions import words
from controlplane.decisions.schemas import Decision, PrefillCandidate, Verdict

AT = datetime(2026, 12, 1, 13, 7, tzinfo=UTC)


def candidate(name: str, seconds: float) -> PrefillCandidate:
    return PrefillCandidate(
        worker_id=name, node_id="n1", own_prefix_tokens=0, used_prefix_tokens=0, queue_seconds=0.0,
        transfer_seconds=0.0, prefill_seconds=seconds, ttft_seconds=seconds, verdict="",
    )  # fmt: skip


def turned_away(gate: str = "ttft", **changes: Any) -> Decision:
    verdict = Verdict(gate=gate, predicted_seconds=2.31, limit_seconds=2.0)  # type: ignore[arg-type]
    values: dict[str, Any] = {
        "request_id": "r1", "at": AT, "gateway_id": "gw-1", "status": "rejected",
        "http_status": 429, "error": "the queue before prefill is full", "admission": verdict,
        "prompt_tokens": 1305, "retry_after_seconds": 3.0,
        "policy_revisions": {"admission/default": 2, "slo/default": 7},
        "prefill_candidates": [candidate("p1", 2.4), candidate("p2", 2.2)],
    }  # fmt: skip
    return Decision.model_validate(values | changes)


def test_what_decided_comes_first_then_by_which_revision() -> None:
    assert words.rejection(turned_away()) == (
        "TTFT 2.31 s > 2.00 s, slo/default r7; 429, Retry-After 3.00 s"
    )
    full = words.rejection(turned_away("queue_full"))
    assert full.startswith("the queue before prefill is full, admission/default r2; 429")
    assert words.deciding_policy(turned_away("deadline")) == "slo/default r7"


def test_what_no_record_says_is_left_out() -> None:
    bare = turned_away(admission=None, retry_after_seconds=None, error="")
    assert words.rejection(bare) == "rejected; 429"
    assert words.deciding_policy(turned_away(policy_revisions={})) == ""


def test_a_route_names_the_best_of_a_rejected_one() -> None:
    assert words.route(turned_away()) == "p2 best"
    assert words.route(turned_away(prefill_candidates=[])) == "-"
    served = {"status": "running", "admission": None}
    assert words.route(turned_away(**served, prefill_worker="p1", decode_worker="d1")) == "p1 -> d1"
    assert words.route(turned_away(**served, decode_worker="d1")) == "- -> d1"
    assert words.route(turned_away(**served)) == "-"


def test_the_command_line_says_the_same() -> None:
    text = cli_text.requests([turned_away()])
    line = text.splitlines()[1]
    assert "p2 best" in line
    assert "- -> -" not in text
    assert "--" not in line
    assert line.endswith(words.rejection(turned_away()))
