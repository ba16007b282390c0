"""Which cores each worker computes on."""

from __future__ import annotations


def split_cores(cores: list[int], num_workers: int) -> list[list[int]]:
    """Even, contiguous shares; with fewer cores than workers, cores are shared in turn.

    Two engines whose threads compete for the same cores wait for each other at every layer.
    """
    if len(cores) < num_workers:
        return [[cores[index % len(cores)]] for index in range(num_workers)]
    least, larger = divmod(len(cores), num_workers)
    shares, begin = [], 0
    for index in range(num_workers):
        end = begin + least + (1 if index < larger else 0)
        shares.append(cores[begin:end])
        begin = end
    return shares


def as_list(cores: list[int]) -> str:
    """`0-3,8`, as the engine's thread binding reads it."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
