"""Requests in flight: what each waits for, how long it may, and what then happens to it."""

from __future__ import annotations

from datetime import tzinfo

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell
from controlplane.gateways.running_schemas import GatewayAnswer, RunningList, RunningRequest

LATE_SHARE = 0.5
"""Of its bound, from which on a wait stands out."""
NOT_YET = "The gateways have not been asked yet."
COLUMNS = (
    Column("request", "REQUEST", 8),
    Column("state", "STATE", 14),
    Column("age", "AGE", 9, "right", drop=3),
    Column("waited", "WAITED", 10, "right"),
    Column("bound", "OF", 8, "right", drop=2),
    Column("then", "THEN", 15),
    Column("waits", "WAITS FOR", 27, grow=True),
    Column("tenant", "TENANT", 8, drop=4),
    Column("prompt", "PROMPT", 7, "right", drop=6),
    Column("tries", "RETRIES", 7, "right", drop=8),
    Column("gateway", "GATEWAY", 8, drop=5),
    Column("model", "MODEL", 12, drop=7),
)
FIELDS: dict[str, FieldKind] = {
    "id": "text",
    "state": "text",
    "age": "seconds",
    "waited": "seconds",
    "bound": "seconds",
    "left": "seconds",
    "waits": "text",
    "worker": "text",
    "tenant": "text",
    "model": "text",
    "gateway": "text",
    "prompt": "number",
    "retries": "number",
    "stuck": "text",
}


def running(found: RunningList | None, *, whole_ids: bool = False) -> Table:
    """In the order that the control plane gives: stuck ones, then the nearest to their bounds.
    `whole_ids` where they are typed again."""
    if found is None:
        return Table(COLUMNS, (), NOT_YET)
    mute = silent(found)
    rows = tuple(_row(item, old=item.gateway in mute, whole_id=whole_ids) for item in found.items)
    return Table(COLUMNS, rows, _empty(found, len(mute)))


def silent(found: RunningList) -> frozenset[str]:
    """Gateways that do not answer: what is shown of them is old."""
    return frozenset(answer.gateway for answer in found.gateways if not answer.answers)


def _empty(found: RunningList, num_silent: int) -> str:
    if not found.gateways:
        return "No gateway has joined: nothing can be in flight."
    if num_silent == len(found.gateways):
        return "No gateway answers: what is in flight is not known."
    others = f" {num_silent} of {len(found.gateways)} did not answer." if num_silent else ""
    return f"Nothing is in flight at {_gateways(len(found.gateways) - num_silent)}.{others}"


def head(
    found: RunningList | None, *, now: float, tz: tzinfo, whole_ids: bool = False
) -> tuple[Text, ...]:
    """How many, in which states; then each gateway that does not answer: since when, and why."""
    if found is None:
        return ()
    states = ", ".join(
        f"{numbers.count(num)} {name.replace('_', ' ')}" for name, num in found.by_state.items()
    )
    listed = sum(found.by_state.values())
    counts = f"{numbers.count(found.total)} in flight at {_gateways(len(found.gateways))}"
    counts += f": {states}" if states else ""
    if listed < found.total:
        counts += f" (of {numbers.count(listed)} listed)"
    lines = [Text(counts if found.stuck else f"{counts}; none is stuck")]
    if found.stuck:
        lines.append(_stuck(found, whole_id=whole_ids))
    if len(found.items) < listed:
        lines.append(
            Text(
                f"the {numbers.count(len(found.items))} nearest to their bounds are shown", "muted"
            )
        )
    lines.extend(_silence(answer, now, tz) for answer in found.gateways if not answer.answers)
    return tuple(lines)


def _stuck(found: RunningList, *, whole_id: bool) -> Text:
    """How many; the one that comes first by name."""
    text = f"{numbers.count(found.stuck)} stuck"
    first = next((item for item in found.items if item.stuck), None)
    if first is not None:
        waited = numbers.duration(first.wait_seconds)
        name = _name(first, whole=whole_id)
        text += f": {name} waits {waited} for {waits_text(first)}"
    return cell(text, "critical")


