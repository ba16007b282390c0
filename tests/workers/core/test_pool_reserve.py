"""How much a pool keeps free by demoting ahead, and what is lost where that is too little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workers.core.hashing import block_hashes

MakeBench = Callable[..., Any]
DEFAULT_SHARE = 1 / 16


def chain(name: int, length: int) -> Any:
    return block_hashes(name.to_bytes(4, "big"), range(length), 1)


def traffic(bench: Any, length: int, num_requests: int = 300) -> tuple[float, float]:
    """Prompts of which each comes back after 10 others, promoted first. Shares: of the blocks that
    left memory, those that left without a copy; of what came back, what was there still."""
    hits = asked = 0
    for number in range(num_requests):
        back = number % 4 == 3 and number > 20
        keys = chain(number - 13 if back else number, length)
        if back:
            found = bench.pool.lookup(b"s" * 32, keys)
            hits += found.num_held + found.num_on_disk
            asked += length
            bench.promote(keys, f"load:d1:{number}")
            bench.demote()
            bench.pool.serve_wanted()
            bench.work()
        bench.store(keys)
        bench.pool.release(f"load:d1:{number}", bench.now)
        bench.demote()
    counters = bench.pool.counters
    gone = counters.dropped_undemoted_total
    return gone / max(1, gone + counters.demoted_blocks_total), hits / asked


@pytest.mark.parametrize(
    ("num_slots", "length"),
    # With a share alone, 59 to 83 % of what left was lost, and at most a third of what came back
    # was there.
    [(16, 4), (32, 6), (32, 8), (32, 12), (64, 16), (128, 32)],
)
def test_small_pools_demote_what_leaves(make_bench: MakeBench, num_slots: int, length: int) -> None:
    bench = make_bench(num_slots, 10_000, reserve_share=DEFAULT_SHARE)
    lost, back = traffic(bench, length)
    assert lost < 0.03
    assert back > 0.9


def test_the_reserve_is_at_least_some_slots_and_at_most_a_quarter_of_few(
    make_bench: MakeBench,
) -> None:
    sizes = (2, 16, 32, 128, 1000, 4096, 100_000)
    pools = [make_bench(size, 8, reserve_share=DEFAULT_SHARE).pool for size in sizes]
    assert [pool.reserve for pool in pools] == [1, 4, 8, 8, 62, 256, 256]


def test_it_follows_the_largest_store_of_late_and_forgets_it(make_bench: MakeBench) -> None:
    bench = make_bench(128, 100, reserve_share=DEFAULT_SHARE)
    bench.store(chain(1, 40))
    assert bench.pool.reserve == 40
    for _ in range(40):
        bench.store(chain(1, 40))
    assert bench.pool.reserve == 8, "nothing new came"
    bench.store(chain(2, 100))
    assert bench.pool.reserve == 64, "never more than half of the pool"


def test_a_large_pool_keeps_what_it_kept(make_bench: MakeBench) -> None:
    bench = make_bench(8192, 100, reserve_share=DEFAULT_SHARE)
    bench.store(chain(1, 400))
    assert bench.pool.reserve == 256
