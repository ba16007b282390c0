"""Follows every node into an index, and asks the nodes at random whether its claims are true.

A claim counts as stale only when the node denied it twice, with every event up to the first answer
taken in: what was evicted meanwhile is news, not an error. A stale claim is dropped; a node with
many is read anew, here and in the gateways.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from controlplane.feed import Feed
from controlplane.index_audit.schemas import CacheResync, ResyncResult, Tier
from controlplane.index_audit.service import NodeFindings
from controlplane.loops.ending import end_tasks
from controlplane.plane import Plane
from workers.client_async import AsyncAgentClient
from workers.client_base import make_hello
from workers.core.errors import PeriluneError
from workers.core.ids import NodeId
from workers.core.messages import Holds, HoldsReply
from workers.core.prefix_index import Claim

AUDIT_SECONDS = 1.0
CLAIMS_A_PASS = 32
MAX_NODES_A_PASS = 64
CALL_SECONDS = 2.0
CATCH_UP_SECONDS = 2.0
LOOK_SECONDS = 0.02
TIERS: dict[str, Tier | None] = {"d": "dram", "s": "ssd", "-": None}

log = structlog.get_logger("controlplane")


@dataclass(slots=True)
class _Followed:
    endpoint: str
    feed: Feed
    task: asyncio.Task[None]


class Auditor:
    """Owns a feed for each node; `step` is one pass, `close` ends everything."""

    def __init__(self, plane: Plane, rng: random.Random | None = None) -> None:
        self._plane = plane
        self._audit = plane.index_audit
        self._rng = rng or random.Random()  # noqa: S311 - samples, no secret
        self._followed: dict[str, _Followed] = {}
        self._turn = 0
        plane.resyncer = self

    async def step(self) -> None:
        """Follow the nodes that there are now; check some claims of each."""
        await self._follow()
        nodes = sorted(self._followed)
        start = self._turn % len(nodes) if nodes else 0
        due = (nodes[start:] + nodes[:start])[:MAX_NODES_A_PASS]
        self._turn += len(due)
        await asyncio.gather(*(self._check(node_id) for node_id in due))

    async def close(self) -> None:
        await asyncio.gather(*(self._unfollow(node_id) for node_id in list(self._followed)))

    async def resync(self, wanted: CacheResync) -> ResyncResult:
        """Do what an operator asks. NotFoundError, or PeriluneError where the agent does not answer."""
        self._plane.nodes.find(wanted.node_id)
        if wanted.key is None or wanted.namespace is None:
            self._read_anew(wanted.node_id)
            return ResyncResult(node_id=wanted.node_id, resync=True)
        namespace, key = bytes.fromhex(wanted.namespace), bytes.fromhex(wanted.key)
        believed = self._audit.index.tier_of(NodeId(wanted.node_id), namespace, key)
        claim = Claim(NodeId(wanted.node_id), namespace, key, believed or "dram")
        found = (await self._ask(wanted.node_id, [claim]))[claim]
        wrong = believed != found
        if wrong and believed is not None:
            self._audit.index.drop_claims([claim])
        if wrong:
            self._read_anew(wanted.node_id)
        return ResyncResult(node_id=wanted.node_id, resync=wrong, believed=believed, found=found)

    # --- following ---

    async def _follow(self) -> None:
        known = {node.id: node for node in self._plane.nodes.list()}
        self._audit.keep(set(known))
        for node_id, followed in list(self._followed.items()):
            node = known.get(node_id)
            if node is None or node.events_endpoint != followed.endpoint:
                await self._unfollow(node_id)
        for node_id, node in known.items():
            if node_id not in self._followed and node.events_endpoint and node.state != "lost":
                self._start(node_id, node.events_endpoint)

    def _start(self, node_id: str, endpoint: str) -> None:
        hello = make_hello("cli", "control-plane-auditor")
        feed = Feed(AsyncAgentClient(endpoint, hello, CALL_SECONDS), self._audit.index)
        task = asyncio.get_running_loop().create_task(feed.run(), name=f"feed-{node_id}")
        self._followed[node_id] = _Followed(endpoint, feed, task)

    async def _unfollow(self, node_id: str) -> None:
        """Its task stays ours until it has ended: a pass that is cut short here goes on with it."""
        followed = self._followed[node_id]
        await end_tasks([followed.task])
        del self._followed[node_id]
        await followed.feed.client.close()

    # --- checking ---

    async def _check(self, node_id: str) -> None:
        found = self._audit.findings(node_id)
        found.reachable = self._followed[node_id].feed.client.subscribed
        claims = self._audit.index.sample(NodeId(node_id), CLAIMS_A_PASS, self._picks())
        if not claims or not found.reachable:
            return
        try:
            suspects = await self._denied(node_id, claims)
            if suspects:
                suspects = await self._denied(node_id, suspects)
        except PeriluneError as error:
            found.last_error = str(error)[:500]
            return
        self._count(node_id, found, claims, set(suspects))

    def _count(
        self, node_id: str, found: NodeFindings, claims: list[Claim], stale: set[Claim]
    ) -> None:
        found.last_error = ""
        for claim in claims:
            found.count(claim, stale=claim in stale, at=self._plane.clock.now())
        self._plane.stats.collector.claims(node_id, len(claims), len(stale))
        if not stale:
            return
        self._audit.index.drop_claims(claim for claim in stale if self._is_believed(claim))
        log.warning("stale claims", node=node_id, claims=len(stale), checked=len(claims))
        if found.needs_resync(self._plane.clock.monotonic()):
            self._read_anew(node_id)

    async def _denied(self, node_id: str, claims: list[Claim]) -> list[Claim]:
        """Claims that the node denies and that are still believed once its events are in."""
        answers = await self._ask(node_id, claims)
        suspects = [claim for claim, tier in answers.items() if not _is_kept(claim.tier, tier)]
        return [claim for claim in suspects if self._is_believed(claim)]

    async def _ask(self, node_id: str, claims: list[Claim]) -> dict[Claim, Tier | None]:
        """The node's truth about these; the index has then caught up with it, if it can."""
        answers: dict[Claim, Tier | None] = {}
        client = self._followed[node_id].feed.client if node_id in self._followed else None
        if client is None:
            raise PeriluneError(f"node {node_id}: it is not followed now. Wait for its heartbeat.")
        for namespace, group in itertools.groupby(sorted(claims), key=lambda claim: claim[1]):
            asked = list(group)
            keys = [claim.block_hash for claim in asked]
            reply = await client.call(Holds(namespace, keys), HoldsReply)
            await self._catch_up(node_id, reply)
            tiers = (TIERS.get(letter) for letter in reply.tiers)
            answers.update(zip(asked, tiers, strict=True))
        return answers

    async def _catch_up(self, node_id: str, reply: HoldsReply) -> None:
        """Wait, bounded, until the index has taken in what the answer knew."""
        for _ in range(int(CATCH_UP_SECONDS / LOOK_SECONDS)):
            position = self._audit.index.position(NodeId(node_id))
            if position >= (reply.incarnation, reply.sequence):
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _is_believed(self, claim: Claim) -> bool:
        index = self._audit.index
        return index.tier_of(claim.node_id, claim.namespace, claim.block_hash) == claim.tier

    def _read_anew(self, node_id: str) -> None:
        """A snapshot for this index, and a word to the gateways through the view."""
        followed = self._followed.get(node_id)
        if followed is not None:
            followed.feed.resync()
        self._audit.findings(node_id).resynced(self._plane.clock.monotonic())
        self._plane.nodes.read_index_anew(node_id)
        self._plane.announcer.nodes(self._plane.nodes.list())

    def _picks(self) -> Iterable[int]:
        while True:
            yield self._rng.getrandbits(62)


def _is_kept(claimed: Tier, found: Tier | None) -> bool:
    """A block nearer than believed is no broken promise."""
    return found == claimed or (claimed == "ssd" and found == "dram")
