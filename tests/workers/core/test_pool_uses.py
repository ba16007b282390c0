"""One request of two legs is one use of a block, in whatever names its pins are held."""

from __future__ import annotations

import pytest

from workers.core.hashing import block_hashes
from workers.core.ids import OwnerId, load_owner, request_of, transfer_owner
from workers.core.messages import StoredSlot
from workers.core.policies.registry import POLICIES, make_policy
from workers.core.pool_state import ClientRef, PoolLimits, PoolState

SPACE = b"s" * 32
CHAIN = block_hashes(b"root", [1, 2, 3], 1)


@pytest.mark.parametrize(
    ("owner", "request_name"),
    [
        (transfer_owner("t1"), "t1"),
        (load_owner("d1", "cmpl-7", "t1"), "t1"),
        (load_owner("d1", "a#b", "t1"), "t1"),
        (load_owner("d1", "cmpl-7"), "load:d1:cmpl-7"),
        (OwnerId("store:p1:cmpl-7"), "store:p1:cmpl-7"),
        (OwnerId("odd"), "odd"),
    ],
)
def test_the_request_of_an_owner(owner: OwnerId, request_name: str) -> None:
    assert request_of(owner) == request_name


def test_loads_of_one_transfer_have_owners_of_their_own() -> None:
    assert load_owner("d1", "r-0", "t1") != load_owner("d1", "r-1", "t1")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_both_legs_are_one_use(name: str) -> None:
    pool = PoolState(8, make_policy(name), PoolLimits())
    prefill, decode = ClientRef(1, "p1"), ClientRef(2, "d1")

    def serve(transfer: str, now: float) -> list[int]:
        pool.prepare_load(prefill, load_owner("p1", "r", transfer), SPACE, CHAIN, now)
        given = pool.prepare_store(prefill, transfer_owner(transfer), SPACE, b"", CHAIN, now + 1)
        stored = [StoredSlot(ref.slot, ref.generation, 1) for ref in given.slots if ref]
        pool.complete_store(now + 2, stored)
        pool.prepare_load(decode, load_owner("d1", "q", transfer), SPACE, CHAIN, now + 3)
        for owner in (load_owner("p1", "r", transfer), load_owner("d1", "q", transfer)):
            pool.release(owner, now + 4)
        pool.release(transfer_owner(transfer), now + 5)
        uses = [pool.policy.use_of(key) for key in CHAIN]
        return [use.uses for use in uses if use is not None]

    assert serve("t1", 100.0) == [1, 1, 1]
    assert serve("t2", 200.0) == [2, 2, 2]
