"""Policies: a change is a new revision; `If-Match` says which one it was made from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.db.session import Transaction
from controlplane.errors import (
    ConflictError,
    IfMatchMissingError,
    InvalidError,
    NotFoundError,
    StaleError,
)
from controlplane.policies import repository
from controlplane.policies.schemas import SCOPE_PATTERN, SPEC_OF_KIND, PolicyRevision
from controlplane.policies.tables import RevisionRow
from controlplane.problems import invalid

KINDS = ("slo", "scheduling", "cache", "admission", "transfer", "records")
DEFAULT_SCOPE = "default"
MAX_SCOPES = 200
KEEP_REVISIONS = 1000
SYSTEM_AUTHOR = "perilune"
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A policy write before it is one. `if_match` is the header as it came."""

    kind: str
    scope: str
    spec: dict[str, object]
    author: str
    reason: str
    if_match: str | None


@dataclass(slots=True)
class PolicyStore:
    """The active revisions in memory; all revisions in the database."""

    clock: Clock
    active: dict[Key, PolicyRevision] = field(default_factory=dict)

    async def load(self, tx: Transaction) -> None:
        """Read the active ones; at the very first start write revision 1 of each kind."""
        for row in await repository.active(tx.session):
            self.active[row.kind, row.scope] = to_schema(row, active=True)
        for kind in KINDS:
            if (kind, DEFAULT_SCOPE) not in self.active:
                spec = validated(kind, SPEC_OF_KIND[kind]().model_dump())
                change = Change(kind, DEFAULT_SCOPE, spec, SYSTEM_AUTHOR, "first start", None)
                await self._add(tx, change)

    def list(self) -> list[PolicyRevision]:
        return [self.active[key] for key in sorted(self.active)]

    def find(self, kind: str, scope: str) -> PolicyRevision:
        policy = self.active.get((kind, scope))
        if policy is None:
            known = ", ".join(f"{k}/{s}" for k, s in sorted(self.active)[:10])
            raise NotFoundError(
                f"No policy {kind}/{scope}.",
                field="scope",
                value=f"{kind}/{scope}",
                way_out=f"There are {known}.",
            )
        return policy

    async def put(
        self, tx: Transaction, change: Change
    ) -> tuple[PolicyRevision | None, PolicyRevision]:
        """Check and write; (before, after). Memory follows once the transaction is committed."""
        check_scope(change.kind, change.scope)
        spec = validated(change.kind, change.spec)
        active = await repository.active_revision(tx.session, change.kind, change.scope)
        check_if_match(change, active)
        before = self.active.get((change.kind, change.scope))
        if before is None and len(self.active) >= MAX_SCOPES:
            raise ConflictError(
                f"There are {MAX_SCOPES} policies, which is the limit.",
                field="scope",
                value=change.scope,
                way_out="Change one of them instead.",
            )
        after = await self._add(
            tx, Change(change.kind, change.scope, spec, change.author, change.reason, None)
        )
        return before, after

    async def _add(self, tx: Transaction, change: Change) -> PolicyRevision:
        number = 1 + await repository.newest_revision(tx.session, change.kind, change.scope)
        row = RevisionRow(
            kind=change.kind,
            scope=change.scope,
            revision=number,
            spec=change.spec,
            author=change.author,
            reason=change.reason,
            created_at=self.clock.now(),
        )
        await repository.add(tx.session, row)
        keep_from = number - KEEP_REVISIONS + 1
        if keep_from > 1:
            await repository.prune(tx.session, change.kind, change.scope, keep_from)
        policy = to_schema(row, active=True)
        tx.after_commit(lambda: self.active.update({(change.kind, change.scope): policy}))
        return policy

    async def revision(
        self, session: AsyncSession, kind: str, scope: str, number: int
    ) -> PolicyRevision:
        active = self.find(kind, scope)
        row = await repository.revision(session, kind, scope, number)
        if row is None:
            raise NotFoundError(
                f"{kind}/{scope} has no revision {number}.",
                field="revision",
                value=number,
                way_out=f"The active one is {active.revision}; see .../revisions.",
            )
        return to_schema(row, active=row.revision == active.revision)


def to_schema(row: RevisionRow, *, active: bool) -> PolicyRevision:
    return PolicyRevision.model_validate(
        {
            "kind": row.kind,
            "scope": row.scope,
            "revision": row.revision,
            "spec": row.spec,
            "author": row.author,
            "reason": row.reason,
            "created_at": row.created_at,
            "active": active,
        }
    )


def validated(kind: str, spec: dict[str, object]) -> dict[str, object]:
    """The whole spec with defaults filled in; a value that cannot work is named with its range."""
    model = SPEC_OF_KIND[kind]
    try:
        return model.model_validate(spec, strict=True).model_dump()
    except ValidationError as error:
        raise invalid(error.errors(), prefix=("spec",), model=model) from error


def check_scope(kind: str, scope: str) -> None:
    """Only an slo policy can be for a tenant or a class."""
    if kind != "slo" and not re.match(SCOPE_PATTERN, scope):
        raise InvalidError(
            f"{kind}/{scope}: only slo policies have tenants or classes as scope.",
            field="scope",
            value=scope,
            way_out="Use default, or a model's name.",
        )


def check_if_match(change: Change, active: int | None) -> None:
    """A change of an existing policy must name the revision that it was made from."""
    name = f"{change.kind}/{change.scope}"
    if change.if_match is None:
        if active is not None:
            raise IfMatchMissingError(
                f"{name} exists: say which revision you change.",
                field="If-Match",
                way_out=f'Read it and send its ETag, now If-Match: "{active}".',
            )
        return
    if change.if_match.strip() == "*" and active is not None:
        return
    given = parse_etag(change.if_match)
    if given != active:
        there = "there is none yet" if active is None else f"the active one is {active}"
        again = "Leave If-Match out to make the first." if active is None else "Read it again."
        raise StaleError(
            f"If-Match names revision {given} of {name}, {there}.",
            field="If-Match",
            value=change.if_match,
            way_out=again,
        )


def parse_etag(text: str) -> int:
    value = text.strip().removeprefix("W/").strip('"')
    if not value.isdecimal() or len(value) > 9:
        raise InvalidError(
            "If-Match: not a revision.",
            field="If-Match",
            value=text,
            way_out='Send the ETag of the revision that you read, e.g. If-Match: "3".',
        )
    return int(value)
