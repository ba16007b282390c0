"""What the holder of blocks answers to control messages of one peer."""

from __future__ import annotations

from typing import Final

from workers.core.errors import ProtocolError
from workers.core.transfer_types import Cause
from workers.core.transfer_verify import Found, Wanted, in_bounds, judge_source
from workers.pool.arena import checksum_of
from workers.transfer import tcp_wire as wire
from workers.transfer.base import PushTarget, SlotMemory
from workers.transfer.rdma import control

MAX_VERIFIED: Final = 4096
MAX_CLAIMED: Final = 4096


class Answers:
    """Of one connection. `end` when its queue pairs are gone: claimed slots are given back."""

    def __init__(self, memory: SlotMemory, push: PushTarget, *, remote_write: bool) -> None:
        self._memory = memory
        self._push = push
        self._remote_write = remote_write
        self._verified: dict[int, Found] = {}
        self._claimed: dict[int, wire.Ask] = {}
        self.taken_bytes = 0

    def answer(self, message: bytes) -> bytes:
        """The reply to a request. ProtocolError: it is none."""
        kind, count, body = control.unpack(message)
        if kind in (control.SUM, control.CLAIM):
            size = (wire.READ_ENTRY if kind == control.SUM else wire.WRITE_ENTRY).size
            _check_size(body, size * count)
            asks = wire.unpack_asks(wire.READ if kind == control.SUM else wire.WRITE, body)
            entries = [self._sum(ask) if kind == control.SUM else self._claim(ask) for ask in asks]
        else:
            _check_size(body, control.OP_ID.size * count)
            ids = [op_id for (op_id,) in control.OP_ID.iter_unpack(body)]
            entries = [self._settle(op_id, landed=kind == control.COMMIT) for op_id in ids]
        return control.pack(kind, entries)

    def end(self) -> None:
        while self._claimed:
            _, ask = self._claimed.popitem()
            self._push.lost(ask.wanted.slot, ask.wanted.generation)

    def _sum(self, ask: wire.Ask) -> bytes:
        cause, checksum, part = self._judge(ask.wanted)
        return wire.REPLY_ENTRY.pack(ask.op_id, wire.STATUS[cause], 0, 0, checksum, part)

    def _judge(self, wanted: Wanted) -> tuple[Cause | None, int, int]:
        memory = self._memory
        if not in_bounds(wanted, memory.num_slots, memory.payload_bytes):
            return Cause.BOUNDS, 0, 0
        found = memory.found(wanted.slot)
        cause = judge_source(wanted, found)
        if cause is not None or found is None:
            return cause, 0, 0
        if not self._verify_whole(wanted.slot, found):
            return Cause.CORRUPT, 0, 0
        part = checksum_of(memory.range(wanted.slot, wanted.offset, wanted.length))
        if memory.found(wanted.slot) != found:
            return Cause.STALE, 0, 0
        return None, found.checksum, part

    def _verify_whole(self, slot: int, found: Found) -> bool:
        """A range's checksum is worth something only if the block that it is of is right."""
        if self._verified.get(slot) == found:
            return True
        if checksum_of(self._memory.range(slot, 0, found.length)) != found.checksum:
            return False
        if len(self._verified) >= MAX_VERIFIED:
            self._verified.clear()
        self._verified[slot] = found
        return True

    def _claim(self, ask: wire.Ask) -> bytes:
        cause = self._try_claim(ask)
        return wire.REPLY_ENTRY.pack(ask.op_id, wire.STATUS[cause], 0, 0, ask.checksum, 0)

    def _try_claim(self, ask: wire.Ask) -> Cause | None:
        wanted, memory = ask.wanted, self._memory
        whole = wanted.offset == 0 and wanted.length == wanted.block_length
        if not whole or not in_bounds(wanted, memory.num_slots, memory.payload_bytes):
            return Cause.BOUNDS
        if ask.op_id in self._claimed:
            raise ProtocolError(f"op {ask.op_id} claims a second slot")
        if not self._remote_write or len(self._claimed) >= MAX_CLAIMED:
            return Cause.REFUSED
        if not self._push.claim(wanted.slot, wanted.generation, wanted.key, wanted.length):
            return Cause.REFUSED
        self._claimed[ask.op_id] = ask
        memory.slab.begin_write(wanted.slot)
        return None

    def _settle(self, op_id: int, *, landed: bool) -> bytes:
        ask = self._claimed.pop(op_id, None)
        if ask is None:
            raise ProtocolError(f"op {op_id} has claimed no slot")
        wanted, cause = ask.wanted, None
        if landed and self._verify_landed(ask):
            self._push.landed(wanted.slot, wanted.generation, ask.checksum)
            self.taken_bytes += wanted.length
        else:
            cause = Cause.CORRUPT
            self._push.lost(wanted.slot, wanted.generation)
        return wire.REPLY_ENTRY.pack(op_id, wire.STATUS[cause], 0, 0, ask.checksum, 0)

    def _verify_landed(self, ask: wire.Ask) -> bool:
        wanted, memory = ask.wanted, self._memory
        if checksum_of(memory.range(wanted.slot, 0, wanted.length)) != ask.checksum:
            return False
        memory.slab.write_header(
            wanted.slot, wanted.generation, wanted.length, ask.checksum, wanted.key
        )
        return True


def _check_size(body: bytes, size: int) -> None:
    if len(body) != size:
        raise ProtocolError(f"a control message with {len(body)} bytes of entries, not {size}")
