"""Records of what is in a slot, as bytes of fixed size: the slab's journal and the SSD's index.

A record carries a checksum of itself, so that a torn one reads as none.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final, Literal

import xxhash

RECORD_BYTES: Final = 256
EMPTY_RECORD: Final = bytes(RECORD_BYTES)
MAX_TENANT_BYTES: Final = 128
_BODY: Final = Struct("<BBH4xQQQ16s16s32s128s")
_SUM: Final = Struct("<Q")
_STATES: Final = ("free", "writing", "stored")

assert _BODY.size + _SUM.size <= RECORD_BYTES


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """`writing`: handed out, perhaps half filled; then only the generation counts."""

    state: Literal["writing", "stored"]
    generation: int
    key: bytes = b""
    parent: bytes = b""  # b"" at a chain's head
    namespace: bytes = b""
    tenant: str = ""
    length: int = 0
    checksum: int = 0


def pack_record(record: SlotRecord | None) -> bytes:
    """`RECORD_BYTES` bytes; zeros for None, and for a tenant that does not fit."""
    tenant = b"" if record is None else record.tenant.encode()
    if record is None or len(tenant) > MAX_TENANT_BYTES or len(record.namespace) > 32:
        return EMPTY_RECORD
    body = _BODY.pack(
        _STATES.index(record.state), bool(record.parent), len(tenant), record.generation,
        record.length, record.checksum, record.key, record.parent, record.namespace, tenant,
    )  # fmt: skip
    return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(RECORD_BYTES, b"\0")


def unpack_record(data: bytes | memoryview) -> SlotRecord | None:
    """None where there is none, or a torn one."""
    (
        state,
        has_parent,
        tenant_bytes,
        generation,
        length,
        checksum,
        key,
        parent,
        namespace,
        tenant,
    ) = _BODY.unpack_from(data)
    if not 0 < state < len(_STATES) or tenant_bytes > MAX_TENANT_BYTES:
        return None
    (found,) = _SUM.unpack_from(data, _BODY.size)
    if found != xxhash.xxh3_64_intdigest(data[: _BODY.size]):
        return None
    return SlotRecord(
        state="stored" if state == _STATES.index("stored") else "writing",
        generation=generation,
        key=key,
        parent=parent if has_parent else b"",
        namespace=namespace,
        tenant=tenant[:tenant_bytes].decode(errors="replace"),
        length=length,
        checksum=checksum,
    )
