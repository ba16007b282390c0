"""The pool traffic of an emulated worker: the real client, slab and agent, small payloads."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Literal

import structlog

from workers.client import AsyncAgentClient, make_hello
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.ids import BlockHash, OwnerId, load_owner, request_of, transfer_owner
from workers.core.messages import (
    CompleteStore,
    Done,
    KvRole,
    Label,
    LegReport,
    LookupReply,
    PinPrefix,
    PreparedLoad,
    PreparedStore,
    PrepareLoad,
    PrepareStore,
    Release,
    ReportCorrupt,
    SlotRef,
    StoredSlot,
)
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import Fetch, Push
from workers.engines.emulated.worker import (
    ENGINE_BLOCK_TOKENS,
    EngineConfig,
    PoolUse,
    Transfer,
    WorkerSpec,
)
from workers.pool.arena import Slab

log = structlog.get_logger(__name__)

PAGE_BYTES = (512, 512)
"""Of an emulated layer's page: enough to be checked, too little to matter."""
WAIT_SECONDS = 1.0
"""How long a decode leg waits for blocks that are being written."""
_KV_ROLES: dict[str, KvRole] = {
    "prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both",
}  # fmt: skip


def emulated_namespace(config: EngineConfig, weights_version: str) -> NamespaceSpec:
    """Shared by all emulated workers of a model; never by a real engine's."""
    return NamespaceSpec(
        model_id=config.model,
        weights_version=weights_version,
        kv_dtype="emulated",
        page_layout="emulated",
        isa="emulated",
        page_bytes=PAGE_BYTES,
        engine_block_tokens=ENGINE_BLOCK_TOKENS,
        block_tokens=config.block_tokens,
        tp_size=1,
        rank_layout="tp1",
    )


