"""Requests: the live list, one request's waterfall, and the decision behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo

from console.viewmodel import numbers, placement
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell, clean
from controlplane.decisions.schemas import Decision, DecodeCandidate, Phase, PrefillCandidate
from controlplane.decisions.words import rejection, route
from workers.core.error_text import error_text

BAR_WIDTH = 28
COLUMNS = (
    Column("at", "TIME", 8),
    Column("request", "REQUEST", 8),
    Column("tenant", "TENANT", 8, drop=4),
    Column("status", "STATUS", 15),
    Column("prompt", "PROMPT", 7, "right"),
    Column("hit", "HIT %", 6, "right"),
    Column("ttft", "TTFT", 9, "right"),
    Column("tbt", "TBT P95", 9, "right", drop=3),
    Column("route", "P -> D", 12, grow=True, drop=2),
    Column("where", "WHERE THE TIME WENT", BAR_WIDTH, drop=5),
    Column("why", "WHY", 24, grow=True, drop=1),
)
FIELDS: dict[str, FieldKind] = {
    "id": "text",
    "tenant": "text",
    "model": "text",
    "status": "text",
    "prompt": "number",
    "hit": "ratio",
    "ttft": "seconds",
    "tbt": "seconds",
    "prefill": "text",
    "decode": "text",
    "why": "text",
}
LETTERS = {
    "admitted": "a",
    "queue": "q",
    "transfer": "t",
    "prefill": "p",
    "handover": "H",
    "first decode step": "d",
    "reply": "r",
}
SLOW_RATIO = 2.0
CHOSEN = "chosen"
"""How the verdict on a candidate begins that was taken."""
_UNFINISHED = frozenset({"rejected", "running", "cancelled", "failed"})


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase of the waterfall; `start` and `end` are shares of the whole, None = not measured."""

    name: str
    predicted: str
    measured: str
    start: float | None
    end: float | None
    note: str
    slow: bool


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request opened: head lines, waterfall, candidates, legs, outcome."""

    request_id: str
    head: tuple[Text, ...]
    total: str
    bars: tuple[Bar, ...]
    prefill: Table
    decode: Table
    legs: Table
    outcome: Text
    context: str
    remarks: tuple[Text, ...] = ()  # of admission, and of what `observe` would have done
    no_bars: str = "No phase has been measured yet."  # said where there is none


def requests(decisions: Sequence[Decision], *, now: float, tz: tzinfo) -> Table:
    """Oldest first, as they come. `now` in seconds since the epoch."""
    rows = tuple(_row(decision, now, tz) for decision in decisions)
    return Table(COLUMNS, rows, "No requests yet. Send one: y copies a curl.")


def _row(decision: Decision, now: float, tz: tzinfo) -> Row:
    ratio = hit_ratio(decision)
    reason = why(decision)
    cells = (
        Text(numbers.clock(decision.at, tz)),
        cell(numbers.short_id(decision.request_id)),
        cell(decision.tenant),
        Text(decision.status, _status_tone(decision)),
        Text(numbers.count(decision.prompt_tokens)),
        Text(_hit_text(decision)),
        Text(latency(decision, decision.ttft_seconds) + ("!" if _slow(decision) else "")),
        Text(latency(decision, decision.tbt_p95_seconds)),
        cell(route(decision) + (" emu" if decision.emulated else "")),
        Text(timeline(decision.phases)),
        cell(reason, "warn" if decision.status in ("rejected", "failed") else "plain"),
    )
    facts: dict[str, Fact] = {
        "id": decision.request_id,
        "tenant": decision.tenant,
        "model": decision.model,
        "status": decision.status,
        "prompt": decision.prompt_tokens,
        "hit": ratio,
        "ttft": decision.ttft_seconds,
        "tbt": decision.tbt_p95_seconds,
        "prefill": decision.prefill_worker,
        "decode": decision.decode_worker,
        "why": reason,
    }
    return Row(decision.request_id, cells, facts, f"request/{decision.request_id}")


def is_client_error(decision: Decision) -> bool:
    """The engine refused what the client sent: nothing of the cluster's failed."""
    return decision.status == "failed" and 400 <= (decision.http_status or 0) < 500


