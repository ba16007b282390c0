"""Chat templates as the engine renders them: same globals, same reading of messages.

The engine's renderer reads a template's text to decide whether it wants message content as text
or as a list of parts; we decide alike. Whatever we get wrong costs a cache hit, never an answer.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_STANDARD = frozenset({"documents", "tools", "add_generation_prompt", "continue_final_message"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_UNSTABLE_SYSTEM_LINE = "x-anthropic-billing-header"  # the engine drops it from system messages


class UnsupportedPromptError(Exception):
    """A prompt whose tokens we do not know (images, templates of the client's own, ...)."""


class _Generation(ext.Extension):
    """`{% generation %}` marks what an assistant wrote; it prints its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_print")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _print(self, caller: Any) -> str:
        return str(caller())


class ChatTemplate:
    """One compiled template. Raises `jinja2.TemplateError` for what the template refuses."""

    def __init__(self, text: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(text)
        self._special = special_tokens
        tree = environment.parse(text)
        self._variables = meta.find_undeclared_variables(tree)
        self.wants_parts = _iterates_content(tree)
        self._knows_developer = '"developer"' in text or "'developer'" in text

    def render(self, fields: dict[str, Any]) -> str:
        """The prompt of a chat body."""
        messages = [self._message(message) for message in fields["messages"]]
        if not self._knows_developer and any(m["role"] == "developer" for m in messages):
            messages = _developer_as_system(messages)
        go_on = fields.get("continue_final_message") is True
        if go_on:
            messages[-1] = _marked(messages[-1])
        text = self._template.render(
            messages=messages,
            tools=_tools(fields.get("tools")),
            documents=fields.get("documents"),
            add_generation_prompt=fields.get("add_generation_prompt", True),
            **{**self._special, **self._extra(fields)},
        )
        return _cut_at_mark(text) if go_on else text

    def _extra(self, fields: dict[str, Any]) -> dict[str, Any]:
        extra = dict(fields.get("chat_template_kwargs") or {})
        effort = fields.get("reasoning_effort")
        if effort is not None:
            extra["reasoning_effort"] = effort
            extra.setdefault("enable_thinking", effort != "none")
        return {
            name: value
            for name, value in extra.items()
            if name in self._variables and name not in _STANDARD and value is not None
        }

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message["role"]
        parts = _parts(message.get("content"), role)
        if self.wants_parts and role != "tool":
            content: Any = parts
        else:
            content = "\n".join(part["text"] for part in parts if part["text"] or role == "tool")
        result = {"role": role, "content": content}
        if role == "assistant":
            _add_assistant_fields(result, message)
        if role == "tool" and "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                result[name] = message[name]
        if role == "developer":
            result["tools"] = message.get("tools")
        return result


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - local time, as the engine's
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _parts(content: Any, role: str) -> list[dict[str, Any]]:
    """Text parts of a message's content."""
    if content is None:
        return []
    items = [content] if isinstance(content, str) else content
    parts = [_part(item) for item in items]
    if role == "system":
        parts = [part for part in map(_without_unstable_line, parts) if part is not None]
    return parts


def _part(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    kind = item.get("type", "text") if isinstance(item, dict) else ""
    if kind not in _TEXT_PARTS:
        raise UnsupportedPromptError(f"content part of type {kind!r}")
    text = item.get(kind if kind in ("refusal", "thinking") else "text")
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise UnsupportedPromptError("a text part without text")
    return {"type": "text", "text": text}


def _without_unstable_line(part: dict[str, Any]) -> dict[str, Any] | None:
    if not part["text"].startswith(_UNSTABLE_SYSTEM_LINE):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _add_assistant_fields(result: dict[str, Any], message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want arguments as a mapping; clients send JSON text."""
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools with the engine's field order and defaults: templates print them as JSON."""
    if tools is None:
        return None
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    given = tool["function"]
    function = {name: given.get(name) for name in ("name", "description", "parameters")}
    for name in ("strict", "defer_loading"):
        if given.get(name) is not None:
            function[name] = given[name]
    return {"type": tool.get("type", "function"), "function": function}


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without that role: one system message at the head."""
    turned = [
        {**{k: v for k, v in m.items() if k != "tools"}, "role": "system"}
        if m["role"] == "developer"
        else m
        for m in messages
    ]
    system = [m for m in turned if m["role"] == "system"]
    if len(system) == 1 and turned[0]["role"] == "system":
        return turned
    texts = [m["content"] if isinstance(m["content"], str) else
             "\n".join(part["text"] for part in m["content"]) for m in system]  # fmt: skip
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(m for m in turned if m["role"] != "system")]


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    last = {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}
    return {**message, "content": [*content[:-1], last]}


def _cut_at_mark(text: str) -> str:
    place = text.rindex(_CONTINUE_MARK.strip())
    if text[place : place + len(_CONTINUE_MARK)] == _CONTINUE_MARK:
        return text[:place]
    return text[:place].rstrip()


# --- does a template loop over a message's content? ---


def _iterates_content(tree: nodes.Template) -> bool:
    """True if some loop runs over `message.content` (or a variable named `content`)."""
    message_names = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _is_messages(tree, loop.iter)
    }
    return any(
        _is_content(loop.iter, message_names)
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name)
    )


def _is_messages(tree: nodes.Template, node: nodes.Node) -> bool:
    names = {"messages"}
    for _ in range(3):  # names assigned from names, a few deep
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _root_name(assign.node) in names:
                names.add(assign.target.name)
    return _root_name(node) in names


def _root_name(node: nodes.Node) -> str:
    """The variable that an expression like `messages[1:] | list` reads."""
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return ""
        assert node.node is not None
        node = node.node
    return node.name if isinstance(node, nodes.Name) else ""


def _is_content(node: nodes.Node, message_names: set[str]) -> bool:
    while isinstance(node, nodes.Filter | nodes.Test):
        assert node.node is not None
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name == "content"
    owner: nodes.Node | None = None
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        owner = node.node if node.arg.value == "content" else None
    elif isinstance(node, nodes.Getattr):
        owner = node.node if node.attr == "content" else None
    return isinstance(owner, nodes.Name) and owner.name in message_names