class AgentPool:
    """Implements `worker.Pool`. An agent that is away is a miss, never an error."""

    def __init__(
        self, address: str, spec: WorkerSpec, config: EngineConfig, weights_version: str
    ) -> None:
        namespace = emulated_namespace(config, weights_version)
        self._worker_id = spec.worker_id
        self._kv_role = _KV_ROLES[spec.role]
        self._block_tokens = config.block_tokens
        self._costs = config.cost_model
        self._block_bytes = namespace.block_bytes
        self._namespace = namespace_digest(namespace)
        hello = make_hello(
            "worker", spec.worker_id, namespace=namespace, kv_role=self._kv_role,
            kv_tokens=config.device_blocks * ENGINE_BLOCK_TOKENS,
        )  # fmt: skip
        self._client = AsyncAgentClient(address, hello)
        self._slab: Slab | None = None
        self._incarnation = 0
        self._loads = count()
        self._missed = 0  # since the agent is away
        self._told = ""  # last, of why

    async def load(
        self,
        use: PoolUse,
        tokens: list[int],
        salt: str,
        max_blocks: int,
        transfer: Transfer,
    ) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        most = min(max_blocks, max(len(tokens) - 1, 0) // self._block_tokens)
        hashes = self._hashes(tokens, salt)[:most]
        if hashes:
            # What is not in memory when this many seconds have passed is quicker to compute.
            patience = self._costs.prefill(most * self._block_tokens, 0)
            await self._quietly(lambda: self._load(use, hashes, patience, salt, transfer))
        use.wait_seconds += loop.time() - start

    async def store(self, use: PoolUse, tokens: list[int], salt: str, transfer: Transfer) -> int:
        hashes = self._hashes(tokens, salt)
        if hashes:
            await self._quietly(lambda: self._store(use, hashes, salt, transfer))
        return use.held_blocks

    async def hint(self, tokens: list[int], salt: str, session: str) -> None:
        hashes = self._hashes(tokens, salt)
        if hashes and session in ("continue", "over"):
            kind: Literal["continue", "over"] = "over" if session == "over" else "continue"
            await self._quietly(lambda: self._client.hint(self._namespace, hashes, kind))

    async def report(self, use: PoolUse, transfer: Transfer, device: int, prompt: int) -> None:
        message = LegReport(
            transfer_id=transfer.transfer_id,
            worker_id=self._worker_id,
            kv_role=self._kv_role,
            prompt_tokens=prompt,
            device_hit_tokens=device,
            pool_hit_tokens=use.hit_tokens,
            computed_tokens=prompt - device - use.hit_tokens,
            loaded_blocks=use.loaded_blocks,
            failed_blocks=use.failed_blocks,
            stored_blocks=use.stored_blocks,
            loaded_bytes=use.loaded_bytes,
            stored_bytes=use.stored_bytes,
            kv_wait_seconds=use.wait_seconds,
            kv_wait_by_stage_seconds={"queue": use.wait_seconds},
        )
        await self._quietly(lambda: self._client.call(message, Done))

    async def connect(self) -> None:
        """Bring the namespace to the agent, so that it shows before the first request."""
        await self._quietly(self._attached)

    async def close(self) -> None:
        await self._client.close()
        if self._slab is not None:
            self._slab.close()

    async def _load(
        self,
        use: PoolUse,
        hashes: list[BlockHash],
        patience: float,
        salt: str,
        transfer: Transfer,
    ) -> None:
        owner = load_owner(self._worker_id, str(next(self._loads)), transfer.transfer_id)
        holder = transfer.holder
        if transfer.label:
            await self._client.call(Label(transfer.transfer_id, transfer.label), Done)
        try:
            here = len(hashes)
            if holder is not None:
                fetch = Fetch(owner, self._namespace, list(hashes), holder, transfer.tenant or salt)
                here = (await self._client.call(fetch, LookupReply)).num_held
            await self._wait_for(use, hashes, owner, patience)
            slab = await self._attached()
            body = PrepareLoad(owner, self._namespace, list(hashes))
            prepared = await self._client.call(body, PreparedLoad)
            for key, ref in zip(hashes, prepared.slots, strict=False):
                data = slab.read_block(ref.slot, ref.generation, key)
                if data != self._payload(key):
                    use.failed_blocks += 1
                    await self._report_corrupt(key, ref)
                    break
                use.loaded_blocks += 1
                use.loaded_bytes += len(data)
            use.fetched_blocks = max(0, use.loaded_blocks - here)
        finally:
            await self._client.call(Release(owner), Done)
        use.hit_tokens = use.loaded_blocks * self._block_tokens

    async def _wait_for(
        self, use: PoolUse, hashes: list[BlockHash], owner: str, patience: float
    ) -> None:
        """Until what is being stored is readable, within `WAIT_SECONDS`, and what lies on SSD has
        come into memory, as long as that beats computing it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        first: LookupReply | None = None
        request = request_of(OwnerId(owner))
        while True:
            held: LookupReply = await self._client.lookup(self._namespace, hashes, request)
            waited = loop.time() - began
            promotes = held.num_on_disk > 0 and waited < min(patience, WAIT_SECONDS)
            if promotes and first is None:
                first = held
                await self._client.promote(owner, self._namespace, hashes)
            if not promotes and (not held.num_pending or waited >= WAIT_SECONDS):
                break
            await asyncio.sleep(0.005)
        if first is not None:
            use.promoted_blocks = max(0, held.num_held - first.num_held)

    async def _store(
        self, use: PoolUse, hashes: list[BlockHash], salt: str, transfer: Transfer
    ) -> None:
        slab = await self._attached()
        owner = transfer_owner(transfer.transfer_id)
        if transfer.target is not None and transfer.leg == "prefill":
            tenant = transfer.tenant or salt
            push = Push(owner, self._namespace, list(hashes), transfer.target, tenant)
            await self._client.call(push, Done)
        body = PrepareStore(
            owner, self._namespace, b"", list(hashes), tenant=transfer.tenant or salt
        )
        prepared = await self._client.call(body, PreparedStore)
        stored = [
            StoredSlot(
                ref.slot,
                ref.generation,
                slab.write_block(ref.slot, ref.generation, key, self._payload(key)),
            )
            for key, ref in zip(hashes, prepared.slots, strict=False)
            if ref is not None
        ]
        if stored:
            await self._client.call(CompleteStore(owner, stored), Done)
        use.stored_bytes = len(stored) * self._block_bytes
        if transfer.foreign:  # nobody knows of these pins, so nobody would end them
            await self._client.call(Release(owner), Done)
        else:
            await self._client.call(PinPrefix(owner, self._namespace, list(hashes)), Done)
        held = await self._client.lookup(self._namespace, hashes)
        use.stored_blocks, use.held_blocks = len(stored), held.num_held

    async def _attached(self) -> Slab:
        """The slab of the agent's present incarnation."""
        await self._client.lookup(self._namespace, [])
        welcome = self._client.welcome
        assert welcome is not None
        if self._slab is None or self._incarnation != welcome.incarnation:
            if self._slab is not None:
                self._slab.close()
            self._slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)
            self._incarnation = welcome.incarnation
        return self._slab

    async def _report_corrupt(self, key: BlockHash, ref: SlotRef) -> None:
        body = ReportCorrupt(self._namespace, key, ref.slot, ref.generation, "checksum")
        await self._client.call(body, Done)

    async def _quietly(self, action: Callable[[], Awaitable[object]]) -> None:
        try:
            await action()
        except (AgentUnavailableError, RefusedError, ProtocolError, OSError) as error:
            self._miss(error)
        else:
            if self._missed:
                log.info("pool_available", worker=self._worker_id, missed=self._missed)
                self._missed = 0

    def _miss(self, error: Exception) -> None:
        """An outage is told once, as is what the agent then refuses. Who refuses is not away."""
        text, is_refusal = str(error), isinstance(error, RefusedError)
        is_told = self._missed > 0 and (not is_refusal or text == self._told)
        self._missed += self._missed > 0 or not is_refusal
        if not is_told:
            self._told = text
            log.warning("pool_unavailable", worker=self._worker_id, error=text)

    def _hashes(self, tokens: list[int], salt: str) -> list[BlockHash]:
        return block_hashes(root_hash(self._namespace, salt or None, None), tokens,
                            self._block_tokens)  # fmt: skip

    def _payload(self, key: bytes) -> bytes:
        return (key * (self._block_bytes // len(key) + 1))[: self._block_bytes]