def _status_tone(decision: Decision) -> Tone:
    if is_client_error(decision):
        return "warn"
    tones: dict[str, Tone] = {
        "running": "accent",
        "rejected": "warn",
        "failed": "critical",
        "cancelled": "muted",
    }
    return tones.get(decision.status, "plain")


def hit_ratio(decision: Decision) -> float | None:
    """Prompt tokens served from any tier / prompt tokens requested; None while unknown."""
    whole = decision.engine_prompt_tokens or decision.prompt_tokens
    return None if decision.hit_tokens is None or not whole else decision.hit_tokens / whole


def _hit_text(decision: Decision) -> str:
    ratio = hit_ratio(decision)
    if ratio is None:
        never = decision.status == "rejected" or decision.request_bytes is not None
        return numbers.NO_TRAFFIC if never else numbers.UNKNOWN
    return numbers.percent(ratio, unit=False)


def latency(decision: Decision, seconds: float | None) -> str:
    """A request that is not streamed has no first token of its own to measure."""
    if seconds is None and (decision.status in _UNFINISHED or not decision.stream):
        return numbers.NO_TRAFFIC
    return numbers.duration(seconds)


def _slow(decision: Decision) -> bool:
    predicted, measured = decision.predicted_ttft_seconds, decision.ttft_seconds
    return bool(predicted) and measured is not None and measured > SLOW_RATIO * (predicted or 0)


def why(decision: Decision) -> str:
    """The shortest true reason for what is unusual about the request, or nothing."""
    if decision.status == "rejected":
        return rejection(decision)
    if decision.error:
        return _error_words(decision)
    worst = max(decision.phases, key=_excess, default=None)
    if worst is not None and _excess(worst) >= SLOW_RATIO:
        return f"{worst.name} {numbers.times(_excess(worst))}"
    return placement.retries(decision.retries)


def _error_words(decision: Decision) -> str:
    """`502: decode leg on d1: ...`; where a retry served it, what the try before it met."""
    text = error_text(decision.error)
    if decision.status.startswith("finished"):
        retried = placement.retries(decision.retries)
        return f"{retried}: {text}" if retried else text
    leg = f"{decision.failed_leg} leg"
    if decision.failed_leg and not text.startswith(leg):
        text = f"{leg}: {text}"
    return f"{decision.http_status}: {text}" if decision.http_status else text


def _excess(phase: Phase) -> float:
    """Measured over predicted; small phases do not count."""
    if not phase.predicted_seconds or phase.measured_seconds is None:
        return 0.0
    if phase.measured_seconds < 0.02:
        return 0.0
    return phase.measured_seconds / phase.predicted_seconds


def timeline(phases: Sequence[Phase], width: int = BAR_WIDTH) -> str:
    """`q:  p:::::  H:::`: each phase measured has its letter, then its share of the width."""
    seen = [(p, p.measured_seconds) for p in phases if p.measured_seconds]
    total = sum(seconds for _, seconds in seen)
    if not total:
        return ""
    room = max(0, width - len(seen))
    return "".join(
        LETTERS.get(phase.name, phase.name[:1] or "?") + ":" * int(room * seconds / total + 0.5)
        for phase, seconds in seen
    )[:width]


