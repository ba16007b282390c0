"""Keys of text pieces: heads in common, owners by what they were sent, bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.text_keys import (
    BYTES_PER_TOKEN,
    MAX_OWNERS,
    MAX_PIECES,
    PIECE_BYTES,
    TextIndex,
    text_prompt,
)

TOKENS = PIECE_BYTES // BYTES_PER_TOKEN


def text(*pieces: int) -> bytes:
    return b"".join(b"%2048d" % piece for piece in pieces)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_keys_are_shared_as_far_as_the_heads_are(left: list[int], right: list[int]) -> None:
    a, b = text_prompt(text(*left) + b"tail", b"m"), text_prompt(text(*right), b"m")
    alike = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
        min(len(left), len(right)),
    )
    assert len(a.keys) == len(left)
    assert [x == y for x, y in zip(a.keys, b.keys, strict=False)] == [
        i < alike for i in range(min(len(left), len(right)))
    ]


def test_other_salts_share_nothing() -> None:
    assert text_prompt(text(1), b"a").keys != text_prompt(text(1), b"b").keys


def test_an_owner_has_what_it_was_sent_from_the_head_on() -> None:
    index = TextIndex()
    index.learn(text_prompt(text(1, 2, 3), b""), "a")
    index.learn(text_prompt(text(1, 2, 9, 9), b""), "b")
    held = index.held_tokens(text_prompt(text(1, 2, 3, 4), b""))
    assert held == {"a": 3 * TOKENS, "b": 2 * TOKENS}
    assert index.held_tokens(text_prompt(text(2, 3), b"")) == {}
    assert index.held_tokens(text_prompt(b"short", b"")) == {}


def test_it_is_bounded_and_heads_stay_longest() -> None:
    index = TextIndex(max_keys=10)
    for i in range(50):
        index.learn(text_prompt(text(i, i + 1, i + 2, i + 3), b""), "a")
        assert len(index) <= 10
    assert index.held_tokens(text_prompt(text(47, 48, 49, 50), b""))["a"] >= TOKENS
    for i in range(20):
        index.learn(text_prompt(text(7), b""), f"w{i}")
    assert len(index.held_tokens(text_prompt(text(7), b""))) == MAX_OWNERS
    assert len(text_prompt(b"x" * (MAX_PIECES + 9) * PIECE_BYTES, b"").keys) == MAX_PIECES
