"""The ledger for a terminal or a pipe. Pure."""

from __future__ import annotations

from controlplane.cli_text import clock, table
from controlplane.ledger.schemas import FalseRejects, LedgerEntry, LedgerList, LedgerSummary
from workers.core.numbers import duration

HEAD = (
    "TIME", "REQUEST", "KIND", "GATE", "CLASS", "TENANT", "PREDICTED", "LIMIT", "MEASURED",
    "WOULD HAVE MET",
)  # fmt: skip


def ledger(page: LedgerList, total: LedgerSummary) -> str:
    """A row a request, and what it comes to."""
    rows = table(HEAD, map(_row, page.items), "Nobody was turned away.")
    wrong = total.false_rejects
    judged = f"false rejections {share(wrong)}"
    end = f"{total.rejected} rejected, {total.shed} shed, {total.probes} probes; {judged}"
    return f"{rows}\n{end}"


def share(found: FalseRejects) -> str:
    """`8.3 % of 60 (95 %: 3.6 to 18.1 %)`; a dash where nothing is known."""
    if found.ratio is None or found.low is None or found.high is None:
        return "-"
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.ratio:.1f} % of {found.samples} (95 %: {low:.1f} to {high:.1f} %)"


def _row(entry: LedgerEntry) -> tuple[str, ...]:
    if entry.kind == "probe":
        met = {True: "yes", False: "no", None: "-"}[entry.met]
    else:
        met = "-" if entry.would_have_met is None else share(entry.would_have_met)
    return (
        clock(entry.at), entry.request_id[:8], entry.kind, entry.gate, entry.priority or "-",
        entry.tenant, duration(entry.predicted_seconds), duration(entry.limit_seconds),
        duration(entry.measured_seconds), met,
    )  # fmt: skip
