"""The grammar behind `/`, `--filter` and `?filter=`: words are ANDed, `field=v`, `-` excludes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from console.viewmodel.table import Fact, Row

FieldKind = Literal["text", "seconds", "bytes", "number", "ratio"]
Operator = Literal["=", "!=", "<", ">", "~"]

_TERM = re.compile(r"(?P<field>[a-z_]+)(?P<op>!=|=|<|>|~)(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*([A-Za-z%]*)")
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_BYTES = {
    "": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_UNITS: dict[FieldKind, dict[str, float]] = {
    "seconds": _SECONDS,
    "bytes": _BYTES,
    "number": {"": 1.0, "k": 1e3, "M": 1e6},
    "ratio": {"": 0.01, "%": 0.01},
}
_EXAMPLES: dict[FieldKind, str] = {
    "seconds": "a time such as 2s or 800ms",
    "bytes": "a size such as 64MiB or 2GB",
    "number": "a number such as 12",
    "ratio": "a percentage such as 60 %",
    "text": "text",
}


class FilterError(Exception):
    """A filter that cannot be read; `position` counts characters from 1."""

    def __init__(self, source: str, problem: str, position: int) -> None:
        super().__init__(f'Filter: "{source}": {problem}, at character {position}.')
        self.position = position


@dataclass(frozen=True, slots=True)
class _Term:
    exclude: bool
    field: str  # "" = any text of the row
    operator: Operator
    texts: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()
    pattern: re.Pattern[str] | None = None

    def matches(self, row: Row) -> bool:
        found = self._any(row) if not self.field else self._one(row.facts.get(self.field))
        return found != self.exclude

    def _any(self, row: Row) -> bool:
        text = " ".join([*(c.text for c in row.cells), *(str(f) for f in row.facts.values())])
        return any(word in text.lower() for word in self.texts)

    def _one(self, fact: Fact) -> bool:
        match self.operator:
            case "=":
                return self._equal(fact)
            case "!=":
                return not self._equal(fact)
            case "<":
                return _is_number(fact) and float(fact or 0) < self.numbers[0]
            case ">":
                return _is_number(fact) and float(fact or 0) > self.numbers[0]
            case "~":
                return self.pattern is not None and self.pattern.search(str(fact or "")) is not None

    def _equal(self, fact: Fact) -> bool:
        if self.numbers:
            return _is_number(fact) and float(fact or 0) in self.numbers
        return ("" if fact is None else str(fact).lower()) in self.texts


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter; an empty one matches everything."""

    source: str = ""
    terms: tuple[_Term, ...] = ()

    def matches(self, row: Row) -> bool:
        """Whether all terms hold for the row."""
        return all(term.matches(row) for term in self.terms)

    def apply(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """The rows that match, in their order."""
        return tuple(row for row in rows if self.matches(row))


def parse(source: str, fields: Mapping[str, FieldKind]) -> Filter:
    """Read a filter for a table with these fields; raises `FilterError`."""
    terms = [_term(source, word, at, fields) for at, word in _words(source)]
    return Filter(source.strip(), tuple(terms))


def _words(source: str) -> list[tuple[int, str]]:
    """Words with their offset; double quotes keep spaces inside one word."""
    words: list[tuple[int, str]] = []
    word, start, quoted = "", 0, False
    for place, char in enumerate(source):
        if char == '"':
            quoted = not quoted
            start = start if word else place
        elif char.isspace() and not quoted:
            if word:
                words.append((start, word))
            word = ""
        else:
            start = start if word else place
            word += char
    if quoted:
        raise FilterError(source, 'a closing " is missing', len(source) + 1)
    return [*words, (start, word)] if word else words


def _term(source: str, word: str, at: int, fields: Mapping[str, FieldKind]) -> _Term:
    exclude = word.startswith("-") and len(word) > 1
    body = word[1:] if exclude else word
    at += exclude
    found = _TERM.fullmatch(body)
    if found is None:
        return _Term(
            exclude, "", "=", texts=tuple(part.lower() for part in body.split("|") if part)
        )
    name, operator, value = found["field"], found["op"], found["value"]
    if name not in fields:
        raise FilterError(
            source, f'no field "{name}" here, but {", ".join(sorted(fields))}', at + 1
        )
    value_at = at + len(name) + len(operator) + 1
    if not value:
        raise FilterError(source, f"expected {_EXAMPLES[fields[name]]}", value_at)
    return _compare(source, name, operator, value, value_at, fields[name], exclude)


def _compare(
    source: str,
    name: str,
    operator: str,
    value: str,
    at: int,
    kind: FieldKind,
    exclude: bool,
) -> _Term:
    if operator == "~":
        try:
            return _Term(exclude, name, "~", pattern=re.compile(value, re.IGNORECASE))
        except re.error as error:
            raise FilterError(
                source, f"bad pattern ({error.msg})", at + (error.pos or 0)
            ) from error
    if operator in ("<", ">"):
        if kind == "text":
            raise FilterError(source, f'"{name}" is text and has no order; use = != or ~', at - 1)
        number = _number(source, value, at, kind)
        return _Term(exclude, name, "<" if operator == "<" else ">", numbers=(number,))
    equal: Operator = "=" if operator == "=" else "!="
    if kind == "text":
        return _Term(exclude, name, equal, texts=tuple(value.lower().split("|")))
    numbers = tuple(_number(source, part, at, kind) for part in value.split("|"))
    return _Term(exclude, name, equal, numbers=numbers)


def _number(source: str, text: str, at: int, kind: FieldKind) -> float:
    found = _NUMBER.fullmatch(text)
    unit = None if found is None else _UNITS[kind].get(found[2])
    if found is None or unit is None:
        raise FilterError(source, f"expected {_EXAMPLES[kind]}", at)
    return float(found[1]) * unit


def _is_number(fact: Fact) -> bool:
    return isinstance(fact, (int, float)) and not isinstance(fact, bool)


def complete(source: str, fields: Mapping[str, FieldKind], rows: Sequence[Row]) -> tuple[str, ...]:
    """Whole filters that Tab may offer: the last word grown to a field or one of its values."""
    head, _, last = source.rpartition(" ")
    lead = f"{head} " if head else ""
    sign = "-" if last.startswith("-") else ""
    word = last[len(sign) :]
    name, equals, start = word.partition("=")
    if not equals:
        names = [f for f in sorted(fields) if f.startswith(word)]
        return tuple(f"{lead}{sign}{name}=" for name in names)
    values = sorted({str(row.facts.get(name)) for row in rows if row.facts.get(name) is not None})
    return tuple(f"{lead}{sign}{name}={v}" for v in values if v.startswith(start))[:20]
