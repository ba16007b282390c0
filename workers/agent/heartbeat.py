"""Tells the control plane once a second how the node is, and takes its wishes home.

A control plane that is down changes nothing here: the agent serves on and tries again.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

import httpx2
import msgspec

from workers.agent.cache_policy import CachePolicy
from workers.agent.node import Node
from workers.core.messages import LegReport, WorkerCommand
from workers.core.transfer_policy import TransferPolicy

TIMEOUT_SECONDS: Final = 2.0
MAX_BACKOFF_SECONDS: Final = 5.0
UNREADABLE: Final = 422
MAX_REPORTS_A_BEAT: Final = 1000

_log = logging.getLogger(__name__)


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The part of the control plane's answer that is read here."""

    commands: list[WorkerCommand] = []
    cache_policy_revision: int = 0
    cache_policy: CachePolicy = CachePolicy()
    transfer_policy_revision: int = 0
    transfer_policy: dict[str, Any] = {}


class Heartbeat:
    """Runs until cancelled."""

    def __init__(self, node: Node) -> None:
        self._node = node
        settings = node.settings
        self._url = (
            f"{settings.control_plane.rstrip('/')}/api/v1/nodes/{settings.node_id}/heartbeat"
        )
        self._failures = 0
        self._told = ""
        self._told_of_transfers = ""

    async def run(self) -> None:
        async with httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
            while True:
                await self._beat(client)
                await asyncio.sleep(self._pause())

    async def _beat(self, client: httpx2.AsyncClient) -> None:
        node = self._node
        reports = list(node.leg_reports)[:MAX_REPORTS_A_BEAT]
        acknowledged = list(node.acknowledged)
        body = heartbeat_body(node, reports, acknowledged)
        headers = {"content-type": "application/json", **_authorization(node.settings.token_file)}
        try:
            response = await client.post(self._url, content=body, headers=headers)
            response.raise_for_status()
            reply = msgspec.json.decode(response.content, type=HeartbeatReply)
        except httpx2.HTTPStatusError as error:
            answer = error.response
            self._note_failure(f"{answer.status_code} {answer.text[:300]}")
            if answer.status_code == UNREADABLE:
                # Whatever it was, it would be refused again: better no report than no heartbeat.
                _drop_sent(node, reports, acknowledged)
            return
        except (httpx2.HTTPError, msgspec.MsgspecError, OSError) as error:
            self._note_failure(str(error))
            return
        if self._failures:
            _log.info("control_plane_back after_failures=%d", self._failures)
        self._failures = 0
        _drop_sent(node, reports, acknowledged)
        node.take_commands(reply.commands)
        node.apply_cache_policy(reply.cache_policy, reply.cache_policy_revision)
        self._apply_transfers(reply)
        if node.host.policy_error and node.host.policy_error != self._told:
            _log.error("cache_policy_left_out %s", node.host.policy_error)
        self._told = node.host.policy_error

    def _apply_transfers(self, reply: HeartbeatReply) -> None:
        """One that this release cannot read changes nothing here."""
        revision, problem = reply.transfer_policy_revision, ""
        try:
            policy = msgspec.convert(reply.transfer_policy, TransferPolicy)
        except msgspec.ValidationError as error:
            problem = f"revision={revision} error={error}"
            if problem != self._told_of_transfers:
                _log.error("transfer_policy_left_out %s", problem)
        else:
            self._node.transfers.apply(policy, revision)
        self._told_of_transfers = problem

    def _note_failure(self, error: str) -> None:
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # 1, 2, 4, 8, ...: no flood
            _log.warning(
                "heartbeat_failed failures=%d url=%s error=%s", self._failures, self._url, error
            )

    def _pause(self) -> float:
        pause = self._node.settings.heartbeat_seconds
        return min(pause * float(2 ** min(self._failures, 8)), max(pause, MAX_BACKOFF_SECONDS))


def heartbeat_body(node: Node, reports: list[LegReport], acknowledged: list[str]) -> bytes:
    """The REST schema `Heartbeat` as JSON; bytes are hex."""
    document = {
        "incarnation": node.incarnation,
        "events_endpoint": node.settings.events_endpoint,
        "pool_stats": to_jsonable(node.stats()),
        "leg_reports": [to_jsonable(report) for report in reports],
        "acknowledged_commands": acknowledged,
    }
    return msgspec.json.encode(document)


def to_jsonable(message: msgspec.Struct) -> Any:
    """A message as plain values; bytes become hex."""
    return _hex(msgspec.to_builtins(message, builtin_types=(bytes,)))


def _hex(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {key: _hex(item) for key, item in value.items()}
        case list() | tuple():
            return [_hex(item) for item in value]
        case _:
            return value


def _authorization(token_file: Path | None) -> dict[str, str]:
    """Read each time: the control plane may write the file after our start.

    A file that holds no token gives no header: the control plane says no, and the node serves on.
    """
    if token_file is None:
        return {}
    try:
        token = token_file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return {}
    return {"authorization": f"Bearer {token}"} if token and token.isprintable() else {}


def _drop_sent(node: Node, reports: list[LegReport], acknowledged: list[str]) -> None:
    """Forget what arrived. What was added or pushed out meanwhile stays as it is."""
    sent = set(map(id, reports))
    while node.leg_reports and id(node.leg_reports[0]) in sent:
        node.leg_reports.popleft()
    known = set(acknowledged)
    while node.acknowledged and node.acknowledged[0] in known:
        node.acknowledged.popleft()
