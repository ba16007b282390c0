"""Small chains, and the messages in which nodes tell of them."""

from workers.core.messages import BlocksStored, EventBatch, KvEvent, Snapshot

SPACE = b"s" * 32


def key(number: int) -> bytes:
    return number.to_bytes(16)


def run(first: int, last: int) -> BlocksStored:
    """Blocks of one chain."""
    parent = key(first - 1) if first else b""
    return BlocksStored(SPACE, parent, [key(i) for i in range(first, last)])


def snapshot(node: str, incarnation: int, sequence: int, *runs: BlocksStored) -> Snapshot:
    return Snapshot(node, incarnation, sequence, True, True, list(runs))


def batch(node: str, incarnation: int, sequence: int, *events: KvEvent) -> EventBatch:
    return EventBatch(node, incarnation, sequence, list(events))
