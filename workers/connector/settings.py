"""What the operator gives the connector, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from workers.core.errors import ConfigError
from workers.core.messages import KvRole

MAX_BACKLOG_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The keys of vLLM's `kv_connector_extra_config`, with the engine's own block size beside.

    Seconds are bounds. `call_timeout_seconds` bounds one question to the agent, so that an agent
    that hangs costs a request that much once; while none answers, requests miss at once.
    """

    agent_socket: str
    worker_id: str
    block_tokens: int
    engine_block_tokens: int
    kv_role: KvRole
    model_id: str
    weights_version: str = ""
    load_timeout_seconds: float = 2.0  # how long leg 2 waits for blocks still being written
    call_timeout_seconds: float = 0.2  # a busy two-core machine needs more than 0.05 now and then
    promote_timeout_seconds: float = 1.0  # the longest wait for blocks on SSD, however many
    store_timeout_seconds: float = 2.0  # of what no engine step waits for
    store_step_seconds: float = 0.005  # how long all of a step's stores may wait for the agent
    store_retry_seconds: float = 10.0  # how long refused blocks are offered again
    store_backlog_bytes: int = 256 << 20  # of refused blocks, in this worker's memory
    start_timeout_seconds: float = 10.0
    lookup_ttl_seconds: float = 0.02
    store_queue_blocks: int = 512
    layer_loads: bool = True  # load by groups of layers where the engine runs layer hooks

    @property
    def pages_per_block(self) -> int:
        """Engine blocks in a pool block."""
        return self.block_tokens // self.engine_block_tokens

    @property
    def stores(self) -> bool:
        """Does this role put blocks into the pool? A consumer only reads."""
        return self.kv_role in ("kv_producer", "kv_both")


_REQUIRED = ("agent_socket", "worker_id", "block_tokens")
_FROM_ENGINE = ("engine_block_tokens", "kv_role")
_POSITIVE = (
    "load_timeout_seconds",
    "call_timeout_seconds",
    "promote_timeout_seconds",
    "store_step_seconds",
    "store_retry_seconds",
    "store_backlog_bytes",
    "store_timeout_seconds",
    "start_timeout_seconds",
    "lookup_ttl_seconds",
    "store_queue_blocks",
)


def parse_settings(
    extra: Mapping[str, Any], *, engine_block_tokens: int, kv_role: KvRole, model: str
) -> ConnectorSettings:
    """Settings of one engine. Raises ConfigError naming the field, its value and the way out."""
    known = {field.name: field for field in fields(ConnectorSettings)}
    given: dict[str, Any] = {}
    for name, value in extra.items():
        if name not in known or name in _FROM_ENGINE:
            raise ConfigError(
                f"kv_connector_extra_config.{name}",
                value,
                "there is no such setting",
                f"Known: {', '.join(sorted(set(known) - set(_FROM_ENGINE)))}",
            )
        given[name] = _typed(name, value, str(known[name].type))
    for name in _REQUIRED:
        if name not in given:
            raise ConfigError(
                f"kv_connector_extra_config.{name}", None, "it is missing", "Give it a value"
            )
    given.setdefault("model_id", model)
    settings = ConnectorSettings(**given, engine_block_tokens=engine_block_tokens, kv_role=kv_role)
    _check(settings)
    return settings


def _typed(name: str, value: Any, wanted: str) -> Any:
    """The value, or ConfigError: msgspec's conversion rules, without silent casts of strings."""
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
    }
    is_bool = isinstance(value, bool)
    if not isinstance(value, kinds[wanted]) or (is_bool and wanted != "bool"):
        raise ConfigError(
            f"kv_connector_extra_config.{name}",
            value,
            f"it is {type(value).__name__}, not {wanted}",
            f"Give {wanted}",
        )
    return float(value) if isinstance(value, int) and wanted == "float" else value


def _check(settings: ConnectorSettings) -> None:
    for name in ("agent_socket", "worker_id"):
        if not getattr(settings, name):
            raise ConfigError(
                f"kv_connector_extra_config.{name}", "", "it is empty", "Give it a value"
            )
    for name in _POSITIVE:
        value = getattr(settings, name)
        if value <= 0:
            raise ConfigError(
                f"kv_connector_extra_config.{name}", value, "it must be above 0", "Raise it"
            )
    if settings.store_backlog_bytes > MAX_BACKLOG_BYTES:
        raise ConfigError(
            "kv_connector_extra_config.store_backlog_bytes",
            settings.store_backlog_bytes,
            f"a worker keeps at most {MAX_BACKLOG_BYTES} bytes of blocks that the pool refused",
            "Lower it; a larger pool or fewer pins help where blocks are refused for long",
        )
    block, engine_block = settings.block_tokens, settings.engine_block_tokens
    if block < 1 or block % engine_block:
        raise ConfigError(
            "block_tokens",
            block,
            f"the pool's block is no multiple of the engine's block of {engine_block} tokens "
            f"(--block-size {engine_block})",
            f"Use {max(1, round(block / engine_block)) * engine_block} for the pool, "
            "or start the engine with a --block-size that divides it",
        )
