"""What clients ask of the pool, each request as one call of the pool's state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Protocol

from blake3 import blake3

from workers.agent.events import EventLog
from workers.agent.session import Session
from workers.core.clock import Clock
from workers.core.ids import BlockHash, OwnerId
from workers.core.messages import (
    CompleteStore,
    Done,
    Hint,
    Holds,
    HoldsReply,
    Label,
    Lookup,
    LookupReply,
    PinPrefix,
    PreparedLoad,
    PrepareLoad,
    PrepareStore,
    Promote,
    Refused,
    Release,
    Renew,
    ReplyBody,
    ReportCorrupt,
)
from workers.core.pool_ops import OPERATOR_PREFIX
from workers.core.pool_state import PoolState
from workers.core.stats_messages import NamespaceSpec
from workers.pool.records import MAX_TENANT_BYTES

MAX_OBSERVED: Final = 4096
MAX_REQUEST_CHARS: Final = 256

MAX_LABEL_CHARS: Final = 32
Handler = Callable[[Session, Any], ReplyBody]


class PoolOwner(Protocol):
    """What of the node is needed here. `pool` is None until a worker brought a namespace."""

    clock: Clock
    namespaces: dict[bytes, NamespaceSpec]
    log: EventLog
    incarnation: int

    @property
    def pool(self) -> PoolState | None: ...


class PoolRequests:
    """Handlers by type of request."""

    def __init__(self, node: PoolOwner) -> None:
        self._node = node
        self._observed: OrderedDict[str, None] = OrderedDict()  # requests, by last lookup

    def handlers(self) -> dict[type, Handler]:
        return {
            Lookup: self._lookup,
            PrepareLoad: self._prepare_load,
            PinPrefix: self._pin_prefix,
            PrepareStore: self._prepare_store,
            Promote: self._promote,
            Hint: self._hint,
            Holds: self._holds,
            Label: self._label,
            CompleteStore: self._complete_store,
            Release: self.release,
            Renew: self._renew,
            ReportCorrupt: self._report_corrupt,
        }

    @property
    def _now(self) -> float:
        return self._node.clock.monotonic()

    def _lookup(self, session: Session, body: Lookup) -> ReplyBody:
        pool = self._node.pool
        if pool is None:
            return LookupReply(0)
        if session.hello.role == "worker" and session.hello.kv_role != "kv_consumer":
            self._observe(pool, body)
        return pool.lookup(body.namespace, body.block_hashes)

    def _observe(self, pool: PoolState, body: Lookup) -> None:
        """A request asks for its prompt: it counts once, however often it is looked up and by
        whichever leg. Two requests are two, be their prompts the same."""
        request, seen = body.request[:MAX_REQUEST_CHARS], self._observed
        if not request or not body.block_hashes:
            return
        is_new = request not in seen
        seen[request] = None
        seen.move_to_end(request)
        if len(seen) > MAX_OBSERVED:
            seen.popitem(last=False)
        if is_new:
            pool.whatif.observe([BlockHash(key) for key in body.block_hashes], self._now)

    def _prepare_load(self, session: Session, body: PrepareLoad) -> ReplyBody:
        pool = self._node.pool
        if pool is None:
            return PreparedLoad([])
        owner = OwnerId(body.owner)
        slots = pool.prepare_load(
            session.client, owner, body.namespace, body.block_hashes, self._now
        )
        return PreparedLoad(slots)

    def _pin_prefix(self, session: Session, body: PinPrefix) -> ReplyBody:
        pool = self._node.pool
        if pool is None:
            return Done(0)
        owner = OwnerId(body.owner)
        return Done(
            pool.pin_prefix(session.client, owner, body.namespace, body.block_hashes, self._now)
        )

    def _prepare_store(self, session: Session, body: PrepareStore) -> ReplyBody:
        pool = self._node.pool
        if pool is None or body.namespace not in self._node.namespaces:
            return Refused(
                "unknown_namespace",
                f"namespace {body.namespace.hex()}: no worker has brought it to this agent. "
                "Send it with Hello first.",
            )
        return pool.prepare_store(
            session.client,
            OwnerId(body.owner),
            body.namespace,
            body.parent,
            body.block_hashes,
            self._now,
            short_tenant(body.tenant),
        )

    def _promote(self, session: Session, body: Promote) -> ReplyBody:
        pool = self._node.pool
        if pool is None:
            return LookupReply(0)
        return pool.promote(
            session.client,
            OwnerId(body.owner),
            body.namespace,
            body.block_hashes,
            body.urgency,
            self._now,
        )

    def _hint(self, session: Session, body: Hint) -> ReplyBody:
        pool = self._node.pool
        if pool is None:
            return Done(0)
        return Done(pool.hint(body.namespace, body.block_hashes, body.session, self._now))

    def _holds(self, session: Session, body: Holds) -> ReplyBody:
        pool, log = self._node.pool, self._node.log
        tiers = "-" * len(body.block_hashes)
        if pool is not None:
            tiers = pool.holds(body.namespace, body.block_hashes)
        return HoldsReply(self._node.incarnation, log.sequence, tiers)

    def _complete_store(self, session: Session, body: CompleteStore) -> ReplyBody:
        pool = self._node.pool
        if pool is None:
            return Done(0)
        return Done(pool.complete_store(self._now, body.stored, body.failed))

    def _label(self, session: Session, body: Label) -> ReplyBody:
        pool = self._node.pool
        if pool is not None and 0 < len(body.label) <= MAX_LABEL_CHARS:
            pool.labels.note(body.request[:MAX_REQUEST_CHARS], body.label)
        return Done(0)

    def release(self, session: Session, body: Release) -> ReplyBody:
        pool = self._node.pool
        if body.owner.startswith(OPERATOR_PREFIX):
            return Refused(
                "owner",
                f"owner = {body.owner!r}: an operator's pin ends by `perilune cache unpin`.",
            )
        if pool is None:
            return Done(0)
        owners = [body.owner, *(one for one in body.more if not one.startswith(OPERATOR_PREFIX))]
        return Done(sum(pool.release(OwnerId(owner), self._now) for owner in owners))

    def _renew(self, session: Session, body: Renew) -> ReplyBody:
        pool = self._node.pool
        return Done(0 if pool is None else pool.renew(map(OwnerId, body.owners), self._now))

    def _report_corrupt(self, session: Session, body: ReportCorrupt) -> ReplyBody:
        pool = self._node.pool
        if pool is None:
            return Done(0)
        return Done(
            pool.report_corrupt(body.namespace, body.block_hash, body.slot, body.generation)
        )


def short_tenant(tenant: str) -> str:
    """A tenant's name as records on disk can hold it: a very long one becomes its digest."""
    raw = tenant.encode()
    return tenant if len(raw) <= MAX_TENANT_BYTES else f"blake3:{blake3(raw).hexdigest()}"
