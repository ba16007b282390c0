"""Blocks on their way: counted while a leg is, by node, along the chain."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.expected import ExpectedBlocks


def chain(*numbers: int) -> list[bytes]:
    """Keys that name all before them, as block hashes do."""
    keys, parent = [], b""
    for number in numbers:
        parent += bytes([number])
        keys.append(parent)
    return keys


def test_a_continuation_finds_what_waits_before_it() -> None:
    expected = ExpectedBlocks()
    expected.start("a", "n1", chain(1, 2, 3))
    expected.start("b", "n2", chain(1, 9))
    assert expected.lengths(chain(1, 2, 3, 4)) == {"n1": 3, "n2": 1}
    expected.end("a")
    assert expected.lengths(chain(1, 2, 3, 4)) == {"n2": 1}
    expected.end("a")
    expected.end("b")
    assert expected.lengths(chain(1)) == {}
    assert len(expected) == 0


def test_changes_are_noted_for_those_who_want_them_and_hearsay_is_not() -> None:
    expected, keys = ExpectedBlocks(), chain(1, 2)
    expected.start("a", "n1", keys)
    assert expected.changes is None
    expected.changes = deque(maxlen=3)
    expected.start("b", "n1", keys)
    expected.start("b", "n1", keys)  # the same once more is no news
    assert expected.hear("other/c", "n2", chain(1, 2, 3))
    assert not expected.hear("other/c", "n3", chain(1))
    assert expected.lengths(chain(1, 2, 3, 4)) == {"n1": 2, "n2": 3}
    expected.end("b")
    assert expected.forget("other/c") == "n2"
    assert expected.forget("other/c") == ""
    assert list(expected.changes) == [("b", "n1", keys), ("b", "n1", ())]
    expected.check_integrity()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(st.integers(0, 2), max_size=4))
    )
)
def test_agrees_with_counting(steps: list[tuple[int, int, list[int]]]) -> None:
    expected, model = ExpectedBlocks(), {}
    for leg, node, numbers in steps:
        if numbers:
            expected.start(str(leg), f"n{node}", chain(*numbers))
            model[leg] = (f"n{node}", chain(*numbers))
        else:
            expected.end(str(leg))
            model.pop(leg, None)
        expected.check_integrity()
        for wanted in (chain(0, 1, 2, 0), chain(1, 1), chain(2)):
            counted: dict[str, int] = {}
            for name, keys in model.values():
                common = len(set(keys) & set(wanted))
                if common:
                    counted[name] = max(counted.get(name, 0), common)
            assert expected.lengths(wanted) == counted