PREFILL_COLUMNS = (
    Column("chosen", "", 1),
    Column("worker", "PREFILL", 10),
    Column("node", "NODE", 8, drop=3),
    Column("own", "OWN PREFIX", 10, "right", drop=2),
    Column("coming", "OF IT COMING", 12, "right", drop=4),
    Column("used", "USED PREFIX", 11, "right"),
    Column("queue", "T_QUEUE", 9, "right"),
    Column("transfer", "T_TRANSFER", 10, "right", drop=1),
    Column("prefill", "T_PREFILL", 9, "right"),
    Column("ttft", "SUM", 9, "right"),
    Column("verdict", "VERDICT", 16, grow=True),
)
PHASE_COLUMNS = (
    Column("phase", "PHASE", 18),
    Column("predicted", "PREDICTED", 10, "right"),
    Column("measured", "MEASURED", 10, "right"),
    Column("note", "", 24, grow=True),
)
DECODE_COLUMNS = (
    Column("chosen", "", 1),
    Column("worker", "DECODE", 10),
    Column("node", "NODE", 8, drop=1),
    Column("running", "RUNNING", 9, "right"),
    Column("tbt", "PRED. TBT", 9, "right"),
    Column("verdict", "VERDICT", 16, grow=True),
)
LEG_COLUMNS = (
    Column("leg", "LEG", 8),
    Column("worker", "WORKER", 10),
    Column("prompt", "TOKENS", 7, "right"),
    Column("device", "= DEVICE", 9, "right"),
    Column("pool", "+ POOL", 9, "right"),
    Column("computed", "+ COMPUTED", 10, "right"),
    Column("loaded", "BLOCKS LOADED", 16, "right", drop=1),
    Column("stored", "BLOCKS STORED", 16, "right", drop=3),
    Column("failed", "BLOCKS FAILED", 13, "right", drop=2),
    Column("wait", "KV WAIT", 9, "right"),
)
"""The prompt's tokens are a sum: in the engine's own cache, from the pool, computed. What crossed
between pool and device counts in blocks, with their bytes."""


def request(decision: Decision, *, now: float, tz: tzinfo) -> RequestView:
    """Everything known of one request."""
    bars, total = waterfall(decision)
    return RequestView(
        request_id=decision.request_id,
        head=_head(decision, now, tz),
        total=numbers.duration(total) if total else numbers.UNKNOWN,
        bars=bars,
        prefill=Table(
            PREFILL_COLUMNS,
            tuple(_prefill_row(c, decision) for c in decision.prefill_candidates),
            "No prefill worker was a candidate.",
        ),
        decode=Table(
            DECODE_COLUMNS,
            tuple(_decode_row(c, decision) for c in decision.decode_candidates),
            "No decode worker was a candidate.",
        ),
        legs=Table(LEG_COLUMNS, _legs(decision), _no_leg(decision)),
        outcome=_outcome(decision),
        context=_context(decision, tz),
        remarks=tuple(
            said
            for say in (
                placement.retried, placement.admission, placement.observed, placement.hedged,
            )
            if (said := say(decision))
        ),
        no_bars=_no_phase(decision),
    )  # fmt: skip


def _no_phase(decision: Decision) -> str:
    if decision.status == "running":
        return "No phase has been measured yet."
    turned = decision.status == "rejected"
    return "It was turned away: no phase began." if turned else "No phase was measured."


def _no_leg(decision: Decision) -> str:
    if decision.status == "running":
        return "No leg has reported yet."
    turned = decision.status == "rejected"
    return "It was turned away: no leg was sent." if turned else "No worker reported on its leg."


def unrecorded(request_id: str) -> str:
    """Instead of a request that is not there: why that may be, and the way on."""
    return (
        f"There is no record of request {clean(request_id)}: it still runs and was not told of yet,"
        " or is older than records are kept (7 shows records/default), or was left out by"
        " sampling there. Esc goes back."
    )


def waterfall(decision: Decision) -> tuple[tuple[Bar, ...], float]:
    """Bars as shares of the whole, and the whole in seconds (0 while nothing is measured)."""
    ends: list[tuple[Phase, float | None, float | None]] = []
    at = 0.0
    for phase in decision.phases:
        if phase.measured_seconds is None:
            ends.append((phase, None, None))
            continue
        start = at if phase.start_seconds is None else phase.start_seconds
        at = start + phase.measured_seconds
        ends.append((phase, start, at))
    total = max([end for _, _, end in ends if end is not None] + [decision.ttft_seconds or 0.0])
    return tuple(_bar(*item, total) for item in ends), total


