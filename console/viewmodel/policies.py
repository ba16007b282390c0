"""Policies: the list, a draft with its validation, the differences, and what a change means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo

from pydantic import ValidationError

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.spec_text import (
    PARAMS_FIELD,
    POLICY_FIELD,
    SpecTextError,
    allowed,
    allowed_param,
    choices,
    is_mapping,
    params_of,
    read,
    read_param,
    show,
)
from console.viewmodel.table import Column, Fact, Row, Table, Text, cell, clean
from controlplane.policies.schemas import SPEC_OF_KIND, PolicyRevision
from controlplane.stats.schemas import Overview
from workers.core.policies.registry import POLICY_PARAMS

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


@dataclass(frozen=True, slots=True)
class FieldView:
    """One line of a draft: the name, the value as text, what is allowed, what is wrong with it."""

    name: str
    text: str
    allowed: str
    error: str = ""
    choices: tuple[str, ...] = ()
    was: str = ""
    when: str = ""  # the eviction policy whose parameter it is

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


def check(draft: Draft, *, all_params: bool = False) -> Checked:
    """Validate by the schema of the kind; each error stands on the field it concerns.

    An eviction policy's parameters are lines of their own, `decay.half_life_seconds`: those of the
    policy that the draft names, or of every policy with `all_params`, for a form that shows them as
    the name changes.
    """
    model = SPEC_OF_KIND[draft.base.kind]
    values: dict[str, object] = {}
    errors: dict[str, str] = {}
    views: list[FieldView] = []
    for name, info in model.model_fields.items():
        if name == PARAMS_FIELD:
            continue
        was = show(draft.base.spec.get(name, info.default))
        text = draft.values.get(name, was).strip()
        views.append(FieldView(name, text, allowed(info), "", choices(info), was))
        try:
            values[name] = read(info, text)
        except SpecTextError as error:
            errors[name] = f"must be {error}"
        if name == POLICY_FIELD:
            views.extend(_params(draft, text, values, errors, all_params=all_params))
    spec = _validate(draft.base.kind, values, errors)
    found = tuple(replace(view, error=errors.get(view.name, "")) for view in views)
    changes = tuple(
        (v.name, v.was, v.text) for v in found if v.changed and v.when in ("", _policy_of(values))
    )
    return Checked(found, None if errors else spec, changes)


def texts_of(policy: PolicyRevision) -> dict[str, str]:
    """A revision as the lines of a draft."""
    return {view.name: view.was for view in check(Draft(policy)).fields}


def _policy_of(values: Mapping[str, object]) -> str:
    return str(values.get(POLICY_FIELD, ""))


def _params(
    draft: Draft,
    policy: str,
    values: dict[str, object],
    errors: dict[str, str],
    *,
    all_params: bool,
) -> list[FieldView]:
    """Lines of parameters; what is not the default of the policy in the draft goes into `values`."""
    base = draft.base.spec
    known = base.get(PARAMS_FIELD)
    active = known if isinstance(known, dict) and base.get(POLICY_FIELD) == policy else {}
    given: dict[str, float] = {}
    views = []
    for name, param in params_of(policy).items():
        line = f"{policy}.{name}"
        was = show(float(active.get(name, param.default)))
        text = draft.values.get(line, was).strip()
        views.append(FieldView(line, text, allowed_param(param), was=was, when=policy))
        try:
            value = read_param(param, text)
        except SpecTextError as error:
            errors[line] = f"must be {error}"
            continue
        if value != param.default or name in active:
            given[name] = value
    values[PARAMS_FIELD] = given
    if all_params:
        others = [other for other in POLICY_PARAMS if other != policy]
        views += [
            FieldView(f"{other}.{name}", show(p.default), allowed_param(p), was=show(p.default), when=other)
            for other in others
            for name, p in POLICY_PARAMS[other].items()
        ]  # fmt: skip
    return views


def _validate(
    kind: str, values: Mapping[str, object], errors: dict[str, str]
) -> dict[str, object] | None:
    model = SPEC_OF_KIND[kind]
    try:
        return model.model_validate(dict(values)).model_dump(mode="json")
    except ValidationError as error:
        for item in error.errors():
            name = str(item["loc"][0]) if item["loc"] else ""
            info = model.model_fields.get(name)
            part = f"{item['loc'][1]}: " if len(item["loc"]) > 1 else ""
            if info is None or is_mapping(info):
                errors.setdefault(name, clean(f"{part}{item['msg']}"))
            else:
                errors.setdefault(name, f"must be {allowed(info)}")
        return None


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


ACTS = {
    "slo": "It acts on the next request.",
    "scheduling": "It acts on the next request.",
    "cache": "It acts on each node with its next heartbeat, within 2 s.",
    "transfer": "It acts on each node with its next heartbeat, within 2 s.",
    "admission": "It acts on the next request, and on those that wait.",
    "records": "It acts on the records of the next requests.",
}
"""When a policy of this kind is in effect; no worker restarts for any."""


def consequences(draft: Draft, checked: Checked, overview: Overview | None) -> tuple[Text, ...]:
    """What agreeing will do, with the numbers it is judged by."""
    acts = ACTS[draft.base.kind].removeprefix("It ").rstrip(".")
    lines = [Text(f"ok    {acts}; no worker restarts")]
    if draft.base.scope == "default":
        lines.append(Text("ok    applies to every tenant without a policy of its own"))
    if draft.base.kind == "cache":
        lines.extend(_cache_lines(draft, checked))
    if draft.base.kind == "slo" and checked.spec is not None:
        lines.extend(_slo_lines(checked.spec, overview))
    lines.append(Text(f"undo  E again: the old values are r{draft.base.revision}", "muted"))
    return tuple(lines)


def _cache_lines(draft: Draft, checked: Checked) -> list[Text]:
    changed = {name: (old, new) for name, old, new in checked.changes}
    lines = []
    if POLICY_FIELD in changed:
        old, new = changed[POLICY_FIELD]
        lines.append(Text(f"ok    blocks stay: {new} takes over what {old} knows of their use"))
    quotas = [name for name in changed if name.endswith("_quota_gib")]
    if quotas:
        lines.append(
            Text(
                "warn  a group over its new quota is evicted from first, until it is within", "warn"
            )
        )
    if "ssd_cap_gib" in changed:
        lines.append(
            Text(
                "warn  a smaller cap evicts from SSD until it is kept; a larger one must fit on the device",
                "warn",
            )
        )
    return lines  # fmt: skip


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
