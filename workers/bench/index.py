"""`perilune bench index`: how fast the prefix index answers and learns, beside a peer's.

One index of ours and one of the peer's get the same events, and are asked the same queries. Both
are told in the form in which events travel: ours as msgpack frames that are decoded first, the
peer's as the JSON that its `apply_event` decodes. Hashing is apart: keys are given.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from workers.bench.index_data import NUM_ROUNDS, Event, IndexData, make_data
from workers.core.framing import LENGTH, decode_reply, encode_reply
from workers.core.messages import BlocksRemoved, BlocksStored, EventBatch, Snapshot
from workers.core.prefix_index import PrefixIndex

PEER: Final = "ai-dynamo-runtime RadixTree"
PEER_PYTHON: Final = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
PEER_TIMEOUT_SECONDS: Final = 600.0
APPLY_ROUNDS: Final = 2
"""Indexes built; the better one counts, on both sides."""
NAMESPACE: Final = b"\x07" * 32
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class PeerMissingError(Exception):
    """The peer was asked for and is not installed."""


def run_index_bench(
    *,
    num_blocks: int,
    num_nodes: int,
    query_blocks: int,
    num_queries: int,
    seed: int,
    peer: bool | None,
) -> dict[str, Any]:
    """The figures as one flat dict. `peer` None: where it is installed. PeerMissingError."""
    found = has_peer()
    if peer and not found:
        raise PeerMissingError
    data = make_data(num_blocks, num_nodes, query_blocks, num_queries, seed)
    result, longest = _own(data, query_blocks)
    result |= {"peer": None, "find_over_peer": None, "apply_over_peer": None}
    if found and peer is not False:
        result |= _beside_peer(data, result, longest)
    return result


def has_peer() -> bool:
    if not PEER_PYTHON.exists():
        return False
    command = [str(PEER_PYTHON), "-c", "from dynamo._core import RadixTree"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _own(data: IndexData, query_blocks: int) -> tuple[dict[str, Any], list[int]]:
    documents = _documents(data)
    gc.collect()
    gc.freeze()  # the bench's own objects are no part of an index
    applied = [_apply(documents) for _ in range(APPLY_ROUNDS)]
    gc.unfreeze()
    index, used = applied[0].told, applied[0].used_bytes
    deep = _find(index, data.deep_queries)
    longest = [max(index.held_lengths(NAMESPACE, q).values()) for q in data.deep_queries]  # type: ignore[arg-type]  # keys as made
    figures = {
        "find_p50_us": _best_median_us(deep),
        "find_p99_us": _quantile_us(deep, 0.99),
        "find_shallow_p50_us": _best_median_us(_find(index, data.shallow_queries)),
        "blocks": index.num_distinct,
        "nodes": data.num_nodes,
        "query_blocks": query_blocks,
        "held_blocks_median": statistics.median(longest),
        "entries": index.num_blocks(),
        "bytes_per_block": used / index.num_distinct,
        "mib_per_million_blocks": used / index.num_distinct * 1e6 / 2**20,
        "events": len(data.events),
        "apply_us": min(_typical_us(data, each.spent_ns) for each in applied),
        "apply_cpu_s": min(each.cpu_seconds for each in applied),
        "snapshot_blocks_per_s": _snapshot_rate(data),
    }
    return figures, longest


class _Applied(NamedTuple):
    """An index that was told everything."""

    told: PrefixIndex
    spent_ns: list[int]  # for each event
    cpu_seconds: float
    used_bytes: int


def _apply(documents: list[bytes]) -> _Applied:
    before, cpu = _rss_bytes(), time.process_time()
    index = PrefixIndex(max_blocks=20_000_000)
    spent = []
    for document in documents:
        started = time.perf_counter_ns()
        message = decode_reply(document).body
        assert isinstance(message, EventBatch)
        index.apply(message)
        spent.append(time.perf_counter_ns() - started)
    return _Applied(index, spent, time.process_time() - cpu, _rss_bytes() - before)


def _typical_us(data: IndexData, spent_ns: list[int]) -> float:
    """Mean time of an event, were each one as its kind and size typically is.

    Medians of alike events, weighted by how many there are: what other programs do at the time
    moves a plain mean by a factor.
    """
    alike: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for event, spent in zip(data.events, spent_ns, strict=True):
        alike[event.kind, len(event.keys).bit_length()].append(spent)
    total = sum(statistics.median(group) * len(group) for group in alike.values())
    return total / len(spent_ns) / 1e3


def _find(index: PrefixIndex, queries: list[list[bytes]]) -> list[int]:
    """Nanoseconds of each query. Keys are objects of their own and freshly hashed, as in a
    gateway that has just computed them."""
    spent = []
    for query in queries:
        fresh: Any = [bytes(bytearray(key)) for key in query]
        any(map(hash, fresh))
        started = time.perf_counter_ns()
        index.held_lengths(NAMESPACE, fresh)
        spent.append(time.perf_counter_ns() - started)
    return spent


def _documents(data: IndexData) -> list[bytes]:
    """Each event as it stands in a frame on the wire."""
    sequences: Counter[int] = Counter()
    documents = []
    for event in data.events:
        sequences[event.node] += 1
        batch = EventBatch(_name(event.node), 1, sequences[event.node], [_message(event)])
        documents.append(encode_reply(0, batch)[LENGTH.size :])
    return documents


def _message(event: Event) -> BlocksStored | BlocksRemoved:
    if event.kind == "stored":
        return BlocksStored(NAMESPACE, event.parent, event.keys)
    return BlocksRemoved(NAMESPACE, event.keys, "capacity")


def _snapshot_rate(data: IndexData) -> float:
    """Blocks a second of one node's snapshot, decoded and taken in."""
    runs = [_message(event) for event in data.events if event.node == 0 and event.kind == "stored"]
    stored = [run for run in runs if isinstance(run, BlocksStored)]
    frame = encode_reply(0, Snapshot("n0", 1, 1, True, True, stored))[LENGTH.size :]
    index = PrefixIndex()
    started = time.perf_counter()
    message = decode_reply(frame).body
    assert isinstance(message, Snapshot)
    index.apply(message)
    return index.num_blocks() / (time.perf_counter() - started)


