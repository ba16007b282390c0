"""Off asks nothing, observe says so, enforce rejects with a Retry-After that means something."""

import pytest

from controlplane.core.admission import (
    AdmissionRules,
    Predicted,
    Slo,
    admit,
    keeps_slo,
    retry_after,
)

LATE = Predicted(ttft_seconds=2.31, wait_seconds=2.0)


@pytest.mark.parametrize(("mode", "admitted", "says"), [
    ("off", True, False), ("observe", True, True), ("enforce", False, True),
])  # fmt: skip
def test_modes(mode: str, admitted: bool, says: bool) -> None:
    verdict = admit(Slo(mode, max_ttft_seconds=1.0), LATE)  # type: ignore[arg-type]
    assert verdict.admitted is admitted
    assert bool(verdict.reason) is says
    assert (verdict.retry_after_seconds is not None) is not admitted


def test_reason_names_value_limit_and_difference() -> None:
    verdict = admit(Slo("enforce", max_ttft_seconds=0.001), LATE)
    assert verdict.reason == "predicted TTFT 2.31 s breaks the SLO of 1 ms by 2.31 s"
    assert verdict.breaks == "ttft"


def test_tbt_is_asked_too() -> None:
    slo = Slo("enforce", max_ttft_seconds=10, max_tbt_seconds=0.05)
    assert admit(slo, Predicted(0.1, 0.0, tbt_seconds=0.06)).breaks == "tbt"
    assert admit(slo, Predicted(0.1, 0.0, tbt_seconds=0.04)).admitted
    assert admit(slo, Predicted(0.1, 0.0, tbt_seconds=None)).admitted


@pytest.mark.parametrize(("over", "wait", "longest", "seconds"), [
    (0.2, 5.0, 30, 1), (4.3, 5.0, 30, 5), (50.0, 60.0, 30, 30), (2.0, 1.0, 30, 30),
])  # fmt: skip
def test_retry_after_comes_from_the_queue(
    over: float, wait: float, longest: int, seconds: int
) -> None:
    assert retry_after(over, wait, longest) == seconds


def test_a_probe_is_let_in_and_named() -> None:
    slo = Slo("enforce", max_ttft_seconds=1.0)
    probe = admit(slo, LATE, lambda: True)
    assert (probe.admitted, probe.probe, probe.breaks) == (True, True, "ttft")
    assert (probe.predicted_seconds, probe.limit_seconds) == (2.31, 1.0)
    assert not admit(slo, LATE, lambda: False).admitted
    assert admit(Slo("observe", max_ttft_seconds=1.0), LATE).probe
    asked: list[bool] = []
    assert not admit(slo, Predicted(0.5, 0.0), lambda: bool(asked.append(True))).probe
    assert asked == []  # only would-be rejections are counted


@pytest.mark.parametrize(("asked", "allowed", "priority"), [
    ("", "", "standard"), ("batch", "", "batch"), ("interactive", "", "standard"),
    ("interactive", "interactive", "interactive"), ("", "interactive", "standard"),
    ("interactive", "*", "interactive"), ("standard", "batch", "batch"), ("", "batch", "batch"),
    ("unheard-of", "*", "standard"), ("interactive", "unheard-of", "standard"),
])  # fmt: skip
def test_a_class_as_the_key_allows(asked: str, allowed: str, priority: str) -> None:
    rules = AdmissionRules()
    standing = rules.standing("acme", asked, allowed)
    assert (standing.priority, standing.tenant) == (priority, "acme")
    assert rules.priorities[standing.rank] == priority


@pytest.mark.parametrize(("ttft", "tbt", "met"), [
    (1.0, 0.05, True), (1.0, None, True), (1.01, 0.01, False), (0.5, 0.06, False),
])  # fmt: skip
def test_what_keeps_an_slo(ttft: float, tbt: float | None, met: bool) -> None:
    assert keeps_slo(Slo("enforce", 1.0, 0.05), ttft, tbt) is met