def phases(view: RequestView) -> Table:
    """The waterfall without its bars."""
    rows = tuple(
        Row(bar.name, (Text(bar.name), Text(bar.predicted), Text(bar.measured), Text(bar.note)))
        for bar in view.bars
    )
    return Table(PHASE_COLUMNS, rows, view.no_bars)


def _bar(phase: Phase, start: float | None, end: float | None, total: float) -> Bar:
    share = None if start is None or not total else max(0.0, min(1.0, start / total))
    until = None if end is None or not total else max(0.0, min(1.0, end / total))
    return Bar(
        clean(phase.name),
        numbers.NO_TRAFFIC
        if phase.predicted_seconds is None
        else numbers.duration(phase.predicted_seconds),
        numbers.UNKNOWN
        if phase.measured_seconds is None
        else numbers.duration(phase.measured_seconds),
        share,
        until,
        clean(phase.note),
        _excess(phase) >= SLOW_RATIO,
    )


def _head(decision: Decision, now: float, tz: tzinfo) -> tuple[Text, ...]:
    output = (
        ""
        if decision.output_tokens is None
        else f"  {numbers.count(decision.output_tokens)} output tokens"
    )
    policies = ", ".join(
        f"{name} r{rev}" for name, rev in sorted(decision.policy_revisions.items())
    )
    first = (
        f"{numbers.short_id(decision.request_id)}  {decision.tenant}  {decision.model}"
        f"  {numbers.count(decision.prompt_tokens)} prompt tokens{output}  {decision.status}"
    )
    hit = f"hit {_hit_text(decision)}"
    if hit_ratio(decision) is not None:
        hit += " % of prompt tokens requested"
    when = f"{numbers.stamp(decision.at, now, tz)}  via {decision.gateway_id}  {route(decision)}"
    lines = [cell(first, "strong"), cell(f"{when}  {hit}")]
    waited = placement.waited(decision)
    if waited:
        lines.append(cell(waited))
    if policies:
        lines.append(cell(f"policy {policies}", "muted"))
    if decision.emulated:
        lines.append(Text("EMULATED: the numbers come from the emulated engine", "warn"))
    engine, own = decision.engine_prompt_tokens, decision.prompt_tokens
    if engine is not None and own is not None and engine != own:
        counts = f"{numbers.count(own)} here, {numbers.count(engine)} by the engine"
        lines.append(Text(f"prompt tokens differ: {counts}; routing saw another prefix", "warn"))
    return tuple(lines)


def _prefill_row(candidate: PrefillCandidate, decision: Decision) -> Row:
    chosen = candidate.worker_id == decision.prefill_worker
    tone: Tone = "strong" if chosen else "plain"
    cells = (
        Text(">" if chosen else "", tone),
        cell(candidate.worker_id, tone),
        cell(candidate.node_id, tone),
        Text(numbers.count(candidate.own_prefix_tokens), tone),
        Text(numbers.count(candidate.coming_prefix_tokens), tone),
        Text(numbers.count(candidate.used_prefix_tokens), tone),
        Text(numbers.duration(candidate.queue_seconds), tone),
        Text(numbers.duration(candidate.transfer_seconds), tone),
        Text(numbers.duration(candidate.prefill_seconds), tone),
        Text(numbers.duration(candidate.ttft_seconds), tone),
        cell(_verdict(candidate, chosen), "warn" if "break" in candidate.verdict else tone),
    )
    return Row(f"prefill:{candidate.worker_id}", cells, {"worker": candidate.worker_id})


def _verdict(candidate: PrefillCandidate | DecodeCandidate, took_it: bool) -> str:
    """As it was decided; where another worker took it in the end, both rows say so."""
    first = candidate.verdict.startswith(CHOSEN)
    if first and not took_it:
        return f"{candidate.verdict} first"
    return candidate.verdict if first or not took_it else f"took it; {candidate.verdict}"