def _beside_peer(data: IndexData, own: dict[str, Any], longest: list[int]) -> dict[str, Any]:
    payloads = [(event.node, _peer_event(i, event)) for i, event in enumerate(data.events)]
    deep, shallow = ([[_word(key) for key in query] for query in queries]
                     for queries in (data.deep_queries, data.shallow_queries))  # fmt: skip
    script = Path(__file__).with_name("index_peer.py")
    with tempfile.TemporaryDirectory(prefix="perilune-index-") as folder:
        path = Path(folder) / "data.pickle"
        path.write_bytes(pickle.dumps((payloads, deep, shallow, NUM_ROUNDS, APPLY_ROUNDS)))
        reply = subprocess.run(
            [str(PEER_PYTHON), str(script), str(path)],
            capture_output=True, text=True, timeout=PEER_TIMEOUT_SECONDS, check=True,
        )  # fmt: skip
    peer = json.loads(reply.stdout.splitlines()[-1])
    apply_us = min(_typical_us(data, spent) for spent in peer["spent_ns"])
    return {
        "peer": PEER,
        "peer_find_p50_us": peer["deep_p50_us"],
        "peer_find_shallow_p50_us": peer["shallow_p50_us"],
        "peer_apply_us": apply_us,
        "peer_apply_cpu_s": peer["apply_cpu_s"],
        "peer_bytes_per_block": peer["bytes"] / own["blocks"],
        "peer_agrees": peer["longest"] == longest,
        "find_over_peer": own["find_p50_us"] / peer["deep_p50_us"],
        "apply_over_peer": own["apply_us"] / apply_us,
        "apply_cpu_over_peer": own["apply_cpu_s"] / peer["apply_cpu_s"],
    }


def _peer_event(number: int, event: Event) -> bytes:
    hashes = [_word(key) for key in event.keys]
    if event.kind == "removed":
        return _json(number, {"removed": {"block_hashes": hashes}})
    blocks = [{"block_hash": value, "tokens_hash": value} for value in hashes]
    parent = _word(event.parent) if event.parent else None
    return _json(number, {"stored": {"parent_hash": parent, "blocks": blocks}})


def _json(number: int, data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


def _word(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _name(node: int) -> str:
    return f"node-{node:02}"


def _best_median_us(spent: list[int]) -> float:
    """The lowest median of the rounds: other programs' noise only adds."""
    size = len(spent) // NUM_ROUNDS
    return min(_median_us(spent[i * size : (i + 1) * size]) for i in range(NUM_ROUNDS))


def _median_us(spent: list[int]) -> float:
    return _quantile_us(spent, 0.5)


def _quantile_us(spent: list[int], share: float) -> float:
    return sorted(spent)[int(len(spent) * share)] / 1e3


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
