"""Weights that changed: the namespace of the old ones is purged by a job, and that is shown.

A worker that brings a model with other weights makes a new namespace (the version is part of it),
so that old blocks can never be used for the new weights. They only take room: where nobody serves
them any more they are purged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.cache.names import SHORT_DIGITS
from controlplane.jobs.service import NewJob
from controlplane.plane import Plane
from controlplane.policies.service import DEFAULT_SCOPE
from workers.core.stats_messages import NamespaceInfo, PoolStats

GRACE_SECONDS = 10.0
"""How long nobody must have served the old weights: a worker may be about to come back."""
AUTHOR = "control-plane"
POLICY_FIELD = "purge_replaced_weights"
AGAIN_SECONDS = 300.0
"""When blocks are left, because a node was away, another purge follows so much later."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A namespace that nobody serves, of a model that is served with other weights."""

    digest: str
    model: str
    old_version: str
    new_version: str


def replaced_namespaces(infos: Iterable[NamespaceInfo]) -> list[Replaced]:
    """Over all nodes. Pure. A namespace with a worker anywhere is not replaced."""
    spec_of = {}
    served = set()
    for info in infos:
        spec_of[info.digest] = info.spec
        if info.workers:
            served.add(info.digest)
    new_version = {spec_of[digest].model_id: spec_of[digest].weights_version for digest in served}
    kept = {(spec_of[digest].model_id, spec_of[digest].weights_version) for digest in served}
    return [
        Replaced(digest.hex(), spec.model_id, spec.weights_version, new_version[spec.model_id])
        for digest, spec in spec_of.items()
        if digest not in served
        and spec.model_id in new_version
        and (spec.model_id, spec.weights_version) not in kept
    ]


def used_blocks(stats: Iterable[PoolStats], digest: str) -> int | None:
    """Blocks of a namespace over all nodes; None where none of them says."""
    groups = [group for pool in stats for group in pool.groups if group.kind == "namespace"]
    return sum(group.used_blocks for group in groups if group.name == digest) if groups else None


class WeightsWatch:
    """Looks at the nodes' namespaces and queues at most one purge for each that was replaced."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._since: dict[str, float] = {}  # monotonic, of those that are replaced now
        self._purged: dict[str, float] = {}  # when a purge was queued

    async def look(self) -> None:
        """Queue purges that are due. Cheap: it reads memory."""
        policy = self._plane.policies.active["cache", DEFAULT_SCOPE]
        if not policy.spec.get(POLICY_FIELD, True):
            return
        live = [node.stats for node in self._plane.nodes.live() if node.stats is not None]
        found = {r.digest: r for r in replaced_namespaces(i for s in live for i in s.namespaces)}
        now = self._plane.clock.monotonic()
        self._since = {digest: self._since.get(digest, now) for digest in found}
        # those that are served again are forgotten: the next change counts anew
        self._purged = {digest: at for digest, at in self._purged.items() if digest in found}
        for digest, since in self._since.items():
            due = max(
                since + GRACE_SECONDS, self._purged.get(digest, now - AGAIN_SECONDS) + AGAIN_SECONDS
            )
            used = used_blocks(live, digest)
            again = digest in self._purged
            if now >= due and (used or (used is None and not again)):
                await self._queue(found[digest], policy.revision)

    async def _queue(self, replaced: Replaced, revision: int) -> None:
        waiting = self._plane.jobs.live.values()
        if any(j.kind == "purge" and j.spec.get("namespace") == replaced.digest for j in waiting):
            return
        reason = (
            f"Automatic ({POLICY_FIELD} in cache/{DEFAULT_SCOPE} r{revision}): {replaced.model} is "
            f"served with weights {replaced.new_version}, nobody serves {replaced.old_version}"
        )
        spec: dict[str, object] = {"namespace": replaced.digest, "include_pinned": True}
        new = NewJob(
            "purge",
            replaced.digest[:SHORT_DIGITS],
            spec,
            author=AUTHOR,
            reason=reason[:500],
            automatic=True,
        )
        now = self._plane.clock.monotonic()
        async with self._plane.db.write() as tx:
            await self._plane.jobs.create(tx, new)
            tx.after_commit(lambda: self._purged.update({replaced.digest: now}))
