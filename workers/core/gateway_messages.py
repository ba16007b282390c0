"""What gateways tell one another of their load, through the nodes' agents.

A gateway sends `TellShare` on its event stream's connection, for the workers of that node only; the
agent passes it as `GatewayShare` to the other gateways that subscribed with `shares`. Each message is
the whole load, so that a lost or overtaken one does no harm; ages are as of sending.
"""

from __future__ import annotations

from typing import Final

import msgspec

from workers.core.hashing import BLOCK_HASH_BYTES

MAX_SHARES: Final = 1024
"""Workers in one message."""
MAX_SAMPLES: Final = 64
"""Of each kind in one message."""
MAX_CLASSES: Final = 16
MAX_LEGS: Final = 256
"""That come or have ended, in one message."""
MAX_CHAIN_BYTES: Final = BLOCK_HASH_BYTES * 2048


class WorkerShare(msgspec.Struct, frozen=True, array_like=True):
    """Of one gateway at one worker. `legs` of `seconds` predicted have been sent to it, the oldest
    `head_age` ago; its window holds `window_tokens` and `window_seconds`; `waiting`: (class, legs,
    predicted seconds) in the gateway's queue before it. `slots` of decode with `kv_tokens`, and
    `slots_waiting` requests of its model for any. Seconds and tokens; `legs_ended` since the start.
    """

    worker_id: str
    legs: int = 0
    seconds: float = 0.0
    head_seconds: float = 0.0
    head_age: float = 0.0
    legs_ended: int = 0
    ended_age: float = 0.0
    window_tokens: int = 0
    window_seconds: float = 0.0
    waiting: list[tuple[int, int, float]] = []
    slots: int = 0
    kv_tokens: int = 0
    slots_waiting: int = 0

    @property
    def is_idle(self) -> bool:
        return not (self.legs or self.window_tokens or self.waiting or self.slots
                    or self.slots_waiting)  # fmt: skip


class PrefillSample(msgspec.Struct, frozen=True, array_like=True):
    """What one leg 1 took, without its wait behind others."""

    worker_id: str
    computed_tokens: int
    cached_tokens: int
    seconds: float


class DecodeSample(msgspec.Struct, frozen=True, array_like=True):
    """A stream's mean time between tokens beside what ran there."""

    worker_id: str
    running: int
    tbt_seconds: float
    kv_tokens: int


class ComingBlocks(msgspec.Struct, frozen=True, array_like=True):
    """A leg is on its way to this node, whose chain it will leave there: its block keys, joined."""

    leg: str
    keys: bytes


class TellShare(msgspec.Struct, tag=True, frozen=True):
    """A gateway's load at the workers of this node; who is not named has none. The rest is news
    since the last one: samples, chains on their way here, legs that are so no more (`ended`)."""

    shares: list[WorkerShare]
    prefills: list[PrefillSample] = []
    decodes: list[DecodeSample] = []
    coming: list[ComingBlocks] = []
    ended: list[str] = []


class GatewayShare(msgspec.Struct, tag=True, frozen=True):
    """The same, told on. `gateway` is unique among this node's connections; `gone`: it has left,
    and nothing of it counts any more. The first one of a gateway says that it is there."""

    gateway: str
    shares: list[WorkerShare] = []
    prefills: list[PrefillSample] = []
    decodes: list[DecodeSample] = []
    coming: list[ComingBlocks] = []
    ended: list[str] = []
    gone: bool = False

    def after(self, before: GatewayShare) -> GatewayShare:
        """One message for this and an earlier one that has not gone out. Old news give way."""
        if self.gone:
            return self
        return msgspec.structs.replace(
            self,
            prefills=[*before.prefills, *self.prefills][-MAX_SAMPLES:],
            decodes=[*before.decodes, *self.decodes][-MAX_SAMPLES:],
            coming=[*before.coming, *self.coming][-MAX_LEGS:],
            ended=[*before.ended, *self.ended][-MAX_LEGS:],
        )


MAX_SECONDS: Final = 1e9
"""An age may be that of a gateway; none is a hundred years."""
MAX_COUNT: Final = 2**40


def fault_of(body: TellShare) -> str:
    """What is wrong with it; "" where nothing is."""
    return _oversize_of(body) or _odd_number_of(body)


def _odd_number_of(body: TellShare) -> str:
    """Who believes in less than nothing, or in what is no number, places and predicts by it."""
    for share in body.shares:
        for name in WorkerShare.__struct_fields__[1:]:
            value = getattr(share, name)
            if name == "waiting":
                odd = next((one for one in value if not all(map(_is_sane, one))), None)
                if odd is not None:
                    return f"{share.worker_id}: waiting = {odd}: no load"
            elif not _is_sane(value):
                return f"{share.worker_id}: {name} = {value}: no load"
    for sample in (*body.prefills, *body.decodes):
        if not all(map(_is_sane, msgspec.structs.astuple(sample)[1:])):
            return f"{sample}: no measurement"
    return ""


def _is_sane(value: float) -> bool:
    return 0 <= value <= (MAX_COUNT if isinstance(value, int) else MAX_SECONDS)


def _oversize_of(body: TellShare) -> str:
    if len(body.shares) > MAX_SHARES:
        return f"{len(body.shares)} workers in one message: at most {MAX_SHARES}"
    if max(len(body.prefills), len(body.decodes)) > MAX_SAMPLES:
        return f"more than {MAX_SAMPLES} samples of one kind in one message"
    if any(len(share.waiting) > MAX_CLASSES for share in body.shares):
        return f"more than {MAX_CLASSES} classes wait for one worker"
    if max(len(body.coming), len(body.ended)) > MAX_LEGS:
        return f"more than {MAX_LEGS} legs in one message"
    for chain in body.coming:
        if not 0 < len(chain.keys) <= MAX_CHAIN_BYTES or len(chain.keys) % BLOCK_HASH_BYTES:
            return f"{len(chain.keys)} bytes of block keys: {BLOCK_HASH_BYTES} each, 2048 at most"
    return ""
