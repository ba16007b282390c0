import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.core.errors import ProtocolError
from workers.core.framing import (
    LENGTH,
    FrameBuffer,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from workers.core.messages import MAX_FRAME_BYTES, Done, Lookup, Release


@given(owners=st.lists(st.text(max_size=50), max_size=8), cuts=st.lists(st.integers(1, 40)))
def test_stream_cut_anywhere_gives_the_same_messages(owners: list[str], cuts: list[int]) -> None:
    stream = b"".join(encode_request(i, Release(owner)) for i, owner in enumerate(owners))
    frames, got = FrameBuffer(), []
    for size in [*cuts, len(stream) + 1]:
        got += frames.feed(stream[:size])
        stream = stream[size:]
    assert [decode_request(document).body for document in got] == [Release(o) for o in owners]


def test_reply_comes_back() -> None:
    (document,) = FrameBuffer().feed(encode_reply(7, Done(3)))
    assert (decode_reply(document).seq, decode_reply(document).body) == (7, Done(3))


@given(st.binary(max_size=60))
def test_garbage_is_a_protocol_error(document: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(ProtocolError):
            decode(document)


def test_strangers_get_less_room() -> None:
    frames = FrameBuffer(100)
    with pytest.raises(ProtocolError, match="at most 100"):
        frames.feed(LENGTH.pack(101))


def test_too_long_frames_are_refused_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        FrameBuffer().feed(LENGTH.pack(MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="at most"):
        encode_request(1, Lookup(b"", [b"x" * MAX_FRAME_BYTES]))
