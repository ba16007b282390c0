"""Nodes in one process, with faults on order: what tests and simulations run the engine over."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.core.errors import RefusedError
from workers.core.transfer_handshake import (
    NONCE_BYTES,
    Initiator,
    Responder,
    SlabFacts,
    StaleIncarnationError,
)
from workers.core.transfer_types import Cause, Completion, Direction, Op
from workers.core.transfer_verify import Found, Wanted, in_bounds, judge_source
from workers.pool.arena import checksum_of
from workers.transfer.base import (
    DownBy,
    Endpoint,
    OpenedBy,
    PeerAddress,
    PushTarget,
    Report,
    SlotMemory,
    Transport,
)
from workers.transfer.push import NoSlots


@dataclass
class Faults:
    """What goes wrong at one node. Probabilities are of one op; change them at any time."""

    drop: float = 0.0  # it never ends
    delay_seconds: float = 0.0
    spread_seconds: float = 0.0  # uniformly added: ops end out of order
    corrupt: float = 0.0  # one byte is flipped on the way
    stall: bool = False  # nothing moves
    refuse_connect: bool = False
    depth: int = 1024
    take: int | None = None  # of one post, no more than this
    break_after: int | None = None  # ops, then the connection breaks


@dataclass
class Node:
    """One node of the fabric."""

    memory: SlotMemory
    incarnation: int
    secret: bytes
    push: PushTarget = field(default_factory=NoSlots)
    faults: Faults = field(default_factory=Faults)
    facts: SlabFacts | None = None  # that it claims, where they differ from its memory's
    connects: int = 0
    posted: list[int] = field(default_factory=list)  # op ids, in order, of all endpoints
    open_endpoints: int = 0


@dataclass
class Fabric:
    """What joins the nodes."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311  a fake
    nodes: dict[str, Node] = field(default_factory=dict)


class MemoryTransport(Transport):
    name = "memory"

    def __init__(self, memory: SlotMemory, node_id: str, secret: bytes, fabric: Fabric) -> None:
        self.memory = memory
        self.node_id = node_id
        self.secret = secret
        self.fabric = fabric

    def connect(self, peer: PeerAddress, incarnation: int) -> Endpoint:
        return MemoryEndpoint(self, peer, incarnation)


