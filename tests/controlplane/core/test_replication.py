"""Hot blocks go to where they are lacking: within bounds, once, and not what a leg brings itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.placement import Placing, Rules, place
from controlplane.core.replication import (
    COOLDOWN_SECONDS,
    COPY_SECONDS,
    HOT_REQUESTS,
    MAX_COPIED_BLOCKS,
    MAX_RUNNING,
    Copy,
    Placed,
    Replication,
    prefetch_window,
)
from controlplane.core.routing import PrefillOption, Source, TransferCost


class Times:
    """1 ms a computed token, nothing for cached ones."""

    def predict(self, uncached_tokens: int, cached_tokens: int) -> float:
        return uncached_tokens / 1000


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name}/{i}".encode() for i in range(count)]


def placed(
    wanted: list[bytes], held: dict[str, int], queues: dict[str, float], moves: bool = False
) -> Placed:
    """Nodes are named as their workers; blocks are of 100 tokens."""
    options = [
        PrefillOption(name, name, held.get(name, 0) * 100, queue, 0, Times())
        for name, queue in queues.items()
    ]
    source = None
    if moves:
        link = TransferCost(1e-6)
        holder = max(held, key=held.__getitem__)
        source = Source(holder, held[holder] * 100, dict.fromkeys(queues, link))
    tokens = len(wanted) * 100 + 50
    return Placed(wanted, held, place(Rules(explore_share=0), options, Placing(tokens), source))


def decisions(replication: Replication, request: Placed, count: int = HOT_REQUESTS) -> list[Copy]:
    made = [replication.decide(request, now=float(i)) for i in range(count)]
    replication.check_integrity()
    return [copy for copy in made if copy is not None]


class TestDecide:
    def test_the_chosen_node_far_behind_gets_what_is_hot(self) -> None:
        wanted = keys("system", 8)
        request = placed(wanted, {"a": 8}, {"a": 9.0, "b": 0.0})
        assert request.ordered[0].option.node_id == "b"
        (copy,) = decisions(Replication(), request)
        assert (copy.source, copy.destination, list(copy.keys)) == ("a", "b", wanted)

    def test_a_leg_that_fetches_itself_needs_no_copy(self) -> None:
        request = placed(keys("system", 8), {"a": 8}, {"a": 9.0, "b": 0.0}, moves=True)
        assert request.ordered[0].transfer_seconds > 0
        assert decisions(Replication(), request) == []

    def test_what_is_wanted_once_stays_where_it_is(self) -> None:
        request = placed(keys("chat", 8), {"a": 8}, {"a": 9.0, "b": 0.0})
        assert decisions(Replication(), request, HOT_REQUESTS - 1) == []

    def test_only_the_hot_part_of_a_chain(self) -> None:
        replication, system = Replication(), keys("system", 4)
        copies = []
        for i in range(HOT_REQUESTS):
            chain = [*system, *keys(f"chat{i}", 4)]
            request = placed(chain, {"a": 8}, {"a": 9.0, "b": 0.0})
            copies.append(replication.decide(request, float(i)))
        assert copies[:-1] == [None] * (HOT_REQUESTS - 1)
        assert copies[-1] is not None
        assert list(copies[-1].keys) == system

    def test_a_holder_that_requests_queue_for_is_relieved(self) -> None:
        wanted = keys("system", 40)
        busy = placed(wanted, {"a": 40}, {"a": 3.0, "b": 0.2, "c": 1.0})
        assert busy.ordered[0].option.node_id == "a"  # 4 s of computing elsewhere
        (copy,) = decisions(Replication(), busy)
        assert (copy.source, copy.destination) == ("a", "b")
        idle = placed(wanted, {"a": 40}, {"a": 0.0, "b": 0.0})
        assert decisions(Replication(), idle) == []

    def test_not_far_behind_is_near_enough(self) -> None:
        request = placed(keys("system", 8), {"a": 8, "b": 7}, {"a": 9.0, "b": 0.0})
        assert decisions(Replication(), request) == []


class TestBounds:
    def test_the_same_copy_has_a_cooldown(self) -> None:
        replication = Replication()
        request = placed(keys("system", 8), {"a": 8}, {"a": 9.0, "b": 0.0})
        assert len(decisions(replication, request, 40)) == 1
        replication.arrived("b", 8)
        assert replication.decide(request, 41.0) is None
        late = COOLDOWN_SECONDS + COPY_SECONDS
        assert [replication.decide(request, late + i) for i in range(3)].count(None) == 2

    def test_one_copy_at_a_time_to_a_node_and_few_in_all(self) -> None:
        replication = Replication()
        made = [
            copy.destination
            for number in range(2 * MAX_RUNNING)
            for name in ("x", "y")
            for copy in decisions(
                replication,
                placed(keys(f"{name}{number}", 4), {"a": 4}, {"a": 9.0, f"b{number}": 0.0}),
            )
        ]
        assert len(made) == len(set(made)) == MAX_RUNNING

    def test_a_copy_is_bounded(self) -> None:
        request = placed(keys("book", 4 * MAX_COPIED_BLOCKS), {"a": 4 * MAX_COPIED_BLOCKS},
                         {"a": 999.0, "b": 0.0})  # fmt: skip
        (copy,) = decisions(Replication(), request)
        assert len(copy.keys) == MAX_COPIED_BLOCKS

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 40)), max_size=60))
    def test_bounds_hold_whatever_comes(self, steps: list[tuple[int, int, float]]) -> None:
        replication, now = Replication(), 0.0
        for chain, held, seconds in steps:
            now += seconds
            wanted = keys(f"chain{chain}", 10)
            request = placed(wanted, {"a": held}, {"a": 9.0, f"b{chain}": 0.0})
            replication.decide(request, now)
            replication.check_integrity()


def test_the_window_of_a_prefetch() -> None:
    assert prefetch_window(1000, 256, 1e9) == 1
    assert prefetch_window(5000, 256, 1e9) == 4
    assert prefetch_window(60_000, 256, 1e9) == 8
    assert prefetch_window(60_000, 256, 2e10) == 12
