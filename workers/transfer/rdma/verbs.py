"""pyverbs, found where Debian puts it, and what must be known about its objects.

Facts about pyverbs 44 that the package lives by: no call gives up the interpreter lock, so nothing
that waits is called; a closed QP that is used, or an object closed twice, ends the process; work
requests are never freed by the garbage collector; a chain keeps raw pointers. So objects are closed
once, in `Closed`'s order, and work requests live in memory of our own (`send_queue`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from workers.core.errors import ConfigError

_SYSTEM_PACKAGES: Final = "/usr/lib/python3/dist-packages"
_EVENT_FILE: Final = "anon_inode:[infinibandevent]"
_descriptor_lock = threading.Lock()


class Verbs:
    """The parts of pyverbs that are used, untyped as they are."""

    def __init__(self) -> None:
        self.device = _part("device")
        self.pd = _part("pd")
        self.mr = _part("mr")
        self.cq = _part("cq")
        self.qp = _part("qp")
        self.wr = _part("wr")
        self.addr = _part("addr")
        self.enums = _enums()
        self.error: type[Exception] = _part("pyverbs_error").PyverbsError

    def constant(self, name: str) -> int:
        return int(getattr(self.enums, name))


@lru_cache(maxsize=1)
def load() -> Verbs:
    """ConfigError: it is not installed, or not for this Python."""
    if importlib.util.find_spec("pyverbs") is None and _SYSTEM_PACKAGES not in sys.path:
        sys.path.append(_SYSTEM_PACKAGES)  # last, so that this environment's own packages win
    try:
        return Verbs()
    except ImportError as error:
        raise ConfigError(
            "transport", "rdma", f"pyverbs cannot be imported ({error})",
            "Install python3-pyverbs, rdma-core and ibverbs-providers, and run the agent with the "
            "system's Python version.",
        ) from error  # fmt: skip


def _part(name: str) -> ModuleType:
    return importlib.import_module(f"pyverbs.{name}")


def _enums() -> ModuleType:
    try:
        return _part("enums")
    except ImportError:  # newer releases
        return _part("libibverbs_enums")


def close_once(objects: list[Any]) -> None:
    """Close pyverbs objects, last made first, and forget them: a second call does nothing."""
    while objects:
        objects.pop().close()


def made_with_descriptor(make: Callable[[], Any]) -> tuple[Any, int]:
    """A completion channel and its descriptor, which pyverbs 44 does not tell."""
    with _descriptor_lock:
        before = _event_descriptors()
        channel = make()
        found = _event_descriptors() - before
    if len(found) != 1:
        channel.close()
        raise OSError(f"{len(found)} new event descriptors where one was expected")
    descriptor = found.pop()
    os.set_blocking(descriptor, False)
    return channel, descriptor


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENT_FILE:
                found.add(int(name))
        except OSError:
            continue  # closed meanwhile, or the listing's own
    return found
