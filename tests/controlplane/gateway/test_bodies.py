"""Bodies as engines read them: pydantic takes 5.0 and "5" for 5, and "yes" for true."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from controlplane.gateway.bodies import (
    Holder,
    LegParams,
    decode_leg,
    label_of,
    ours,
    parse,
    prefill_leg,
    session_of,
)


class EngineBody(BaseModel):
    """The two types, as vLLM's own bodies declare them."""

    stream: bool | None = False
    max_tokens: int | None = 16
    n: int | None = 1


VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 5.0, 5.5, 0.0, "5", "5.0", "0", "-3", "x", "", "inf", "nan",
    "true", "TRUE", "yes", "on", "off", "no", "t", "2", [], {}, 1e300, 10**30,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_leg_1_is_capped_whatever_form_the_client_chose(value: Any) -> None:
    """Leg 1 asks for one token of one choice, unstreamed, or for what the engine will refuse."""
    for name, wanted in (("stream", False), ("max_tokens", 1), ("n", 1)):
        body = parse(json.dumps({name: value}).encode(), chat=False)
        sent = json.loads(prefill_leg(body, ours(LegParams("t", "prefill")), None))
        try:
            reads = getattr(EngineBody.model_validate({name: value}), name)
        except ValidationError:
            assert sent[name] in (value, wanted)  # leg 2 has it as it came
            continue
        if name == "stream":
            assert body.stream is (reads is True)
            assert not EngineBody.model_validate(sent).stream
        elif reads is None or reads >= 1:
            assert sent[name] == wanted
        else:
            assert sent[name] == value


class TestSessionAndHolder:
    @pytest.mark.parametrize(
        ("header", "session"),
        [(b"over", "over"), (b" Continue ", "continue"), (b"", ""), (b"perhaps", "")],
    )
    def test_a_hint_is_one_of_two_words_or_none(self, header: bytes, session: str) -> None:
        assert session_of({b"x-perilune-session": header}) == session
        assert session_of({}) == ""

    def test_legs_name_the_node_to_pull_from(self) -> None:
        body = parse(b'{"prompt": "a"}', chat=False)
        params = LegParams("t", "decode", 4, "over", Holder("n1", "tcp:10.0.0.1:7720", 7))
        sent = json.loads(decode_leg(body, ours(params), None))
        assert sent["kv_transfer_params"]["perilune"] == {
            "transfer_id": "t", "leg": "decode", "num_blocks": 4, "session": "over",
            "holder": {"node_id": "n1", "endpoint": "tcp:10.0.0.1:7720", "incarnation": 7},
        }  # fmt: skip
        plain = json.loads(prefill_leg(body, ours(LegParams("t", "prefill")), None))
        assert plain["kv_transfer_params"] == {"perilune": {"transfer_id": "t", "leg": "prefill"}}

    @pytest.mark.parametrize(
        ("header", "label"),
        [(b"report", "report"), (b" Long.Form-2 ", "long.form-2"), (b"a b", ""), (b"x" * 33, "")],
    )
    def test_a_class_is_a_short_plain_word_or_none(self, header: bytes, label: str) -> None:
        assert label_of({b"x-perilune-class": header}) == label


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"prompt": "a"}, 1), ({"prompt": ["a"]}, 1), ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [1, 2, 3]}, 1), ({"prompt": [[1], [2, 3]]}, 2), ({"prompt": []}, 1),
        ({"prompt": "a", "n": 3}, 3), ({"prompt": ["a", "b"], "n": "2"}, 4),
        ({"prompt": "a", "n": 2.0}, 2), ({"prompt": "a", "n": None}, 1), ({"prompt": "a", "n": "x"}, 1),
    ],
)  # fmt: skip
def test_sequences_are_prompts_times_choices(fields: dict[str, Any], wanted: int) -> None:
    assert parse(json.dumps(fields).encode(), chat=False).num_sequences == wanted


def test_a_chat_has_one_prompt() -> None:
    body = parse(b'{"messages": [{}, {}], "prompt": ["a", "b"], "n": 2}', chat=True)
    assert body.num_sequences == 2


def test_leg_1_has_the_fields_that_its_connector_needs_instead_of_the_clients() -> None:
    body = parse(b'{"prompt": "a", "min_tokens": 40}', chat=False)
    assert "min_tokens" not in json.loads(prefill_leg(body, None, None))
    assert json.loads(prefill_leg(body, None, None, {"min_tokens": 1}))["min_tokens"] == 1
