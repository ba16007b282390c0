"""The half that lives in vLLM's scheduler: vLLM's objects in, the planner's values out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from workers.client import make_hello
from workers.connector.lora import lora_identity
from workers.connector.metadata import StepOrders, StepResults
from workers.connector.planner import Planner, RequestInfo, Scheduled
from workers.connector.request import SessionHint, Urgency
from workers.connector.session import AgentSession
from workers.connector.settings import ConnectorSettings
from workers.core.hashing import namespace_digest
from workers.core.messages import (
    Done,
    Hint,
    Label,
    LegReport,
    Lookup,
    LookupReply,
    PinPrefix,
    PreparedLoad,
    PrepareLoad,
    Promote,
    Release,
    SlotRef,
)
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import Fetch, HolderRef, Push

logger = logging.getLogger(__name__)

_MAX_ID_CHARS = 256
# Pins decide over a load that was already promised: worth more patience than a lookup.
_PIN_TIMEOUT_SECONDS = 0.25


class SessionPool:
    """`PoolCalls` over a session: one bounded question each, None where no agent answers."""

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self._owners: set[str] = set()

    def attach(self, session: AgentSession) -> None:
        """Before anything else is asked."""
        self._session = session

    def owners(self) -> tuple[str, ...]:
        """Whose leases to renew. Asked by the session's thread: the copy is atomic."""
        return tuple(self._owners)

    @property
    def incarnation(self) -> int:
        welcome = self._session.welcome
        return welcome.incarnation if welcome is not None else 0

    def lookup(
        self, chains: Sequence[Sequence[bytes]], requests: Sequence[str]
    ) -> list[LookupReply] | None:
        bodies = [
            Lookup(self.namespace, list(chain), request)
            for chain, request in zip(chains, requests, strict=True)
        ]
        return self._session.call_many(bodies, LookupReply)

    def prepare_load(self, owner: str, hashes: Sequence[bytes]) -> list[SlotRef] | None:
        body = PrepareLoad(owner, self.namespace, list(hashes))
        reply = self._session.call(body, PreparedLoad, _PIN_TIMEOUT_SECONDS)
        if reply is None:
            return None
        self._owners.add(owner)
        return reply.slots

    def promote(self, owner: str, hashes: Sequence[bytes], urgency: Urgency) -> LookupReply | None:
        body = Promote(owner, self.namespace, list(hashes), urgency)
        reply = self._session.call(body, LookupReply)
        if reply is not None:
            self._owners.add(owner)
        return reply

    def promote_later(self, owner: str, hashes: Sequence[bytes]) -> None:
        self._session.post(Promote(owner, self.namespace, list(hashes), "batch"))

    def fetch(
        self, owner: str, hashes: Sequence[bytes], holder: HolderRef, tenant: str
    ) -> LookupReply | None:
        body = Fetch(owner, self.namespace, list(hashes), holder, tenant)
        reply = self._session.call(body, LookupReply)
        if reply is not None:
            self._owners.add(owner)
        return reply

    def push(self, owner: str, hashes: Sequence[bytes], target: HolderRef, tenant: str) -> None:
        self._session.post(Push(owner, self.namespace, list(hashes), target, tenant))

    def pin_prefix(self, owner: str, hashes: Sequence[bytes]) -> int:
        body = PinPrefix(owner, self.namespace, list(hashes))
        reply = self._session.call(body, Done, _PIN_TIMEOUT_SECONDS)
        return reply.count if reply is not None else 0

    def release(self, owner: str) -> None:
        self._owners.discard(owner)
        self._session.post(Release(owner))

    def keep(self, owner: str) -> None:
        self._owners.add(owner)

    def let_go(self, owner: str) -> None:
        self._owners.discard(owner)

    def report(self, leg: LegReport) -> None:
        self._session.post(leg)

    def label(self, request: str, label: str) -> None:
        self._session.post(Label(request, label))

    def hint(self, hashes: Sequence[bytes], session: Literal["continue", "over"]) -> None:
        self._session.post(Hint(self.namespace, list(hashes), session))


