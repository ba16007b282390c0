"""Requests that a plain engine and the gateway must answer alike, with the reasons where not.

A row is a call of the public `openai` client; arguments that the client does not know go into
its `extra_body`. `LONG` fills some blocks of the pool, so that KV really travels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat"]

LONG = (
    "The harbour master wrote down every ship that came in, the hour, the cargo and the name of"
    " the captain, and each evening the clerk copied the day's page into the great book. When the"
    " fog lay over the bay the bell was rung twice a minute, and boats waited outside the mole"
    " until the light on the tower could be seen. That winter forty ships came from the north"
    " with timber, and nine from the south with oranges and wine. "
)
QUESTION = [{"role": "user", "content": LONG + "What did the clerk copy each evening?"}]
SYSTEM = [{"role": "system", "content": "You answer briefly. " + LONG}, QUESTION[0]]
TURNS = [
    QUESTION[0],
    {"role": "assistant", "content": "The day's page."},
    {"role": "user", "content": "And what was rung?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        },
    },
}  # fmt: skip
CALL = {
    "id": "call_1", "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}  # fmt: skip
TOOL_TURNS = [
    {"role": "user", "content": "How is the weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees, rain"},
    {"role": "user", "content": "So?"},
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["city", "n"], "additionalProperties": False,
        },
    },
}  # fmt: skip
IDS = [504, 28, 827, 4321, 99, 1200, 30, 17] * 20
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@dataclass(frozen=True)
class Row:
    """One call. `different` names the fields that differ on purpose and why."""

    name: str
    api: Api
    arguments: dict[str, Any]
    different: dict[str, str] = field(default_factory=dict)
    model: str | None = None  # another than the served one


def completion(name: str, different: dict[str, str] | None = None, **arguments: Any) -> Row:
    defaults = {"prompt": LONG, "max_tokens": 6, "temperature": 0}
    return Row(name, "completions", {**defaults, **arguments}, different or {})


def chat(name: str, different: dict[str, str] | None = None, **arguments: Any) -> Row:
    defaults = {"messages": QUESTION, "max_tokens": 6, "temperature": 0}
    return Row(name, "chat", {**defaults, **arguments}, different or {})


NO_DETAILS = {
    "body.usage.prompt_tokens_details": "served whole by the decode worker, which does not tell:"
    " it would count as cached what it loads",
}
CATALOGUE = {"error": "the gateway's own catalogue answers, and names the models there are"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

COMPLETIONS = [
    completion("text"),
    completion("text, no cap", max_tokens=None, prompt="One, two,"),
    completion("short text", prompt="One, two,"),
    completion("list of one text", prompt=[LONG]),
    completion("list of texts", prompt=[LONG, "One, two,", LONG + "Then"]),
    completion("token ids", prompt=IDS),
    completion("lists of token ids", prompt=[IDS, IDS[:9]]),
    completion("unicode", prompt=LONG + "Größe, 日本語, 👩‍👩‍👧‍👦, e\u0301"),
    completion("special tokens in the text", prompt=LONG + "<|im_end|>\n<|im_start|>user\n"),
    completion("no special tokens", add_special_tokens=False),
    completion("two choices", n=2, temperature=0.7, seed=7),
    completion("texts with two choices each", prompt=[LONG, "One,"], n=2, temperature=0.7, seed=1),
    completion("seed", temperature=0.8, seed=42, top_p=0.9),
    completion("top_k and min_p", temperature=0.5, seed=3, top_k=5, min_p=0.05),
    completion("penalties", frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1),
    completion("stop", stop=[" ship", "."], max_tokens=40),
    completion("stop, kept in the text", stop=".", include_stop_str_in_output=True, max_tokens=40),
    completion("stop ids", stop_token_ids=[30], max_tokens=20),
    completion("min_tokens", min_tokens=5, max_tokens=9),
    completion("ignore_eos", ignore_eos=True, max_tokens=12),
    completion("logit_bias", logit_bias={"504": 5.0}),
    completion("bad words", bad_words=[" ship"]),
    completion("allowed ids", allowed_token_ids=[504, 28, 827]),
    completion("logprobs", logprobs=3),
    completion("logprobs 0", logprobs=0),
    completion("prompt_logprobs", NO_DETAILS, prompt_logprobs=1, prompt="One, two, three"),
    completion("echo", NO_DETAILS, echo=True),
    completion("echo of a list", NO_DETAILS, echo=True, prompt=["One, two,", "Three,"]),
    completion("echo with logprobs", NO_DETAILS, echo=True, logprobs=1, prompt="One, two, three"),
    completion("echo and nothing else", NO_DETAILS, echo=True, max_tokens=0),
    completion("echo, logprobs, nothing else", NO_DETAILS, echo=True, logprobs=1, max_tokens=0, prompt="One,"),
    completion("token ids returned", return_token_ids=True),
    completion("tokens as ids", logprobs=1, return_tokens_as_token_ids=True),
    completion("truncated prompt", truncate_prompt_tokens=16),
    completion("truncated to the model", NO_DETAILS, truncate_prompt_tokens=-1),
    completion("beam search", use_beam_search=True, n=2, max_tokens=4),
    completion("suffix", suffix="end"),
    completion("user", user="someone"),
    completion("cache_salt", cache_salt="mine"),
    completion("priority", priority=0),
    completion("regex", structured_outputs={"regex": "[0-9]{3}"}, max_tokens=8),
    completion("choice", structured_outputs={"choice": ["yes", "no"]}),
    completion("json_object", response_format={"type": "json_object"}, max_tokens=8),
    completion("stream", stream=True),
    completion("stream with usage", **USAGE),
    completion("stream, usage all along", stream=True,
               stream_options={"include_usage": True, "continuous_usage_stats": True}),
    completion("stream of a list", prompt=[LONG, "One,"], **USAGE),
    completion("stream of two choices", n=2, temperature=0.7, seed=9, **USAGE),
    completion("stream with echo", echo=True, stream=True),
    completion("stream with logprobs", logprobs=2, stream=True),
    completion("stream with stop", stop=[","], max_tokens=30, **USAGE),
    completion("stream with token ids", return_token_ids=True, stream=True),
]  # fmt: skip

CHATS = [
    chat("question"),
    chat("system prompt", messages=SYSTEM),
    chat("turns", messages=TURNS),
    chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    chat("both caps", max_tokens=9, max_completion_tokens=4),
    chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "Go on."}]}]),
    chat("developer", messages=[{"role": "developer", "content": "Be kind."}, QUESTION[0]]),
    chat("name", messages=[{"role": "user", "name": "Ann", "content": LONG}]),
    chat("go on with the last message", messages=[*QUESTION, {"role": "assistant", "content": "The"}],
         add_generation_prompt=False, continue_final_message=True),
    chat("echo", NO_DETAILS, echo=True),
    chat("three choices", n=3, temperature=0.7, seed=5),
    chat("seed", temperature=1.0, seed=11),
    chat("stop", stop=["."], max_tokens=30),
    chat("min_tokens", min_tokens=4, max_tokens=8),
    chat("logprobs", logprobs=True, top_logprobs=5),
    chat("logprobs of the token only", logprobs=True),
    chat("prompt_logprobs", NO_DETAILS, prompt_logprobs=1, messages=[{"role": "user", "content": "Hi"}]),
    chat("tools, none", tools=[TOOL], tool_choice="none"),
    chat("tool turns", messages=TOOL_TURNS, tools=[TOOL], tool_choice="none"),
    chat("named tool", tools=[TOOL], max_tokens=24,
         tool_choice={"type": "function", "function": {"name": "get_weather"}}),
    chat("json_schema", response_format=SCHEMA, max_tokens=40),
    chat("reasoning_effort", reasoning_effort="low"),
    chat("template arguments", chat_template_kwargs={"enable_thinking": False}),
    chat("template of its own", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"),
    chat("metadata and user", user="someone", metadata={"a": "b"}),
    chat("prompt text returned", return_prompt_text=True),
    chat("stream", stream=True),
    chat("stream with usage", **USAGE),
    chat("stream with logprobs", logprobs=True, top_logprobs=2, stream=True),
    chat("stream of two choices", n=2, temperature=0.7, seed=2, **USAGE),
    chat("stream of a tool call", tools=[TOOL], max_tokens=24, stream=True,
         tool_choice={"type": "function", "function": {"name": "get_weather"}}),
    chat("stream of a schema", response_format=SCHEMA, max_tokens=40, **USAGE),
]  # fmt: skip

REFUSED = [
    completion("max_tokens of a wrong type", max_tokens="many"),
    completion("max_tokens 0", max_tokens=0),
    completion("max_tokens below 0", max_tokens=-1),
    completion("temperature below 0", temperature=-1),
    completion("top_p over 1", top_p=1.5),
    completion("n 0", n=0),
    completion("prompt missing", prompt=None),
    completion("prompt empty", prompt=""),
    completion("prompt an empty list", prompt=[]),
    completion("prompt an object", prompt={"text": "a"}),
    completion("prompt of mixed types", prompt=["a", 5]),
    completion("token id below 0", prompt=[1, -2, 3]),
    completion("token id out of the vocabulary", prompt=[1, 10_000_000]),
    completion("prompt too long", prompt=[504] * 9000),
    completion("prompt and cap too long", prompt=[504] * 100, max_tokens=9000),
    completion("min over max", min_tokens=20, max_tokens=10),
    completion("too many logprobs", logprobs=500),
    completion("stream_options without stream", stream_options={"include_usage": True}),
    completion("stream of a wrong type", stream="perhaps"),
    completion("prompt_logprobs in a stream", prompt_logprobs=1, stream=True),
    completion("stream of a prompt too long", prompt=[504] * 9000, stream=True),
    completion("cache_salt empty", cache_salt=""),
    completion("bad regex", structured_outputs={"regex": "[0-9"}),
    completion("unknown priority", priority=5),
    chat("messages missing", messages=None),
    chat("messages empty", messages=[]),
    chat("messages of a wrong type", messages="hello"),
    chat("message without a role", messages=[{"content": "x"}]),
    chat("unknown part", messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    chat("image to a text model", messages=[{"role": "user", "content": [
        {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]}]),
    chat("top_logprobs without logprobs", top_logprobs=3),
    chat("tool_choice without tools", tool_choice="required"),
    chat("tool_choice auto, not enabled", tools=[TOOL], tool_choice="auto"),
    chat("unknown tool", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "x"}}),
    chat("bad schema", response_format={"type": "json_schema"}),
    chat("template arguments of a wrong type", chat_template_kwargs="x"),
    Row("unknown model", "completions", {"prompt": "a"}, model="no-such-model", different=CATALOGUE),
    Row("unknown model, chat", "chat", {"messages": QUESTION}, model="no-such-model", different=CATALOGUE),
]  # fmt: skip

TABLE = [*COMPLETIONS, *CHATS, *REFUSED]
