"""Pages that other packages bring: entry points of the group `perilune.pages`."""

from __future__ import annotations

from importlib.metadata import entry_points

import structlog
from fastapi import FastAPI

from controlplane.settings import Settings

GROUP = "perilune.pages"
log = structlog.get_logger("controlplane")


def mount_pages(app: FastAPI, settings: Settings) -> list[str]:
    """Call every `mount(app, settings)`; one that fails is logged and left out. Names mounted."""
    mounted = []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()(app, settings)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning("pages not mounted", pages=entry.name, reason=reason)
        else:
            mounted.append(entry.name)
    return mounted
