"""The palette behind `:`: where to go and what to do, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from console.tui.keys import LATER
from console.tui.pages.base import Location
from console.viewmodel.numbers import short_id
from console.viewmodel.state import Snapshot
from console.viewmodel.table import clean

MAX_SHOWN = 8
MAX_REQUESTS = 50


@dataclass(frozen=True, slots=True)
class Entry:
    """`words` are matched and shown; `key` is the short way there; `does` an action instead of a place."""

    words: str
    key: str = ""
    location: Location | None = None
    does: str = ""
    acts: bool = False


NOUNS = (
    Entry("overview (ov)", "1", Location("overview")),
    Entry("topology (topo)", "2", Location("topology")),
    Entry("cache", "3", Location("cache")),
    Entry("transfers (tr)", "4", Location("transfers")),
    Entry("requests (rq)", "6", Location("requests")),
    Entry("in-flight (stuck)", "6 ]", Location("requests", "in_flight")),
    Entry("rejections (ledger)", "6 [", Location("requests", "rejections")),
    Entry("health (workers)", "2 [", Location("topology", "health")),
    Entry("policies (policy)", "7", Location("policies")),
    Entry("cache tiers", "3 ]", Location("cache", "tiers")),
    Entry("cache tenants", "3 ]", Location("cache", "tenants")),
    Entry("cache what-if", "3 ]", Location("cache", "what_if")),
    Entry("cache pins", "3 ]", Location("cache", "pins")),
    Entry("jobs", "8", Location("jobs")),
    Entry("doctor", "0", Location("doctor")),
    Entry("audit", "", Location("audit")),
    Entry("-", "", does="previous"),
    Entry("help", "?", does="help"),
    Entry("live", "=", does="live"),
    Entry("hold", "p", does="hold"),
    Entry("reconnect", "Ctrl-r", does="reconnect"),
    Entry("set utc", "", does="set_utc"),
    Entry("set local", "", does="set_local"),
    Entry("quit (q)", "q", does="quit"),
)


def entries(snapshot: Snapshot, *, can_act: bool) -> list[Entry]:
    """Everything that can be named now. Verbs that a role lacks are not listed."""
    found = list(NOUNS)
    for policy in snapshot.policies:
        name = f"{policy.kind}/{policy.scope}"
        found.append(Entry(f"policy {clean(name)}", "7 Enter", Location("policy", name)))
        if can_act:
            found.append(Entry(f"edit {clean(name)}", "E", Location("draft", name), acts=True))
    found.extend(
        Entry(f"node {clean(n.id)}", "2 Enter", Location("node", n.id)) for n in snapshot.nodes
    )
    found.extend(
        Entry(f"worker {clean(w.id)}", "2 ] Enter", Location("worker", w.id))
        for w in snapshot.workers
    )
    found.extend(
        Entry(f"request {short_id(d.request_id)}", "6 Enter", Location("request", d.request_id))
        for d in reversed(snapshot.decisions[-MAX_REQUESTS:])
    )
    return found


def search(text: str, known: Sequence[Entry], recent: Sequence[Location]) -> list[Entry]:
    """Best matches first; nothing typed shows where one has been."""
    wanted = split_filter(text)[0].strip().lower()
    if not wanted:
        names = [Entry(_recent_words(place), "recent", place) for place in reversed(recent)]
        return [*names, *known][:MAX_SHOWN]
    scored = [
        (score, place, e) for place, e in enumerate(known) if (score := _score(wanted, e.words)) > 0
    ]
    scored.sort(key=lambda item: (-item[0], item[1]))
    by_id = [] if scored and scored[0][0] > 1 else _request_by_id(split_filter(text)[0])
    return [*by_id, *(entry for _, _, entry in scored)][:MAX_SHOWN]


def _request_by_id(text: str) -> list[Entry]:
    """A request that is none of the last ones, by its whole id."""
    noun, _, name = text.strip().partition(" ")
    if noun not in ("request", "rq") or not name:
        return []
    return [Entry(f"request {clean(name)}", "", Location("request", name))]


def split_filter(text: str) -> tuple[str, str]:
    """`rq /status=rejected` is a place and a filter."""
    head, slash, tail = text.partition(" /")
    return head, tail if slash else ""


def _recent_words(place: Location) -> str:
    return clean(f"{place.noun} {place.name}".strip())


def _score(wanted: str, words: str) -> int:
    """Exact name or alias, then start, then inside, then letters in order."""
    name = words.lower()
    names = [part.strip("()") for part in name.split(" (")]
    if wanted in names:
        return 4
    if any(part.startswith(wanted) for part in names):
        return 3
    if wanted in name:
        return 2
    letters = iter(name)
    return 1 if all(letter in letters for letter in wanted) else 0


def later(key: str) -> str:
    """What a key of a screen that does not exist yet says."""
    return f"{key} is kept for {LATER[key]}: not available in this version."
