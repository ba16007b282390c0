"""Chains and holders in the shape of public request traces, made from a seed.

The shape (512-token blocks there, 64-token blocks here): every prompt begins with one system
prompt; half of the requests share nothing else; the others go on with a conversation. Prompt
lengths are log-normal, median 112 blocks, 1 % above 1,300; an answer has 343 tokens on average,
which is five blocks, each told of as it fills. Most blocks are seen once or twice. A conversation mostly stays with its node; sometimes another takes over and then holds it too, and
nodes lose tails of chains.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

NUM_ROUNDS = 3
"""Rounds of queries, each of its own ones: a query asked before would be in the caches."""
SYSTEM_BLOCKS = 8
TEMPLATES = 40
TEMPLATE_BLOCKS = 60
MEDIAN_BLOCKS = 112
SIGMA = 1.06
MAX_CHAIN_BLOCKS = 2000
ANSWER_BLOCKS = 5
RUN_BLOCKS = 8
"""Blocks that one event of a prefill tells of: the traces' own unit of 512 tokens, about what one
prompt gets of a step that several share."""


@dataclass(slots=True)
class Conversation:
    """One chain; `holders` says how many blocks of it each node holds."""

    keys: list[bytes]
    node: int
    holders: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of one node: a run after `parent` (b"": the head) was stored, or left."""

    kind: Literal["stored", "removed"]
    node: int
    parent: bytes
    keys: list[bytes]


@dataclass(slots=True)
class IndexData:
    """What nodes told, in order; and what is asked then."""

    num_nodes: int
    num_blocks: int = 0  # distinct
    events: list[Event] = field(default_factory=list)
    deep_queries: list[list[bytes]] = field(default_factory=list)  # go on with a conversation
    shallow_queries: list[list[bytes]] = field(default_factory=list)  # share the system prompt
    num_entries: int = 0  # (block, node) pairs held at the end


def make_data(
    num_blocks: int, num_nodes: int, query_blocks: int, num_queries: int, seed: int
) -> IndexData:
    """Deterministic in all arguments. Takes about three seconds for a million blocks."""
    return _Maker(num_blocks, num_nodes, random.Random(seed)).make(query_blocks, num_queries)


class _Maker:
    def __init__(self, num_blocks: int, num_nodes: int, rng: random.Random) -> None:
        self._rng = rng
        self._wanted = num_blocks
        self._data = IndexData(num_nodes)
        self._system = self._fresh(SYSTEM_BLOCKS)
        self._templates = [self._system + self._fresh(TEMPLATE_BLOCKS) for _ in range(TEMPLATES)]
        self._talks: list[Conversation] = []
        self._held: list[set[bytes]] = [set() for _ in range(num_nodes)]
        self._holders: Counter[bytes] = Counter()

    @property
    def _num_held(self) -> int:
        """Distinct blocks that some node holds."""
        return len(self._holders)

    def make(self, query_blocks: int, num_queries: int) -> IndexData:
        while self._num_held < self._wanted:
            self._request()
        data = self._data
        for _ in range(NUM_ROUNDS * num_queries):
            data.deep_queries.append(self._deep(query_blocks))
            data.shallow_queries.append(self._system + self._fresh(query_blocks - SYSTEM_BLOCKS))
        data.num_blocks = self._num_held
        data.num_entries = sum(map(len, self._held))
        return data

    def _fresh(self, count: int) -> list[bytes]:
        return [self._rng.randbytes(16) for _ in range(count)]

    def _length(self) -> int:
        length = self._rng.lognormvariate(math.log(MEDIAN_BLOCKS), SIGMA)
        return min(max(int(length), SYSTEM_BLOCKS + 1), MAX_CHAIN_BLOCKS)

    def _request(self) -> None:
        rng = self._rng
        going_on = self._talks and rng.random() < 0.5
        if going_on:
            recent = self._talks[-400:]
            talk = rng.choice(recent)
            if rng.random() < 0.2:
                talk.node = rng.randrange(self._data.num_nodes)
            room = MAX_CHAIN_BLOCKS - len(talk.keys)
            talk.keys += self._fresh(min(room, 1 + int(rng.expovariate(1 / 40))))
        else:
            head = rng.choice(self._templates) if rng.random() < 0.3 else self._system
            keys = head + self._fresh(max(self._length() - len(head), 1))
            talk = Conversation(keys, rng.randrange(self._data.num_nodes))
            self._talks.append(talk)
        self._store(talk, RUN_BLOCKS)
        talk.keys += self._fresh(int(rng.expovariate(1 / ANSWER_BLOCKS)))
        self._store(talk, 1)
        if rng.random() < 0.1:
            self._lose_tail(talk)

    def _store(self, talk: Conversation, run_blocks: int) -> None:
        held = self._held[talk.node]
        first = next((i for i, key in enumerate(talk.keys) if key not in held), len(talk.keys))
        for start in range(first, len(talk.keys), run_blocks):
            keys = talk.keys[start : start + run_blocks]
            parent = talk.keys[start - 1] if start else b""
            self._data.events.append(Event("stored", talk.node, parent, keys))
            held.update(keys)
            self._holders.update(keys)
        talk.holders[talk.node] = len(talk.keys)

    def _lose_tail(self, talk: Conversation) -> None:
        private = SYSTEM_BLOCKS + TEMPLATE_BLOCKS
        length = talk.holders[talk.node]
        if length <= private:
            return
        kept = self._rng.randrange(private, length)
        keys = talk.keys[kept:length]
        self._holders.subtract(keys)
        for key in keys:
            if not self._holders[key]:
                del self._holders[key]
        self._data.events.append(Event("removed", talk.node, talk.keys[kept - 1], keys))
        self._held[talk.node].difference_update(keys)
        talk.holders[talk.node] = kept

    def _deep(self, query_blocks: int) -> list[bytes]:
        keys = self._rng.choice(self._talks).keys[:query_blocks]
        return keys + self._fresh(query_blocks - len(keys))
