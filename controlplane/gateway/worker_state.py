"""What a gateway knows of one worker."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic

from controlplane.core.prediction import DecodeModel, PrefillModel, join_batches
from controlplane.core.prefill_queue import PrefillQueue
from controlplane.core.routing import TransferCost
from controlplane.gateway.upstream import Upstream
from controlplane.gateway.wire import ViewWorker


@dataclass(slots=True)
class WorkerState:
    """One worker: its row in the view, its connections, its predictions."""

    row: ViewWorker
    upstream: Upstream
    since: float = field(default_factory=monotonic)  # legs that were sent before met another engine
    namespace: bytes | None = None
    block_tokens: int | None = None
    prefill_times: PrefillModel = field(default_factory=PrefillModel)
    decode_times: DecodeModel = field(default_factory=DecodeModel)
    prefill_queue: PrefillQueue = field(default_factory=PrefillQueue)
    kv_capacity_tokens: int | None = None  # of the engine's own memory; None: it has not said
    decode_cap: int = 0  # by its row and the scheduling policy
    trial: str = ""  # the request that was last offered a slot as the worker's trial
    _prefilled: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=16))
    _decoded: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=16))
    _handovers: deque[tuple[str, int, float, TransferCost | None]] = field(
        default_factory=lambda: deque(maxlen=16)
    )
    # The same for other gateways, until they have been told.
    untold_prefills: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=16))
    untold_decodes: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=16))

    def prefilled(self, uncached_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A sample for `learn`; of many in a short time the last ones count."""
        sample = (uncached_tokens, cached_tokens, seconds)
        if self.prefill_queue.is_shared and self.prefill_times.refuses(*sample):
            return
        self._prefilled.append(sample)
        self.untold_prefills.append(sample)

    def decoded(self, running: int, tbt_seconds: float, kv_tokens: int = 0) -> None:
        sample = (running, tbt_seconds, kv_tokens)
        self._decoded.append(sample)
        self.untold_decodes.append(sample)

    def handed_over(
        self, source: str, tokens: int, seconds: float, path: TransferCost | None
    ) -> None:
        """KV of so many tokens from node `source`, for leg 2 here; `path`: as priced."""
        self._handovers.append((source, tokens, seconds, path))

    def heard(
        self, prefills: Iterable[tuple[int, int, float]], decodes: Iterable[tuple[int, float, int]]
    ) -> None:
        """Samples of other gateways."""
        self._prefilled.extend(prefills)
        self._decoded.extend(decodes)

    @property
    def cache_owner(self) -> str:
        """Whose a prefix that it has computed is: its node's pool's, or its own alone."""
        return self.row.node_id if self.namespace is not None else self.row.id

    def learn(self) -> None:
        """Fit the predictions to the samples: off the request path, a few times a second."""
        for sample in join_batches(self._prefilled):
            self.prefill_times.observe(*sample)
        self._prefilled.clear()
        while self._decoded:
            self.decode_times.observe_tbt(*self._decoded.popleft())
        while self._handovers:
            self.decode_times.handover.observe(*self._handovers.popleft())
