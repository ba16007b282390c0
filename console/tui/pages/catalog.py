"""Which page shows which noun."""

from __future__ import annotations

from collections.abc import Callable

from console.tui.pages.act import ActPage
from console.tui.pages.audit import AuditPage
from console.tui.pages.base import Page
from console.tui.pages.cache import CachePage
from console.tui.pages.confirm import ConfirmPage
from console.tui.pages.detail import DetailPage
from console.tui.pages.doctor import DoctorPage
from console.tui.pages.help import HelpPage
from console.tui.pages.jobs import JobsPage
from console.tui.pages.overview import OverviewPage
from console.tui.pages.pair import PairPage
from console.tui.pages.policies import DraftPage, PoliciesPage, PolicyPage
from console.tui.pages.requests import RequestsPage
from console.tui.pages.topology import TopologyPage
from console.tui.pages.transfers import TransfersPage

PAGES: dict[str, Callable[[], Page]] = {
    "overview": OverviewPage,
    "topology": TopologyPage,
    "cache": CachePage,
    "transfers": TransfersPage,
    "requests": RequestsPage,
    "policies": PoliciesPage,
    "policy": PolicyPage,
    "draft": DraftPage,
    "confirm": ConfirmPage,
    "jobs": JobsPage,
    "act": ActPage,
    "audit": AuditPage,
    "doctor": DoctorPage,
    "help": HelpPage,
    "request": lambda: DetailPage("request"),
    "node": lambda: DetailPage("node"),
    "worker": lambda: DetailPage("worker"),
    "gateway": lambda: DetailPage("gateway"),
    "pair": PairPage,
    "job": lambda: DetailPage("job"),
    "audit_row": lambda: DetailPage("audit_row"),
}


def make(noun: str) -> Page | None:
    """A new page, or None for a noun that this version does not show."""
    build = PAGES.get(noun)
    return build() if build else None
