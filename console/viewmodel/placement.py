"""Beside the candidates of a decision: retries, what admission said, what `observe` would have done."""

from __future__ import annotations

from console.viewmodel import numbers
from console.viewmodel.table import Text, cell
from controlplane.decisions.schemas import Decision
from controlplane.decisions.words import deciding_policy
from workers.core.error_text import error_text

_GATES = {"queue_full": "the queue was full", "deadline": "it waited up to the SLO's deadline"}


def admission(decision: Decision) -> Text | None:
    """None where nothing was wrong with it: the prediction kept the SLO."""
    verdict = decision.admission
    if verdict is None:
        return None
    policy = deciding_policy(decision)
    by = f" by {policy}" if policy else ""
    if verdict.gate in _GATES:
        return cell(f"ADMISSION  shed{by} while it waited: {_GATES[verdict.gate]}", "warn")
    predicted, limit = (
        numbers.duration(verdict.predicted_seconds),
        numbers.duration(verdict.limit_seconds),
    )
    at = f" at P{verdict.percentile:g}" if verdict.percentile else ""
    said = f"{verdict.gate.upper() or 'prediction'} {predicted}{at} > {limit}"
    if not verdict.probe:
        return cell(f"ADMISSION  rejected{by}: predicted {said}", "warn")
    met = {True: "it kept the SLO", False: "it missed the SLO", None: "its end says nothing"}
    measured = numbers.duration(verdict.measured_seconds)
    came = f" ({measured} measured)" if verdict.measured_seconds is not None else ""
    running = "it still runs" if decision.status == "running" else met[verdict.met]
    text = f"ADMISSION  let in as a probe of {policy or 'admission'} though predicted {said}: {running}{came}"
    return cell(text, "strong")


def observed(decision: Decision) -> Text | None:
    """What the algorithm under `observe` would have chosen; None where none observes."""
    other = decision.observed_placement
    if other is None:
        return None
    predicted = numbers.duration(other.predicted_ttft_seconds)
    chosen = next(
        (c for c in decision.prefill_candidates if c.worker_id == decision.prefill_worker), None
    )
    if other.worker_id == decision.prefill_worker:
        return cell(
            f"OBSERVE  {other.algorithm} would have chosen {other.worker_id} too ({predicted})"
        )
    against = ""
    if chosen is not None:
        gap = other.predicted_ttft_seconds - chosen.ttft_seconds
        word = "later" if gap >= 0 else "sooner"
        against = f", {numbers.duration(abs(gap))} {word} than {chosen.worker_id}"
    text = f"OBSERVE  {other.algorithm} would have chosen {other.worker_id}: predicted {predicted}{against}"
    return cell(text, "accent")


def retries(num: int) -> str:
    """`1 retry`, `3 retries`, or nothing."""
    return "" if not num else f"{num} {'retry' if num == 1 else 'retries'}"


def retried(decision: Decision) -> Text | None:
    """How often, and what the try met that a served request left behind; None where once was enough."""
    if not decision.retries:
        return None
    served = decision.error and decision.status.startswith("finished")
    met = f", the last after: {error_text(decision.error)}" if served else ""
    return cell(f"RETRIED  {numbers.count(decision.retries)}x{met}", "warn")


def hedged(decision: Decision) -> Text | None:
    """Of two prefill legs, whose answer was taken; None where there was one."""
    hedge = decision.hedge
    if hedge is None:
        return None
    sent = f"a second prefill leg went to {hedge.worker_id} after {numbers.duration(hedge.sent_after_seconds)}"
    running = "none has answered yet" if decision.status == "running" else "none was used"
    came = {"first": "the first one answered first", "second": "it answered first", "": running}
    return cell(f"HEDGE  {sent}: {came[hedge.winner]}")


def waited(decision: Decision) -> str:
    """`class batch, waited 1.20 s for its turn`; what is not known is left out."""
    parts = [f"route {decision.route}"] if decision.route else []
    if decision.request_bytes is not None:
        asked, given = decision.request_bytes, decision.reply_bytes
        came = numbers.NO_TRAFFIC if given is None else numbers.moved_bytes(given)
        parts.append(f"{numbers.moved_bytes(asked)} in, {came} out")
    if decision.priority:
        parts.append(f"class {decision.priority}")
    if decision.dispatch_wait_seconds is not None:
        parts.append(f"waited {numbers.duration(decision.dispatch_wait_seconds)} for its turn")
    if decision.normalised:
        parts.append(f"normalised: {', '.join(decision.normalised)}")
    if decision.sampled_one_in > 1:
        parts.append(f"1 of {decision.sampled_one_in} like it is recorded")
    return ", ".join(parts)
