"""One key, one meaning, on all screens. The table is also the help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

UPPER_LOOKS = frozenset("G")
"""The one upper-case key that only looks."""


@dataclass(frozen=True, slots=True)
class Key:
    """`name` as Textual gives it; `shown` as people read it; `does` names an action.

    `acts` opens a preflight: hidden from those who may not act. `on_row` is about the row at the
    cursor.
    """

    name: str
    shown: str
    does: str
    words: str
    group: str
    acts: bool = False
    footer: bool = False
    on_row: bool = False


class KeyCollisionError(Exception):
    """Two bindings of one screen share a key."""


MOVE = (
    Key("down", "Down j", "down", "next row", "move"),
    Key("j", "", "down", "", "move"),
    Key("up", "Up k", "up", "row above", "move"),
    Key("k", "", "up", "", "move"),
    Key("left", "Left h", "left", "cell to the left", "move"),
    Key("h", "", "left", "", "move"),
    Key("right", "Right l", "right", "cell to the right", "move"),
    Key("l", "", "right", "", "move"),
    Key("g", "g Home", "top", "top", "move"),
    Key("home", "", "top", "", "move"),
    Key("G", "G End", "bottom", "bottom", "move"),
    Key("end", "", "bottom", "", "move"),
    Key("ctrl+d", "Ctrl-d", "half_down", "half a page down", "move"),
    Key("ctrl+u", "Ctrl-u", "half_up", "half a page up", "move"),
    Key("pagedown", "PgDn", "page_down", "a page down", "move"),
    Key("pageup", "PgUp", "page_up", "a page up", "move"),
)
GLOBAL = (
    Key("enter", "Enter", "open", "open the row at the cursor", "go"),
    Key("escape", "Esc", "back", "back: filter, then one crumb; never quits", "go"),
    Key("1", "1", "screen overview", "Overview", "go"),
    Key("2", "2", "screen topology", "Topology", "go"),
    Key("3", "3", "screen cache", "Cache", "go"),
    Key("4", "4", "screen transfers", "Transfers", "go"),
    Key("6", "6", "screen requests", "Requests", "go"),
    Key("7", "7", "screen policies", "Policies", "go"),
    Key("8", "8", "screen jobs", "Jobs", "go"),
    Key("0", "0", "screen doctor", "Doctor", "go"),
    Key("tab", "Tab", "next_pane", "next pane", "go"),
    Key("shift+tab", "Shift-Tab", "previous_pane", "pane before", "go"),
    Key("left_square_bracket", "[", "previous_view", "view before", "go"),
    Key("right_square_bracket", "]", "next_view", "next view of this screen", "go"),
    Key("colon", ":", "palette", "go to or do, by name (:audit is there)", "go", footer=True),
    Key("q", "q", "quit", "quit", "go"),
    Key("slash", "/", "filter", "filter rows: words, field=v, -not, ttft>2s", "find", footer=True),
    Key("p", "p", "hold", "hold at now", "time", footer=True),
    Key("equals_sign", "=", "live", "back to live", "time"),
    Key("y", "y", "copy", "copy this view's link (a curl where nothing has come)", "show"),
    Key("question_mark", "?", "help", "this list", "show", footer=True),
    Key("ctrl+r", "Ctrl-r", "reconnect", "reconnect now", "app"),
    Key("ctrl+l", "Ctrl-l", "redraw", "redraw", "app"),
    Key("ctrl+c", "Ctrl-c", "interrupt", "leave a prompt; twice: quit", "app"),
    Key("ctrl+z", "Ctrl-z", "suspend", "suspend", "app"),
)
LATER = {"5": "KV wait", "9": "Alerts"}
"""Screens that this version does not have; their keys stay free for them."""

VIEWS = Key("", "[ ]", "next_view", "next view of this screen, and the one before", "go")
"""Both, for the footer."""
FOLLOW = Key("f", "f", "follow", "follow the newest row", "show", footer=True)
NEXT_VALUE = Key(
    "v", "v", "next_value", "next value: P99 or P95, bytes, failures", "show", footer=True
)
AS_TABLE = Key("s", "s", "as_table", "figure as table", "show", footer=True)
NEXT_MARK = Key("n", "n", "next_mark", "next event under the time axis", "find")
LAST_MARK = Key("b", "b", "previous_mark", "event before", "find")
WINDOW = Key("w", "w", "window", "window 15 min, 1 h, 24 h", "time", footer=True)
COMPARE = Key("c", "c", "compare", "compare with the active revision", "time")
EDIT = Key("E", "E", "edit", "edit: opens a draft", "act", acts=True, footer=True)
EDIT_CACHE = Key("E", "E", "edit_cache", "edit the cache policy: opens a draft", "act", acts=True, footer=True)  # fmt: skip
PIN = Key("P", "P", "pin", "pin the tenant or namespace; on a pin: end it", "act", acts=True, footer=True, on_row=True)  # fmt: skip
PREFETCH = Key(
    "W", "W", "prefetch", "prefetch from SSD into DRAM", "act", acts=True, footer=True, on_row=True
)
PURGE = Key(
    "X", "X", "purge", "purge: asks for the name first", "act", acts=True, footer=True, on_row=True
)
CANCEL = Key("K", "K", "cancel_job", "cancel the job", "act", acts=True, footer=True, on_row=True)
UNDO = Key("Z", "Z", "undo_job", "take the job back, where that can be done", "act", acts=True, footer=True, on_row=True)  # fmt: skip
CANCEL_REQUEST = Key("K", "K", "cancel_request", "cancel the request", "act", acts=True, footer=True, on_row=True)  # fmt: skip
RUN_DOCTOR = Key("T", "T", "run_doctor", "run the doctor, on a pair for the pair", "act", acts=True, footer=True)  # fmt: skip
REBASE = Key("E", "E", "edit", "take the draft onto the newer revision", "act", acts=True)
PUT = Key("S", "S", "put", "put the draft into effect: shows what will happen first", "act", acts=True, footer=True)  # fmt: skip


_NAMES = {
    ":": "colon",
    "/": "slash",
    "?": "question_mark",
    "=": "equals_sign",
    "[": "left_square_bracket",
    "]": "right_square_bracket",
}


def name_of(key: str, character: str | None) -> str:
    """The name in this table of a key as the terminal reports it."""
    if character and character.isprintable() and len(key) != 1:
        return _NAMES.get(character, key)
    return character if character and character.isprintable() else key


def merged(page: Iterable[Key]) -> dict[str, Key]:
    """All keys of one screen by name; two meanings for one key raise `KeyCollisionError`."""
    keys: dict[str, Key] = {}
    for key in (*MOVE, *GLOBAL, *page):
        if key.name in keys:
            raise KeyCollisionError(f"{key.name}: {keys[key.name].does} and {key.does}")
        single_upper = len(key.name) == 1 and key.name.isupper() and key.name not in UPPER_LOOKS
        if single_upper != key.acts:
            raise KeyCollisionError(f"{key.name}: lower case looks, upper case acts")
        keys[key.name] = key
    return keys
