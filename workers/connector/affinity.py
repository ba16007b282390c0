"""Which CPUs the connector's own threads run on."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def leave_engine_cores() -> None:
    """Give this thread the CPUs that the engine's compute threads do not use.

    vLLM binds its process to the cores it computes on and threads inherit that. The parent
    process keeps the machine's whole set; where no core is left over, any of them will do.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    try:
        everywhere = os.sched_getaffinity(os.getppid())
        spare = everywhere - bound_cpus(os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""))
        os.sched_setaffinity(0, spare or everywhere)
    except OSError as error:
        logger.info("a thread of the connector stays on the engine's cores: %s", error)


def bound_cpus(binding: str) -> set[int]:
    """CPUs in "0-1,4|5"; what is no such list counts as none."""
    cpus: set[int] = set()
    for part in binding.replace("|", ",").split(","):
        first, dash, last = part.partition("-")
        if first.isdigit() and (not dash or last.isdigit()):
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
