"""What a pool never does, however much comes: grow, decay in its hits, leave a hole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.core.hashing import block_hashes
from workers.core.ids import OwnerId
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef
from workers.core.quotas import MAX_GROUPS_A_KIND

SPACE = b"s" * 32
P1 = ClientRef(1, "p1")
A = block_hashes(b"a", range(20), 1)
B = block_hashes(b"b", range(20), 1)
C = block_hashes(b"c", range(20), 1)
MakeBench = Callable[..., Any]


def test_b39_keys_are_bounded_however_many_come(make_bench: MakeBench) -> None:
    bench = make_bench(64, 64, reserve_share=0.1)
    for number in range(3000):
        bench.store(block_hashes(number.to_bytes(4, "big"), range(3), 1), f"tenant{number}")
        bench.pool.demote_ahead(bench.now)
        bench.work()
    pool = bench.pool
    assert len(pool.blocks) <= 128
    assert len(pool.history) <= pool.history.max_entries
    assert len(pool.groups.all()) <= 2 * MAX_GROUPS_A_KIND
    assert len(pool.owners) == 0
    check_integrity(pool)


def test_b09_hit_rate_stays_level_under_one_and_a_half_times_the_pool(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(60, 0)
    chains = [block_hashes(f"chain{i}".encode(), range(6), 1) for i in range(15)]
    rates = []
    for _ in range(6):
        hits = asked = 0
        for number in range(150):
            keys = chains[(number * number + 3 * number) % 15]
            hits += bench.pool.lookup(SPACE, keys).num_held
            asked += len(keys)
            bench.store(keys)
            check_integrity(bench.pool)
        rates.append(hits / asked)
    assert min(rates[1:]) > 0.9 * max(rates)
    assert bench.pool.slots.num_used == len(bench.pool.blocks), "allocated = indexed"


def test_b40_an_empty_node_takes_no_more_at_once_than_its_queue(make_bench: MakeBench) -> None:
    """Nobody is slowed by a restarted node's appetite: it refuses beyond its write queue."""
    bench = make_bench(1000, 0, write_queue_blocks=16)
    reply = bench.pool.prepare_store(P1, OwnerId("t"), SPACE, b"", A, 0.0)
    assert (reply.num_refused, reply.write_queue) == (4, (16, 16))
    more = bench.pool.prepare_store(P1, OwnerId("u"), SPACE, b"", B, 0.0)
    assert more.num_refused == len(B)


def test_b43_refused_blocks_are_told_and_can_be_stored_without_a_hole(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(8, 0, write_queue_blocks=3)
    assert bench.store(A[:8]) == 3
    assert bench.pool.counters.store_refused_total == 5
    assert bench.store(A[5:8], parent=A[4]) == 0, "nothing behind a hole"
    assert bench.store(A[3:8], parent=A[2]) == 3
    assert bench.store(A[:8]) == 2
    assert bench.tiers(A[:8]) == "d" * 8