class MemoryEndpoint(Endpoint):
    """Ends ops when their time has come, by the `now` that `poll` is given."""

    def __init__(self, transport: MemoryTransport, peer: PeerAddress, incarnation: int) -> None:
        self._transport = transport
        self._node = transport.fabric.nodes.get(peer.node_id)
        self._rng = transport.fabric.rng
        self._report = Report()
        self._due: list[tuple[float, int, Op]] = []
        self._new: list[Op] = []
        self._lost: dict[int, Op] = {}
        self._ops = 0
        self._ended = False
        if self._node is not None:
            self._node.open_endpoints += 1
            self._node.connects += 1
        self._connect(peer, incarnation)

    def post(self, ops: Sequence[Op]) -> int:
        node = self._node
        if self._ended or node is None:
            return 0
        room = node.faults.depth - len(self._due) - len(self._new) - len(self._lost)
        taken = ops[: max(0, room)]
        if node.faults.take is not None:
            taken = taken[: node.faults.take]
        node.posted += [op.id for op in taken]
        for op in taken:
            if self._rng.random() < node.faults.drop:
                self._lost[op.id] = op
            else:
                self._new.append(op)
        return len(taken)

    def cancel(self, op_ids: Sequence[int]) -> None:
        wanted = set(op_ids)
        known = [entry[2] for entry in self._due] + self._new + list(self._lost.values())
        self._due = [entry for entry in self._due if entry[2].id not in wanted]
        heapq.heapify(self._due)
        self._new = [op for op in self._new if op.id not in wanted]
        for op in known:
            if op.id in wanted:
                self._lost.pop(op.id, None)
                self._report.completions.append(Completion(op.id, Cause.CANCELLED))

    def poll(self, now: float) -> Report:
        report, self._report = self._report, Report()
        node = self._node
        if self._ended or node is None:
            return report
        faults = node.faults
        for op in self._new:
            due = now + faults.delay_seconds + self._rng.random() * faults.spread_seconds
            heapq.heappush(self._due, (due, op.id, op))
        self._new = []
        while self._due and self._due[0][0] <= now and not faults.stall:
            if faults.break_after is not None and self._ops >= faults.break_after:
                report.down = DownBy(Cause.CONNECTION, "the connection broke")
                self.close()
                break
            op = heapq.heappop(self._due)[2]
            self._ops += 1
            report.completions.append(self._end(node, op))
            report.moved_bytes += op.length
        return report

    def wake_at(self, now: float) -> float | None:
        report = self._report
        if report.completions or report.down or report.opened or self._new:
            return now
        stalled = self._node is None or self._node.faults.stall
        return self._due[0][0] if self._due and not stalled else None

    def close(self) -> None:
        if not self._ended and self._node is not None:
            self._node.open_endpoints -= 1
        self._ended = True
        self._due, self._new, self._lost = [], [], {}

    # --- moving -----------------------------------------------------------------------------

    def _end(self, node: Node, op: Op) -> Completion:
        piece, mine = op.piece, self._transport.memory
        remote = Wanted(
            piece.remote_slot, piece.remote_generation, piece.key,
            piece.block_length, op.offset, op.length,
        )  # fmt: skip
        local = remote._replace(slot=piece.local_slot, generation=piece.local_generation)
        if not (
            in_bounds(remote, node.memory.num_slots, node.memory.payload_bytes)
            and in_bounds(local, mine.num_slots, mine.payload_bytes)
        ):
            return Completion(op.id, Cause.BOUNDS)
        if op.direction is Direction.PUSH:
            return self._end_push(node, op, local)
        found = node.memory.found(piece.remote_slot)
        cause = judge_source(remote, found)
        if cause is not None or found is None:
            return Completion(op.id, cause)
        block = node.memory.range(piece.remote_slot, 0, found.length)
        if not op.whole and checksum_of(block) != found.checksum:
            return Completion(op.id, Cause.CORRUPT)
        source = block[op.offset : op.offset + op.length]
        target = mine.range(piece.local_slot, op.offset, op.length)
        self._carry(node, source, target)
        wanted = found.checksum if op.whole else checksum_of(source)
        cause = None if checksum_of(target) == wanted else Cause.CORRUPT
        return Completion(op.id, cause, found.checksum)

    def _end_push(self, node: Node, op: Op, local: Wanted) -> Completion:
        piece, mine = op.piece, self._transport.memory
        found: Found | None = mine.found(piece.local_slot)
        cause = judge_source(local, found)
        if cause is not None or found is None:
            return Completion(op.id, cause)
        slot, generation = piece.remote_slot, piece.remote_generation
        if not node.push.claim(slot, generation, piece.key, op.length):
            return Completion(op.id, Cause.REFUSED)
        node.memory.slab.begin_write(slot)
        target = node.memory.range(slot, 0, op.length)
        self._carry(node, mine.range(piece.local_slot, 0, op.length), target)
        if checksum_of(target) != found.checksum:
            node.push.lost(slot, generation)
            return Completion(op.id, Cause.CORRUPT)
        node.memory.slab.write_header(slot, generation, op.length, found.checksum, piece.key)
        node.push.landed(slot, generation, found.checksum)
        return Completion(op.id, None, found.checksum)

    def _carry(self, node: Node, source: memoryview, target: memoryview) -> None:
        target[:] = source
        if self._rng.random() < node.faults.corrupt:
            target[self._rng.randrange(len(target))] ^= 0xFF

    def _connect(self, peer: PeerAddress, incarnation: int) -> None:
        node = self._node
        if node is None or node.faults.refuse_connect:
            self._report.down = DownBy(Cause.CONNECTION, f"{peer.node_id}: connection refused")
            self.close()
            return
        try:
            self._shake_hands(node, peer.node_id, incarnation)
        except StaleIncarnationError as error:
            self._report.down = DownBy(Cause.INCARNATION, str(error), error.actual)
            self.close()
        except RefusedError as error:
            self._report.down = DownBy(Cause.REFUSED, f"{error.code}: {error}")
            self.close()
        else:
            self._report.opened = OpenedBy(node.faults.depth, node.incarnation)

    def _shake_hands(self, node: Node, peer: str, incarnation: int) -> None:
        transport = self._transport
        nonce = self._rng.randbytes(NONCE_BYTES)
        initiator = Initiator(
            transport.secret, transport.node_id, transport.memory.facts, nonce, incarnation
        )
        responder = Responder(
            node.secret, peer, node.incarnation, node.facts or node.memory.facts,
            self._rng.randbytes(NONCE_BYTES), depth=node.faults.depth,
        )  # fmt: skip
        document: bytes | None = initiator.start()
        while document is not None:
            document = initiator.receive(responder.receive(document))
