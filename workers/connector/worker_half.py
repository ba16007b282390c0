"""The half that lives beside the model: copies between the engine's pages and the slab."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from workers.client import make_hello
from workers.connector.affinity import leave_engine_cores
from workers.connector.layout import PagedKv
from workers.connector.load import BadBlock, Load, LoadBatch
from workers.connector.metadata import StepOrders, StepResults, StoreResult
from workers.connector.session import AgentSession
from workers.connector.settings import ConnectorSettings
from workers.connector.slots import SlabSlots
from workers.connector.storer import Storer
from workers.core.hashing import namespace_digest
from workers.core.messages import ReportCorrupt, Welcome
from workers.core.stats_messages import NamespaceSpec
from workers.pool.prefault import PageMapper

logger = logging.getLogger(__name__)

_MAX_POISONED = 4096


class WorkerHalf:
    """All calls come from the worker's main thread, but `_attach`, from the session's."""

    def __init__(
        self, settings: ConnectorSettings, spec_of: Callable[[PagedKv], NamespaceSpec]
    ) -> None:
        """`spec_of` names the namespace of blocks with these pages."""
        self._settings = settings
        self._spec_of = spec_of
        self._slots: SlabSlots | None = None
        self._mapper: PageMapper | None = None
        self._session: AgentSession | None = None
        self.namespace_spec: NamespaceSpec | None = None  # known once the pages are
        self._storer: Storer | None = None
        self._batch: LoadBatch | None = None
        self._seen: dict[str, float] = {}  # of the store side's cumulative counts
        self._results = StepResults()
        self._spoiled: set[int] = set()
        # Attempts whose load failed: what they compute until the planner knows is worthless.
        self._poisoned: dict[tuple[str, int], None] = {}
        self._counts: dict[str, float] = {}

    # --- start and end ------------------------------------------------------------------------

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the pages, introduce this engine to the agent.

        Raises ConfigError for a layout that cannot be shared and RefusedError where the agent
        says no. Without an agent the engine starts and computes everything itself.
        """
        settings = self._settings
        self._paged = PagedKv(kv_caches, settings.pages_per_block)
        self._batch = LoadBatch(self._paged)
        self._lazy = settings.layer_loads and self._paged.format.device == "cpu"
        self.namespace_spec = self._spec_of(self._paged)
        hello = make_hello(
            "worker",
            settings.worker_id,
            namespace=self.namespace_spec,
            kv_role=settings.kv_role,
            kv_tokens=self._paged.num_blocks * self.namespace_spec.engine_block_tokens,
        )
        self._session = AgentSession(
            settings.agent_socket,
            hello,
            call_timeout_seconds=settings.call_timeout_seconds,
            on_connect=self._attach,
            owners=self._store_owners,
        )
        self._storer = Storer(settings, self._session, self._paged, lambda: self._slots)
        self._session.start()
        if not self._session.wait_settled(settings.start_timeout_seconds):
            logger.warning(
                "no node agent at %s after %.0f s: starting without the pool, still trying",
                settings.agent_socket,
                settings.start_timeout_seconds,
            )

    def close(self) -> None:
        if self._storer is not None:
            self._storer.close()
        if self._session is not None:
            self._session.close()
        if self._mapper is not None:
            self._mapper.close()

    def _attach(self, welcome: Welcome) -> None:
        """A new agent, a new slab. Copies under way keep the old mapping alive until they end."""
        self._count("agent_connects", 1)
        current = self._slots
        if current is not None and current.incarnation == welcome.incarnation:
            return
        self._slots = None
        former, self._mapper = self._mapper, None
        try:
            self._slots = SlabSlots(welcome, self._paged.block_bytes)
        except (OSError, ValueError) as error:
            logger.warning("cannot map the slab %s: %s", welcome.slab_path, error)
        if former is not None:
            former.close()  # the new slots serve already, for this may take a moment
        try:
            if self._slots is not None:
                self._mapper = self._slots.map_ahead(leave_engine_cores)
        except RuntimeError as error:  # there is no thread to be had
            logger.warning("pages of the slab are not mapped ahead: %s", error)

    def _store_owners(self) -> set[str]:
        return self._storer.publisher.owners() if self._storer is not None else set()

    # --- loads --------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        """Before the step's forward pass."""
        if not orders.loads or self._batch is None:
            return
        slots = self._slots
        loads = [Load(order, slots, self._paged) for order in orders.loads]
        self._batch.begin(loads, lazy=self._lazy)

    def before_layer(self, name: str) -> None:
        if self._batch is not None:
            self._batch.before_layer(name)

    def finish_loads(self) -> None:
        """After the forward pass: verify, and say what must not be used."""
        if self._batch is None or not self._batch.active:
            return
        for result, bad, spoiled in self._batch.finish():
            self._results.loads.append(result)
            self._spoiled |= spoiled
            if result.first_failed >= 0:
                self._poison(result.request_id, result.attempt)
                logger.warning(
                    "request %s: %d of %d blocks could not be loaded; they are computed instead",
                    result.request_id,
                    result.failed_blocks,
                    result.failed_blocks + result.loaded_blocks,
                )
            for block in bad:
                self._report_corrupt(block)
            self._count("loaded_blocks", result.loaded_blocks)
            self._count("loaded_bytes", result.loaded_bytes)
            self._count("load_failed_blocks", result.failed_blocks)
            self._count("load_scatter_seconds", result.scatter_seconds)
            self._count("load_verify_seconds", result.verify_seconds)

    def _poison(self, request_id: str, attempt: int) -> None:
        self._poisoned[request_id, attempt] = None
        while len(self._poisoned) > _MAX_POISONED:
            del self._poisoned[next(iter(self._poisoned))]

    def _report_corrupt(self, bad: BadBlock) -> None:
        self._count("load_corrupt_blocks", 1)
        assert self._session is not None
        assert self.namespace_spec is not None
        block = bad.block
        digest = namespace_digest(self.namespace_spec)
        self._session.post(
            ReportCorrupt(digest, block.block_hash, block.slot, block.generation, bad.cause)
        )

    # --- stores -------------------------------------------------------------------------------

    def store(self, orders: StepOrders) -> None:
        """After the forward pass: copy what it finished into the slab."""
        if self._storer is None:
            return
        if orders.number:
            self._results.steps.append(orders.number)
        began = time.perf_counter()
        sound = [o for o in orders.stores if (o.request_id, o.attempt) not in self._poisoned]
        results = self._storer.store(sound)
        for order in orders.stores:
            if (order.request_id, order.attempt) in self._poisoned:
                results.append(StoreResult(order.request_id))  # the planner waits for a word
        self._results.stores += results
        for result in results:
            self._count("stored_blocks", result.stored_blocks)
            self._count("stored_bytes", result.stored_bytes)
            self._count("store_refused_blocks", result.refused_blocks)
            self._count("store_dropped_blocks", result.dropped_blocks)
        if orders.stores:
            self._count("store_seconds", time.perf_counter() - began)

    # --- results ------------------------------------------------------------------------------

    def take_results(self) -> StepResults | None:
        """What happened since the last call, for the planner; None where nothing did."""
        results, self._results = self._results, StepResults()
        return results or None

    def take_spoiled(self) -> set[int]:
        """The engine's blocks that hold unverified bytes."""
        spoiled, self._spoiled = self._spoiled, set()
        return spoiled

    def take_counts(self) -> dict[str, float]:
        """Counter increments since the last call."""
        if (storer := self._storer) is not None:
            backlog = storer.backlog.counts
            self._count_since("store_failed_blocks", storer.publisher.counts.failed)
            self._count_since("store_retried_blocks", backlog.retried)
            self._count_since("store_expired_blocks", backlog.expired)
            self._count_since("store_holes", backlog.holes)
            self._count_since("store_queue_alarms", storer.alarms)
        counts, self._counts = self._counts, {}
        return counts

    def _count_since(self, name: str, total: float) -> None:
        self._count(name, total - self._seen.get(name, 0.0))
        self._seen[name] = total

    def _count(self, name: str, amount: float) -> None:
        if amount:
            self._counts[name] = self._counts.get(name, 0.0) + amount
