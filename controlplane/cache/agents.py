"""Asking nodes' agents directly: bounded calls, errors that name node, endpoint and way out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from controlplane.nodes.service import NodeRegistry
from workers.client_async import AsyncAgentClient
from workers.client_base import make_hello
from workers.core.cache_messages import (
    ChainInfo,
    ChainPage,
    ListChains,
    Selection,
    Slice,
    UnpinChains,
)
from workers.core.errors import (
    AgentUnavailableError,
    PeriluneError,
    ProtocolError,
    RefusedError,
)
from workers.core.messages import ReplyBody, RequestBody

CALL_SECONDS = 5.0
R = TypeVar("R", bound=ReplyBody)


class NodeError(PeriluneError):
    """A node did not do what was asked; the text names node, endpoint and way out."""

    def __init__(self, node: str, endpoint: str, problem: str, way_out: str) -> None:
        super().__init__(f"node {node} ({endpoint or 'no endpoint'}): {problem}. {way_out}")
        self.node = node
        self.problem = problem


class NodeRefusedError(NodeError):
    """The agent said no; `code` is the agent's."""

    def __init__(self, node: str, endpoint: str, code: str, message: str) -> None:
        problem, way_out = message.rstrip("."), "Nothing more was changed there."
        super().__init__(node, endpoint, problem, way_out)
        self.code = code


@dataclass(frozen=True, slots=True)
class Target:
    """A node to ask."""

    node: str
    endpoint: str


class NodeAgent:
    """One node's agent. Made by `open_agent`."""

    def __init__(self, target: Target) -> None:
        self.node = target.node
        self.endpoint = target.endpoint
        self._client = AsyncAgentClient(
            target.endpoint, make_hello("cli", "control-plane"), timeout_seconds=CALL_SECONDS
        )

    async def call(self, body: RequestBody, expected: type[R]) -> R:
        """Raises NodeError."""
        try:
            return await self._client.call(body, expected)
        except RefusedError as error:
            raise NodeRefusedError(self.node, self.endpoint, error.code, str(error)) from error
        except (AgentUnavailableError, ProtocolError) as error:
            reason = str(error).removeprefix(f"{self.endpoint}: ")
            raise NodeError(
                self.node,
                self.endpoint,
                f"no answer ({reason})",
                "See whether its agent runs (perilune get nodes), then do it again.",
            ) from error

    async def chains(self, selection: Selection, limit: int) -> AsyncIterator[ChainPage]:
        """Pages to the end of the node's index."""
        cursor: int | None = 0
        while cursor is not None:
            page = await self.call(ListChains(selection, cursor, limit), ChainPage)
            yield page
            cursor = page.cursor

    async def unpin(self, name: str) -> int:
        """End a pin; how many blocks it held."""
        num_blocks = 0
        while True:
            reply = await self.call(UnpinChains(name), Slice)
            num_blocks += reply.num_blocks
            if reply.cursor is None:
                return num_blocks

    async def close(self) -> None:
        await self._client.close()


@asynccontextmanager
async def open_agent(target: Target) -> AsyncIterator[NodeAgent]:
    """An agent to call for the length of the block; what it pinned for us ends with it."""
    if not target.endpoint:
        raise NodeError(
            target.node, "", "it has not said where its agent listens", "Wait for its heartbeat."
        )
    agent = NodeAgent(target)
    try:
        yield agent
    finally:
        await agent.close()


def targets(nodes: NodeRegistry, node_id: str | None) -> list[Target]:
    """The node asked for, or every known one: one that does not answer fails what is asked of all,
    lost ones too, since their blocks come back with them. NotFoundError: it is unknown."""
    if node_id is not None:
        node = nodes.find(node_id)
        return [Target(node.id, node.events_endpoint)]
    return [Target(node.id, node.events_endpoint) for node in nodes.list()]


async def hottest_chains(agent: NodeAgent, selection: Selection, count: int) -> list[ChainInfo]:
    """The chains of a node with most uses, the most first."""
    best: list[ChainInfo] = []
    async for page in agent.chains(selection, 500):
        best = sorted([*best, *page.chains], key=_heat, reverse=True)[:count]
    return best


def _heat(chain: ChainInfo) -> tuple[int, float]:
    idle = chain.idle_seconds if chain.idle_seconds is not None else float("inf")
    return chain.hits or 0, -idle


def first_problem(problems: dict[str, str]) -> str:
    """One line for all nodes that failed."""
    names: Iterator[str] = iter(problems)
    first = next(names)
    others = ", ".join(names)
    return problems[first] + (f" The same or alike on: {others}." if others else "")
