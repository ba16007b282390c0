"""Percentiles from merged histograms. Pure."""

from collections.abc import Sequence


def add_counts(into: list[int], counts: Sequence[int]) -> None:
    """Bucket-wise sum, in place."""
    for index, count in enumerate(counts):
        into[index] += count


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` (0..1) of the observations lie; null without any.

    Linear within a bucket; the open last bucket answers its lower bound. `counts` has one entry
    more than `bounds`.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank = share * total
    below = 0.0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(bounds):
                return bounds[-1]
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * max(rank - below, 0.0) / count
        below += count
    return bounds[-1]


def bucket_of(bounds: Sequence[float], value: float) -> int:
    """Index of the bucket that counts `value`."""
    for index, bound in enumerate(bounds):
        if value <= bound:
            return index
    return len(bounds)
