"""What became of would-be rejections: how often a rejection was wrong, and how sure that is.

Some requests that admission would reject are let in all the same (probes; all of them in the mode
`observe`). A probe that kept the SLO would have been rejected falsely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

Z_95: Final = 1.96
NEIGHBOURS: Final = 20


class FalseRejects(msgspec.Struct, frozen=True):
    """`ratio` of `samples` probes kept the SLO; `low` and `high`: 95 % interval (Wilson, 1927).
    None without samples."""

    samples: int
    met: int
    ratio: float | None
    low: float | None
    high: float | None


class Probe(msgspec.Struct, frozen=True, gc=False):
    """An ended probe: how far over its limit it was predicted to be, and whether it kept it."""

    excess: float  # predicted over limit, 1.0 = at the limit
    met: bool


def false_rejects(samples: int, met: int) -> FalseRejects:
    if samples <= 0:
        return FalseRejects(0, 0, None, None, None)
    share = met / samples
    z2 = Z_95 * Z_95
    middle = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    spread = Z_95 / (1 + z2 / samples)
    spread *= math.sqrt(share * (1 - share) / samples + z2 / (4 * samples * samples))
    return FalseRejects(samples, met, share, max(0.0, middle - spread), min(1.0, middle + spread))


def would_have_met(excess: float, probes: Sequence[Probe]) -> FalseRejects:
    """For a rejected request: what came of the probes whose prediction was most like its own."""
    nearest = sorted(probes, key=lambda probe: abs(probe.excess - excess))[:NEIGHBOURS]
    return false_rejects(len(nearest), sum(probe.met for probe in nearest))
