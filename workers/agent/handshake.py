"""Who may work with this agent. Pure: what was offered against what is here."""

from __future__ import annotations

import math
from typing import Final

from workers.core.hashing import PUBLISHED_TEST_VECTOR
from workers.core.messages import PROTOCOL_VERSION, Hello, LegReport, Refused
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import Reserve

MAX_NAMESPACES: Final = 256
MAX_ID_CHARS: Final = 200
MAX_CHAIN_BLOCKS: Final = 1 << 24


def check_hello(hello: Hello) -> Refused | None:
    """What every client must agree on."""
    if hello.protocol != PROTOCOL_VERSION:
        return Refused(
            "protocol_version",
            f"{hello.client_id} speaks protocol {hello.protocol}, the agent {PROTOCOL_VERSION}. "
            "Run the same release of Perilune on both sides.",
        )
    if hello.hash_vector != PUBLISHED_TEST_VECTOR:
        return Refused(
            "hash_vector",
            f"{hello.client_id} computes other block keys: its test vector is "
            f"{hello.hash_vector.hex() or '(empty)'}, the agent's "
            f"{PUBLISHED_TEST_VECTOR.hex()}. Nothing would ever hit: run the same release and "
            "the same blake3 on both sides.",
        )
    return None


def check_block_tokens(spec: NamespaceSpec, block_tokens: int) -> Refused | None:
    """The pool's block against the engine's (B29). `block_tokens` is the agent's."""
    engine = spec.engine_block_tokens
    if engine < 1 or spec.block_tokens % engine:
        return Refused(
            "block_alignment",
            f"pool block of {spec.block_tokens} tokens, engine block of {engine} tokens: the "
            "first must be a multiple of the second, else nothing ever hits. "
            "Change block_tokens or the engine's --block-size.",
        )
    if spec.block_tokens != block_tokens:
        return Refused(
            "block_tokens",
            f"the worker's pool block has {spec.block_tokens} tokens, the agent's "
            f"{block_tokens}. Give both the same block_tokens.",
        )
    if not spec.page_bytes or min(spec.page_bytes) < 1:
        return Refused(
            "geometry",
            f"page_bytes = {list(spec.page_bytes)}: every layer needs at least one byte a page. "
            "Send the engine's page sizes, layer by layer.",
        )
    return None


def check_leg_report(report: LegReport) -> Refused | None:
    """What others would choke on must not be passed on: it would be sent again and again."""
    for name in ("transfer_id", "worker_id"):
        if len(getattr(report, name)) > MAX_ID_CHARS:
            return Refused("leg_report", f"{name} has over {MAX_ID_CHARS} characters.")
    seconds = [
        report.kv_wait_seconds,
        *report.kv_wait_by_layer_seconds,
        *report.kv_wait_by_stage_seconds.values(),
    ]
    if not all(map(math.isfinite, seconds)):
        return Refused("leg_report", "A wait is no finite number of seconds.")
    return None


def check_reserve(body: Reserve) -> Refused | None:
    """As with reports of legs: it shows in this node's statistics, and goes on to the control plane."""
    if not 0 < len(body.source) <= MAX_ID_CHARS or len(body.owner) > MAX_ID_CHARS:
        return Refused("reserve", f"source and owner have 1 to {MAX_ID_CHARS} characters.")
    if not (0 <= body.latency_seconds < math.inf and 0 <= body.bytes_per_second < math.inf):
        return Refused(
            "reserve",
            f"latency_seconds = {body.latency_seconds}, bytes_per_second = "
            f"{body.bytes_per_second}: each is a finite number from 0 up.",
        )
    if not 0 <= body.num_total <= MAX_CHAIN_BLOCKS:
        return Refused("reserve", f"num_total = {body.num_total}: at most {MAX_CHAIN_BLOCKS}.")
    return None


def check_geometry(
    block_bytes: int, known_bytes: int, slab_bytes: int, slot: int
) -> Refused | None:
    """A block against the slots there are. `known_bytes` is 0 before the first namespace."""
    if known_bytes and block_bytes != known_bytes:
        return Refused(
            "geometry",
            f"the worker's blocks have {block_bytes} bytes, this agent's slots hold blocks of "
            f"{known_bytes} bytes. Serve that model with an agent of its own.",
        )
    if slot > slab_bytes:
        return Refused(
            "slab_too_small",
            f"one block needs a slot of {slot} bytes, the slab has {slab_bytes}. "
            "Enlarge --slab-bytes or take smaller blocks.",
        )
    return None