class SchedulerHalf:
    """Follows requests; decides loads and stores."""

    def __init__(self, settings: ConnectorSettings, spec: NamespaceSpec) -> None:
        self._settings = settings
        hello = make_hello(
            "worker",
            settings.worker_id,
            namespace=spec,
            kv_role=settings.kv_role,
            engine_role="scheduler",
        )
        pool = SessionPool(namespace_digest(spec))
        self._session = AgentSession(
            settings.agent_socket,
            hello,
            call_timeout_seconds=settings.call_timeout_seconds,
            owners=pool.owners,
        )
        pool.attach(self._session)
        self._planner = Planner(settings, pool)
        self._session.start()

    def add(self, request: Any) -> None:
        self._planner.add(request_info(request, self._settings.block_tokens))

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        if not self._planner.knows(request.request_id):
            self.add(request)
        return self._planner.match(
            request.request_id, num_local_tokens, request.num_tokens, time.monotonic()
        )

    def allocate(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()[0]
        self._planner.allocate(request.request_id, block_ids, num_external_tokens, time.monotonic())

    def step(self, scheduler_output: Any) -> StepOrders:
        return self._planner.step(scheduled_of(scheduler_output), time.monotonic())

    def apply(self, results: StepResults) -> set[int]:
        return self._planner.apply(results, time.monotonic())

    def finish(self, request: Any) -> dict[str, Any] | None:
        completed = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        return self._planner.finish(request.request_id, completed=completed)

    def take_counts(self) -> dict[str, float]:
        return self._planner.take_counts()

    def reset_cache(self) -> None:
        self._planner.reset_cache()

    def close(self) -> None:
        self._session.close()


def request_info(request: Any, block_tokens: int) -> RequestInfo:
    """What the planner needs of a vLLM request."""
    params = _our_params(request)
    tokens = request.prompt_token_ids
    embeds = getattr(request, "prompt_embeds", None) is not None
    skip = (
        tokens is None
        or embeds
        or bool(getattr(request, "resumable", False))
        or bool(getattr(request, "skip_reading_prefix_cache", False))
        or request.sampling_params is None
    )
    tokens = () if tokens is None else list(tokens)
    features = getattr(request, "mm_features", None) or ()
    return RequestInfo(
        request_id=request.request_id,
        prompt_token_ids=tokens,
        cache_salt=request.cache_salt,
        lora=lora_identity(request.lora_request),
        extras=media_extras(features, len(tokens), block_tokens) if features else (),
        transfer_id=_text(params.get("transfer_id")),
        leg=_text(params.get("leg")),
        expected_blocks=_count(params.get("num_blocks")),
        holder=_holder(params.get("holder")),
        target=_holder(params.get("target")),
        session=_session(params.get("session")),
        label=_text(params.get("label")),
        tenant=_text(params.get("tenant")),
        skip=skip,
    )


def _holder(value: object) -> HolderRef | None:
    """As the gateway writes it; anything else names nobody."""
    try:
        return msgspec.convert(value, HolderRef)
    except msgspec.ValidationError:
        return None


def media_extras(
    features: Sequence[Any], num_tokens: int, block_tokens: int
) -> list[tuple[bytes, ...]]:
    """Per block, which images (whole digests) it holds and where in them it begins."""
    extras: list[tuple[bytes, ...]] = [()] * (num_tokens // block_tokens)
    for feature in features:
        start = feature.mm_position.offset
        end = start + feature.mm_position.length
        for index in range(start // block_tokens, min(len(extras), -(-end // block_tokens))):
            shift = start - index * block_tokens
            extras[index] += (f"{feature.identifier}@{shift}".encode(),)
    return extras


def scheduled_of(scheduler_output: Any) -> list[Scheduled]:
    """The step's requests, new, resumed and running alike."""
    num_scheduled = scheduler_output.num_scheduled_tokens
    scheduled = [
        Scheduled(
            new.req_id,
            new.num_computed_tokens,
            num_scheduled.get(new.req_id, 0),
            new.block_ids[0],
            replaces_blocks=True,
        )
        for new in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        scheduled.append(
            Scheduled(
                request_id,
                cached.num_computed_tokens[index],
                num_scheduled.get(request_id, 0),
                blocks[0] if blocks is not None else (),
                replaces_blocks=request_id in cached.resumed_req_ids,
            )
        )
    return scheduled


def _our_params(request: Any) -> dict[str, Any]:
    """The gateway's part of `kv_transfer_params`; a client may have put anything there."""
    params = request.kv_transfer_params
    ours = params.get("perilune") if isinstance(params, dict) else None
    return ours if isinstance(ours, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= _MAX_ID_CHARS else ""


def _session(value: Any) -> SessionHint:
    return value if value in ("continue", "over") else ""


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
