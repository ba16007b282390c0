"""Policies: the list, a draft with its validation, the differences, and what a change means."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from typing import Annotated, Literal, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Column, Fact, Row, Table, Text, cell, clean
from controlplane.policies.schemas import SPEC_OF_KIND, PolicyRevision
from controlplane.stats.schemas import Overview

COLUMNS = (
    Column("policy", "KIND/SCOPE", 20, grow=True),
    Column("active", "ACTIVE", 7, "right"),
    Column("changed", "CHANGED", 11),
    Column("by", "BY", 12),
    Column("reason", "REASON", 24, grow=True, drop=1),
    Column("spec", "SPEC", 30, grow=True, drop=2),
)
FIELDS: dict[str, FieldKind] = {"kind": "text", "scope": "text", "by": "text", "reason": "text"}


def policies(rows: Sequence[PolicyRevision], *, now: float, tz: tzinfo) -> Table:
    """The active revisions. `now` in seconds since the epoch."""
    return Table(
        COLUMNS,
        tuple(_row(row, now, tz) for row in rows),
        "No policies are known: the control plane has not answered yet.",
    )


def _row(policy: PolicyRevision, now: float, tz: tzinfo) -> Row:
    name = f"{policy.kind}/{policy.scope}"
    spec = ", ".join(f"{key} {show(value)}" for key, value in policy.spec.items())
    cells = (
        cell(name),
        Text(f"r{policy.revision}", "strong"),
        Text(numbers.stamp(policy.created_at, now, tz)),
        cell(policy.author),
        cell(policy.reason or numbers.NO_TRAFFIC),
        cell(spec, "muted"),
    )
    facts: dict[str, Fact] = {
        "kind": policy.kind,
        "scope": policy.scope,
        "by": policy.author,
        "reason": policy.reason,
    }
    return Row(name, cells, facts, f"policy/{name}")


def show(value: object) -> str:
    """A spec's value as it is written in a draft."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


@dataclass(frozen=True, slots=True)
class FieldView:
    """One line of a draft: the name, the value as text, what is allowed, what is wrong with it."""

    name: str
    text: str
    allowed: str
    error: str = ""
    choices: tuple[str, ...] = ()
    was: str = ""

    @property
    def changed(self) -> bool:
        """Differs from the revision that the draft started from."""
        return self.text.strip() != self.was


@dataclass(frozen=True, slots=True)
class Draft:
    """An edit kept locally until it is put or dropped. `base` is the revision it started from."""

    base: PolicyRevision
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`slo/default`."""
        return f"{self.base.kind}/{self.base.scope}"

    def with_value(self, name: str, text: str) -> Draft:
        """The draft with one field written anew."""
        return replace(self, values={**self.values, name: text})

    def rebased(self, base: PolicyRevision) -> Draft:
        """The same changes on top of another revision; untouched fields follow it."""
        touched = {view.name: view.text for view in check(self).fields if view.changed}
        return replace(self, base=base, values=touched)


@dataclass(frozen=True, slots=True)
class Checked:
    """`spec` is None while any field is wrong; `changes` are the diff's lines."""

    fields: tuple[FieldView, ...]
    spec: dict[str, object] | None
    changes: tuple[tuple[str, str, str], ...]

    @property
    def num_unchanged(self) -> int:
        """Fields that stay as they are."""
        return len(self.fields) - len(self.changes)


def check(draft: Draft) -> Checked:
    """Validate by the schema of the kind; each error stands on the field it concerns."""
    model = SPEC_OF_KIND[draft.base.kind]
    raw = {
        name: draft.values.get(name, show(draft.base.spec.get(name, info.default))).strip()
        for name, info in model.model_fields.items()
    }
    spec, errors = _validate(draft.base.kind, raw)
    views = tuple(
        FieldView(
            name,
            text,
            allowed(model.model_fields[name]),
            errors.get(name, ""),
            choices(model.model_fields[name]),
            show(draft.base.spec.get(name, model.model_fields[name].default)),
        )
        for name, text in raw.items()
    )
    changes = tuple((v.name, v.was, v.text) for v in views if v.changed)
    return Checked(views, spec, changes)


