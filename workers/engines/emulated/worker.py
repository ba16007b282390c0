"""State of one emulated worker: device cache, cost model, counters."""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, Protocol

from workers.core.cost_model import CostModel
from workers.core.transfer_messages import HolderRef

Role = Literal["prefill", "decode", "both"]
ENGINE_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`p1:prefill:8101` on the command line."""

    worker_id: str
    role: Role
    port: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What all workers of the process share: tokens, blocks, milliseconds. `costs` goes before the
    two plain times."""

    model: str
    model_path: str | None = None
    seed: int = 0
    prefill_ms_per_token: float = 0.2
    decode_ms: float = 5.0
    block_tokens: int = 64
    max_model_len: int = 8192
    device_blocks: int = 4096
    prompt_tokens_details: bool = False
    api_key: str = ""
    costs: CostModel | None = None

    @property
    def cost_model(self) -> CostModel:
        if self.costs is not None:
            return self.costs
        return CostModel(
            per_token=self.prefill_ms_per_token / 1000, decode_seconds=self.decode_ms / 1000
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """`kv_transfer_params.perilune` of a request; or, `foreign`, those of a connector that moves
    KV from engine to engine, without a pool."""

    transfer_id: str = ""
    leg: str = ""
    num_blocks: int = 0
    session: str = ""  # "continue", "over" or nothing
    holder: HolderRef | None = None  # another node, to pull from
    tenant: str = ""
    label: str = ""
    foreign: bool = False
    target: HolderRef | None = None  # of leg 1: leg 2's node, to push to


@dataclass(slots=True)
class PoolUse:
    """What one leg did with the pool: tokens and blocks, bytes, seconds."""

    hit_tokens: int = 0
    loaded_blocks: int = 0
    failed_blocks: int = 0
    stored_blocks: int = 0
    held_blocks: int = 0  # of the prompt, by the pool, after storing
    promoted_blocks: int = 0  # that came from SSD for this leg
    fetched_blocks: int = 0  # that came from another node for this leg
    loaded_bytes: int = 0
    stored_bytes: int = 0
    wait_seconds: float = 0.0


class Pool(Protocol):
    """How a worker reaches its node's pool; every call is bounded and never raises."""

    async def load(
        self,
        use: PoolUse,
        tokens: list[int],
        salt: str,
        max_blocks: int,
        transfer: Transfer,
    ) -> None:
        """Load the held prefix, at most `max_blocks`, fetched from the transfer's holder where this
        node lacks it; `use` says how much it was."""

    async def store(self, use: PoolUse, tokens: list[int], salt: str, transfer: Transfer) -> int:
        """Store the full blocks of `tokens`, pinned for the transfer; how many the pool has."""

    async def hint(self, tokens: list[int], salt: str, session: str) -> None:
        """Say whether the session of this prompt goes on."""

    async def report(self, use: PoolUse, transfer: Transfer, device: int, prompt: int) -> None:
        """Send the leg's report."""


@dataclass(slots=True)
class Counters:
    """Cumulative, but `running` and `waiting`."""

    running: int = 0
    waiting: int = 0
    requests: int = 0
    aborted: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    device_queries: int = 0
    device_hits: int = 0
    pool_queries: int = 0
    pool_hits: int = 0
    promoted_blocks: int = 0
    prefill_seconds: float = 0.0  # that prompts took, without waiting for one another


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Outcome of computing one prompt."""

    cached_tokens: int
    num_blocks: int


@dataclass(slots=True)
class DeviceCache:
    """LRU over chained hashes of the engine's own blocks."""

    capacity: int
    _blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def hit_and_fill(self, tokens: list[int], salt: str) -> int:
        """Tokens found from the head; afterwards the whole prompt's full blocks are held."""
        if not self.capacity:
            return 0
        hit_blocks, unbroken, parent = 0, True, salt.encode()
        for start in range(0, len(tokens) - ENGINE_BLOCK_TOKENS + 1, ENGINE_BLOCK_TOKENS):
            block = tokens[start : start + ENGINE_BLOCK_TOKENS]
            parent = hashlib.blake2b(parent + repr(block).encode(), digest_size=16).digest()
            unbroken = unbroken and parent in self._blocks
            hit_blocks += unbroken
            self._blocks[parent] = None
            self._blocks.move_to_end(parent)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)
        return min(hit_blocks * ENGINE_BLOCK_TOKENS, max(len(tokens) - 1, 0))

    def clear(self) -> None:
        self._blocks.clear()


