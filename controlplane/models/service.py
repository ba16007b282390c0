"""Models that the cluster serves: few, so that all of them stay in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.session import Transaction
from controlplane.errors import ConflictError, NotFoundError
from controlplane.fleet.schemas import Worker
from controlplane.models import repository
from controlplane.models.schemas import Model, ModelRegistration

MAX_MODELS = 500


@dataclass(slots=True)
class ModelRegistry:
    _models: dict[str, ModelRegistration] = field(default_factory=dict)

    async def load(self, session: AsyncSession) -> None:
        for row in await repository.everything(session):
            self._models[row.id] = ModelRegistration(
                path=row.path,
                max_model_len=row.max_model_len,
                kv_bytes_per_token=row.kv_bytes_per_token,
            )

    def get(self, model_id: str) -> ModelRegistration | None:
        return self._models.get(model_id)

    async def put(self, tx: Transaction, model_id: str, body: ModelRegistration) -> None:
        if model_id not in self._models and len(self._models) >= MAX_MODELS:
            raise ConflictError(
                f"{MAX_MODELS} models are registered, which is the limit.",
                field="model_id",
                value=model_id,
                way_out="Remove one that is no longer served.",
            )
        await repository.save(tx.session, {"id": model_id, **body.model_dump()})
        tx.after_commit(lambda: self._models.update({model_id: body}))

    async def remove(self, tx: Transaction, model_id: str) -> None:
        await repository.remove(tx.session, model_id)

        def forget() -> None:
            self._models.pop(model_id, None)

        tx.after_commit(forget)

    def list(self, workers: Iterable[Worker]) -> list[Model]:
        """With the workers that serve each; those of lost nodes are left out."""
        serving: dict[str, list[str]] = {}
        for worker in workers:
            if worker.state not in {"lost", "stopped", "failed"}:
                serving.setdefault(worker.model, []).append(worker.id)
        return [
            Model(
                id=model_id,
                workers=serving.get(model_id, []),
                **self._models[model_id].model_dump(),
            )
            for model_id in sorted(self._models)
        ]

    def find(self, model_id: str) -> ModelRegistration:
        model = self._models.get(model_id)
        if model is None:
            known = ", ".join(sorted(self._models)[:10]) or "none"
            raise NotFoundError(
                f"No model {model_id!r}.",
                field="model_id",
                value=model_id,
                way_out=f"Registered models: {known}.",
            )
        return model