def _decode_row(candidate: DecodeCandidate, decision: Decision) -> Row:
    chosen = candidate.worker_id == decision.decode_worker
    tone: Tone = "strong" if chosen else "plain"
    cells = (
        Text(">" if chosen else "", tone),
        cell(candidate.worker_id, tone),
        cell(candidate.node_id, tone),
        Text(f"{numbers.count(candidate.running)} / {numbers.count(candidate.cap)}", tone),
        Text(numbers.duration(candidate.predicted_tbt_seconds), tone),
        cell(_verdict(candidate, chosen), tone),
    )
    return Row(f"decode:{candidate.worker_id}", cells, {"worker": candidate.worker_id})


def _legs(decision: Decision) -> tuple[Row, ...]:
    rows = []
    for name, leg in (("prefill", decision.prefill_leg), ("decode", decision.decode_leg)):
        if leg is None:
            continue
        cells = (
            Text(name),
            cell(leg.worker_id),
            Text(numbers.count(leg.prompt_tokens)),
            Text(numbers.count(leg.device_hit_tokens)),
            Text(numbers.count(leg.pool_hit_tokens)),
            Text(numbers.count(leg.computed_tokens)),
            Text(_blocks(leg.loaded_blocks, leg.loaded_bytes)),
            Text(_blocks(leg.stored_blocks, leg.stored_bytes)),
            Text(numbers.count(leg.failed_blocks), "critical" if leg.failed_blocks else "plain"),
            Text(numbers.duration(leg.kv_wait_seconds)),
        )
        rows.append(Row(name, cells, {"worker": leg.worker_id}))
    return tuple(rows)


def _blocks(num: int, size: int) -> str:
    """`20 (41 kB)`."""
    return f"{numbers.count(num)} ({numbers.moved_bytes(size)})" if num else numbers.count(0)


def _outcome(decision: Decision) -> Text:
    measured, predicted = decision.ttft_seconds, decision.predicted_ttft_seconds
    if decision.status in ("rejected", "failed"):
        return cell(f"{decision.status}: {why(decision)}", _status_tone(decision))
    if decision.status == "running":
        return Text(f"running; predicted TTFT {numbers.duration(predicted)}")
    if decision.request_bytes is not None:
        return cell(f"answered whole by one worker, e2e {numbers.duration(decision.e2e_seconds)}")
    streamed = decision.stream or measured is not None
    ttft = f"TTFT {numbers.duration(measured)}" if streamed else "not streamed: no TTFT"
    parts = [f"{ttft}, predicted {numbers.duration(predicted)}"]
    if measured is not None and predicted:
        parts.append(numbers.times(measured / predicted))
    if streamed:
        parts.append(f"TBT P95 {numbers.duration(decision.tbt_p95_seconds)}")
    parts.append(f"e2e {numbers.duration(decision.e2e_seconds)}")
    return Text(", ".join(parts), "warn" if _slow(decision) else "plain")


def _context(decision: Decision, tz: tzinfo) -> str:
    threshold = decision.balancing_threshold
    limit = "" if threshold is None else f"  threshold {threshold:.2f}"
    return f"DECISION {numbers.clock(decision.at, tz)}{limit}{_to_first_token(decision)}"


def _to_first_token(decision: Decision) -> str:
    """A candidate's SUM ends with prefill; the TTFT that is predicted and judged goes on from there."""
    chosen = [c for c in decision.prefill_candidates if c.verdict.startswith(CHOSEN)]
    best = min(chosen or decision.prefill_candidates, key=lambda c: c.ttft_seconds, default=None)
    predicted = decision.predicted_ttft_seconds
    if best is None or predicted is None or predicted <= best.ttft_seconds:
        return ""
    rest = numbers.duration(predicted - best.ttft_seconds)
    verdict = decision.admission
    judged = ""
    if verdict is not None and verdict.gate == "ttft" and verdict.percentile:
        judged = f", {numbers.duration(verdict.predicted_seconds)} at P{verdict.percentile:g}"
    return f"  SUM + {rest} after prefill = predicted TTFT {numbers.duration(predicted)}{judged}"
