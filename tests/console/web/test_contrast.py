"""WCAG contrast of what the stylesheet and the figures' palettes put together: 4.5:1 for text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import console.web
from console.viewmodel.levels import COLOR256, NUM_LEVELS, TEXT_ON, TRUECOLOR, Palette

CSS = (Path(console.web.__file__).parent / "static" / "base.css").read_text(encoding="utf-8")
TEXT = 4.5
CONTROL = 3.0
SCHEMES: tuple[Palette, ...] = ("dark", "light")
Color = tuple[float, ...]


def parse(text: str) -> Color:
    digits = text.lstrip("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    return tuple(int(digits[place : place + 2], 16) for place in (0, 2, 4))


def of_256(number: int) -> Color:
    """Of the usual palette: a cube of 6 steps, then greys."""
    if number >= 232:
        return (8.0 + 10 * (number - 232),) * 3
    steps = (0, 95, 135, 175, 215, 255)
    place = number - 16
    return (steps[place // 36], steps[place // 6 % 6], steps[place % 6])


def luminance(color: Color) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    red, green, blue = (
        part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in color
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Color, other: Color) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def tokens(scheme: Palette) -> dict[str, Color]:
    bodies = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    found = re.findall(r"--(\w+): (#[0-9a-f]{3,6})", bodies[SCHEMES.index(scheme)])
    return {name: parse(value) for name, value in found}


def hovered(found: dict[str, Color], ground: str) -> Color:
    """A row under the pointer: 5 % of the text's colour."""
    pairs = zip(found["text"], found[ground], strict=True)
    return tuple(0.05 * text + 0.95 * below for text, below in pairs)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ground", ["page", "panel"])
@pytest.mark.parametrize("name", ["text", "muted", "link", "well", "warn", "critical"])
def test_text_on_every_ground(scheme: Palette, ground: str, name: str) -> None:
    found = tokens(scheme)
    assert contrast(found[name], found[ground]) >= TEXT
    assert contrast(found[name], hovered(found, ground)) >= TEXT
    assert contrast(found["page"], found[name]) >= TEXT  # a filled badge


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["edge", "focus"])
def test_controls_and_focus(scheme: Palette, name: str) -> None:
    found = tokens(scheme)
    assert min(contrast(found[name], found[ground]) for ground in ("page", "panel")) >= CONTROL


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("level", range(NUM_LEVELS))
def test_the_label_of_a_cell(scheme: Palette, level: int) -> None:
    found = tokens(scheme)
    assert contrast(found[f"l{level}"], found[f"t{level}"]) >= TEXT
    assert found[f"l{level}"] == parse(TRUECOLOR[scheme][level])  # page and terminal are one
    label = parse(TEXT_ON[scheme][level])
    assert contrast(parse(TRUECOLOR[scheme][level]), label) >= TEXT
    assert contrast(of_256(COLOR256[scheme][level]), label) >= 4.0  # the cube has no closer one


def test_what_is_old_or_gone_is_not_made_faint() -> None:
    """Opacity takes contrast away: only from what is not text, or cannot be used."""
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", CSS):
        if re.search(r"(?<![-\w])opacity:", body):
            assert all(
                part.strip().endswith(("svg", "[disabled]"))
                for part in selector.split("*/")[-1].split(",")
            ), selector
