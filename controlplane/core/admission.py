"""SLO admission: reject at once what would come too late (R31)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from controlplane.core.dispatch_queue import QueueRules
from workers.core.numbers import duration

SloMode = Literal["off", "observe", "enforce"]
Gate = Literal["", "ttft", "tbt", "queue_full", "deadline"]
DEFAULT_PRIORITIES = ("interactive", "standard", "batch")
DEFAULT_PRIORITY = "standard"


@dataclass(frozen=True, slots=True)
class Slo:
    """The active slo policy's spec, in seconds. `percentile` of requests are to keep it."""

    mode: SloMode = "observe"
    max_ttft_seconds: float = 10.0
    max_tbt_seconds: float = 0.5
    percentile: float = 95.0
    retry_after_max_seconds: int = 30


class Standing(msgspec.Struct, frozen=True, gc=False):
    """Whose request it is, and how urgent. `rank` 0 is the first of the priority classes."""

    tenant: str = "default"
    priority: str = DEFAULT_PRIORITY
    rank: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The active admission policy's spec. `priorities`: highest first."""

    priorities: tuple[str, ...] = DEFAULT_PRIORITIES
    default_priority: str = DEFAULT_PRIORITY
    probe_share: float = 0.05
    hit_min_share: float = 0.5
    max_wait_seconds: float = 60.0
    queue: QueueRules = field(default_factory=QueueRules)

    def standing(self, tenant: str, asked: str, allowed: str) -> Standing:
        """The class asked for, as far as the key allows: up to `allowed` ("": the default class,
        "*": any). A class that is not among ours counts as not asked."""
        ranks = self.priorities
        default = ranks.index(self.default_priority) if self.default_priority in ranks else 0
        best = 0 if allowed == "*" else ranks.index(allowed) if allowed in ranks else default
        rank = max(best, ranks.index(asked)) if asked in ranks else max(best, default)
        return Standing(tenant, ranks[rank], rank)


class Predicted(msgspec.Struct, frozen=True, gc=False):
    """What the chosen pair would give to the SLO's percentile. `wait_seconds` is the part of TTFT
    that passes by waiting."""

    ttft_seconds: float
    wait_seconds: float
    tbt_seconds: float | None = None


class Admission(msgspec.Struct, frozen=True, gc=False):
    """`reason` is empty where the prediction keeps the SLO; `retry_after_seconds` on a no.
    `probe`: it breaks the SLO by prediction and is let in all the same."""

    admitted: bool
    reason: str = ""
    breaks: Literal["", "ttft", "tbt"] = ""
    retry_after_seconds: int | None = None
    predicted_seconds: float = 0.0
    limit_seconds: float = 0.0
    probe: bool = False


ADMITTED = Admission(admitted=True)


def admit(slo: Slo, predicted: Predicted, is_probe: Callable[[], bool] | None = None) -> Admission:
    """`off` asks nothing, `observe` only says so, `enforce` rejects, but for a probe: `is_probe` is
    asked for each would-be rejection."""
    if slo.mode == "off":
        return ADMITTED
    ttft, tbt = predicted.ttft_seconds, predicted.tbt_seconds
    what: Literal["ttft", "tbt"] = "ttft"
    value, limit = ttft, slo.max_ttft_seconds
    if ttft <= limit:
        if tbt is None or tbt <= slo.max_tbt_seconds:
            return ADMITTED
        what, value, limit = "tbt", tbt, slo.max_tbt_seconds
    reason = (
        f"predicted {what.upper()} {duration(value)} breaks the SLO of {duration(limit)}"
        f" by {duration(value - limit)}"
    )
    if slo.mode == "observe" or (is_probe is not None and is_probe()):
        return Admission(True, reason, what, None, value, limit, probe=True)
    seconds = retry_after(value - limit, predicted.wait_seconds, slo.retry_after_max_seconds)
    return Admission(False, reason, what, seconds, value, limit)


def retry_after(over_seconds: float, wait_seconds: float, longest_seconds: int) -> int:
    """Whole seconds, 1 to `longest_seconds`: when the queue has shrunk enough.

    Where even an empty queue would not do, the longest: trying sooner is of no use.
    """
    if over_seconds > wait_seconds:
        return longest_seconds
    return max(1, min(longest_seconds, math.ceil(over_seconds)))


def keeps_slo(slo: Slo, ttft_seconds: float, tbt_p95_seconds: float | None) -> bool:
    """Whether a stream was as the SLO wants it."""
    if ttft_seconds > slo.max_ttft_seconds:
        return False
    return tbt_p95_seconds is None or tbt_p95_seconds <= slo.max_tbt_seconds
