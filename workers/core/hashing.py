"""Keys of KV blocks: canonical bytes in, blake3 out. Equal in every process and on every host.

A message to hash is `domain || field*`, and a field is `tag (1 byte) || length (u32 LE) || bytes`,
so that no two different inputs share an encoding. Each use has a domain of its own. Python's
`hash()` takes no part: PYTHONHASHSEED changes nothing.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

from blake3 import blake3

from workers.core.ids import BlockHash, NamespaceDigest
from workers.core.stats_messages import NamespaceSpec

BLOCK_HASH_BYTES: Final = 16
TOKEN_BYTES: Final = 4

_NAMESPACE_DOMAIN: Final = b"perilune/namespace/1\0"
_ROOT_DOMAIN: Final = b"perilune/root/1\0"
_BLOCK_DOMAIN: Final = b"perilune/block/1\0"
_VECTOR_DOMAIN: Final = b"perilune/test-vector/1\0"
_HEADER: Final = Struct("<cI")
_IS_LITTLE: Final = sys.byteorder == "little" and array("i").itemsize == TOKEN_BYTES

PUBLISHED_TEST_VECTOR: Final = bytes.fromhex(
    "0118515345cdc9a60777c3e3b3da96e368267eaa459a10a2e555fa4bd7083ed1"
)
"""What `hash_test_vector()` gives wherever hashing works as it must."""


def namespace_digest(spec: NamespaceSpec) -> NamespaceDigest:
    """32 bytes over every field of `spec`, by name in alphabetical order."""
    parts = [_NAMESPACE_DOMAIN]
    for name in sorted(spec.__struct_fields__):
        parts.append(_field(b"N", name.encode()))
        parts.append(_value(getattr(spec, name)))
    return NamespaceDigest(blake3(b"".join(parts)).digest())


def root_hash(namespace: bytes, cache_salt: str | None, lora: str | None) -> bytes:
    """The 32 bytes that stand before a chain's first block. None differs from the empty text."""
    parts = [_ROOT_DOMAIN, _field(b"N", namespace), _optional(b"S", cache_salt)]
    parts.append(_optional(b"L", lora))
    return blake3(b"".join(parts)).digest()


def block_hashes(
    root: bytes,
    tokens: Sequence[int],
    block_tokens: int,
    extras: Sequence[Iterable[bytes]] = (),
) -> list[BlockHash]:
    """Keys of the full blocks of `tokens`; a partly filled last block has none.

    `root` comes from `root_hash`, or is the key of the block before `tokens[0]` to go on with a
    chain. `extras[i]` lists what else block i depends on (whole digests of images, say), in
    order; blocks past its end have none. ValueError: a token that is no int32.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens = {block_tokens}: must be at least 1")
    packed = _pack_tokens(tokens)
    block_bytes = block_tokens * TOKEN_BYTES
    num_blocks = len(packed) // block_bytes
    if any(extras):
        return _hash_with_extras(root, packed, block_bytes, num_blocks, extras)
    return _hash_plain(root, packed, block_bytes, num_blocks)


def hash_test_vector() -> bytes:
    """32 bytes that two sides compare before they trust each other's keys (B26, B27)."""
    spec = NamespaceSpec(
        model_id="perilune/test-vector",
        weights_version="1",
        kv_dtype="bfloat16",
        page_layout="LBHNC",
        isa="vec",
        page_bytes=(24576, 24576),
        engine_block_tokens=32,
        block_tokens=64,
        tp_size=1,
        rank_layout="tp1",
    )
    namespace = namespace_digest(spec)
    tokens = [(i * 2654435761) % 151_936 for i in range(200)]
    parts: list[bytes] = [namespace]
    for salt, lora in ((None, None), ("", None), ("tenant-ä", "adapter")):
        root = root_hash(namespace, salt, lora)
        parts += [root, *block_hashes(root, tokens, 64)]
        parts += block_hashes(root, tokens, 64, extras=[(), (b"image", b"")])
    return blake3(_VECTOR_DOMAIN + b"".join(_field(b"P", part) for part in parts)).digest()


def _hash_plain(root: bytes, packed: bytes, block_bytes: int, num_blocks: int) -> list[BlockHash]:
    """The hot path: one join and one digest a block."""
    head_of_root = _BLOCK_DOMAIN + _HEADER.pack(b"P", len(root))
    head = _BLOCK_DOMAIN + _HEADER.pack(b"P", BLOCK_HASH_BYTES)
    middle = _HEADER.pack(b"T", block_bytes)
    hashes: list[BlockHash] = []
    previous, prefix = root, head_of_root
    for start in range(0, num_blocks * block_bytes, block_bytes):
        message = prefix + previous + middle + packed[start : start + block_bytes]
        previous = blake3(message).digest(BLOCK_HASH_BYTES)
        hashes.append(BlockHash(previous))
        prefix = head
    return hashes


def _hash_with_extras(
    root: bytes,
    packed: bytes,
    block_bytes: int,
    num_blocks: int,
    extras: Sequence[Iterable[bytes]],
) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    previous = root
    for i in range(num_blocks):
        chunk = packed[i * block_bytes : (i + 1) * block_bytes]
        parts = [_BLOCK_DOMAIN, _field(b"P", previous), _field(b"T", chunk)]
        if i < len(extras):
            parts += [_field(b"E", extra) for extra in extras[i]]
        previous = blake3(b"".join(parts)).digest(BLOCK_HASH_BYTES)
        hashes.append(BlockHash(previous))
    return hashes


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian int32. (One pack of all beats array("i") by 2.5 and numpy by 3.)"""
    if isinstance(tokens, array) and tokens.typecode == "i" and _IS_LITTLE:
        return tokens.tobytes()
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise ValueError(f"tokens: not all are 32-bit integers ({error})") from None


def _field(tag: bytes, value: bytes) -> bytes:
    return _HEADER.pack(tag, len(value)) + value


def _optional(tag: bytes, text: str | None) -> bytes:
    """Absent and empty differ by the tag's case. Lone surrogates are legal in JSON strings."""
    if text is None:
        return _field(tag.lower(), b"")
    return _field(tag, text.encode("utf-8", "surrogatepass"))


def _value(value: object) -> bytes:
    match value:
        case str():
            return _field(b"s", value.encode("utf-8", "surrogatepass"))
        case int():
            return _field(b"i", str(value).encode())
        case tuple():
            return _field(b"t", b"".join(_value(item) for item in value))
        case _:
            raise TypeError(f"a namespace field of type {type(value).__name__} has no encoding")
