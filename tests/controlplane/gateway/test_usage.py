"""Corrections of replies touch the field and no other byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.gateway.usage import correct_events, read_whole

ODD = (
    b'{"id":"x","choices":[{"index":0,"text":"\\"usage\\":{\\"prompt_tokens\\":5}",'
    b'"logprobs":{"token_logprobs":[-1.00e-3,-0.10]},"finish_reason":"length",'
    b'"stop_reason":9.0}], "usage" : %b,"kv_transfer_params":%b}'
)


def details(cached: int | None) -> dict[str, Any] | None:
    return None if cached is None else {"cached_tokens": cached}


def odd(usage: bytes, params: bytes = b"null") -> bytes:
    return ODD % (usage, params)


@pytest.mark.parametrize("usage", [b'{"prompt_tokens":1e999}', b'{"prompt_tokens":1,"x":"\xff"}'])
def test_a_usage_that_cannot_be_read_is_passed_on_as_it_is(usage: bytes) -> None:
    assert read_whole(odd(usage), details(4)).body == odd(usage)


@pytest.mark.parametrize(("usage", "cached", "expected"), [
    (b'{"prompt_tokens":9,"prompt_tokens_details":null}', 4,
     b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}'),
    (b'{"prompt_tokens":9}', 0, b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}'),
    (b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}', 40,
     b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}}'),
    (b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}', None, b'{"prompt_tokens":9}'),
    (b'{"prompt_tokens_details":{"cached_tokens":8,"multimodal_tokens":{"image":4}}}', None,
     b'{"prompt_tokens_details":{"cached_tokens":null,"multimodal_tokens":{"image":4}}}'),
    (b'{"prompt_tokens":9,"prompt_tokens_details":null}', None,
     b'{"prompt_tokens":9,"prompt_tokens_details":null}'),
    (b"null", 4, b"null"),
])  # fmt: skip
def test_a15_a16_only_the_usage_changes(usage: bytes, cached: int | None, expected: bytes) -> None:
    read = read_whole(odd(usage), details(cached))
    assert read.body == odd(expected)
    assert read.by_length


def test_transfer_parameters_stay_among_ourselves() -> None:
    params = b'{"perilune": {"num_blocks": 3, "a": [1.50, "}"]}}'
    assert read_whole(odd(b"{}", params), None).body == odd(b"{}")


def test_a17_the_engines_count_is_taken_and_odd_stop_reasons_stay() -> None:
    body = odd(b'{"prompt_tokens":9,"completion_tokens":700}')
    read = read_whole(body, None)
    assert (read.prompt_tokens, read.completion_tokens) == (9, 700)
    assert read.body == body


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"usage":7}', b'{"choices":5}', b"\xff\xfe", b"null"]
)
def test_what_cannot_be_read_is_passed_on(body: bytes) -> None:
    assert read_whole(body, details(3)).body == body
    event = b"data: " + body + b'"usage"\n\n'
    assert correct_events(event, details(3)) == event


def test_the_last_frame_of_a_stream_has_the_details_and_others_have_none() -> None:
    middle = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":9}}\n\n'
    last = b'data: {"choices":[],"usage":{"prompt_tokens":9}}\n\n'
    done = b"data: [DONE]\n\n"
    with_details = last.replace(b":9}", b':9,"prompt_tokens_details":{"cached_tokens":2}}')
    assert correct_events(b": ping\n\n" + middle + last + done, details(2)) == (
        b": ping\n\n" + middle + with_details + done
    )


def test_details_of_leg_1_stand_whole_in_replies_and_without_nulls_in_frames() -> None:
    known = {"cached_tokens": 4, "created_cache_tokens": 5, "multimodal_tokens": None}
    read = read_whole(odd(b'{"prompt_tokens":9,"prompt_tokens_details":null}'), known)
    assert json.loads(read.body)["usage"]["prompt_tokens_details"] == known
    frame = b'data: {"choices":[],"usage":{"prompt_tokens":9}}\n\n'
    sent = json.loads(correct_events(frame, known)[6:])
    assert sent["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "created_cache_tokens": 5}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(st.text(max_size=6), JSON, max_size=4),
    st.none() | st.integers(0, 99),
    st.integers(0, 50),
)
@example({"usage": None}, None, 0)  # it stands before another field that holds the same
def test_any_reply_keeps_all_but_the_cached_count(
    other: dict[str, Any], cached: int | None, prompt: int
) -> None:
    usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": 50}}
    reply = {**other, "x": {"usage": usage}, "usage": usage, "kv_transfer_params": {"a": usage}}
    read = read_whole(json.dumps(reply).encode(), details(cached))
    ours = json.loads(read.body)
    found = ours["usage"].get("prompt_tokens_details")
    assert found == (None if cached is None else {"cached_tokens": min(cached, prompt)})
    expected = {**reply, "usage": ours["usage"], "kv_transfer_params": None}
    if "choices" not in other:
        assert ours == expected
