"""Everything that must agree before two engines may share blocks, read from the engine."""

from __future__ import annotations

from typing import Any

import torch

from workers.connector.layout import PagedKv
from workers.connector.settings import ConnectorSettings
from workers.core.errors import ConfigError
from workers.core.stats_messages import NamespaceSpec


def require_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError for models and set-ups that this connector cannot serve correctly."""
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ConfigError(
            "model",
            vllm_config.model_config.model,
            f"it has {groups} KV cache groups (a hybrid model), and one is supported",
            "Serve it without the pool, or use a model with one kind of attention",
        )
    kind = type(kv_cache_config.kv_cache_groups[0].kv_cache_spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise ConfigError(
            "model",
            vllm_config.model_config.model,
            f"its KV cache is of the kind {kind}, and full attention is supported",
            "Serve it without the pool",
        )
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name)) != 1:
            raise ConfigError(
                name,
                size,
                "the pool's blocks hold all of a model's heads and layers",
                "Set it to 1",
            )


def namespace_of(
    settings: ConnectorSettings, vllm_config: Any, kv_cache_config: Any, paged: PagedKv
) -> NamespaceSpec:
    """The namespace of one engine's blocks. ConfigError where pages are not what they seem."""
    if paged.num_blocks != kv_cache_config.num_blocks:
        raise ConfigError(
            "KV cache layout",
            f"{paged.num_blocks} x {paged.format.shape}",
            f"its first axis does not count the engine's {kv_cache_config.num_blocks} blocks",
            "Use a vLLM release that gives each layer as [blocks, ...]",
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = paged.format.dtype
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or "unnamed"
    return NamespaceSpec(
        model_id=settings.model_id,
        weights_version=settings.weights_version,
        kv_dtype=dtype if cache_dtype == "auto" else f"{cache_dtype}/{dtype}",
        page_layout=f"{layout}:{paged.format.shape}",
        isa=_isa(vllm_config, kv_cache_config) if paged.format.device == "cpu" else "cuda",
        page_bytes=paged.format.page_bytes,
        engine_block_tokens=settings.engine_block_tokens,
        block_tokens=settings.block_tokens,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        rank_layout=f"tp{vllm_config.parallel_config.tensor_parallel_size}",
    )


def _isa(vllm_config: Any, kv_cache_config: Any) -> str:
    """CPU kernels pack a page for their instruction set: ask the backend which one it takes."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

        return str(
            _get_attn_isa(
                vllm_config.model_config.dtype,
                spec.block_size,
                spec.head_size,
                vllm_config.cache_config.cache_dtype,
            )
        )
    except (ImportError, TypeError, AttributeError):
        # Another vLLM release: the CPU's own capability separates at least unlike machines.
        return f"cpu-{torch.backends.cpu.get_cpu_capability()}"
