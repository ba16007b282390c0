"""Pin and unpin as jobs: all nodes asked for or none."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime
from typing import Any

from controlplane.cache.agents import NodeAgent, NodeError, Target, open_agent
from controlplane.cache.context import JobContext, OperationError
from controlplane.cache.selection import selection_of
from controlplane.jobs.service import Outcome
from workers.core.cache_messages import (
    MAX_PIN_SHARE,
    ListPins,
    PinChains,
    PinInfo,
    PinList,
    Selection,
    Slice,
)

TIDY_SECONDS = 3.0
"""For taking back what a pin that fails has pinned so far."""


async def pin(context: JobContext) -> Outcome:
    """Pin a selection under a name; a node that cannot undoes it on the others."""
    name = str(context.spec["name"])
    touched: list[Target] = []
    try:
        for target in context.targets():
            async with open_agent(target) as agent:
                await _check_free(context, agent, name)
                touched.append(target)
                num_blocks = await _pin_here(context, agent, name)
                context.by_node[target.node] = {"blocks": num_blocks}
    except BaseException:
        await _take_back(touched, name)
        raise
    num_pinned = context.sum("blocks")
    if not num_pinned:
        raise OperationError(
            "No node holds a block of this selection: nothing is pinned. "
            "perilune cache list shows what is there."
        )
    spec = {key: context.spec[key] for key in ("name", "node") if key in context.spec}
    undo = {"kind": "unpin", "spec": spec, "how": f"unpin {name}"}
    return context.outcome(undo, blocks=num_pinned, name=name)


async def unpin(context: JobContext) -> Outcome:
    """End pins by name, or those that hold a block of a selection."""
    ended: list[dict[str, object]] = []

    async def act(target: Target) -> dict[str, object]:
        async with open_agent(target) as agent:
            found = await _pins_meant(context, agent)
            context.expect(sum(pin.num_blocks for pin in found))
            for info in found:
                num_blocks = await agent.unpin(info.name)
                ended.append(_restored(context, target, info))
                context.undo = _undo_of(ended)
                context.progress(num_blocks, target.node)
        total = sum(info.num_blocks for info in found)
        return {"blocks": total, "pins": [info.name for info in found]}

    await context.on_each(act)
    if not ended and not context.problems:
        raise OperationError("There is no such pin. perilune cache pins lists them.")
    return context.outcome(context.undo, blocks=context.sum("blocks"))


def _undo_of(ended: list[dict[str, object]]) -> dict[str, object]:
    if not all(entry["whole"] for entry in ended):
        return {"how": "A pin held too many chains to write them down."}
    names = sorted({str(entry["name"]) for entry in ended})
    return {"kind": "pin", "spec": {"restore": ended}, "how": f"pin {', '.join(names)} again"}


async def restore(context: JobContext) -> Outcome:
    """Pin again what an unpin let go; what left the pool meanwhile is not there any more."""
    entries: list[dict[str, Any]] = context.spec["restore"]
    targets = {target.node: target for target in context.targets()}
    for entry in entries:
        target = targets.get(entry["node"])
        if target is None:
            context.problems[entry["node"]] = f"node {entry['node']} is lost."
            continue
        try:
            num_blocks = await _restore_one(context, target, entry)
        except NodeError as error:
            context.problems[target.node] = str(error)
            continue
        before = context.by_node.get(target.node, {"blocks": 0})["blocks"]
        assert isinstance(before, int)
        context.by_node[target.node] = {"blocks": before + num_blocks}
    undo = {
        "kind": "unpin",
        "spec": {"names": sorted({str(entry["name"]) for entry in entries})},
        "how": "unpin them again",
    }
    return context.outcome(undo, blocks=context.sum("blocks"))


async def _restore_one(context: JobContext, target: Target, entry: dict[str, Any]) -> int:
    seconds = _seconds_left(context, entry.get("expires_at"))
    num_blocks = 0
    async with open_agent(target) as agent:
        for tip in entry["keys"]:
            selection = Selection(key=bytes.fromhex(tip))
            body = PinChains(entry["name"], selection, seconds, MAX_PIN_SHARE)
            reply = await agent.call(body, Slice)
            num_blocks += reply.num_blocks
            context.progress(reply.num_blocks, target.node)
    return num_blocks


def _restored(context: JobContext, target: Target, info: PinInfo) -> dict[str, object]:
    expires_at = None
    if info.expires_in_seconds is not None:
        expires_at = context.clock.now().timestamp() + info.expires_in_seconds
    return {
        "node": target.node,
        "name": info.name,
        "keys": [tip.hex() for tip in info.tips],
        "expires_at": expires_at,
        "whole": len(info.tips) == info.num_tips,
    }


async def _check_free(context: JobContext, agent: NodeAgent, name: str) -> None:
    """A name is one pin's. What an interrupted attempt of this very job pinned goes first."""
    reply = await agent.call(ListPins(), PinList)
    if name not in {info.name for info in reply.pins}:
        return
    if context.attempts > 1:
        await agent.unpin(name)
        return
    raise OperationError(
        f"name = {name!r}: node {agent.node} has a pin of this name. "
        f"Take another, or end that one: perilune cache unpin --name {name}"
    )


async def _pin_here(context: JobContext, agent: NodeAgent, name: str) -> int:
    selection = selection_of(context.spec)
    max_share = float(context.spec["max_share"])
    num_blocks, cursor = 0, 0
    while True:
        seconds = _seconds_left(context, context.spec.get("expires_at"))
        body = PinChains(name, selection, seconds, max_share, cursor)
        reply = await agent.call(body, Slice)
        num_blocks += reply.num_blocks
        context.progress(reply.num_blocks, f"node {agent.node}")
        if reply.cursor is None:
            return num_blocks
        cursor = reply.cursor


async def _take_back(touched: list[Target], name: str) -> None:
    """As far as the nodes answer within a moment; what is left ends with `unpin`."""
    with contextlib.suppress(TimeoutError, NodeError):
        async with asyncio.timeout(TIDY_SECONDS):
            for target in touched:
                with contextlib.suppress(NodeError):
                    async with open_agent(target) as agent:
                        await agent.unpin(name)


async def _pins_meant(context: JobContext, agent: NodeAgent) -> list[PinInfo]:
    names = context.spec.get("names") or [context.spec.get("name")]
    selection = selection_of(context.spec)
    reply = await agent.call(ListPins(selection), PinList)
    if names == [None]:
        return reply.pins
    return [info for info in reply.pins if info.name in names]


def _seconds_left(context: JobContext, expires_at: object) -> float | None:
    """From a time as text or in seconds; None: for good."""
    if expires_at is None:
        return None
    now = context.clock.now()
    if isinstance(expires_at, str):
        left = (datetime.fromisoformat(expires_at) - now).total_seconds()
    else:
        left = float(str(expires_at)) - now.timestamp()
    return max(1.0, left)
