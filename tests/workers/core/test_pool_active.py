"""The newest blocks of active sequences stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.core.hashing import block_hashes
from workers.core.pool_integrity import check_integrity

SPACE = b"s" * 32
A = block_hashes(b"a", range(20), 1)
B = block_hashes(b"b", range(20), 1)
C = block_hashes(b"c", range(20), 1)
MakeBench = Callable[..., Any]


class TestActiveSequences:
    def test_newest_blocks_of_active_sequences_stay(self, make_bench: MakeBench) -> None:
        bench = make_bench(8, 0, pin_active_share=0.5, pin_active_blocks=2)
        bench.store(A[:4])
        bench.store(B[:8])
        assert bench.tiers(A[:4]) == "dddd"
        assert bench.tiers(B[:8]) == "dddd----"
        bench.pool.expire(bench.now + 31)
        bench.store(C[:6])
        assert bench.tiers(A[:4]).rstrip("-") != "dddd"
        check_integrity(bench.pool)

    def test_share_bounds_them_and_the_session_that_is_over_lets_go(
        self, make_bench: MakeBench
    ) -> None:
        bench = make_bench(8, 0, pin_active_share=0.5, pin_active_blocks=2)
        bench.store(A[:5])
        assert bench.pool.active.num_kept == 0, "longer than the share"
        bench.store(B[:2])
        bench.store(C[:1])
        assert bench.pool.active.num_kept == 3
        assert bench.pool.hint(SPACE, B[:2], "over", bench.now) == 2
        assert bench.pool.active.num_kept == 1
        assert bench.pool.hint(SPACE, A[:4], "continue", bench.now) == 4
        assert bench.pool.active.num_kept == 4, "the one used longest ago gives way"
        assert [bench.pool.blocks[key].keeps for key in A[:5]] == [0, 0, 1, 1, 0]
        check_integrity(bench.pool)

    def test_a_conversation_is_kept_once_at_its_end(self, make_bench: MakeBench) -> None:
        bench = make_bench(16, 0, pin_active_share=1.0, pin_active_blocks=3)
        for length in (2, 5, 9):
            bench.store(A[:length])
        assert len(bench.pool.active) == 1
        kept = [key for key in A if key in bench.pool.blocks and bench.pool.blocks[key].keeps]
        assert kept == A[6:9]
        check_integrity(bench.pool)
