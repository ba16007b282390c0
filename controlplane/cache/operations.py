"""Which operation a kind of job is."""

from __future__ import annotations

from controlplane.cache.context import JobContext, Operation
from controlplane.cache.copies import replicate
from controlplane.cache.pins import pin, restore, unpin
from controlplane.cache.promotions import prefetch
from controlplane.cache.purges import purge
from controlplane.jobs.schemas import JobKind
from controlplane.jobs.service import Outcome


async def _pin_or_restore(context: JobContext) -> Outcome:
    return await (restore if "restore" in context.spec else pin)(context)


OPERATIONS: dict[JobKind, Operation] = {
    "pin": _pin_or_restore,
    "unpin": unpin,
    "purge": purge,
    "prefetch": prefetch,
    "replicate": replicate,
}
