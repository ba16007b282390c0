"""REST of workers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from controlplane.deps import Actor, IdPath, OperatorDep, PlaneDep
from controlplane.errors import ConflictError
from controlplane.fleet import repository
from controlplane.fleet.schemas import (
    Worker,
    WorkerAction,
    WorkerActionReply,
    WorkerList,
    WorkerRegistration,
)
from controlplane.fleet.service import LiveWorker, row_of
from controlplane.plane import Plane

router = APIRouter(tags=["workers"])


@router.get("/workers")
async def list_workers(plane: PlaneDep) -> WorkerList:
    return WorkerList(items=plane.fleet.list())


@router.get("/workers/{worker_id}")
async def get_worker(plane: PlaneDep, worker_id: IdPath) -> Worker:
    return plane.fleet.to_schema(plane.fleet.find(worker_id))


@router.post("/workers", status_code=201)
async def register_worker(
    plane: PlaneDep, operator: OperatorDep, body: WorkerRegistration
) -> Worker:
    """An engine that Perilune did not start. The same again changes nothing."""
    changed, worker = plane.fleet.register(body)
    if changed:
        async with plane.db.write() as tx:
            await repository.save(tx.session, [row_of(worker)])
            await plane.audit.record(
                tx,
                actor=operator.name,
                request_id=operator.request_id,
                verb="worker.register",
                target=body.id,
                after=body.model_dump(),
            )

            def put() -> None:
                worker.dirty = False
                plane.fleet.put(worker)
                plane.announcer.workers([plane.fleet.to_schema(worker)])

            tx.after_commit(put)
    return plane.fleet.to_schema(plane.fleet.find(body.id))


@router.delete("/workers/{worker_id}", status_code=204)
async def remove_worker(
    plane: PlaneDep,
    operator: OperatorDep,
    worker_id: IdPath,
    reason: Annotated[str, Query(max_length=500)] = "",
) -> None:
    """Forget a registered engine, or a worker that is stopped or lost."""
    before = plane.fleet.to_schema(plane.fleet.removable(worker_id))
    commands = plane.commands.of_workers([worker_id])
    async with plane.db.write() as tx:
        await repository.remove(tx.session, [worker_id])
        await repository.remove_commands(tx.session, commands)
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb="worker.remove",
            target=worker_id,
            before={"node_id": before.node_id, "state": before.state, "url": before.url},
            reason=reason,
        )

        def forget() -> None:
            plane.commands.forget(commands)
            plane.fleet.drop([worker_id])
            plane.announcer.workers_removed([worker_id])

        tx.after_commit(forget)


@router.post("/workers/{worker_id}/actions")
async def act(
    plane: PlaneDep, operator: OperatorDep, worker_id: IdPath, body: WorkerAction
) -> WorkerActionReply:
    """Restart goes to the worker's node; drain and resume also change the view at once."""
    worker = plane.fleet.find(worker_id)
    _check(plane, worker, body)
    drained = {"drain": True, "resume": False}.get(body.action, worker.drained)
    before = plane.fleet.to_schema(worker)
    command_id = await _write(plane, operator, worker, body, drained=drained)
    after = plane.fleet.to_schema(worker)
    if after.state != before.state:
        plane.announcer.workers([after])
    return WorkerActionReply(worker=after, command_id=command_id)


def _check(plane: Plane, worker: LiveWorker, body: WorkerAction) -> None:
    if body.action != "restart":
        return
    state = plane.fleet.state_of(worker)
    if worker.external or state == "lost":
        cause = "was not started by Perilune" if worker.external else "is lost with its node"
        raise ConflictError(
            f"Worker {worker.status.worker_id} {cause}.",
            field="action",
            value="restart",
            way_out="Start it again where it runs.",
        )


async def _write(
    plane: Plane, operator: Actor, worker: LiveWorker, body: WorkerAction, *, drained: bool
) -> str | None:
    worker_id = worker.status.worker_id
    command_id: str | None = None
    async with plane.db.write() as tx:
        await repository.save(tx.session, [{**row_of(worker), "drained": drained}])
        if not worker.external:
            command_id = await plane.commands.add(tx, worker_id, worker.node_id, body.action)
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb=f"worker.{body.action}",
            target=worker_id,
            before={"state": plane.fleet.state_of(worker), "drained": worker.drained},
            after={"drained": drained, "command_id": command_id},
            reason=body.reason,
        )

        def apply() -> None:
            worker.drained = drained

        tx.after_commit(apply)
    return command_id
