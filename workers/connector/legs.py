"""A leg's report from what its request did."""

from __future__ import annotations

from workers.connector.request import RequestState
from workers.connector.settings import ConnectorSettings
from workers.core.messages import LegReport


def pool_hit_tokens(state: RequestState, block_tokens: int) -> int:
    """What was loaded and verified; a failed load's rest was computed after all."""
    failed = [load for load in state.loads if load.first_failed >= 0]
    if not failed:
        return state.pool_hit_tokens
    usable = failed[0].first_failed * block_tokens - state.device_hit_tokens
    return min(max(0, usable), state.pool_hit_tokens)


def leg_report(settings: ConnectorSettings, state: RequestState) -> LegReport:
    """Each prompt token counts once in a leg: device hit, pool hit or computed."""
    pool_hit = pool_hit_tokens(state, settings.block_tokens)
    prompt_tokens = len(state.info.prompt_token_ids)
    verify = sum(load.verify_seconds for load in state.loads)
    scatter = sum(load.scatter_seconds for load in state.loads)
    by_layer = state.loads[-1].by_layer_seconds if state.loads else []
    return LegReport(
        transfer_id=state.info.transfer_id,
        worker_id=settings.worker_id,
        kv_role=settings.kv_role,
        prompt_tokens=prompt_tokens,
        device_hit_tokens=state.device_hit_tokens,
        pool_hit_tokens=pool_hit,
        computed_tokens=prompt_tokens - state.device_hit_tokens - pool_hit,
        loaded_blocks=sum(load.loaded_blocks for load in state.loads),
        failed_blocks=sum(load.failed_blocks for load in state.loads),
        stored_blocks=state.stored_blocks,
        loaded_bytes=sum(load.loaded_bytes for load in state.loads),
        stored_bytes=state.stored_bytes,
        kv_wait_seconds=state.wait_seconds + verify + scatter,
        kv_wait_by_layer_seconds=list(by_layer),
        kv_wait_by_stage_seconds={
            "queue": max(0.0, state.wait_seconds - state.fetch_seconds),
            "wire": state.fetch_seconds,
            "verify": verify,
            "scatter": scatter,
        },
        observed="layer" if by_layer else "stage",
    )
