"""What an operator's cache operations ask of a node agent, through the control plane (role "cli").

Every request does a bounded slice of work, so that workers never wait behind it: what is longer is
asked for again with the `cursor` of the last reply until that is None. The walk runs from the
block stored last to the one stored first, over a pool that changes meanwhile: a block that comes
or goes during it may be met twice or missed.
"""

from __future__ import annotations

from typing import Final

import msgspec

MAX_SLICE_BLOCKS: Final = 4000
"""Blocks looked at in one call: a few milliseconds of the agent."""
CHANGED_BLOCKS: Final = 500
"""Blocks that one call changes: each costs more than one that is only looked at."""
MAX_PAGE_CHAINS: Final = 500
MAX_CHAIN_BLOCKS: Final = 65_536
MAX_PINS: Final = 1024
MAX_PIN_SHARE: Final = 0.5
"""No setting lets operators pin more of a pool than this."""
MAX_PIECE_BYTES: Final = 1 << 20
"""Payload of one `ReadBlocks` or `WriteBlocks`: far under `MAX_FRAME_BYTES`, so that the agent's
loop is held for a millisecond and not for ten."""


class Selection(msgspec.Struct, frozen=True):
    """Which blocks: all that is given must match. `key` means the chains through that block."""

    namespace: bytes = b""  # b"": any
    tenant: str | None = None  # None: any; "": those without a salt
    key: bytes = b""  # b"": any


class ChainInfo(msgspec.Struct, frozen=True):
    """One chain, from its head to a block without children. Unknown is None."""

    namespace: bytes
    tenant: str
    head: bytes
    tip: bytes
    num_blocks: int
    num_on_disk: int  # of these, on SSD only; the others are in memory
    pins: int  # owners that keep its last block now, operators included
    pinned_by: list[str]  # names of the operators' pins on its last block
    hits: int | None = None  # uses of its last block since it was stored
    idle_seconds: float | None = None  # since the last use


class PinInfo(msgspec.Struct, frozen=True):
    """An operator's pin on this node. `tips` are its chains' ends, the first few; `num_tips` None:
    it holds too much to count them."""

    name: str
    num_blocks: int
    expires_in_seconds: float | None  # None: never
    tips: list[bytes]
    num_tips: int | None


class BlockPiece(msgspec.Struct, frozen=True, array_like=True):
    """`data` lies at `offset` of a block of `block_bytes`; `checksum` is xxh3_64 over all of it.

    Read: `slot` and `generation` are the source's. Written: those that `PrepareStore` gave here.
    """

    key: bytes
    slot: int
    generation: int
    checksum: int
    block_bytes: int
    offset: int
    data: bytes


# --- requests -------------------------------------------------------------------------------


class ListChains(msgspec.Struct, tag=True, frozen=True):
    """Chains of a selection, newest first; answered by `ChainPage`."""

    selection: Selection = Selection()
    cursor: int = 0
    limit: int = 100


class GetChain(msgspec.Struct, tag=True, frozen=True):
    """All keys from the head to this block; answered by `ChainKeys`."""

    key: bytes


class ListPins(msgspec.Struct, tag=True, frozen=True):
    """Operators' pins that hold a block of this selection; answered by `PinList`."""

    selection: Selection = Selection()


class PinChains(msgspec.Struct, tag=True, frozen=True):
    """Keep what is selected from eviction, under a name; answered by `Slice`.

    With a key: the blocks from the head to it. Refused where operators would then hold more than
    `max_share` of the pool; blocks pinned by earlier slices stay until `UnpinChains`.
    """

    name: str
    selection: Selection
    seconds: float | None = None  # until it ends by itself; None: never
    max_share: float = 0.2
    cursor: int = 0
    limit: int = CHANGED_BLOCKS


class UnpinChains(msgspec.Struct, tag=True, frozen=True):
    """End an operator's pin. Idempotent; answered by `Slice`, whose cursor says to ask again."""

    name: str
    limit: int = CHANGED_BLOCKS


class PurgeChains(msgspec.Struct, tag=True, frozen=True):
    """Withdraw what is selected, with what follows it; answered by `Slice`.

    With a key: that block and all that follows it. What a running request uses leaves the index
    now and its slot is free when the request lets go. Operators' pins hold their blocks here
    (`num_skipped`) unless `include_pinned`.
    """

    selection: Selection
    cursor: int = 0
    limit: int = CHANGED_BLOCKS
    include_pinned: bool = False


class ReadBlocks(msgspec.Struct, tag=True, frozen=True):
    """Bytes of these blocks, the first from `offset` on, up to `MAX_PIECE_BYTES` in all.

    Answered by `BlockPieces`: what is not readable in memory, or fails verification, ends it.
    Pin the blocks first.
    """

    namespace: bytes
    block_hashes: list[bytes]
    offset: int = 0


class WriteBlocks(msgspec.Struct, tag=True, frozen=True):
    """Fill slots that `PrepareStore` gave to this connection; answered by `WrittenBlocks`.

    A block is stored with its last piece, if the checksum over all of it agrees.
    """

    pieces: list[BlockPiece]


# --- replies --------------------------------------------------------------------------------


class ChainPage(msgspec.Struct, tag=True, frozen=True):
    """`cursor` None ends the list; a page may be short or empty before that."""

    chains: list[ChainInfo]
    cursor: int | None
    num_blocks: int  # in the node's index now, selected or not


class ChainKeys(msgspec.Struct, tag=True, frozen=True):
    """Empty where the block is not here."""

    namespace: bytes
    tenant: str
    block_hashes: list[bytes]


class PinList(msgspec.Struct, tag=True, frozen=True):
    pins: list[PinInfo]
    num_blocks: int  # different blocks that operators pin
    capacity_blocks: int


class Slice(msgspec.Struct, tag=True, frozen=True):
    """A part of an operation is done: `num_blocks` blocks it concerned, `num_skipped` left alone.

    `num_in_use` of the purged blocks keep their slots until their readers let go.
    """

    num_blocks: int
    num_skipped: int = 0
    num_in_use: int = 0
    cursor: int | None = None
    total_blocks: int = 0  # in the node's index at the slice's start
    num_left: int | None = None
    """Of a purge's selection, in the index after this slice, with what is left alone. At most that,
    where a tenant and a namespace are given; at least, where a key has very much below it."""


class BlockPieces(msgspec.Struct, tag=True, frozen=True):
    pieces: list[BlockPiece]


class WrittenBlocks(msgspec.Struct, tag=True, frozen=True):
    """Blocks that became whole here, and those given up: their slot or their bytes were not right."""

    num_stored: int
    num_failed: int


CacheRequest = (
    ListChains
    | GetChain
    | ListPins
    | PinChains
    | UnpinChains
    | PurgeChains
    | ReadBlocks
    | WriteBlocks
)
CacheReply = ChainPage | ChainKeys | PinList | Slice | BlockPieces | WrittenBlocks
