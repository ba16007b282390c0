"""What stands on every page: cluster, time mark, the numbers that are always visible."""

from __future__ import annotations

from dataclasses import dataclass

from console.viewmodel import numbers
from console.viewmodel.freshness import Mark, freshness
from console.viewmodel.overview import Figure, figures
from console.viewmodel.state import Snapshot

from .viewer import Viewer


@dataclass(frozen=True, slots=True)
class NavItem:
    """`letter` is the console's key for the same screen."""

    key: str
    label: str
    href: str
    letter: str = ""


NAV = (
    NavItem("overview", "Overview", "/", "1"),
    NavItem("topology", "Topology", "/topology", "2"),
    NavItem("cache", "Cache", "/cache/hit-rate", "3"),
    NavItem("transfers", "Transfers", "/transfers", "4"),
    NavItem("requests", "Requests", "/requests", "6"),
    NavItem("policies", "Policies", "/policies", "7"),
    NavItem("jobs", "Jobs", "/jobs", "8"),
    NavItem("doctor", "Doctor", "/doctor", "0"),
    NavItem("audit", "Audit", "/audit", ""),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """`spoken` is what a screen reader hears when it changes."""

    cluster: str
    emulated: bool
    mark: Mark
    mark_text: str
    offset: str
    age_text: str
    age_seconds: float
    figures: tuple[Figure, ...]
    num_critical: int
    num_warn: int
    spoken: str


def frame_of(snapshot: Snapshot, viewer: Viewer, cluster: str) -> Frame:
    """`cluster` is shown until the control plane has named its own."""
    seen = snapshot.overview
    fresh = freshness(
        now=0.0,
        received=None if seen is None else 0.0,
        sample_age=seen.sample_age_seconds if seen else None,
    )
    at = seen.at if seen else None
    clock = numbers.clock(at, viewer.tz)
    attention = seen.attention if seen else []
    return Frame(
        cluster=seen.cluster if seen else cluster,
        emulated=snapshot.emulated,
        mark=fresh.mark,
        mark_text=fresh.stale_text if fresh.is_stale else f"LIVE {clock}",
        offset="" if at is None or fresh.is_stale else numbers.offset(at, viewer.tz),
        age_text="" if fresh.is_stale else fresh.age_text,
        age_seconds=fresh.age_seconds or 0.0,
        figures=figures(seen),
        num_critical=sum(item.severity == "critical" for item in attention),
        num_warn=sum(item.severity == "warn" for item in attention),
        spoken=attention[0].text if attention else "Nothing needs attention.",
    )
