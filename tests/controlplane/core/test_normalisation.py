"""Texts in one form: what each rule changes, and what none may touch."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.normalisation import Rule, normalised

RULES: tuple[Rule, ...] = get_args(Rule)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "a  b \r\nc"}


@pytest.mark.parametrize(("rule", "text", "expected"), [
    ("line_ends", "a\r\nb\rc\n\n", "a\nb\nc\n\n"),
    ("spaces", "a\u00a0 b\tc  \n    x =  1\t\n", "a b c\n    x = 1\n"),
    ("spaces", "  indented", "  indented"),
    ("system_first", "a  b\r\n", "a  b\r\n"),
])  # fmt: skip
def test_a_rule_does_what_it_says(rule: Rule, text: str, expected: str) -> None:
    fields, applied = normalised({"prompt": text, "n": 1}, [rule], chat=False)
    assert fields == {"prompt": expected, "n": 1}
    assert applied == ([rule] if text != expected else [])


def test_system_messages_go_first_in_their_order() -> None:
    developer = {"role": "developer", "content": "x"}
    fields, applied = normalised(
        {"messages": [USER, SYSTEM, USER, developer]}, ["system_first"], chat=True
    )
    assert fields["messages"] == [SYSTEM, developer, USER, USER]
    assert applied == ["system_first"]
    assert normalised({"messages": [SYSTEM, USER]}, ["system_first"], chat=True)[1] == []


def test_parts_of_text_change_and_nothing_else() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:  x\r"}}
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a":  "\\r"}'}}
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a  b"}, picture],
        "tool_calls": [call],
    }
    fields, _ = normalised({"messages": [message]}, RULES, chat=True)
    assert fields["messages"][0] == {
        **message,
        "content": [{"type": "text", "text": "a b"}, picture],
    }
    ids = {"prompt": [[1, 2], [3]]}
    assert normalised(ids, RULES, chat=False) == (ids, [])


BROKEN = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner, max_size=3),
)  # fmt: skip


@given(BROKEN, st.booleans())
def test_malformed_bodies_are_the_engines_to_judge_and_twice_is_once(
    value: Any, chat: bool
) -> None:
    fields = {"messages" if chat else "prompt": value}
    once, _ = normalised(fields, RULES, chat=chat)
    assert once.keys() == fields.keys()
    assert normalised(once, RULES, chat=chat) == (once, [])
