"""Client keys of /v1: the secret is shown once and kept only as its SHA-256."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.db.session import Transaction
from controlplane.errors import ConflictError, NotFoundError
from controlplane.gateways.schemas import ClientKey
from controlplane.tokens import repository
from controlplane.tokens.schemas import Key, KeyCreate, KeyCreated
from controlplane.tokens.tables import KeyRow

MAX_KEYS = 5000
PREFIX_CHARS = 8


@dataclass(slots=True)
class KeyStore:
    clock: Clock
    _keys: dict[int, tuple[Key, str]] = field(default_factory=dict)

    async def load(self, session: AsyncSession) -> None:
        for row in await repository.everything(session):
            self._keys[row.id] = (_to_schema(row), row.key_sha256)

    def public(self) -> list[Key]:
        return [key for key, _ in self._keys.values()]

    def for_gateways(self) -> list[ClientKey]:
        return [
            ClientKey(key_sha256=digest, tenant=key.tenant, max_priority=key.max_priority)
            for key, digest in self._keys.values()
        ]

    def find(self, key_id: int) -> Key:
        if key_id not in self._keys:
            raise NotFoundError(
                f"No key {key_id}.",
                field="key_id",
                value=key_id,
                way_out="GET /api/v1/keys lists them.",
            )
        return self._keys[key_id][0]

    async def create(self, tx: Transaction, body: KeyCreate) -> KeyCreated:
        if len(self._keys) >= MAX_KEYS:
            raise ConflictError(
                f"There are {MAX_KEYS} keys, which is the limit.",
                field="keys",
                value=len(self._keys),
                way_out="Delete keys that are no longer used.",
            )
        secret = "plk_" + secrets.token_urlsafe(32)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        row = await repository.add(
            tx.session,
            KeyRow(
                prefix=secret[:PREFIX_CHARS],
                key_sha256=digest,
                tenant=body.tenant,
                note=body.note,
                max_priority=body.max_priority,
                created_at=self.clock.now(),
            ),
        )
        key = _to_schema(row)
        tx.after_commit(lambda: self._keys.update({key.id: (key, digest)}))
        return KeyCreated(**key.model_dump(), secret=secret)

    async def remove(self, tx: Transaction, key_id: int) -> Key:
        key = self.find(key_id)
        await repository.remove(tx.session, key_id)

        def forget() -> None:
            self._keys.pop(key_id, None)

        tx.after_commit(forget)
        return key


def _to_schema(row: KeyRow) -> Key:
    return Key(
        id=row.id,
        prefix=row.prefix,
        tenant=row.tenant,
        note=row.note,
        max_priority=row.max_priority,
        created_at=row.created_at,
    )
