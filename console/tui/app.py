"""The console: one screen, a path walked through pages, a feed behind it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import UTC, datetime, tzinfo

from rich.segment import Segment
from textual import events, work
from textual.app import App, ComposeResult
from textual.color import Color
from textual.containers import Container
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen

from console.tui import actions, cache_actions, frame, keys, palette
from console.tui.caps import Caps, ascii_segments, detect
from console.tui.context import Context
from console.tui.ending import end_at_the_latest
from console.tui.feed import EventSource, Feed
from console.tui.lines import Line, LinesView, line, toned
from console.tui.localtime import LocalZone
from console.tui.pages import catalog
from console.tui.pages.act import ActPage
from console.tui.pages.base import Location, Page
from console.tui.pages.confirm import ConfirmPage
from console.tui.pages.panel import PanelPage
from console.tui.prompt import Prompt
from console.tui.widgets.rows import RowsView
from console.viewmodel.freshness import freshness
from console.viewmodel.state import ConsoleState, Part

MAX_PATH = 20
NOTICE_SECONDS = 8.0
REDRAW_SECONDS = 0.25
IDLE_REDRAW_SECONDS = 1.0


class MainScreen(Screen[None], inherit_bindings=False):
    """No bindings of its own: the key table is the whole truth."""


class AsciiFilter(LineFilter):
    """Over every line, whatever a name, a reason or an error holds."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same line in ASCII."""
        return ascii_segments(segments)


class FeedChanged(Message):
    """The state has taken something; bursts become one."""

    def __init__(self, parts: frozenset[Part]) -> None:
        super().__init__()
        self.parts = parts

    def can_replace(self, message: Message) -> bool:
        """Only the last of a burst matters: the redraw reads the whole state."""
        return isinstance(message, FeedChanged)


