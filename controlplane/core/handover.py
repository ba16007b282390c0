"""Time from leg 1's answer to leg 2's first byte, fitted online for each decode worker.

It grows with the KV that is brought, and how fast it comes depends on where it lies: one line for
each node that prefixes came from, so that a long prompt does not speak for short ones.
"""

from __future__ import annotations

from typing import Final

from controlplane.core.fitting import LinearFit, relative_weight
from controlplane.core.routing import TransferCost

MAX_SOURCES: Final = 64
"""Nodes that one worker's KV came from; the one seen first goes for a new one."""
_FEW: Final = 3
_FORGETTING: Final = 0.95
"""About the last 20 count: how many wait for the same link changes within seconds."""
_LEAST_SECONDS: Final = 1e-3
_MOST_TIMES: Final = 8.0
"""A sample counts as no more than that many times what was expected: one odd one says little."""


class HandoverModel:
    """seconds = base + per_1000 tokens / 1000, by source node."""

    def __init__(self) -> None:
        self._fits: dict[str, LinearFit] = {}

    def knows(self, source: str) -> bool:
        """Whether any came from there."""
        return source in self._fits

    def predict(self, source: str, tokens: int, path: TransferCost | None = None) -> float | None:
        """Of a prompt whose KV lies on node `source`. Before any came from there: by `path`, and
        what others showed to pass besides; None where nothing is known."""
        fit = self._fits.get(source)
        if fit is not None:
            return fit.predict((1.0, tokens / 1000))
        if path is not None:
            return self._base() + path.seconds(tokens)
        return self._base() if self._fits else None

    def observe(
        self, source: str, tokens: int, seconds: float, path: TransferCost | None = None
    ) -> None:
        """One leg 2 that began well."""
        fit = self._fits.get(source)
        if fit is None:
            if len(self._fits) >= MAX_SOURCES:
                del self._fits[next(iter(self._fits))]
            per_1000 = 1000 * path.seconds_per_token if path is not None else 0.0
            fit = LinearFit((self._base(), per_1000), forgetting=_FORGETTING, non_negative=True)
            self._fits[source] = fit
        x = (1.0, tokens / 1000)
        expected = fit.predict(x)
        if fit.num_samples < _FEW:
            fit.observe(x, seconds, relative_weight(seconds, expected))
            return
        # Waits behind others are in it, so that it is many times the usual at some times and a
        # fraction at others: relative to what was measured, the short ones alone would count.
        usual = max(expected, _LEAST_SECONDS)
        fit.observe(x, min(seconds, _MOST_TIMES * usual), usual**-0.5)

    def _base(self) -> float:
        """Without any tokens, at the quickest source."""
        return min((fit.theta[0] for fit in self._fits.values()), default=0.0)
