"""Commands to workers, kept until their node's agent acknowledges them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, cast

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.db.session import Transaction
from controlplane.fleet import repository
from controlplane.fleet.tables import CommandRow
from workers.core.messages import WorkerCommand

Action = Literal["restart", "drain", "resume"]
EXPIRE_SECONDS = 600.0
MAX_IN_REPLY = 100


@dataclass(slots=True)
class _Pending:
    node_id: str
    command: WorkerCommand
    since: float


@dataclass(slots=True)
class CommandQueue:
    """At most one pending command a worker and kind: a later one takes the earlier one's place."""

    clock: Clock
    _pending: dict[str, _Pending] = field(default_factory=dict)

    async def load(self, session: AsyncSession) -> None:
        for row in await repository.commands(session):
            command = WorkerCommand(row.worker_id, cast("Action", row.action), row.id)
            self._pending[row.id] = _Pending(row.node_id, command, self.clock.monotonic())

    async def add(self, tx: Transaction, worker_id: str, node_id: str, action: Action) -> str:
        """Queue a command; it is delivered once the transaction is committed."""
        command = WorkerCommand(worker_id, action, secrets.token_hex(8))
        replaced = [i for i, p in self._pending.items() if _replaces(command, p.command)]
        await repository.remove_commands(tx.session, replaced)
        row = CommandRow(
            id=command.command_id,
            worker_id=worker_id,
            node_id=node_id,
            action=action,
            created_at=self.clock.now(),
        )
        await repository.add_command(tx.session, row)
        pending = _Pending(node_id, command, self.clock.monotonic())

        def deliver() -> None:
            self.forget(replaced)
            self._pending[command.command_id] = pending

        tx.after_commit(deliver)
        return command.command_id

    def for_node(self, node_id: str) -> list[dict[str, str]]:
        """What its next heartbeat's reply carries, oldest first."""
        found = [p.command for p in self._pending.values() if p.node_id == node_id]
        return [msgspec.to_builtins(command) for command in found[:MAX_IN_REPLY]]

    def known(self, node_id: str, command_ids: Iterable[str]) -> list[str]:
        wanted = set(command_ids)
        return [i for i, p in self._pending.items() if i in wanted and p.node_id == node_id]

    def of_workers(self, worker_ids: Iterable[str]) -> list[str]:
        wanted = set(worker_ids)
        return [i for i, p in self._pending.items() if p.command.worker_id in wanted]

    def expired(self) -> list[str]:
        oldest = self.clock.monotonic() - EXPIRE_SECONDS
        return [i for i, p in self._pending.items() if p.since < oldest]

    def forget(self, command_ids: Iterable[str]) -> None:
        for command_id in command_ids:
            self._pending.pop(command_id, None)


def _replaces(new: WorkerCommand, old: WorkerCommand) -> bool:
    opposites = {"drain", "resume"}
    same_kind = new.action == old.action or {new.action, old.action} == opposites
    return new.worker_id == old.worker_id and same_kind
