"""Counters of both halves, shown as `perilune_connector_...` in the engine's /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from workers.connector.counters import COUNTERS


def empty() -> dict[str, float]:
    return dict.fromkeys(COUNTERS, 0.0)


class PeriluneStats(KVConnectorStats):
    """Sums since the last step that reported."""

    def reset(self) -> None:
        self.data = empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in COUNTERS:
            self.data[name] = self.data.get(name, 0.0) + other.data.get(name, 0.0)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PeriluneProm(KVConnectorPromMetrics):
    """One counter a name, labelled as vLLM labels its own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[int, dict[str, Any]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"perilune_connector_{name}", documentation=text, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine][name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if value and name in self._counters.get(engine_idx, {}):
                self._counters[engine_idx][name].inc(value)
