"""REST of models. Their ids may hold slashes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from controlplane.deps import OperatorDep, PlaneDep
from controlplane.models.schemas import Model, ModelList, ModelRegistration

router = APIRouter(tags=["models"])
ModelPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}$")]
Reason = Annotated[str, Query(max_length=500)]


@router.get("/models")
async def list_models(plane: PlaneDep) -> ModelList:
    return ModelList(items=plane.models.list(plane.fleet.list()))


@router.get("/models/{model_id:path}")
async def get_model(plane: PlaneDep, model_id: ModelPath) -> Model:
    plane.models.find(model_id)
    models = plane.models.list(plane.fleet.list())
    return next(model for model in models if model.id == model_id)


@router.put("/models/{model_id:path}")
async def put_model(
    plane: PlaneDep, operator: OperatorDep, model_id: ModelPath, body: ModelRegistration
) -> Model:
    """Register or change a model. The same again changes nothing and leaves no audit row."""
    before = plane.models.get(model_id)
    if before != body:
        async with plane.db.write() as tx:
            await plane.models.put(tx, model_id, body)
            await plane.audit.record(
                tx,
                actor=operator.name,
                request_id=operator.request_id,
                verb="model.put",
                target=model_id,
                before=before.model_dump() if before else None,
                after=body.model_dump(),
            )
            tx.after_commit(plane.view.bump)
    return await get_model(plane, model_id)


@router.delete("/models/{model_id:path}", status_code=204)
async def remove_model(
    plane: PlaneDep, operator: OperatorDep, model_id: ModelPath, reason: Reason = ""
) -> None:
    before = plane.models.find(model_id)
    async with plane.db.write() as tx:
        await plane.models.remove(tx, model_id)
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb="model.remove",
            target=model_id,
            before=before.model_dump(),
            reason=reason,
        )
        tx.after_commit(plane.view.bump)
