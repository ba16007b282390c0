"""Policies: the list, one with its revisions and its form, and the check of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from console.viewmodel import numbers, policies, policy_history
from console.viewmodel.policies import Draft
from console.viewmodel.table import Row, Table, Text
from console.web.links import path
from controlplane.policies.schemas import PolicyRevision

from .base import MAX_ROWS, Context, Page


async def policies_page(context: Context) -> Page:
    """The active revisions."""
    rows = policies.policies(await context.client.policies(), now=context.now, tz=context.viewer.tz)
    crumbs = [("Policies", "")]
    return Page("policies.html", "Policies", "policies", crumbs, {"rows": rows})


async def policy_page(context: Context, kind: str, scope: str) -> Page:
    """Active revision, form, differences from the revision in `?compare=`, history."""
    client, viewer = context.client, context.viewer
    active = await client.policy(kind, scope)
    history = await client.policy_revisions(kind, scope, limit=MAX_ROWS)
    compared = int(viewer.compare) if viewer.compare.isdecimal() else 0
    other = await client.policy_revision(kind, scope, compared) if compared else None
    name = f"{kind}/{scope}"
    data = {
        "active": active,
        "name": name,
        "since": numbers.stamp(active.created_at, context.now, viewer.tz),
        "fields": policies.check(Draft(active), all_params=True).fields,
        "chosen": str(active.spec.get("eviction", "")),
        "api": f"/api/v1{path('policies', kind, scope)}",
        "check": f"{path('policies', kind, scope)}/check",
        "revisions": _revisions(history.items, context, active),
        "acts": policies.ACTS[kind],
        "compared": compared,
        "diff": _diff(other, active) if other else (),
    }
    crumbs = [("Policies", "/policies"), (name, "")]
    return Page("policy.html", name, "policies", crumbs, data, has_form=True)


async def check_draft(
    context: Context, kind: str, scope: str, values: Mapping[str, str], base: str
) -> dict[str, object]:
    """What putting these values would change and do, or what is wrong with them. Writes nothing."""
    active = await context.client.policy(kind, scope)
    draft = Draft(active, dict(values))
    checked = policies.check(draft)
    shown = policies.check(Draft(active), all_params=True).fields
    behind = base.isdecimal() and int(base) != active.revision
    return {
        "errors": {view.name: view.error for view in checked.fields if view.error},
        "spec": checked.spec,
        "changes": [_line(text) for text in policies.diff(draft, checked)],
        "effects": [
            _line(text) for text in policies.consequences(draft, checked, context.snapshot.overview)
        ],
        "conflict": policies.conflict(draft, active, context.viewer.tz) if behind else "",
        "active": {"revision": active.revision, "texts": {v.name: v.was for v in shown}},
    }


def _line(text: Text) -> dict[str, str]:
    return {"text": text.text, "tone": text.tone}


def _diff(old: PolicyRevision, active: PolicyRevision) -> tuple[Text, ...]:
    draft = Draft(old, policies.texts_of(active))
    return policies.diff(draft, policies.check(draft))


def _revisions(rows: Sequence[PolicyRevision], context: Context, active: PolicyRevision) -> Table:
    """As the terminal shows them; the state stands with the revision."""
    table = policy_history.history(rows, now=context.now, tz=context.viewer.tz)
    first, _, *columns = table.columns
    shown = tuple(_revision_row(row, active) for row in table.rows)
    return Table((replace(first, align="left"), *columns), shown, table.empty)


def _revision_row(row: Row, active: PolicyRevision) -> Row:
    name, _, *rest = row.cells
    if row.key == str(active.revision):
        return Row(row.key, (replace(name, text=f"{name.text} active"), *rest), row.facts)
    page = path("policies", active.kind, active.scope)
    return Row(row.key, (name, *rest), row.facts, f"{page}?compare={row.key}#diff")
