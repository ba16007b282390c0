"""The doctor's report for a terminal or a pipe. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from controlplane.doctor.schemas import DoctorCheck, DoctorReport
from workers.core import numbers
from workers.core.disaggregation import gbps


def report(found: DoctorReport) -> str:
    """A line a check, failing ones first in each part, and what to do under it."""
    if found.state == "none":
        return "No run yet. perilune doctor starts one."
    parts = [(node.node_id, node.checks) for node in found.nodes]
    parts += [(f"{pair.source} > {pair.destination}", pair.checks) for pair in found.pairs]
    names = [name for name, _ in parts]
    kinds = [check.name for _, checks in parts for check in checks]
    widths = max(map(len, names), default=0), max(map(len, kinds), default=0)
    lines = [line for name, checks in parts for line in _checks(name, checks, widths)]
    return "\n".join([*lines, "", *_summary(found)])


def _checks(name: str, checks: Iterable[DoctorCheck], widths: tuple[int, int]) -> Iterator[str]:
    for check in checks:
        state = check.state.upper().ljust(7)
        yield f"{state}  {name.ljust(widths[0])}  {check.name.ljust(widths[1])}  {check.value}"
        indent = " " * (9 + widths[0] + 2)
        if check.state != "ok" and check.wanted:
            yield f"{indent}wanted: {check.wanted}"
        if check.state != "ok" and check.what_to_do:
            yield f"{indent}-> {check.what_to_do}"


def _summary(found: DoctorReport) -> Iterator[str]:
    counts = ", ".join(f"{found.counts.get(state, 0)} {state}" for state in ("fail", "warn", "unknown", "ok"))  # fmt: skip
    yield f"{len(found.nodes)} nodes, {len(found.pairs)} pairs: {counts}"
    if found.pairs_left_out:
        yield f"{found.pairs_left_out} pairs were not probed: --node or --pair picks some"
    if found.bound is not None:
        bound = found.bound
        yield (
            f"disaggregation needs {gbps(bound.bytes_per_second)} between a prefill and a decode node: "
            f"{numbers.count(bound.kv_bytes_per_token)} bytes a token x "
            f"{numbers.count(bound.tokens_per_second)} tokens/s ({bound.origin})"
        )
    if found.state == "failed":
        yield f"The run did not come to its end: {found.error}"