def _silence(answer: GatewayAnswer, now: float, tz: tzinfo) -> Text:
    since = numbers.stamp(answer.silent_since, now, tz)
    report = numbers.age(max(0.0, now - answer.last_report_at.timestamp()))
    old = (
        "nothing of it is shown"
        if answer.age_seconds is None
        else f"of it is shown what ran {numbers.age(answer.age_seconds)} ago"
    )
    text = (
        f"~ {answer.gateway} ({answer.state}) has not answered since {since}: {answer.problem};"
        f" its last report is {report} old; {old}"
    )
    return cell(text, "warn")


def _name(item: RunningRequest, *, whole: bool) -> str:
    return item.request_id if whole else numbers.short_id(item.request_id)


def _row(item: RunningRequest, *, old: bool, whole_id: bool) -> Row:
    rest: Tone = "stale" if old else "plain"
    tone = "stale" if old else _tone(item)
    waited = numbers.duration(item.wait_seconds) + ("!" if is_past(item) else "")
    state = "stuck: " * item.stuck + item.state.replace("_", " ") + " ~" * old
    cells = (
        cell(_name(item, whole=whole_id), rest),
        cell(state, tone),
        Text(numbers.duration(item.age_seconds), rest),
        Text(numbers.UNKNOWN if item.wait_seconds is None else waited, tone),
        Text(_bound(item), rest),
        Text(then(item), rest),
        cell(waits_text(item), rest),
        cell(item.tenant, rest),
        Text(numbers.count(item.prompt_tokens), rest),
        Text(numbers.count(item.retries), rest),
        cell(item.gateway, rest),
        cell(item.model, rest),
    )
    return Row(key_of(item), cells, _facts(item), f"request/{item.request_id}")


def key_of(item: RunningRequest) -> str:
    """Ids are of one gateway."""
    return f"{item.gateway}/{item.request_id}"


def find(found: RunningList | None, key: str) -> RunningRequest | None:
    """The request of a row, if it still runs."""
    items = found.items if found is not None else []
    return next((item for item in items if key_of(item) == key), None)


def is_past(item: RunningRequest) -> bool:
    """Its wait is over the bound."""
    left = seconds_left(item)
    return item.stuck or (left is not None and left < 0)


def seconds_left(item: RunningRequest) -> float | None:
    """Until its bound; None where its wait has none."""
    if item.bound_seconds is None or item.wait_seconds is None:
        return None
    return item.bound_seconds - item.wait_seconds


def then(item: RunningRequest) -> str:
    """What the scheduling policy does at the bound: `504`, with the time left once that is near;
    `reported only`; `no bound`."""
    left = seconds_left(item)
    if left is None:
        return "no bound"
    if item.at_bound == "report":
        return "reported only"
    if left <= 0:
        return "504 now"
    return f"504 in {numbers.duration(left)}" if _is_late(item, left) else "504"


def waits_text(item: RunningRequest) -> str:
    """`d5: first piece, decode leg`: the worker stands first, where no column cuts it off."""
    if not item.waits_for:
        return numbers.NO_TRAFFIC
    text = item.waits_for.removeprefix("the ").replace(" of the decode leg", ", decode leg")
    if not item.worker:
        return text
    for word in ("on", "to"):
        text = text.removesuffix(f" {word} worker {item.worker}")
    return f"{item.worker}: {text}"


def _bound(item: RunningRequest) -> str:
    return (
        numbers.NO_TRAFFIC if item.bound_seconds is None else numbers.duration(item.bound_seconds)
    )


def _tone(item: RunningRequest) -> Tone:
    if is_past(item):
        return "critical"
    left = seconds_left(item)
    return "warn" if left is not None and _is_late(item, left) else "plain"


def _is_late(item: RunningRequest, left: float) -> bool:
    return left < (1 - LATE_SHARE) * (item.bound_seconds or 0.0)


def _facts(item: RunningRequest) -> dict[str, Fact]:
    return {
        "id": item.request_id,
        "state": item.state,
        "age": item.age_seconds,
        "waited": item.wait_seconds,
        "bound": item.bound_seconds,
        "left": seconds_left(item),
        "waits": item.waits_for,
        "worker": item.worker,
        "tenant": item.tenant,
        "model": item.model,
        "gateway": item.gateway,
        "prompt": item.prompt_tokens,
        "retries": item.retries,
        "stuck": "yes" if item.stuck else "no",
    }


def _gateways(num: int) -> str:
    return f"{num} gateway{'' if num == 1 else 's'}"
