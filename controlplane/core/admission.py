"""SLO admission: reject at once what would come too late (R31)."""

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from workers.core.numbers import duration

SloMode = Literal["off", "observe", "enforce"]


@dataclass(frozen=True, slots=True)
class Slo:
    """The active slo policy's spec, in seconds."""

    mode: SloMode = "observe"
    max_ttft_seconds: float = 10.0
    max_tbt_seconds: float = 0.5
    retry_after_max_seconds: int = 30


class Predicted(msgspec.Struct, frozen=True, gc=False):
    """What the chosen pair would give. `wait_seconds` is the part that passes by waiting."""

    ttft_seconds: float
    wait_seconds: float
    tbt_seconds: float | None = None


class Admission(msgspec.Struct, frozen=True, gc=False):
    """`reason` is empty where the prediction keeps the SLO; `retry_after_seconds` on a no."""

    admitted: bool
    reason: str = ""
    breaks: Literal["", "ttft", "tbt"] = ""
    retry_after_seconds: int | None = None


_ADMITTED = Admission(admitted=True)


def admit(slo: Slo, predicted: Predicted) -> Admission:
    """`off` asks nothing, `observe` only says so, `enforce` rejects."""
    if slo.mode == "off":
        return _ADMITTED
    over = predicted.ttft_seconds - slo.max_ttft_seconds
    if over > 0:
        return _broken(slo, "ttft", predicted.ttft_seconds, slo.max_ttft_seconds, predicted)
    tbt = predicted.tbt_seconds
    if tbt is not None and tbt > slo.max_tbt_seconds:
        return _broken(slo, "tbt", tbt, slo.max_tbt_seconds, predicted)
    return _ADMITTED


def retry_after(over_seconds: float, wait_seconds: float, longest_seconds: int) -> int:
    """Whole seconds, 1 to `longest_seconds`: when the queue has shrunk enough.

    Where even an empty queue would not do, the longest: trying sooner is of no use.
    """
    if over_seconds > wait_seconds:
        return longest_seconds
    return max(1, min(longest_seconds, math.ceil(over_seconds)))


def _broken(
    slo: Slo, what: Literal["ttft", "tbt"], value: float, limit: float, predicted: Predicted
) -> Admission:
    reason = (
        f"predicted {what.upper()} {duration(value)} breaks the SLO of {duration(limit)}"
        f" by {duration(value - limit)}"
    )
    if slo.mode == "observe":
        return Admission(admitted=True, reason=reason, breaks=what)
    seconds = retry_after(value - limit, predicted.wait_seconds, slo.retry_after_max_seconds)
    return Admission(admitted=False, reason=reason, breaks=what, retry_after_seconds=seconds)