def _validate(kind: str, raw: Mapping[str, str]) -> tuple[dict[str, object] | None, dict[str, str]]:
    model = SPEC_OF_KIND[kind]
    try:
        return model.model_validate(dict(raw)).model_dump(mode="json"), {}
    except ValidationError as error:
        errors: dict[str, str] = {}
        for item in error.errors():
            name = str(item["loc"][0]) if item["loc"] else ""
            info = model.model_fields.get(name)
            errors[name] = f"must be {allowed(info)}" if info else clean(item["msg"])
        return None, errors


def allowed(info: FieldInfo) -> str:
    """`off | observe | enforce`, `1 to 600,000`, `true | false`."""
    options = choices(info)
    if options:
        return " | ".join(options)
    low, high = _bounds(info)
    whole = " (whole number)" if _bare_type(info.annotation) is int else ""
    if low is not None and high is not None:
        return f"{_plain(low)} to {_plain(high)}{whole}"
    return "a number" if low is None else f"at least {_plain(low)}{whole}"


def choices(info: FieldInfo) -> tuple[str, ...]:
    """The words that a field may have; empty for numbers."""
    bare = _bare_type(info.annotation)
    if bare is bool:
        return ("true", "false")
    return tuple(map(str, get_args(bare))) if get_origin(bare) is Literal else ()


def _bare_type(annotation: object) -> object:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _bare_type(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return _bare_type(next(a for a in get_args(annotation) if a is not type(None)))
    return annotation


def _bounds(info: FieldInfo) -> tuple[float | None, float | None]:
    low = next((m.ge for m in info.metadata if isinstance(m, annotated_types.Ge)), None)
    high = next((m.le for m in info.metadata if isinstance(m, annotated_types.Le)), None)
    return (_number(low), _number(high))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _plain(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def diff(draft: Draft, checked: Checked) -> tuple[Text, ...]:
    """`max_ttft_ms   2000 -> 1`, then how many fields stay."""
    width = max((len(name) for name, _, _ in checked.changes), default=0)
    before = max((len(old) for _, old, _ in checked.changes), default=0)
    lines = [
        cell(f"{name:<{width}}  {old:>{before}}  ->  {new}", "strong")
        for name, old, new in checked.changes
    ]
    if not lines:
        lines.append(Text(f"Nothing differs from r{draft.base.revision}.", "muted"))
    if checked.num_unchanged:
        lines.append(Text(f"({checked.num_unchanged} fields unchanged)", "muted"))
    return tuple(lines)


def consequences(draft: Draft, checked: Checked, overview: Overview | None) -> tuple[Text, ...]:
    """What agreeing will do, with the numbers it is judged by."""
    lines = [Text("ok    acts on the next request; no worker restarts")]
    if draft.base.scope == "default":
        lines.append(Text("ok    applies to every tenant without a policy of its own"))
    if draft.base.kind == "slo" and checked.spec is not None:
        lines.extend(_slo_lines(checked.spec, overview))
    lines.append(Text(f"undo  E again: the old values are r{draft.base.revision}", "muted"))
    return tuple(lines)


def _slo_lines(spec: Mapping[str, object], overview: Overview | None) -> list[Text]:
    mode = spec.get("mode")
    limit = float(str(spec.get("max_ttft_ms", 0))) / 1000
    p50 = overview.ttft_p50_seconds if overview else None
    p95 = overview.ttft_p95_seconds if overview else None
    shown = f"TTFT P50 {numbers.duration(p50)}, P95 {numbers.duration(p95)} against {numbers.duration(limit)}"
    if mode != "enforce":
        what = "nothing is checked" if mode == "off" else "misses are counted, nothing is rejected"
        return [Text(f"ok    mode {mode}: {what}; now {shown}")]
    if p50 is None:
        return [Text(f"ok    mode enforce; no request in the window to compare: {shown}")]
    if p50 > limit:
        return [Text(f"warn  now {shown}: more than half of such requests would get 429", "warn")]
    if p95 is not None and p95 > limit:
        return [Text(f"warn  now {shown}: the slowest of such requests would get 429", "warn")]
    return [Text(f"ok    now {shown}")]


def conflict(draft: Draft, newer: PolicyRevision, tz: tzinfo) -> str:
    """Someone else was first (412)."""
    when = numbers.clock(newer.created_at, tz, seconds=False)
    return clean(
        f"{draft.name} r{newer.revision} was taken by {newer.author} at {when}. "
        "Your draft is kept; c compares, E rebases."
    )
