"""A heartbeat's dictionaries as the agent's own messages. Pure; what does not fit is named."""

from __future__ import annotations

import base64
import binascii
from typing import Any, TypeVar

import msgspec

from controlplane.errors import InvalidError
from workers.core.messages import LegReport
from workers.core.stats_messages import PoolStats
from workers.core.transfer_stats import BUCKET_SECONDS

DIGEST_BYTES = 32
MAX_WORKERS = 512
MAX_PAIRS = 4096
MAX_TIERS = 8
MAX_GROUPS = 4096
MAX_POINTS = 64
MAX_SLOWEST = 64
SHORTEN = "The agent must send fewer: of groups the largest."
T = TypeVar("T")


def pool_stats(raw: dict[str, object], node_id: str, incarnation: int) -> PoolStats:
    """The agent's `PoolStats` from JSON (bytes as hex); raises `InvalidError`."""
    value: dict[str, Any] = dict(raw)
    namespaces = value.get("namespaces", [])
    if isinstance(namespaces, list):
        value["namespaces"] = [_with_digest(item, i) for i, item in enumerate(namespaces)]
    stats = _convert(value, PoolStats, "pool_stats")
    for name, given, known in (
        ("node_id", stats.node_id, node_id),
        ("incarnation", stats.incarnation, incarnation),
    ):
        if given != known:
            raise InvalidError(
                f"pool_stats.{name} is {given!r}, the heartbeat is of {known!r}.",
                field=f"pool_stats.{name}",
                value=given,
                way_out="Both must name the same life of the same node.",
            )
    _bound("pool_stats.workers", len(stats.workers), MAX_WORKERS)
    _bound("pool_stats.shm_bytes_by_pair", len(stats.shm_bytes_by_pair), MAX_PAIRS)
    _bound("pool_stats.tiers", len(stats.tiers), MAX_TIERS, SHORTEN)
    _bound("pool_stats.groups", len(stats.groups), MAX_GROUPS, SHORTEN)
    _bound("pool_stats.whatif", len(stats.whatif), MAX_POINTS, SHORTEN)
    _check_transfers(stats)
    return stats


def _check_transfers(stats: PoolStats) -> None:
    moved, name = stats.transfers, "pool_stats.transfers"
    _bound(f"{name}.pairs", len(moved.pairs), MAX_PAIRS)
    _bound(f"{name}.links", len(moved.links), MAX_PAIRS)
    _bound(f"{name}.alarms", len(moved.alarms), MAX_PAIRS)
    _bound(f"{name}.modes", len(moved.modes), MAX_PAIRS)
    _bound(f"{name}.ports", len(moved.ports), MAX_SLOWEST)
    _bound(f"{name}.rails", len(moved.rails), MAX_PAIRS)
    for pair in moved.pairs:
        _bound(f"{name}.pairs.slowest", len(pair.slowest), MAX_SLOWEST)
        _bound(f"{name}.pairs.missing_by_cause", len(pair.missing_by_cause), MAX_SLOWEST)
        _bound(f"{name}.pairs.seconds", len(pair.seconds), MAX_SLOWEST)
        for stage in pair.seconds:
            if len(stage.counts) != len(BUCKET_SECONDS) + 1:
                raise InvalidError(
                    f"{name}.pairs.seconds.counts has {len(stage.counts)} entries, "
                    f"{len(BUCKET_SECONDS) + 1} are known.",
                    field=f"{name}.pairs.seconds.counts",
                    value=len(stage.counts),
                    way_out="Agent and control plane must be of one version.",
                )


def leg_reports(raw: list[dict[str, object]]) -> list[LegReport]:
    """`LegReport`s from JSON; raises `InvalidError` naming the first that does not fit."""
    return [_convert(item, LegReport, f"leg_reports.{i}") for i, item in enumerate(raw)]


def _with_digest(item: object, index: int) -> object:
    if not isinstance(item, dict) or not isinstance(item.get("digest"), str):
        return item
    return {**item, "digest": _digest(item["digest"], index)}


def _digest(text: str, index: int) -> bytes:
    try:
        if len(text) == 2 * DIGEST_BYTES:
            return bytes.fromhex(text)
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InvalidError(
            f"pool_stats.namespaces.{index}.digest: not a digest.",
            field=f"pool_stats.namespaces.{index}.digest",
            value=text,
            way_out=f"Send {DIGEST_BYTES} bytes as hex.",
        ) from error


def _convert(value: object, kind: type[T], field: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        _, _, path = message.partition(" - at `$")
        where = field + path.rstrip("`").replace("[...]", "").replace("$", "")
        raise InvalidError(
            f"{where}: {message.partition(' - at')[0]}.",
            field=where,
            value=value if not path else None,
            way_out="Agent and control plane must be of one version.",
        ) from error


def _bound(
    field: str,
    number: int,
    limit: int,
    way_out: str = "Spread the workers over more nodes.",
) -> None:
    if number > limit:
        raise InvalidError(
            f"{field} has {number} entries, the limit is {limit}.",
            field=field,
            value=number,
            way_out=way_out,
        )
