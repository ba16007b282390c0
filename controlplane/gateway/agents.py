"""Follows node agents: their KV events feed the prefix index, their leg reports the records."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import inf
from time import monotonic

import structlog

from controlplane.feed import Feed
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.lasting import lasting
from controlplane.gateway.sharing import TELL_SECONDS, Neighbours, Sharing
from controlplane.gateway.wire import View, ViewModel, ViewNode, ViewWorker
from workers.client import AsyncAgentClient, make_hello
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.gateway_messages import GatewayShare
from workers.core.ids import NodeId, transfer_owner
from workers.core.messages import Done, LegReport, LookupReply
from workers.core.stats_messages import PoolStats, WorkerStatus
from workers.core.transfer_messages import CancelFetch, Fetch

log = structlog.get_logger(__name__)

MAX_RELEASES = 10_000
"""Releases that wait for an agent; beyond it the oldest are left to their lease."""
MAX_FETCHES = 256
"""Fetches and releases that may wait for an agent before further fetches are left out."""
RELEASE_PAUSE_SECONDS = 0.02
MAX_TOGETHER = 256
STATS_SECONDS = 1.0
ALONE_SECONDS = 0.25
"""How often a gateway looks whether it has neighbours."""
RELEASE_AGAIN_SECONDS = 2.0
"""A cancelled prefill may still pin a last block: released once more."""


@dataclass(slots=True)
class _Followed:
    address: str
    client: AsyncAgentClient
    feed: Feed
    index_epoch: int | None = None  # of the last view
    stats: PoolStats | None = None
    neighbours: Neighbours = field(default_factory=Neighbours)
    releases: asyncio.Queue[str | Fetch | CancelFetch] = field(
        default_factory=lambda: asyncio.Queue(MAX_RELEASES)
    )
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def node_id(self) -> str:
        """Empty until the agent has said it."""
        return self.feed.node_id


class Agents:
    """Starts and ends a follower for each agent of the view, and for those of the command line."""

    def __init__(
        self, gateway_id: str, fixed: tuple[str, ...], cluster: Cluster,
        on_leg: Callable[[LegReport], None],
    ) -> None:  # fmt: skip
        self._gateway_id = gateway_id
        self._fixed = set(fixed)
        self._cluster = cluster
        self._on_leg = on_leg
        self._followed: dict[str, _Followed] = {}
        self._loop = asyncio.get_running_loop()
        self._sharing = Sharing(cluster)
        self._telling = self._loop.create_task(lasting("telling", self._tell_others))
        cluster.on_view.append(self.follow_view)
        for address in fixed:
            self._follow(address)

    def follow_view(self, view: View) -> None:
        """The view's agents, and no others."""
        wanted = {node.events_endpoint for node in view.nodes if node.events_endpoint}
        for address in self._followed.keys() - wanted - self._fixed:
            self._unfollow(address)
        for address in wanted - self._followed.keys():
            self._follow(address)
        for node in view.nodes:
            self._take_epoch(node)

    def follows(self, node_id: str) -> bool:
        """Whether this node's leg reports reach us now."""
        for followed in self._followed.values():
            if followed.node_id == node_id:
                return followed.client.subscribed
        return False

    @property
    def num_subscribed(self) -> int:
        return sum(followed.client.subscribed for followed in self._followed.values())

    @property
    def num_neighbours(self) -> int:
        """Other gateways that serve the same nodes, at most at one node."""
        return max((len(f.neighbours.names) for f in self._followed.values()), default=0)

    def release(self, transfer_id: str, *, again: bool = False) -> None:
        """End the transfer's pins on every node that may hold some. Never blocks."""
        owner = transfer_owner(transfer_id)
        for followed in self._followed.values():
            if followed.releases.full():
                followed.releases.get_nowait()
            followed.releases.put_nowait(owner)
        if again and self._followed:
            self._loop.call_later(RELEASE_AGAIN_SECONDS, self.release, transfer_id)

    def fetch(self, node_id: str, fetch: Fetch, *, release: bool = False) -> bool:
        """Have a node pull blocks; whether that was queued. Never blocks. Its pins end with its
        owner's release, or at once: then only what is on its way stays pinned till it is there."""
        for followed in self._followed.values():
            if followed.node_id == node_id and followed.client.subscribed:
                if followed.releases.qsize() >= MAX_FETCHES:
                    return False
                followed.releases.put_nowait(fetch)
                if release:
                    followed.releases.put_nowait(fetch.owner)
                return True
        return False

    def cancel_fetch(self, node_id: str, transfer_id: str) -> None:
        """Have a node end what it still fetches ahead for this request. Never blocks."""
        for followed in self._followed.values():
            if followed.node_id == node_id and not followed.releases.full():
                followed.releases.put_nowait(CancelFetch(transfer_owner(transfer_id)))
                return

    async def close(self) -> None:
        """End every follower; what is to be released is sent first, for a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                for followed in self._followed.values():
                    if followed.client.subscribed:
                        await followed.releases.join()
        self._telling.cancel()
        tasks = [self._telling, *(task for f in self._followed.values() for task in f.tasks)]
        for address in list(self._followed):
            self._unfollow(address)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- following ---

    def _follow(self, address: str) -> None:
        hello = make_hello("gateway", self._gateway_id)
        neighbours = Neighbours()
        refused = partial(self._sharing.refused, neighbours, address)
        client = AsyncAgentClient(address, hello, shares=True, on_refused=refused)
        feed = Feed(client, self._cluster.index, self._on_leg, partial(self._hear, address))
        followed = _Followed(address, client, feed, neighbours=neighbours)
        self._followed[address] = followed
        for name, run in (
            ("events", followed.feed.run),
            ("releases", partial(self._send_releases, followed)),
            ("statistics", partial(self._read_stats, followed)),
        ):
            task = self._loop.create_task(lasting(f"{name} of {address}", run))
            followed.tasks.append(task)

    def _hear(self, address: str, told: GatewayShare) -> None:
        """Of another gateway."""
        followed = self._followed.get(address)
        if followed is not None:
            self._sharing.hear(followed.node_id, followed.neighbours, told, monotonic())

    async def _tell_others(self) -> None:
        """Runs until cancelled; next to nothing while there are no others."""
        while True:
            await asyncio.sleep(TELL_SECONDS if self.num_neighbours else ALONE_SECONDS)
            now, by_node, sharing = monotonic(), self._cluster.by_node(), self._sharing
            changes = sharing.changes(wanted=self.num_neighbours > 0)
            for followed in self._followed.values():
                neighbours, name = followed.neighbours, followed.node_id
                if not followed.client.subscribed:
                    neighbours.names.clear()  # they are named again when it is
                neighbours.news(changes.get(name, ()))
                sharing.tell(neighbours, by_node.get(name, []), followed.client.tell, now)
                sharing.expire_chains(neighbours, now)
            sharing.expire(now)

    def _take_epoch(self, node: ViewNode) -> None:
        """The control plane found wrong claims of this node, or an operator asks."""
        followed = self._followed.get(node.events_endpoint)
        if followed is None:
            return
        if followed.index_epoch is not None and node.index_epoch > followed.index_epoch:
            followed.feed.resync()
        followed.index_epoch = node.index_epoch

    def _unfollow(self, address: str) -> None:
        followed = self._followed.pop(address)
        self._sharing.expire_chains(followed.neighbours, inf)
        for task in followed.tasks:
            task.cancel()
        if followed.node_id:
            self._cluster.index.drop_node(NodeId(followed.node_id))
            self._cluster.paths.drop(followed.node_id)

    async def _send_releases(self, followed: _Followed) -> None:
        """What falls due within milliseconds goes out in one write: pins can wait that long."""
        queue = followed.releases
        while True:
            due = [await queue.get()]
            if isinstance(due[0], str):
                await asyncio.sleep(RELEASE_PAUSE_SECONDS)
            while len(due) < MAX_TOGETHER and not queue.empty():
                due.append(queue.get_nowait())
            try:
                for is_release, group in groupby(due, lambda one: isinstance(one, str)):
                    await _send(followed.client, list(group), is_release=is_release)
            finally:
                for _ in due:
                    queue.task_done()

    async def _read_stats(self, followed: _Followed) -> None:
        """Namespaces of workers; and the workers themselves where no view has come."""
        try:
            while True:
                try:
                    self._take_stats(followed, await followed.client.stats())
                except (AgentUnavailableError, RefusedError, ProtocolError):
                    self._cluster.paths.drop(followed.node_id)
                await asyncio.sleep(STATS_SECONDS)
        finally:
            await followed.client.close()

    def _take_stats(self, followed: _Followed, stats: PoolStats) -> None:
        followed.feed.node_id, followed.stats = stats.node_id, stats
        self._cluster.paths.take(stats)
        if not self._cluster.view.boot_id:
            self._view_of_agents()
        self._apply_namespaces(stats)

    def _apply_namespaces(self, stats: PoolStats) -> None:
        for namespace in stats.namespaces:
            for worker_id in namespace.workers:
                worker = self._cluster.workers.get(worker_id)
                if worker is not None and worker.row.node_id == stats.node_id:
                    worker.namespace = namespace.digest
                    worker.block_tokens = namespace.spec.block_tokens
                    worker.kv_capacity_tokens = namespace.kv_tokens.get(worker_id)

    def _view_of_agents(self) -> None:
        """Without a control plane: what the followed agents list."""
        nodes, workers = [], []
        for followed in self._followed.values():
            if followed.stats is not None:
                nodes.append(ViewNode(followed.node_id, "ready", followed.address))
                rows = (_row(followed.node_id, status) for status in followed.stats.workers)
                workers += [row for row in rows if row is not None]
        models = [ViewModel(name, path) for name, path in self._cluster.model_paths.items()]
        view = View(nodes=nodes, workers=workers, models=models)
        if view != self._cluster.view:
            self._cluster.apply(view)


async def _send(
    client: AsyncAgentClient, due: list[str | Fetch | CancelFetch], *, is_release: bool
) -> None:
    """What fails is left: the pins' lease ends them, what is not fetched is computed or fetched
    later."""
    lost = (AgentUnavailableError, RefusedError, ProtocolError)
    if is_release:
        with contextlib.suppress(*lost):
            await client.release(*(owner for owner in due if isinstance(owner, str)))
        return
    for fetch in due:
        with contextlib.suppress(*lost):
            if isinstance(fetch, Fetch):
                await client.call(fetch, LookupReply)
            elif isinstance(fetch, CancelFetch):
                await client.call(fetch, Done)


def _row(node_id: str, status: WorkerStatus) -> ViewWorker | None:
    if not status.url:
        return None
    return ViewWorker(
        id=status.worker_id,
        node_id=node_id,
        role=status.role,
        model=status.model,
        url=status.url,
        state=status.state,
        engine=status.engine,
    )
