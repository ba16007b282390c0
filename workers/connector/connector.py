"""The class that vLLM loads: `kv_connector` PeriluneConnector, module workers.connector.connector.

vLLM makes one object in its scheduler's process and one beside each model. Each carries the half
that its process needs; this class only hands calls on.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from workers.connector.metadata import StepOrders, StepResults
from workers.connector.namespace import namespace_of, require_supported
from workers.connector.scheduler_half import SchedulerHalf
from workers.connector.settings import parse_settings
from workers.connector.stats import PeriluneProm, PeriluneStats, empty
from workers.connector.worker_half import WorkerHalf
from workers.core.stats_messages import NamespaceSpec
from workers.process import PARENT_PID_VARIABLE, die_with_parent

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class PeriluneMetadata(KVConnectorMetadata):
    """A step's orders, from the scheduler to the worker."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class PeriluneWorkerMetadata(KVConnectorWorkerMetadata):
    """A step's results, from the worker to the scheduler."""

    def __init__(self, results: StepResults) -> None:
        self.results = results

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, PeriluneWorkerMetadata)
        return PeriluneWorkerMetadata(
            StepResults(
                [*self.results.loads, *other.results.loads],
                [*self.results.stores, *other.results.stores],
                [*self.results.steps, *other.results.steps],
            )
        )


class PeriluneHandshake(KVConnectorHandshakeMetadata):
    """What the scheduler's half needs of the worker's before the first request."""

    def __init__(self, spec: NamespaceSpec) -> None:
        self.spec = spec


class PeriluneConnector(KVConnectorBase_V1):
    """Shares KV blocks with other engines through the node agent's pool."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _end_with_the_engine()
        transfer = vllm_config.kv_transfer_config
        self._settings = parse_settings(
            transfer.kv_connector_extra_config,
            engine_block_tokens=vllm_config.cache_config.block_size,
            kv_role=transfer.kv_role,
            model=vllm_config.model_config.model,
        )
        require_supported(vllm_config, kv_cache_config)
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy = %r: a lost block becomes an error for the client; "
                "set it to 'recompute'",
                transfer.kv_load_failure_policy,
            )
        self._block_pool: Any = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = WorkerHalf(
                self._settings,
                lambda paged: namespace_of(self._settings, vllm_config, kv_cache_config, paged),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A pool is best effort: what is not stored is computed again."""
        return False

    # --- worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._in_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        spec = self._in_worker.namespace_spec
        return PeriluneHandshake(spec) if spec is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._in_worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._in_worker.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        self._in_worker.finish_loads()
        self._in_worker.store(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads are synchronous and stores hold no blocks: nothing finishes later."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._in_worker.take_spoiled()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        results = self._in_worker.take_results()
        return PeriluneWorkerMetadata(results) if results is not None else None

    def get_kv_connector_stats(self) -> PeriluneStats | None:
        half = self._worker or self._scheduler
        counts = half.take_counts() if half is not None else {}
        return PeriluneStats(data=empty() | counts) if counts else None

    # --- scheduler ----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Comes once, before the first request: now keys can be computed."""
        handshake = next(iter(metadata.values()))
        assert isinstance(handshake, PeriluneHandshake)
        self._scheduler = SchedulerHalf(self._settings, handshake.spec)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._block_pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self._in_scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._in_scheduler.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._in_scheduler.allocate(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return PeriluneMetadata(self._in_scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, PeriluneWorkerMetadata):
            return
        spoiled = self._in_scheduler.apply(meta.results)
        if spoiled and self._block_pool is not None:
            # Until it is computed again, nobody else may find these blocks by their content.
            self._block_pool.evict_blocks(spoiled)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never keeps the blocks: what leg 2 needs is in the slab."""
        return False, self._in_scheduler.finish(request)

    def reset_cache(self) -> bool:
        """Also called for every pause and sleep: the shared pool stays as it is."""
        self._in_scheduler.reset_cache()
        return True

    # --- both ---------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PeriluneStats:
        return PeriluneStats(data=empty() | (data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PeriluneProm:
        return PeriluneProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PeriluneMetadata)
        return metadata.orders

    @property
    def _in_worker(self) -> WorkerHalf:
        assert self._worker is not None, "a worker's call reached the scheduler's half"
        return self._worker

    @property
    def _in_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler's call reached the worker's half"
        return self._scheduler


def _end_with_the_engine() -> None:
    """A killed API server takes its engine core and worker with it, and so on down.

    Not where vLLM runs inside somebody's own process.
    """
    if multiprocessing.parent_process() is not None:
        # The supervisor's pid, meant for the API server; our parent is that server.
        os.environ.pop(PARENT_PID_VARIABLE, None)
        die_with_parent(signal.SIGKILL)
