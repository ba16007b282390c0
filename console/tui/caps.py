"""What the terminal can show, and how a tone or a level looks on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style

from console.viewmodel import levels
from console.viewmodel.table import Tone

ColorDepth = Literal["truecolor", "256", "16", "none"]

_TONES: dict[Tone, Style] = {
    "plain": Style(),
    "strong": Style(bold=True),
    "well": Style(color="green"),
    "warn": Style(color="yellow"),
    "critical": Style(color="bright_red", bold=True),
    "stale": Style(color="bright_black"),
    "muted": Style(color="bright_black"),
    "accent": Style(color="cyan"),
}
"""The terminal's own palette and background, never our hex."""


@dataclass(frozen=True, slots=True)
class Caps:
    """`ascii_only` also replaces half blocks, sparklines and box lines."""

    color: ColorDepth = "truecolor"
    ascii_only: bool = False
    light: bool = False

    @property
    def paints(self) -> bool:
        """Cells are coloured blocks; otherwise glyphs carry the level."""
        return self.color in ("truecolor", "256")

    @property
    def palette(self) -> levels.Palette:
        """Which ramp fits the background."""
        return "light" if self.light else "dark"


def detect(
    environ: Mapping[str, str], color_system: str | None, *, ascii_only: bool, light: bool
) -> Caps:
    """From the environment and what rich found out about the terminal."""
    depth: ColorDepth = "16"
    if environ.get("NO_COLOR") is not None or color_system is None:
        depth = "none"
    elif color_system in ("truecolor", "windows"):
        depth = "truecolor"
    elif color_system == "256":
        depth = "256"
    return Caps(depth, ascii_only or not is_utf8(environ), light)


def is_utf8(environ: Mapping[str, str]) -> bool:
    """The locale's encoding, by the first of the usual variables that is set."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environ.get(name)
        if value:
            return "utf-8" in value.lower() or "utf8" in value.lower()
    return True  # nothing said: terminals of today; C.UTF-8 is the default of containers


def tone_style(tone: Tone) -> Style:
    """Style of a tone; never None, which a colourless terminal cannot draw."""
    return _TONES[tone]


@lru_cache(maxsize=256)
def level_style(level: int, caps: Caps) -> Style:
    """Style of a one-row cell: a painted block, or the glyph's colour."""
    if caps.color == "none":
        return Style()
    if caps.color == "16":
        return Style(color=levels.COLOR16[caps.palette][level], bold=level >= 6)
    text = Color.parse(levels.TEXT_ON[caps.palette][level])
    return Style.from_color(text, level_color(level, caps))


@lru_cache(maxsize=256)
def level_color(level: int, caps: Caps) -> Color:
    """The ramp's colour in the depth that the terminal has."""
    if caps.color == "truecolor":
        return Color.parse(levels.TRUECOLOR[caps.palette][level])
    return Color.from_ansi(levels.COLOR256[caps.palette][level])


def as_ascii(text: str) -> str:
    """What names and reasons hold beyond ASCII, as `?` over as many cells."""
    if text.isascii():
        return text
    return "".join(char if char.isascii() else "?" * cell_len(char) for char in text)


def ascii_segments(segments: list[Segment]) -> list[Segment]:
    """A line for a terminal that shows ASCII alone."""
    return [
        segment if segment.text.isascii() else Segment(as_ascii(segment.text), segment.style)
        for segment in segments
    ]