class Worker:
    """Computes prompts one after the other and decodes side by side, as a real worker does."""

    def __init__(self, spec: WorkerSpec, config: EngineConfig, pool: Pool | None = None) -> None:
        self.spec = spec
        self.config = config
        self.pool = pool
        self.counters = Counters()
        self.device = DeviceCache(config.device_blocks)
        self._costs = config.cost_model
        self._prefill_turn = asyncio.Lock()

    async def prefill(self, tokens: list[int], salt: str, transfer: Transfer) -> Prefilled:
        """Take a turn, load what the pool has, compute the rest, store full blocks."""
        self.counters.waiting += 1
        try:
            await self._prefill_turn.acquire()
        finally:
            self.counters.waiting -= 1
        try:
            return await self._prefill(tokens, salt, transfer)
        finally:
            self._prefill_turn.release()

    async def _prefill(self, tokens: list[int], salt: str, transfer: Transfer) -> Prefilled:
        device = self.device.hit_and_fill(tokens, salt)
        use = PoolUse()
        is_decode_leg = transfer.leg == "decode"
        if self.pool is not None and transfer.leg and not (transfer.foreign and is_decode_leg):
            wanted = transfer.num_blocks if is_decode_leg else len(tokens)
            await self.pool.load(use, tokens, salt, wanted, transfer)
        elif is_decode_leg:  # no pool here: believe the blocks to be there
            use.hit_tokens = transfer.num_blocks * self.config.block_tokens
            if transfer.foreign:
                use.hit_tokens = len(tokens)
        pool_hits = max(0, min(use.hit_tokens, len(tokens) - 1) - device)
        self._count(len(tokens), device, pool_hits)
        moved = use.fetched_blocks * self.config.block_tokens
        seconds = self._seconds(len(tokens), device + pool_hits, moved, is_decode_leg)
        self.counters.prefill_seconds += seconds
        if seconds > 0:
            await asyncio.sleep(seconds)
        num_blocks = len(tokens) // self.config.block_tokens
        if self.pool is not None and transfer.leg == "prefill":
            num_blocks = await self.pool.store(use, tokens, salt, transfer)
        if self.pool is not None and transfer.leg and not transfer.foreign:
            use.hit_tokens = pool_hits
            self.counters.promoted_blocks += use.promoted_blocks
            await self.pool.report(use, transfer, device, len(tokens))
            if transfer.session and transfer.leg != "prefill":  # once: leg 1 leaves it to leg 2
                await self.pool.hint(tokens, salt, transfer.session)
        return Prefilled(device + pool_hits, num_blocks)

    def _seconds(self, total: int, cached: int, moved: int, is_decode_leg: bool) -> float:
        """A decode leg's KV streams in layer by layer behind the prefill: only what it lacks costs."""
        if is_decode_leg:
            return self._costs.prefill(total, 0) - self._costs.prefill(cached, 0)
        return self._costs.transfer(moved) + self._costs.prefill(total, cached)

    def _count(self, prompt: int, device: int, pool: int) -> None:
        counters = self.counters
        counters.prompt_tokens += prompt
        counters.device_queries += prompt
        counters.device_hits += device
        if self.pool is not None:
            counters.pool_queries += prompt - device
            counters.pool_hits += pool

    async def step(self, kv_tokens: int = 0, *, first: bool = False) -> None:
        """One decode step beside what else runs. The `first` gives one of the model's tokens."""
        seconds = self._costs.step(self.counters.running, kv_tokens)
        if first:
            seconds /= self._costs.scale
        if seconds > 0:
            await asyncio.sleep(seconds)

    def metrics(self) -> bytes:
        """Prometheus text with vLLM's names."""
        counters = self.counters
        rows = {
            "vllm:num_requests_running": ("gauge", counters.running),
            "vllm:num_requests_waiting": ("gauge", counters.waiting),
            "vllm:prompt_tokens_total": ("counter", counters.prompt_tokens),
            "vllm:generation_tokens_total": ("counter", counters.generation_tokens),
            "vllm:request_success_total": ("counter", counters.finished),
            "vllm:prefix_cache_queries_total": ("counter", counters.device_queries),
            "vllm:prefix_cache_hits_total": ("counter", counters.device_hits),
            "vllm:external_prefix_cache_queries_total": ("counter", counters.pool_queries),
            "vllm:external_prefix_cache_hits_total": ("counter", counters.pool_hits),
            "perilune_emulated_requests_total": ("counter", counters.requests),
            "perilune_emulated_aborted_total": ("counter", counters.aborted),
        }
        label = f'{{engine="0",model_name="{self.config.model}"}}'
        return "".join(
            f"# TYPE {name.removesuffix('_total')} {kind}\n{name}{label} {value}\n"
            for name, (kind, value) in rows.items()
        ).encode()
