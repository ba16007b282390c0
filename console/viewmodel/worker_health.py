"""Workers as the gateways meet them: who is left out and for how long, how legs ended lately, and
how far the fitted predictions were off."""

from __future__ import annotations

from collections.abc import Sequence

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell
from controlplane.gateways.schemas import Gateway, WorkerLoad

ERRORS_KEPT = 64
"""Of predictions, that a median goes over."""
OFF_SHARE = 0.5
"""From which median error on a predictor stands out."""
COLUMNS = (
    Column("worker", "WORKER", 10, grow=True),
    Column("state", "LEGS MEET", 22),
    Column("window", "FAILED LATELY", 13, "right"),
    Column("row", "IN A ROW", 8, "right", drop=4),
    Column("requests", "LEGS", 8, "right", drop=5),
    Column("failed", "FAILED", 7, "right", drop=3),
    Column("prefill", "PREFILL OFF", 15, "right"),
    Column("tbt", "TBT OFF", 15, "right", drop=2),
    Column("gateway", "GATEWAY", 8, drop=6),
    Column("why", "WHY", 18, grow=True, drop=1),
)
FIELDS: dict[str, FieldKind] = {
    "worker": "text",
    "gateway": "text",
    "state": "text",
    "failed": "number",
    "requests": "number",
    "prefill": "ratio",
    "tbt": "ratio",
    "why": "text",
}
_ORDER = {"ejected": 0, "trial": 1, "failing": 2, "ok": 3}


def worker_health(gateways: Sequence[Gateway], worker_id: str = "") -> Table:
    """A row a worker and gateway, the worst first; of one worker alone where its id is given."""
    rows = [
        (_rank(load), worker, gateway.id, _row(worker, load, gateway))
        for gateway in gateways
        if gateway.stats is not None
        for worker, load in gateway.stats.workers.items()
        if worker_id in ("", worker)
    ]
    rows.sort(key=lambda row: row[:3])
    empty = "No gateway has reported yet." if not gateways else "No gateway has met a worker yet."
    return Table(COLUMNS, tuple(row for *_, row in rows), empty)


def head(gateways: Sequence[Gateway]) -> tuple[Text, ...]:
    """Who is left out; then each gateway: its own predictions, and where it is silent, since when."""
    loads = [
        (worker, gateway.id, load)
        for gateway in gateways
        if gateway.stats is not None
        for worker, load in gateway.stats.workers.items()
    ]
    out = [
        f"{w} at {g}" for w, g, load in sorted(loads, key=_by_name) if state_of(load) == "ejected"
    ]
    failing = sum(state_of(load) in ("trial", "failing") for _, _, load in loads)
    if out:
        more = f" and {len(out) - 3} more" if len(out) > 3 else ""
        first = cell(f"left out after failures: {', '.join(out[:3])}{more}", "critical")
    else:
        others = f"; {failing} on trial or failing" if failing else ""
        first = Text(f"no worker is left out{others}", "warn" if failing else "plain")
    return (first, *(_gateway_line(gateway) for gateway in gateways))


def _by_name(item: tuple[str, str, WorkerLoad]) -> tuple[str, str]:
    return item[:2]


def _gateway_line(gateway: Gateway) -> Text:
    if gateway.state != "ready":
        heard = numbers.age(gateway.age_seconds)
        text = f"~ {gateway.id} is {gateway.state}: its last report is {heard} old, so are its rows"
        return cell(text, "warn")
    stats = gateway.stats
    if stats is None:
        return cell(f"{gateway.id}: no statistics yet", "muted")
    ttft, transfer = off(stats.ttft_error), off(stats.transfer_error)
    return cell(
        f"{gateway.id}: TTFT predictions off by {ttft}, transfers by {transfer}"
        f" (medians of the last {ERRORS_KEPT})",
        "muted",
    )


def state_of(load: WorkerLoad) -> str:
    """`failing`: it serves, and its last leg did not end well."""
    if load.data_path == "ok" and load.failures_in_a_row:
        return "failing"
    return load.data_path


def state_text(load: WorkerLoad) -> str:
    """`ejected, trial in 4.2 s`, `on trial`, `failing`, `ok`."""
    state = state_of(load)
    if state == "ejected":
        return f"ejected, trial in {numbers.age(load.pause_seconds)}"
    return "on trial, one leg" if state == "trial" else state


def off(error: float | None) -> str:
    """A median of relative errors: `6.2 %`; `--` before the first prediction has come true."""
    return numbers.percent(error)


def _rank(load: WorkerLoad) -> tuple[int, float, float]:
    failed = load.outcomes_failed / load.outcomes if load.outcomes else 0.0
    worst = max(load.prefill_error or 0.0, load.tbt_error or 0.0)
    return (_ORDER.get(state_of(load), 3), -failed, -worst)


def _row(worker: str, load: WorkerLoad, gateway: Gateway) -> Row:
    state = state_of(load)
    old = gateway.state != "ready"
    tones: dict[str, Tone] = {"ejected": "critical", "trial": "warn", "failing": "warn"}
    tone: Tone = "stale" if old else tones.get(state, "plain")
    rest: Tone = "stale" if old else "plain"
    cells = (
        cell(worker, rest),
        Text(state_text(load) + (" ~" if old else ""), tone),
        Text(_window(load), tone if load.outcomes_failed else rest),
        Text(numbers.count(load.failures_in_a_row), rest),
        Text(numbers.count(load.requests_total), rest),
        Text(numbers.count(load.failures_total), rest),
        _error(load.prefill_error, load.prefill_samples, rest),
        _error(load.tbt_error, load.tbt_samples, rest),
        cell(gateway.id, rest),
        cell(load.data_path_note, rest),
    )
    facts: dict[str, Fact] = {
        "worker": worker,
        "gateway": gateway.id,
        "state": state,
        "failed": load.outcomes_failed,
        "requests": load.requests_total,
        "prefill": load.prefill_error,
        "tbt": load.tbt_error,
        "why": load.data_path_note,
    }
    return Row(f"{worker}/{gateway.id}", cells, facts, f"worker/{worker}")


def _window(load: WorkerLoad) -> str:
    """`10 of 20`; a worker that did not fail lately is not kept count of."""
    return f"{load.outcomes_failed} of {load.outcomes}" if load.outcomes else "none"


def _error(error: float | None, samples: int, tone: Tone) -> Text:
    """`6.2 % of 64`: the median, and of how many."""
    if not samples:
        return Text(numbers.NO_TRAFFIC, tone)
    if error is None:
        return Text(f"{numbers.UNKNOWN} of {samples}", tone)
    off_far = error > OFF_SHARE
    text = f"{off(error)}{'!' if off_far else ''} of {min(samples, ERRORS_KEPT)}"
    return Text(text, "warn" if off_far and tone == "plain" else tone)
