"""Blocks sent ahead of need, when leg 1 goes out: to the decode node what nodes hold of the prompt
already (R15), and hot blocks to where they are lacking (R33). Fetches are queued to the agents;
nothing here waits."""

from itertools import count
from time import monotonic

from controlplane.core.replication import Copy, Placed, Replication, prefetch_window
from controlplane.core.routing import Priced
from controlplane.gateway.agents import Agents
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.scheduling import Plan
from controlplane.gateway.stats import Stats
from controlplane.gateway.worker_state import WorkerState
from workers.core.ids import transfer_owner
from workers.core.transfer_messages import Fetch, HolderRef

MAX_PREFETCHED_BLOCKS = 512


class Spreader:
    """`dispatched` once for each leg 1."""

    def __init__(self, gateway_id: str, cluster: Cluster, agents: Agents, stats: Stats) -> None:
        self._gateway_id = gateway_id
        self._cluster, self._agents, self._stats = cluster, agents, stats
        self._replication = Replication()
        self._numbers = count(1)

    def dispatched(
        self, plan: Plan, request_id: str, tenant: str, worker: WorkerState, decode_worker: str
    ) -> str:
        """Leg 1 goes to `worker`, leg 2 to the slot held at `decode_worker`. The node that was told
        to fetch for it, if one was."""
        held, fetches = plan.held, ""
        if not held.keys or not held.blocks or not self._cluster.paths.costs:
            return ""
        decode = self._cluster.workers.get(decode_worker)
        if (
            decode is not None
            and decode.namespace == held.namespace
            and self._prefetch(plan, request_id, tenant, worker, decode)
        ):
            fetches = decode.row.node_id
        for node_id, blocks in held.blocks.items():
            self._replication.arrived(node_id, blocks)
        chosen = [one for one in plan.prefill if one.option.worker_id == worker.row.id]
        others = [one for one in plan.prefill if one.option.worker_id != worker.row.id]
        self._replicate(plan, [*chosen, *others], tenant)
        return fetches

    def needless(self, node_id: str, request_id: str) -> None:
        """What this node was told to fetch for the request, nobody will ask for."""
        self._agents.cancel_fetch(node_id, request_id)
        self._stats.prefetches_cancelled += 1

    def _prefetch(
        self, plan: Plan, request_id: str, tenant: str, worker: WorkerState, decode: WorkerState
    ) -> bool:
        """From the prefill node, or the holder of more; not what comes from there later anyway."""
        node_id, held = decode.row.node_id, plan.held
        costs = self._cluster.paths.costs
        blocks, source = max((blocks, source) for source, blocks in held.blocks.items())
        if held.blocks.get(worker.row.node_id, 0) >= blocks:
            source = worker.row.node_id
        here = held.blocks.get(node_id, 0)
        holder, cost = self._holder(source), costs.get(source, {}).get(node_id)
        if (
            node_id in (source, worker.row.node_id)
            or here >= blocks
            or holder is None
            or cost is None
        ):
            return False
        block_tokens = decode.block_tokens or 1
        end = min(blocks, here + MAX_PREFETCHED_BLOCKS)
        rate = self._cluster.paths.bytes_per_second(source, node_id)
        first = min(end, here + prefetch_window((blocks - here) * block_tokens, block_tokens, rate))
        owner = transfer_owner(request_id)
        fetches = [Fetch(owner, held.namespace, list(held.keys[:first]), holder, tenant)]
        if end > first:
            rest: list[bytes] = list(held.keys[:end])
            fetches.append(Fetch(owner, held.namespace, rest, holder, tenant, "batch"))
        told = [self._agents.fetch(node_id, fetch) for fetch in fetches]
        if all(told):
            self._stats.prefetched_blocks += end - here
        return any(told)

    def _replicate(self, plan: Plan, ordered: list[Priced], tenant: str) -> None:
        held = plan.held
        placed = Placed(held.keys, held.blocks, ordered)
        self._replication.threshold = plan.policies.scheduling.rules.balancing_threshold
        copy = self._replication.decide(placed, monotonic())
        if copy is not None:
            self._send(copy, held.namespace, tenant)

    def _send(self, copy: Copy, namespace: bytes, tenant: str) -> None:
        holder = self._holder(copy.source)
        if holder is None:
            return
        owner = f"replicate:{self._gateway_id}:{next(self._numbers)}"
        fetch = Fetch(owner, namespace, list(copy.keys), holder, tenant, "batch")
        if self._agents.fetch(copy.destination, fetch, release=True):
            self._stats.replicated_blocks += len(copy.keys)

    def _holder(self, node_id: str) -> HolderRef | None:
        known = self._cluster.paths.holders.get(node_id)
        if known is None:
            return None
        return HolderRef(known.node_id, known.endpoint, known.incarnation)
