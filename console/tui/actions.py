"""What keys and prompts do to the app."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, tzinfo
from typing import TYPE_CHECKING
from urllib.parse import quote

from textual import events

from console.tui import cache_actions, palette
from console.tui.localtime import LocalZone
from console.tui.pages.base import Location, Page
from console.tui.pages.cache import CachePage
from console.tui.pages.confirm import Change, ConfirmPage
from console.tui.pages.help import HelpPage
from console.tui.pages.policies import DraftPage, PolicyPage
from console.tui.pages.requests import RequestsPage
from console.tui.pages.topology import TopologyPage
from console.viewmodel import filters, policies
from controlplane.client_http import ClientError, UnreachableError
from controlplane.policies.schemas import NODE_POLICIES, PolicyPut, PolicyPutReply, PolicyRevision

if TYPE_CHECKING:
    from console.tui.app import ConsoleApp


async def perform(app: ConsoleApp, action: str) -> None:
    """One action of the key table."""
    if action.startswith("screen "):
        await app.go(Location(action.removeprefix("screen ")), fresh=True)
        return
    if app.page.do(action):
        app.redraw()
        return
    match action:
        case "open":
            await _open(app)
        case "back":
            await app.back()
        case "quit":
            app.exit()
        case "filter":
            _open_filter(app)
        case "palette":
            app.prompt.open("palette", ":", "", hint="Enter goes, Up Down choose, Esc leaves")
            prompt_changed(app)
        case "help":
            await _help(app)
        case "edit" | "put" | "compare":
            await _policy_action(app, action)
        case _:
            await _app_action(app, action)


async def _app_action(app: ConsoleApp, action: str) -> None:
    if action in cache_actions.NAMES:
        await cache_actions.ask(app, action)
    elif action == "previous":
        if app.recent:
            await app.go(app.recent[-1])
    elif action in _SIMPLE:
        _SIMPLE[action](app)


def _live(app: ConsoleApp) -> None:
    app.held = None
    app.redraw()


def _reconnect(app: ConsoleApp) -> None:
    app.feed.reconnect()
    app.notice("Reconnecting.")


def _set_zone(app: ConsoleApp, zone: tzinfo) -> None:
    app.tz = zone
    app.redraw()


async def _open(app: ConsoleApp) -> None:
    page = app.page
    if isinstance(page, DraftPage):
        _edit_field(app, page)
        return
    place = page.opens()[1]
    if place is not None:
        await app.go(place)


async def _help(app: ConsoleApp) -> None:
    if app.page.noun == "help":
        return
    table = list(app.key_table().values())
    twin = _twin(app)
    await app.go(Location("help"))
    page = app.page
    if isinstance(page, HelpPage):
        page.of(table, twin)
    app.redraw()


def _twin(app: ConsoleApp) -> str:
    source = app.page.filtered.filter.source
    tail = f"?filter={quote(source)}" if source else ""
    return f"{app.source.url}{app.page.url}{tail}"


def _copy(app: ConsoleApp) -> None:
    snapshot = app.context().snapshot
    text = _twin(app)
    quiet = app.page.noun in ("overview", "requests") and not snapshot.decisions
    if quiet and snapshot.gateways:
        model = next((worker.model for worker in snapshot.workers), "MODEL")
        text = (
            f"curl {snapshot.gateways[0].url}/v1/chat/completions -H 'Content-Type: application/json'"
            f' -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
        )
    app.copy_to_clipboard(text)
    app.notice(f"Copied: {text}")


_SIMPLE: dict[str, Callable[[ConsoleApp], object]] = {
    "hold": lambda app: app.hold(),
    "live": _live,
    "copy": _copy,
    "reconnect": _reconnect,
    "redraw": lambda app: app.screen.refresh(layout=True),
    "suspend": lambda app: app.action_suspend_process(),
    "set_utc": lambda app: _set_zone(app, UTC),
    "set_local": lambda app: _set_zone(app, LocalZone()),
}


# --- prompt -----------------------------------------------------------------------------------


def _open_filter(app: ConsoleApp) -> None:
    if not app.page.fields:
        app.notice("This screen has no rows to filter.")
        return
    names = " ".join(sorted(app.page.fields))
    app.prompt.open("filter", "/", app.page.filtered.filter.source, hint=f"fields: {names}")
    app.redraw()


def set_filter(app: ConsoleApp, source: str) -> str:
    """Filter the page in front; returns what is wrong, and then leaves the table alone."""
    page = app.page
    try:
        page.filtered.filter = filters.parse(source, page.fields)
    except filters.FilterError as error:
        return str(error)
    place = app.trail[-1]
    app.trail[-1] = Location(place.noun, place.name, source.strip())
    return ""


def prompt_changed(app: ConsoleApp) -> None:
    """Filters act while they are typed; the palette searches; a field is checked."""
    prompt = app.prompt
    value = prompt.input.value
    if prompt.kind == "palette":
        known = palette.entries(app.state.snapshot(), can_act=app.can_act)
        prompt.offer(palette.search(value, known, app.recent))
    elif prompt.kind == "filter":
        prompt.say(set_filter(app, value))
    elif isinstance(app.page, DraftPage) and app.page.draft is not None:
        draft = app.page.draft.with_value(prompt.field, value)
        fields = {view.name: view for view in policies.check(draft).fields}
        prompt.say(fields[prompt.field].error)
    app.redraw()


async def prompt_key(app: ConsoleApp, event: events.Key) -> None:
    """One key while the prompt is open."""
    prompt = app.prompt
    match event.key:
        case "escape":
            if prompt.kind == "filter":
                set_filter(app, prompt.before)
            prompt.close()
            app.redraw()
        case "up" | "down":
            prompt.choose(-1 if event.key == "up" else 1)
            app.redraw()
        case "tab":
            _complete(app)
            prompt_changed(app)
        case _:
            if await prompt.input.take(event):
                await prompt_submitted(app, prompt.input.value)
            else:
                prompt_changed(app)


def _complete(app: ConsoleApp) -> None:
    prompt = app.prompt
    value = prompt.input.value
    if prompt.kind == "palette" and prompt.found:
        value = prompt.found[prompt.chosen].words.partition(" (")[0]
    elif prompt.kind == "filter":
        view = app.page.rows_view()
        offers = filters.complete(value, app.page.fields, view.table.rows if view else ())
        value = offers[0] if offers else value
    elif isinstance(app.page, DraftPage):
        value = _next_choice(app.page, prompt.field, value)
    prompt.input.value = value
    prompt.input.cursor_position = len(value)


def _next_choice(page: DraftPage, name: str, value: str) -> str:
    checked = page.checked()
    view = next((v for v in checked.fields if v.name == name), None) if checked else None
    if view is None or not view.choices:
        return value
    at = view.choices.index(value) if value in view.choices else -1
    return view.choices[(at + 1) % len(view.choices)]


async def prompt_submitted(app: ConsoleApp, value: str) -> None:
    """Enter."""
    prompt = app.prompt
    match prompt.kind:
        case "filter":
            if not set_filter(app, value):
                prompt.close()
        case "field":
            if isinstance(app.page, DraftPage):
                app.page.set_field(prompt.field, value.strip())
            prompt.close()
        case "palette":
            chosen = prompt.found[prompt.chosen] if prompt.found else None
            prompt.close()
            await _run_entry(app, chosen, value)
    app.redraw()


async def _run_entry(app: ConsoleApp, entry: palette.Entry | None, value: str) -> None:
    if entry is None:
        app.notice(f'":{value}" names nothing here. :help lists the keys.')
    elif entry.does:
        await perform(app, entry.does)
    elif entry.location is not None:
        place = entry.location
        source = palette.split_filter(value)[1] or place.filter
        if place.noun == "draft" and not app.can_act:
            app.notice(viewer_words("Editing"))
            return
        await app.go(Location(place.noun, place.name, source), fresh=True)


# --- policies ---------------------------------------------------------------------------------


async def prepare(app: ConsoleApp, page: Page, place: Location) -> None:
    """What a page needs before it is drawn."""
    if isinstance(page, CachePage | RequestsPage | TopologyPage):
        page.open_view(place.name)
        page.name_shown = ""
        app.trail[-1] = Location(place.noun, filter=place.filter)
    if isinstance(page, PolicyPage):
        app.run_worker(_read_revisions(app, page, place.name), group="revisions", exclusive=True)
    if isinstance(page, DraftPage) and (page.draft is None or page.draft.name != place.name):
        active = [p for p in app.state.snapshot().policies if f"{p.kind}/{p.scope}" == place.name]
        page.draft = policies.Draft(active[0]) if active else None
        page.note = ""


async def _read_revisions(app: ConsoleApp, page: PolicyPage, name: str) -> None:
    kind, _, scope = name.partition("/")
    try:
        page.revisions = (await app.source.policy_revisions(kind, scope, limit=50)).items
    except ClientError as error:
        app.notice(str(error))
    app.redraw()


async def _policy_action(app: ConsoleApp, action: str) -> None:
    page = app.page
    if isinstance(page, DraftPage):
        if action == "put":
            await _ask(app, page)
        elif action == "compare":
            page.comparing = not page.comparing
        elif page.newer is not None and page.draft is not None:
            page.draft = page.draft.rebased(page.newer)
            page.note = ""
        app.redraw()
        return
    row = app.page.selected()
    name = page.name_shown if isinstance(page, PolicyPage) else row.key if row else ""
    if action == "edit" and name:
        await app.go(Location("draft", name))


def _edit_field(app: ConsoleApp, page: DraftPage) -> None:
    view = page.field()
    if view is None:
        return
    hint = f"allowed: {view.allowed}" + ("; Tab walks them" if view.choices else "")
    app.prompt.open("field", f"{view.name} = ", view.text, hint=hint, field=view.name)
    app.redraw()


async def _ask(app: ConsoleApp, page: DraftPage) -> None:
    draft, checked = page.draft, page.checked()
    if draft is None or checked is None:
        return
    wrong = next((view for view in checked.fields if view.error), None)
    if wrong is not None:
        app.notice(f"{wrong.name} = {wrong.text or 'nothing'}: {wrong.error}.")
    elif not checked.changes:
        app.notice(f"Nothing differs from r{draft.base.revision}: there is nothing to put.")
    elif page.newer is not None:
        app.notice(policies.conflict(draft, page.newer, app.tz))
    else:
        await app.go(Location("confirm", draft.name))
        panel = app.page
        if isinstance(panel, ConfirmPage):
            panel.ask(Change(draft, checked), app.clock())
        app.redraw()


async def put(app: ConsoleApp, change: Change, reason: str) -> None:
    """Write the draft as the next revision; a refusal keeps it."""
    draft = change.draft
    body = PolicyPut(spec=change.checked.spec or {}, reason=reason)
    try:
        reply = await app.source.put_policy(
            draft.base.kind, draft.base.scope, body, if_match=draft.base.revision
        )
    except ClientError as error:
        text = await _refused(app, change, error)
        await app.back()
        page = app.page
        if isinstance(page, DraftPage):
            page.note = text
        app.notice(text)
        return
    app.state.load(app.clock(), policies=[*_others(app, draft.name), reply.active])
    kept = app.pages.get("draft")
    if isinstance(kept, DraftPage):
        kept.draft, kept.note = None, ""
    await app.go(Location("policies"), fresh=True)
    app.notice(put_words(reply))


def _others(app: ConsoleApp, name: str) -> list[PolicyRevision]:
    return [p for p in app.state.snapshot().policies if f"{p.kind}/{p.scope}" != name]


def put_words(reply: PolicyPutReply) -> str:
    """What happened, to what, and who acts on it."""
    active = reply.active
    if active.kind in NODE_POLICIES:
        return (
            f"{active.kind}/{active.scope} r{active.revision} is active; "
            "each node acts on it with its next heartbeat."
        )
    num = len(reply.acknowledged_gateways)
    text = f"{active.kind}/{active.scope} r{active.revision} is active; {num} gateway{'' if num == 1 else 's'} act{'s' if num == 1 else ''} on it."
    if reply.pending_gateways:
        text += f" Not yet: {', '.join(reply.pending_gateways)}, when back."
    return text


async def _refused(app: ConsoleApp, change: Change, error: ClientError) -> str:
    if isinstance(error, UnreachableError):
        return (
            "No answer: whether the policy was taken is unknown. Policies shows it once LIVE again."
        )
    if error.status in (401, 403):
        return viewer_words("Putting a policy")
    if error.status == 412:
        try:
            newer = await app.source.policy(change.draft.base.kind, change.draft.base.scope)
        except ClientError:
            return f"{change.draft.name} was changed by someone else. Nothing was done; your draft is kept."
        app.state.load(app.clock(), policies=[*_others(app, change.draft.name), newer])
        return policies.conflict(change.draft, newer, app.tz)
    return f"Nothing was done: {error}"


def viewer_words(doing: str) -> str:
    """Why a viewer cannot, and what would help."""
    return f"{doing} needs the operator's token: $PERILUNE_TOKEN, or the token file of the data folder."
