"""Eight levels per figure, with fixed edges: a colour means the same in two pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from console.viewmodel.numbers import known

GLYPHS = ".:;+*%#@"
NO_DATA, NO_TRAFFIC, STALE, ABSENT = "/", "-", "~", " "
NUM_LEVELS = 8

Palette = Literal["dark", "light"]

TRUECOLOR: dict[Palette, tuple[str, ...]] = {
    "dark": ("#2f2854", "#4a3787", "#664cac", "#b55686", "#de717a", "#ff916f", "#ffc385", "#f8f2b0"),
    "light": ("#f2edc8", "#e1ca8c", "#e39a68", "#d76f39", "#b35245", "#8b3659", "#4c2b6d", "#31164b"),
}  # fmt: skip
"""Neighbouring steps stay apart for colour-blind readers and in grey; lightness is monotone."""
COLOR256: dict[Palette, tuple[int, ...]] = {
    "dark": (236, 54, 61, 132, 167, 209, 222, 229),
    "light": (255, 186, 173, 166, 131, 89, 53, 235),
}
COLOR16: dict[Palette, tuple[str, ...]] = {
    "dark": ("bright_black", "bright_black", "cyan", "cyan", "yellow", "yellow", "bright_red", "bright_red"),
    "light": ("bright_black", "bright_black", "blue", "blue", "magenta", "magenta", "red", "red"),
}  # fmt: skip
"""In 16 colours the glyph carries the level; colour repeats it in four steps, the last bold."""
TEXT_ON: dict[Palette, tuple[str, ...]] = {
    "dark": ("#ffffff",) * 4 + ("#0f1419",) * 4,
    "light": ("#0f1419",) * 4 + ("#ffffff",) * 4,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """`edges` run in the direction of ink: ascending, or descending where low is strong.

    An edge of 0 is exact: zero itself is the weakest level.
    """

    name: str
    edges: tuple[float, ...]
    low_is_strong: bool
    strong: str  # "strong = slow"
    labels: tuple[str, ...]  # one a level, for the legend
    alarm: float | None = None

    def level(self, value: float | None, previous: int | None = None) -> int | None:
        """0 (weakest) to 7. With `previous`, the level moves only 10 % past an edge."""
        number = known(value)
        if number is None:
            return None
        plain = self._plain(number)
        if previous is None or plain == previous:
            return plain
        edge = previous if plain > previous else previous - 1
        past = abs(number - self.edges[edge]) >= self._slack(edge)
        return plain if past or abs(plain - previous) > 1 else previous

    def _plain(self, number: float) -> int:
        if self.low_is_strong:
            return sum(number < edge for edge in self.edges)
        return sum(number > 0 if edge == 0 else number >= edge for edge in self.edges)

    def _slack(self, edge: int) -> float:
        """A tenth of the narrower of the two steps that meet at this edge."""
        here = self.edges[edge]
        if here == 0:
            return 0.0
        nearby = [
            abs(here - self.edges[i]) for i in (edge - 1, edge + 1) if 0 <= i < len(self.edges)
        ]
        return min(nearby) * 0.1

    def breaches(self, value: float | None) -> bool:
        """At or past the alarm."""
        number = known(value)
        if number is None or self.alarm is None:
            return False
        return number < self.alarm if self.low_is_strong else number >= self.alarm

    def legend(self) -> str:
        """`.<50 ms :<100 ;<200 ... @>=5`: both ends in words."""
        return " ".join(f"{glyph}{label}" for glyph, label in zip(GLYPHS, self.labels, strict=True))


HIT_RATE = Scale(
    "hit_rate", (0.95, 0.85, 0.75, 0.65, 0.50, 0.30, 0.10), True, "strong = low",
    (">=95", ">=85", ">=75", ">=65", ">=50", ">=30", ">=10", "<10 %"), alarm=0.50,
)  # fmt: skip
LATENCY = Scale(
    "latency", (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0), False, "strong = slow",
    ("<50 ms", "<100", "<200", "<500", "<1 s", "<2", "<5", ">=5 s"), alarm=2.0,
)  # fmt: skip
KV_WAIT = Scale(
    "kv_wait", (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05), False, "strong = long",
    ("0", "<1 ms", "<2", "<5", "<10", "<20", "<50", ">=50 ms"),
)  # fmt: skip
EVICTIONS = Scale(
    "evictions", (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0), False, "strong = many",
    ("0", "<1", "<2", "<5", "<10", "<20", "<50", ">=50 blocks/s"),
)  # fmt: skip
SHM_BYTES = Scale(
    "shm_bytes", (0.0, 1e6, 1e7, 5e7, 1e8, 5e8, 1e9), False, "strong = much",
    ("0", "<1 MB/s", "<10", "<50", "<100", "<500", "<1 GB/s", ">=1 GB/s"),
)  # fmt: skip
"""Shared memory has no link cap to be a percentage of: fixed rates instead."""
FAILURES = Scale(
    "failures", (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0), False, "strong = many",
    ("0", "<1", "<2", "<4", "<8", "<16", "<32", ">=32/min"), alarm=1.0,
)  # fmt: skip


def legend_of_states() -> str:
    """What is not a value."""
    return "/ no data  - no traffic  ~ stale"
