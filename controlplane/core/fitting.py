"""Straight lines fitted online: a handful of floats, no library, no history."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

FORGETTING: Final = 0.99
"""Weight of a sample against the next one: about the last 100 count."""
_VAGUE: Final = 1e-3
_MOST: Final = 1e12
_LEAST_ACTUAL_SECONDS: Final = 1e-3  # errors and weights below a millisecond say nothing
ERRORS_KEPT: Final = 64
_NEWS: Final = 0.1
"""Share of the samples that count which has to be new before a line is fitted again: one in a
hundred moves it next to nothing, and to solve takes longer than all else that is done for it."""


class _Sums:
    """Over samples of one kind: of x x^T and of x y."""

    __slots__ = ("products", "targets")

    def __init__(self, size: int) -> None:
        self.products = [[0.0] * size for _ in range(size)]
        self.targets = [0.0] * size

    def add(self, x: tuple[float, ...], y: float, keep: float) -> None:
        self.targets = [keep * old + one * y for old, one in zip(self.targets, x, strict=True)]
        self.products = [
            [keep * old + one * other for old, other in zip(row, x, strict=True)]
            for row, one in zip(self.products, x, strict=True)
        ]


def _total(sums: list[_Sums], size: int) -> tuple[list[list[float]], list[float]]:
    if len(sums) == 1:
        return sums[0].products, sums[0].targets
    rows, columns = range(size), range(size)
    products = [[sum(one.products[i][j] for one in sums) for j in columns] for i in rows]
    return products, [sum(one.targets[i] for one in sums) for i in rows]


class LinearFit:
    """y = theta . x by least squares over samples that are forgotten exponentially, held together
    by a prior where they say nothing. Callers scale x to about 1.

    `precision` is how sure the prior is of each coefficient, in samples. `non_negative`: the
    coefficients are times and cannot fall below zero; one that would is zero.
    """

    def __init__(
        self,
        prior: tuple[float, ...],
        precision: tuple[float, ...] | None = None,
        forgetting: float = FORGETTING,
        *,
        non_negative: bool = False,
    ) -> None:
        self.theta = list(prior)
        self.num_samples = 0
        self._precision = precision or (_VAGUE,) * len(prior)
        self._forgetting = forgetting
        self._non_negative = non_negative
        self._prior = self.theta
        self._sums: dict[int, _Sums] = {}  # by kind of sample
        self._num_new = 0
        self._most_that_count = 1 / (1 - forgetting)

    def predict(self, x: tuple[float, ...]) -> float:
        return sum(weight * value for weight, value in zip(self.theta, x, strict=True))

    def observe(self, x: tuple[float, ...], y: float, weight: float = 1.0, kind: int = 0) -> None:
        """Take one sample in. `weight` scales its error: 1 / y makes the errors relative. Samples
        are forgotten for others of their `kind`, of which there are to be few: what rare ones alone
        show is not lost among common ones.

        One that no measurement brings (not finite, beyond `_MOST`) is left out: it would stay.
        """
        if weight != 1.0:
            x, y = tuple(value * weight for value in x), y * weight
        if not all(-_MOST < value < _MOST for value in (*x, y)):
            return
        if kind not in self._sums:
            self._sums[kind] = _Sums(len(x))
        self._sums[kind].add(x, y, self._forgetting)
        self.num_samples += 1
        self._num_new += 1
        if self._num_new >= _NEWS * min(self.num_samples, self._most_that_count):
            self._num_new = 0
            self._solve()

    def _solve(self) -> None:
        """With the prior; what comes out negative is fixed at zero and the rest solved again."""
        size = len(self._prior)
        products, targets = _total(list(self._sums.values()), size)
        kept = list(range(size))
        while kept:
            matrix = [
                [products[i][j] + (self._precision[i] if i == j else 0.0) for j in kept]
                for i in kept
            ]
            right = [targets[i] + self._precision[i] * self._prior[i] for i in kept]
            solution = solve(matrix, right)
            lowest = min(range(len(kept)), key=solution.__getitem__)
            if not self._non_negative or solution[lowest] >= 0:
                break
            del kept[lowest]
        else:
            solution = []
        theta = [0.0] * len(self._prior)
        for i, value in zip(kept, solution, strict=True):
            theta[i] = value
        self.theta = theta


def relative_weight(actual_seconds: float, predicted_seconds: float) -> float:
    """Errors relative to the longer of the two: one relative to what was measured alone would let a
    single sample near zero outweigh all others."""
    return 1 / max(actual_seconds, predicted_seconds, _LEAST_ACTUAL_SECONDS)


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a small positive definite system, by elimination. Overwrites both."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i][i]
        for k in range(i + 1, size):
            factor = matrix[k][i] / pivot
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    for i in reversed(range(size)):
        for j in range(i + 1, size):
            right[i] -= matrix[i][j] * right[j]
        right[i] /= matrix[i][i]
    return right


@dataclass(slots=True)
class Average:
    """Exponentially forgetting mean; None before the first sample."""

    value: float | None = None
    weight: float = 0.1

    def observe(self, sample: float) -> None:
        old = self.value
        self.value = sample if old is None else old + self.weight * (sample - old)


@dataclass(slots=True)
class Calibration:
    """How far predictions were from what came, over the last `ERRORS_KEPT`."""

    num_samples: int = 0
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))

    def observe(self, predicted_seconds: float, actual_seconds: float) -> None:
        """One prediction, made before its outcome was learned from."""
        scale = max(actual_seconds, _LEAST_ACTUAL_SECONDS)
        self._errors.append(abs(predicted_seconds - actual_seconds) / scale)
        self.num_samples += 1

    def median_relative_error(self) -> float | None:
        """0.1: half of the predictions were within 10 %. None before the first one."""
        if not self._errors:
            return None
        return sorted(self._errors)[len(self._errors) // 2]
