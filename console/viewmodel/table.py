"""Tables as values: what the terminal, the web and plain text draw alike."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["plain", "strong", "well", "warn", "critical", "stale", "muted", "accent"]
Fact = str | float | bool | None
"""What filters compare: base units (seconds, bytes), text, or None for unknown."""


@dataclass(frozen=True, slots=True)
class Column:
    """`drop` 0 stays at any width; the highest number leaves first. `width` is in cells."""

    key: str
    label: str
    width: int
    align: Literal["left", "right"] = "left"
    drop: int = 0
    grow: bool = False  # takes the width that is left over


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text and what it means; never colour alone: the words carry it too."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Row:
    """Cells in column order. `key` is the row's identity across updates; `opens` a console path."""

    key: str
    cells: tuple[Text, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    opens: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """`empty` says in one sentence why there are no rows, and what to do next."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str = ""

    def index(self, key: str) -> int | None:
        """Where the row with this key stands."""
        for place, row in enumerate(self.rows):
            if row.key == key:
                return place
        return None


def cell(text: str, tone: Tone = "plain") -> Text:
    """A cell whose text may come from outside: see `clean`."""
    return Text(clean(text), tone)


def clean(text: str) -> str:
    """One line that cannot shift a column or drive a terminal.

    Control, format (bidi, joiners) and variation characters leave; line ends become a space.
    """
    if text.isascii() and text.isprintable():
        return text
    kept: list[str] = []
    for char in text:
        if char in "\n\r\t":
            kept.append(" ")
        elif unicodedata.category(char) in ("Cc", "Cs", "Co", "Cn"):
            kept.append("?")
        elif unicodedata.category(char) != "Cf" and not 0xFE00 <= ord(char) <= 0xFE0F:
            kept.append(char)
    return "".join(kept)
