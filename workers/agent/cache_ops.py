"""An operator's cache operations at the agent: bounded slices over the pool, and copies of blocks.

Only the control plane asks for them (role "cli"). Bytes go through the slab that the workers map,
verified when a block is read and again when its copy is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from workers.agent.session import Session
from workers.core.blocks import SLOT_HEADER_BYTES, Block, BlockState, slot_bytes_of
from workers.core.cache_messages import (
    MAX_PIECE_BYTES,
    BlockPiece,
    BlockPieces,
    ChainKeys,
    ChainPage,
    GetChain,
    ListChains,
    ListPins,
    PinChains,
    PinList,
    PurgeChains,
    ReadBlocks,
    Slice,
    UnpinChains,
    WriteBlocks,
    WrittenBlocks,
)
from workers.core.clock import Clock
from workers.core.ids import BlockHash
from workers.core.messages import Refused, ReplyBody, SlotRef, StoredSlot
from workers.core.pool_ops import (
    PinRefusedError,
    chain_keys,
    list_chains,
    list_pins,
    pin,
    purge,
    unpin,
)
from workers.core.pool_state import PoolState
from workers.pool.arena import Slab, checksum_of

Handler = Callable[[Session, Any], ReplyBody]


class PoolOwner(Protocol):
    """What of the node is needed here. `pool` is None until a worker brought a namespace."""

    clock: Clock
    slab_path: str

    @property
    def pool(self) -> PoolState | None: ...


class CacheOps:
    """Handlers by type of request."""

    def __init__(self, node: PoolOwner) -> None:
        self._node = node
        self._slab: Slab | None = None

    def handlers(self) -> dict[type, Handler]:
        handlers: dict[type, Callable[[Session, PoolState, Any], ReplyBody]] = {
            ListChains: self._list_chains,
            PinChains: self._pin,
            PurgeChains: self._purge,
            ReadBlocks: self._read,
            WriteBlocks: self._write,
            GetChain: lambda _session, pool, body: chain_keys(pool, body.key),
            ListPins: lambda _session, pool, body: list_pins(pool, body.selection, self._now),
            UnpinChains: lambda _session, pool, body: unpin(pool, body),
        }
        return {kind: self._guarded(handler) for kind, handler in handlers.items()}

    def _guarded(self, handler: Callable[[Session, PoolState, Any], ReplyBody]) -> Handler:
        def handle(session: Session, body: Any) -> ReplyBody:
            if session.hello.role != "cli":
                what = type(body).__name__
                return Refused(
                    "role", f"{what} from a {session.hello.role}: only the control plane may."
                )
            pool = self._node.pool
            return _EMPTY[type(body)] if pool is None else handler(session, pool, body)

        return handle

    @property
    def _now(self) -> float:
        return self._node.clock.monotonic()

    def _list_chains(self, session: Session, pool: PoolState, body: ListChains) -> ReplyBody:
        return list_chains(pool, body.selection, body.cursor, body.limit, self._now)

    def _pin(self, session: Session, pool: PoolState, body: PinChains) -> ReplyBody:
        try:
            return pin(pool, body, self._now)
        except PinRefusedError as error:
            return Refused(error.code, str(error))

    def _purge(self, session: Session, pool: PoolState, body: PurgeChains) -> ReplyBody:
        return purge(pool, body)

    # --- bytes ------------------------------------------------------------------------------

    def _read(self, session: Session, pool: PoolState, body: ReadBlocks) -> ReplyBody:
        pieces: list[BlockPiece] = []
        room, offset = MAX_PIECE_BYTES, body.offset
        for key in body.block_hashes:
            block = pool.blocks.get(BlockHash(key))
            piece = None
            if block is not None and block.namespace == body.namespace and room:
                piece = self._piece(pool, block, offset, room)
            if piece is None:
                break
            pieces.append(piece)
            room, offset = room - len(piece.data), 0
        return BlockPieces(pieces)

    def _piece(self, pool: PoolState, block: Block, offset: int, room: int) -> BlockPiece | None:
        """Bytes of one block; None where it cannot be read. What fails verification is withdrawn."""
        if block.state is not BlockState.STORED or not 0 <= offset < pool.block_bytes:
            return None
        slab = self._attached(pool)
        header = slab.read_header(block.slot)
        found = None if header is None else (header.generation, header.key, header.length)
        payload = slab.payload(block.slot, pool.block_bytes)
        # once a block: its reader verifies the whole again
        whole = offset > 0 or (header is not None and checksum_of(payload) == header.checksum)
        if header is None or found != (block.generation, block.key, pool.block_bytes) or not whole:
            pool.report_corrupt(block.namespace, block.key, block.slot, block.generation)
            return None
        data = bytes(payload[offset : offset + room])
        return BlockPiece(
            block.key, block.slot, block.generation, header.checksum, header.length, offset, data
        )

    def _write(self, session: Session, pool: PoolState, body: WriteBlocks) -> ReplyBody:
        stored: list[StoredSlot] = []
        failed: list[SlotRef] = []
        num_refused = 0  # another's slot, or out of bounds: its owner may still be right
        for piece in body.pieces:
            if not self._is_being_written(session, pool, piece):
                num_refused += 1
                continue
            outcome = self._fill(pool, piece)
            if isinstance(outcome, StoredSlot):
                stored.append(outcome)
            elif outcome is not None:
                failed.append(outcome)
        num_stored = pool.complete_store(self._now, stored)
        pool.complete_store(self._now, (), failed)
        return WrittenBlocks(num_stored, len(failed) + num_refused)

    def _is_being_written(self, session: Session, pool: PoolState, piece: BlockPiece) -> bool:
        """Is this slot this connection's to fill, with this key and within its bounds?"""
        block = pool.by_slot.get(piece.slot)
        if block is None or not block.writing or block.client != session.client.connection:
            return False
        inside = 0 <= piece.offset <= pool.block_bytes - len(piece.data)
        whole = piece.block_bytes == pool.block_bytes
        return (block.generation, block.key) == (piece.generation, piece.key) and inside and whole

    def _fill(self, pool: PoolState, piece: BlockPiece) -> StoredSlot | SlotRef | None:
        """Put a piece in its place; with the last one, the verdict on the whole block."""
        slab = self._attached(pool)
        if piece.offset == 0:
            slab.begin_write(piece.slot)
        payload = slab.payload(piece.slot, pool.block_bytes)
        end = piece.offset + len(piece.data)
        payload[piece.offset : end] = piece.data
        if end < pool.block_bytes:
            return None
        if checksum_of(payload) != piece.checksum:
            return SlotRef(piece.slot, piece.generation)
        slab.write_header(piece.slot, piece.generation, pool.block_bytes, piece.checksum, piece.key)
        return StoredSlot(piece.slot, piece.generation, piece.checksum)

    def _attached(self, pool: PoolState) -> Slab:
        """Mapped at the first use, for as long as the agent lives."""
        if self._slab is None:
            slot_bytes = slot_bytes_of(pool.block_bytes)
            self._slab = Slab.attach(self._node.slab_path, slot_bytes, SLOT_HEADER_BYTES)
        return self._slab


_EMPTY: dict[type, ReplyBody] = {
    ListChains: ChainPage([], None, 0),
    GetChain: ChainKeys(b"", "", []),
    ListPins: PinList([], 0, 0),
    PinChains: Slice(0),
    UnpinChains: Slice(0),
    PurgeChains: Slice(0),
    ReadBlocks: BlockPieces([]),
    WriteBlocks: WrittenBlocks(0, 0),
}
"""Answers of a node to which no worker has brought a namespace yet."""
