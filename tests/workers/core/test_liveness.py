"""What a process that does not answer is doing, by two readings of it."""

from __future__ import annotations

import pytest

from workers.core.liveness import Reading, Sign, Span, in_words, judge


def span(
    state: str = "S", cpu: float = 0.0, waited: float = 0.0, faults: int = 0, states: str = "",
    late: float = 0.0,
) -> Span:  # fmt: skip
    """Of two seconds; a long life before it."""
    before = Reading("S", 100.0, 50.0, 1000)
    after = Reading(state, 100.0 + cpu, 50.0 + waited, 1000 + faults)
    return Span(before, after, states, 2.0, late)


@pytest.mark.parametrize(("seen", "sign"), [
    (span(), Sign.STILL),
    (span(cpu=0.05), Sign.STILL),  # its timers
    (span("T", cpu=1.0), Sign.STOPPED),
    (span("t"), Sign.STOPPED),
    (span(cpu=0.3), Sign.BUSY),  # in a thread
    (span("R", cpu=2.0, states="RRRRR"), Sign.BUSY),
    (span("R", cpu=0.1, states="RRRRS"), Sign.STARVED),
    (span("R", cpu=0.1), Sign.STARVED),
    (span("S", cpu=0.1, waited=1.5), Sign.STARVED),
    (span("S", states="DSSDS"), Sign.STARVED),
    (span("S", states="SSSSSSSSSD"), Sign.STILL),
    (span("S", faults=400), Sign.STARVED),
    (span("S", late=3.0), Sign.STARVED),  # so is the supervisor
])  # fmt: skip
def test_by_what_it_shows(seen: Span, sign: Sign) -> None:
    assert judge(seen) is sign
    assert sign.is_progress == (sign in (Sign.BUSY, Sign.STARVED))
    assert in_words(seen, sign).startswith(sign.value)


def test_no_time_shows_nothing() -> None:
    reading = Reading("S", 1.0, 0.0, 0)
    nothing = Span(reading, reading, "", 0.0)
    assert judge(nothing) is Sign.STILL
    assert "0 % of a core" in in_words(nothing, Sign.STILL).replace("%", " %")
