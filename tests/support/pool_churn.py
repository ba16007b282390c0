"""Processes that store and load blocks of known content through a real agent, without pause.

`python pool_churn.py writer|reader SOCKET COUNTS_FILE SEED` runs one of them until it is killed.
A block's content follows from its key, so that a reader can tell any wrong byte.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from blake3 import blake3

from workers.client import AgentClient, make_hello
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import ReportCorrupt, SlotRef, StoredSlot
from workers.core.stats_messages import NamespaceSpec
from workers.pool.arena import Slab, checksum_of

BLOCK_TOKENS = 64
BLOCK_BYTES = 65_536
CHAIN_BLOCKS = 16
NUM_CHAINS = 180
PROMOTION_SECONDS = 1.0
SPEC = NamespaceSpec(
    model_id="churn", weights_version="1", kv_dtype="bfloat16", page_layout="LBHNC", isa="vec",
    page_bytes=(BLOCK_BYTES // 2, BLOCK_BYTES // 2), engine_block_tokens=BLOCK_TOKENS,
    block_tokens=BLOCK_TOKENS, tp_size=1, rank_layout="tp1",
)  # fmt: skip
NAMESPACE = namespace_digest(SPEC)


def chain(number: int) -> list[bytes]:
    root = root_hash(NAMESPACE, f"chain {number}", None)
    tokens = range(number, number + CHAIN_BLOCKS * BLOCK_TOKENS)
    return [*block_hashes(root, tokens, BLOCK_TOKENS)]


def content(key: bytes) -> bytes:
    return blake3(key).digest(length=BLOCK_BYTES)


class Churner:
    """One client process."""

    def __init__(self, kind: str, socket: str, counts: Path, seed: int) -> None:
        self.kind = kind
        self.rng = random.Random(seed)
        self.client_id = f"{kind[0]}{seed}"
        hello = make_hello("worker", self.client_id, namespace=SPEC)
        self.client = AgentClient(f"unix:{socket}", hello, timeout_seconds=5.0)
        self.counts_file = counts
        self.counts: Counter[str] = Counter()
        self.slab: Slab | None = None
        self.incarnation = 0
        self.numbers = itertools.count()
        self.chains = [chain(number) for number in range(NUM_CHAINS)]
        self.checksums = {key: checksum_of(content(key)) for c in self.chains for key in c}
        self._told = 0.0

    def run(self) -> None:
        step = self.store if self.kind == "writer" else self.load
        while True:
            try:
                self.attach()
                step(self.chains[self._pick()], f"{os.getpid()}-{next(self.numbers)}")
            except (AgentUnavailableError, RefusedError, ProtocolError, OSError):
                self.counts["away"] += 1
                time.sleep(0.02)
            self._tell()

    def attach(self) -> None:
        """The slab of the agent that answers now."""
        welcome = self.client.connect()
        if welcome.incarnation != self.incarnation:
            if self.slab is not None:
                self.slab.close()
            self.slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)
            self.incarnation = welcome.incarnation

    def store(self, keys: Sequence[bytes], number: str) -> None:
        """What a prefill worker does, a few blocks at a time; sometimes it gives up midway."""
        owner = f"transfer:{number}"
        for first in range(0, len(keys), 4):
            parent = keys[first - 1] if first else b""
            wanted = keys[first : first + 4]
            tenant = f"t{self.chains.index(list(keys)) % 3}"
            reply = self.client.prepare_store(owner, NAMESPACE, parent, wanted, tenant=tenant)
            self.counts["refused"] += reply.num_refused
            slots = [(r, k) for r, k in zip(reply.slots, wanted, strict=True) if r is not None]
            given_up = self.rng.random() < 0.02
            stored = [] if given_up else [self._write(ref, key) for ref, key in slots]
            failed = [ref for ref, _ in slots] if given_up else []
            if slots:
                self.client.complete_store(owner, stored, failed)
            self.counts["stored"] += len(stored)
            if reply.num_refused or given_up:
                break
        self.client.release(owner)

    def _write(self, ref: SlotRef, key: bytes) -> StoredSlot:
        assert self.slab is not None
        checksum = self.slab.write_block(ref.slot, ref.generation, key, content(key))
        return StoredSlot(ref.slot, ref.generation, checksum)

    def load(self, keys: Sequence[bytes], number: str) -> None:
        """What a decode worker does: bring back what lies on SSD, pin, copy, verify, let go."""
        owner = f"load:{self.client_id}:{number}"
        self._bring_back(keys, owner)
        refs = self.client.prepare_load(owner, NAMESPACE, keys)
        assert self.slab is not None
        for ref, key in zip(refs, keys, strict=False):
            data = self.slab.read_block(ref.slot, ref.generation, key)
            if data is None:
                self.counts["unreadable"] += 1
                self.client.report_corrupt(
                    ReportCorrupt(NAMESPACE, key, ref.slot, ref.generation, "checksum")
                )
            elif checksum_of(data) == self.checksums[key]:
                self.counts["read"] += 1
            else:
                self.counts["WRONG"] += 1
        self.client.release(owner)
        self.counts["asked"] += len(keys)
        self.counts["hit"] += len(refs)

    def _bring_back(self, keys: Sequence[bytes], owner: str) -> None:
        reply = self.client.lookup(NAMESPACE, keys)
        deadline = time.monotonic() + PROMOTION_SECONDS
        self.counts["on_disk"] += reply.num_on_disk
        while reply.num_on_disk and time.monotonic() < deadline:
            reply = self.client.promote(owner, NAMESPACE, keys, self.rng.choice(URGENCIES))
            time.sleep(0.001)

    def _pick(self) -> int:
        """Some chains are wanted far more than others."""
        return (
            min(int(self.rng.paretovariate(0.6)) - 1, NUM_CHAINS - 1)
            if (self.rng.random() < 0.7)
            else self.rng.randrange(NUM_CHAINS)
        )

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told > 0.5:
            self._told = now
            fresh = self.counts_file.with_suffix(".new")
            fresh.write_text(json.dumps(self.counts))
            fresh.replace(self.counts_file)


URGENCIES: list[Literal["first_token", "batch"]] = ["first_token", "batch"]

if __name__ == "__main__":
    Churner(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])).run()