class ConsoleApp(App[None], inherit_bindings=False):
    """`can_act` is False for viewers: no acting key works or shows."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    #header { height: 2; }
    #crumbs, #footer { height: 1; }
    #body { height: 1fr; width: 1fr; }
    #small { height: 1fr; }
    """

    def __init__(
        self,
        source: EventSource,
        *,
        clock: Callable[[], float],
        can_act: bool,
        actor: str = "",
        ascii_only: bool = False,
        light: bool = False,
        caps: Caps | None = None,
        tz: tzinfo | None = None,
        start: str = "overview",
    ) -> None:
        # Textual takes NO_COLOR out of the environment, so it is read before.
        environ = dict(os.environ)
        super().__init__(ansi_color=True)
        self.caps = caps or detect(
            environ, self.console.color_system, ascii_only=ascii_only, light=light
        )
        self.source = source
        self.clock = clock
        self.token_given = can_act
        self.actor = actor
        self.tz: tzinfo = tz or LocalZone()
        self.state = ConsoleState()
        self.feed = Feed(source, self.state, clock, self._feed_changed)
        self.trail: list[Location] = [Location.parse(start)]
        self.recent: list[Location] = []
        self.pages: dict[str, Page] = {}
        self.held: Context | None = None
        self.twin = source.url
        self._notice = ""
        self._notice_until = 0.0
        self._dirty = True
        self._drawn_at = 0.0
        self._interrupted_at = -10.0
        self._header = LinesView("header")
        self._crumbs = LinesView("crumbs")
        self._body = Container(id="body")
        self._small = LinesView("small")
        self._footer = LinesView("footer")
        self.prompt = Prompt()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's own, and ours where only ASCII can be shown."""
        own = (AsciiFilter(),) if self.caps.ascii_only else ()
        return (*super().get_line_filters(), *own)

    def get_default_screen(self) -> Screen[None]:
        """The one screen."""
        return MainScreen(id="_default")

    def compose(self) -> ComposeResult:
        """Header, breadcrumbs, body, footer; the prompt takes the footer's place."""
        yield self._header
        yield self._crumbs
        yield self._body
        yield self._small
        yield self.prompt
        yield self._footer

    async def on_mount(self) -> None:
        """Draw the frame at once, then listen."""
        self._catch_signals()
        await self.go(self.trail.pop(), fresh=True)
        self.set_interval(REDRAW_SECONDS, self._redraw_if_due)
        self._run_feed()

    def _catch_signals(self) -> None:
        """TERM and HUP end the app in order, so that the terminal is left as it was."""
        loop = self._loop
        if loop is None:
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            try:
                loop.add_signal_handler(number, self._end_by_signal, int(number))
            except (NotImplementedError, RuntimeError, ValueError):
                return  # not the main thread: whoever runs the loop owns the signals

    def _end_by_signal(self, number: int) -> None:
        end_at_the_latest(128 + number)
        self.exit(return_code=128 + number)

    @work(exclusive=True, group="feed")
    async def _run_feed(self) -> None:
        await self.feed.run()

    def _feed_changed(self, parts: frozenset[Part]) -> None:
        self.post_message(FeedChanged(parts))

    def on_feed_changed(self, message: FeedChanged) -> None:
        """Redraw soon."""
        self._dirty = True

    # --- what is drawn ----------------------------------------------------------------------

    @property
    def page(self) -> Page:
        """The page in front."""
        return self.pages[self.trail[-1].noun]

    @property
    def can_act(self) -> bool:
        """A token, and not looking at a held moment."""
        return self.token_given and self.held is None

    def context(self) -> Context:
        """This instant, or the one that is held."""
        now = self.clock()
        size = self.size
        if self.held is not None:
            return self._held_context(self.held, now)
        snapshot = self.state.snapshot()
        overview = snapshot.overview
        return Context(
            snapshot=snapshot,
            history=self.state.history,
            now=now,
            server_now=snapshot.server_now(now) or datetime.now(UTC).timestamp(),
            tz=self.tz,
            fresh=freshness(
                now=now,
                received=snapshot.received,
                sample_age=overview.sample_age_seconds if overview else None,
                retry_at=self.feed.retry_at,
                connected=self.feed.connected,
            ),
            caps=self.caps,
            can_act=self.can_act,
            is_operator=self.token_given,
            width=size.width,
            height=size.height,
            problem=self.feed.problem,
        )

    def _held_context(self, held: Context, now: float) -> Context:
        mark = freshness(now=now, received=held.now, held_at=held.server_now)
        return Context(
            held.snapshot, held.history, held.now, held.server_now, self.tz, mark, self.caps,
            is_operator=self.token_given, width=self.size.width, height=self.size.height,
        )  # fmt: skip

    def hold(self) -> None:
        """Keep drawing this instant."""
        context = self.context()
        if context.snapshot.overview is None:
            self.notice("Nothing to hold yet: the control plane has not answered.")
            return
        self.held = Context(
            context.snapshot, deepcopy(context.history), context.now, context.server_now,
            self.tz, context.fresh,
        )  # fmt: skip
        self.redraw()

    def notice(self, text: str) -> None:
        """One line in the footer's place for a while."""
        self._notice, self._notice_until = text, self.clock() + NOTICE_SECONDS
        self.redraw()

    def _redraw_if_due(self) -> None:
        if self._dirty or self.clock() - self._drawn_at >= IDLE_REDRAW_SECONDS:
            self.redraw()

    def redraw(self) -> None:
        """Draw everything; equal lines are not sent."""
        if not self.is_running or not self.trail or self.trail[-1].noun not in self.pages:
            return
        self._dirty, self._drawn_at = False, self.clock()
        context = self.context()
        width, height = context.width, context.height
        small = width < frame.MIN_WIDTH or height < frame.MIN_HEIGHT
        for view in (self._crumbs, self._body, self._footer):
            view.display = not small and not (view is self._footer and self.prompt.is_open)
        self._small.display = small
        self._header.show(frame.header(context, width, self.actor), stale=False)
        if small:
            self._small.show([line(toned(frame.too_small(width, height), "warn"))])
            return
        self.feed.want(self.page.wanted)
        self.page.show_context(context)
        path: list[str] = []
        for place in self.trail[:-1]:
            path = frame.joined(path, self._crumb(place))
        own = self.page.path()
        path = frame.joined(path, own[1:] if path and self.page.name_shown else own)
        self._crumbs.show([frame.crumbs(path, self.page.right(), width)])
        self._footer.show([self._footer_line(context, width)])
        self.prompt.show_around(width)

    def _crumb(self, place: Location) -> list[str]:
        page = self.pages.get(place.noun)
        if place.name:
            return [place.name[:24], *(["draft"] if place.noun == "draft" else [])]
        return [page.title if page else place.noun]

    def _footer_line(self, context: Context, width: int) -> Line:
        message = self._notice if self.clock() < self._notice_until else self.page.footer_text
        message = message or frame.unanswered(context)
        left = [k for k in self.page.offered() if k.footer and (self.can_act or not k.acts)]
        left += [keys.VIEWS] if len(self.page.views) > 1 else []
        right = [k for k in keys.GLOBAL if k.footer and k.does != "filter"]
        if self.page.fields:
            right = [k for k in keys.GLOBAL if k.footer]
        if self.held is not None:
            live = keys.Key("equals_sign", "=", "live", "live", "time")
            right = [live, *(k for k in right if k.does != "hold")]
        return frame.footer(left, self.page.opens()[0], right, width, message)

    # --- where one is -----------------------------------------------------------------------

    async def go(self, place: Location, *, fresh: bool = False) -> None:
        """Open a place: `fresh` starts a new path, else it is one crumb further."""
        page = self.pages.get(place.noun)
        if page is None:
            page = catalog.make(place.noun)
            if page is None:
                self.notice(f'"{place.noun}" is not available in this version.')
                return
            self.pages[place.noun] = page
            await self._body.mount(page)
        if self.trail:
            self._remember(self.trail[-1])
        self.trail = [] if fresh else self.trail[-MAX_PATH + 1 :]
        if not self.trail or self.trail[-1] != place:
            self.trail.append(place)
        await self._enter(place)

    def _remember(self, place: Location) -> None:
        if place in self.recent:
            self.recent.remove(place)
        self.recent = [*self.recent[-MAX_PATH + 1 :], place]

    async def _enter(self, place: Location) -> None:
        page = self.pages[place.noun]
        page.name_shown = place.name
        for other in self.pages.values():
            other.display = other is page
        self.screen.set_focus(None)
        await actions.prepare(self, page, place)
        actions.set_filter(self, place.filter)  # its fields are those of the view
        self.redraw()
        self.call_after_refresh(self.redraw)  # a page just mounted knows its size only now

    async def back(self) -> None:
        """Filter first, then one crumb; never quits."""
        if self.page.filtered.filter.source:
            actions.set_filter(self, "")
            self.redraw()
        elif len(self.trail) > 1:
            self._remember(self.trail.pop())
            await self._enter(self.trail[-1])

    # --- keys -------------------------------------------------------------------------------

    def key_table(self) -> dict[str, keys.Key]:
        """What works on the page in front for this token."""
        table = keys.merged(self.page.keys)
        return {name: key for name, key in table.items() if self.can_act or not key.acts}

    async def on_event(self, event: events.Event) -> None:
        """Keys are taken here, one after the other: what one opens gets the next, even in a burst."""
        if isinstance(event, events.Key) and not event.is_forwarded and self.trail:
            await self._take_key(event)
        else:
            await super().on_event(event)

    async def _take_key(self, event: events.Key) -> None:
        """Every key of the app comes through the key table."""
        if event.key == "ctrl+c":
            await self.interrupt()
            return
        if self.prompt.is_open:
            await actions.prompt_key(self, event)
            return
        page = self.page
        if isinstance(page, PanelPage):
            await page.press(event, self.clock())
            return
        name = keys.name_of(event.key, event.character)
        key = self.key_table().get(name)
        self._notice_until = 0.0
        if key is not None:
            await actions.perform(self, key.does)
        elif (refused := keys.merged(page.keys).get(name)) is not None:
            self.notice(frame.no_acting(refused, held=self.held is not None))
        elif name in keys.LATER:
            self.notice(palette.later(name))
        else:
            self._dirty = True

    async def interrupt(self) -> None:
        """Ctrl-c leaves a prompt or panel; twice quits."""
        now = self.clock()
        if self.prompt.is_open:
            self.prompt.close()
            self.redraw()
        elif isinstance(self.page, PanelPage):
            await self.back()
        elif now - self._interrupted_at < 2.0:
            self.exit()
        else:
            self._interrupted_at = now
            self.notice("Ctrl-c again quits; q quits at once.")

    def on_paste(self, event: events.Paste) -> None:
        """What was pasted into the prompt counts as typed."""
        if self.prompt.is_open:
            self.call_after_refresh(actions.prompt_changed, self)

    async def on_rows_view_opened(self, message: RowsView.Opened) -> None:
        """A second click opens."""
        await actions.perform(self, "open")

    def on_rows_view_moved(self, message: RowsView.Moved) -> None:
        """Enter may mean something else now."""
        self._dirty = True

    async def on_confirm_page_agreed(self, message: ConfirmPage.Agreed) -> None:
        """The one place from which anything is written."""
        self.run_worker(
            actions.put(self, message.change, message.reason), group="put", exclusive=True
        )

    async def on_act_page_agreed(self, message: ActPage.Agreed) -> None:
        """The one place from which an operator's action is sent."""
        self.run_worker(
            cache_actions.send(self, message.act, message.reason), group="put", exclusive=True
        )

    async def on_panel_page_cancelled(self, message: PanelPage.Cancelled) -> None:
        """Back to where one was; a draft is kept."""
        await self.back()

    def on_resize(self, event: events.Resize) -> None:
        """Another size, another layout."""
        self._dirty = True
        self.call_after_refresh(self.redraw)
