"""Where the doctor's bound comes from: what is given, the model's geometry, or measured prefills."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from controlplane.decisions.schemas import Decision
from controlplane.doctor.schemas import DoctorRun
from controlplane.errors import InvalidError
from workers.core.disaggregation import (
    Bound,
    Geometry,
    bound_by_geometry,
    bound_by_rate,
    geometry_of,
    prefill_rate,
)
from workers.core.stats_messages import NamespaceSpec

PREFILL_PHASE = "prefill"
MAX_CONFIG_BYTES = 1 << 20


def kv_bytes_per_token(specs: Iterable[NamespaceSpec]) -> int | None:
    """Over all layers and ranks, of the model with the most; None where no worker has joined."""
    found = [spec.block_bytes // spec.block_tokens * max(1, spec.tp_size) for spec in specs]
    return max(found, default=None)


def check_geometry(flops: float, geometry: Geometry | None) -> Geometry:
    """InvalidError: FLOPS are given, and no model's geometry is known."""
    if geometry is None:
        raise InvalidError(
            "flops: no registered model has a config.json that this control plane can read.",
            field="flops",
            value=flops,
            way_out="Give prefill_tokens_per_second instead.",
        )
    return geometry


def bound_of(
    body: DoctorRun,
    kv_bytes: int | None,
    decisions: Iterable[Decision],
    geometry: Geometry | None,
) -> Bound | None:
    """What is given wins; None where nothing is known."""
    if body.flops is not None and geometry is not None:
        return bound_by_geometry(geometry, body.flops, body.prompt_tokens)
    if kv_bytes is None:
        return None
    if body.prefill_tokens_per_second is not None:
        return bound_by_rate(kv_bytes, body.prefill_tokens_per_second, "given")
    rate = prefill_rate(_samples(decisions))
    return None if rate is None else bound_by_rate(kv_bytes, rate, "measured")


def _samples(decisions: Iterable[Decision]) -> Iterable[tuple[int, float]]:
    """(tokens computed, seconds) of prefills."""
    for decision in decisions:
        leg = decision.prefill_leg
        for phase in decision.phases:
            if leg is not None and phase.name == PREFILL_PHASE and phase.measured_seconds:
                yield leg.computed_tokens, phase.measured_seconds


def read_geometry(paths: Iterable[str]) -> Geometry | None:
    """Of the first of these model folders that tells. Blocks: call it in a thread."""
    for path in paths:
        try:
            with (Path(path) / "config.json").open("rb") as file:
                config = json.loads(file.read(MAX_CONFIG_BYTES))
        except (OSError, ValueError):
            continue
        found = geometry_of(config) if isinstance(config, dict) else None
        if found is not None:
            return found
    return None
