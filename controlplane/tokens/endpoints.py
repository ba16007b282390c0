"""REST of client keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from controlplane.deps import OperatorDep, PlaneDep
from controlplane.tokens.schemas import Key, KeyCreate, KeyCreated, KeyList

router = APIRouter(tags=["keys"])
KeyId = Annotated[int, Path(ge=1, le=2**31 - 1)]


@router.get("/keys")
async def list_keys(plane: PlaneDep) -> KeyList:
    return KeyList(items=plane.keys.public())


@router.post("/keys", status_code=201)
async def create_key(plane: PlaneDep, operator: OperatorDep, body: KeyCreate) -> KeyCreated:
    """The reply is the only place where the secret ever stands."""
    async with plane.db.write() as tx:
        created = await plane.keys.create(tx, body)
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb="key.create",
            target=f"key/{created.id}",
            after=created.model_dump(exclude={"secret"}, mode="json"),
            reason=body.note,
        )
        tx.after_commit(plane.view.bump)
    return created


@router.delete("/keys/{key_id}")
async def delete_key(
    plane: PlaneDep,
    operator: OperatorDep,
    key_id: KeyId,
    reason: Annotated[str, Query(max_length=500)] = "",
) -> Key:
    """Gateways refuse the key as soon as they have the next view."""
    async with plane.db.write() as tx:
        key = await plane.keys.remove(tx, key_id)
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb="key.delete",
            target=f"key/{key_id}",
            before=key.model_dump(mode="json"),
            reason=reason,
        )
        tx.after_commit(plane.view.bump)
    return key
