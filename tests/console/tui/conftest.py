"""A console on a fake source, driven without a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta, timezone
from typing import Any

import pytest
from textual.pilot import Pilot

from console.tui.app import ConsoleApp
from console.tui.caps import Caps

WAIT_SECONDS = 20.0
ZONE = timezone(timedelta(hours=1))


class Clock:
    """Stands still until a test moves it, so that ages need no waiting and pictures are steady."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return 1000.0 + self.ahead


@dataclass
class Driven:
    """The app under test and its hands and eyes."""

    app: ConsoleApp
    pilot: Pilot[None]
    source: Any
    clock: Clock

    def text(self) -> str:
        """The screen as characters. (`_compositor` is private: only here.)"""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    def line(self, wanted: str) -> str:
        """The first line that holds a text."""
        return next((line for line in self.text().splitlines() if wanted in line), "")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def type(self, text: str) -> None:
        names = {" ": "space", "/": "slash", ":": "colon", "=": "equals_sign", ">": "greater_than_sign", "-": "minus", "_": "underscore", ".": "full_stop"}  # fmt: skip
        await self.press(*(names.get(char, char) for char in text))

    async def until(self, *wanted: str, gone: str = "") -> str:
        """Wait until all the texts are on the screen, and `gone` is not."""
        loop = asyncio.get_running_loop()
        end = loop.time() + WAIT_SECONDS
        while True:
            await self.pilot.pause()
            self.app.redraw()
            await self.pilot.pause()
            shown = self.text()
            if all(text in shown for text in wanted) and not (gone and gone in shown):
                return shown
            assert loop.time() < end, f"waited for {wanted}, without {gone!r}:\n{shown}"
            await asyncio.sleep(0.02)


Opener = Callable[..., AbstractAsyncContextManager[Driven]]


@pytest.fixture
def open_console(make_source: Callable[[Any], Any]) -> Opener:
    """`async with open_console(world, size=(80, 24), ...) as console`."""

    @asynccontextmanager
    async def opened(
        world: Any,
        *,
        size: tuple[int, int] = (80, 24),
        can_act: bool = True,
        caps: Caps | None = None,
        start: str = "overview",
        down: bool = False,
    ) -> AsyncIterator[Driven]:
        source, clock = make_source(world), Clock()
        source.down = down
        app = ConsoleApp(
            source,
            clock=clock,
            can_act=can_act,
            actor="ana",
            caps=caps or Caps("none"),
            tz=ZONE,
            start=start,
        )
        async with app.run_test(size=size) as pilot:
            console = Driven(app, pilot, source, clock)
            if not down:
                await console.until("LIVE")
                await until_loaded(console)
            yield console

    return opened


async def until_loaded(console: Driven) -> None:
    """The first snapshot has come in whole."""
    loop = asyncio.get_running_loop()
    end = loop.time() + WAIT_SECONDS
    while console.app.state.snapshot().matrix is None or not len(console.app.state.history):
        assert loop.time() < end or not console.source.world.nodes
        if not console.source.world.nodes:
            break
        await asyncio.sleep(0.01)
    console.app.redraw()
    await console.pilot.pause()
