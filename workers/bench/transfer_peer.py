"""Mooncake Store as a holder and as a reader, for `perilune bench transfer` to compare with.

Run by path, by the interpreter of the peers' environment; imports nothing of this project. Speaks
lines of JSON: one request on stdin, one answer on stdout.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from importlib.metadata import version
from typing import Any

from mooncake.store import (  # type: ignore[import-not-found]  # the peers' environment has it
    MooncakeDistributedStore,
)


def main() -> None:
    role, host, master, segment_bytes, buffer_bytes = sys.argv[1:6]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library logs to stdout
    store = MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", int(segment_bytes), 64 << 20, "tcp", "", master)
    buffer = mmap.mmap(-1, int(buffer_bytes))
    memory = memoryview(buffer)
    memory[:] = bytes(len(memory))
    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    code = code or store.register_buffer(base, int(buffer_bytes))
    _say(answers, {"ready": code == 0, "code": code, "version": _version()})
    for line in sys.stdin:
        request = json.loads(line)
        verbs = {"put": _put, "read": _read, "read_batch": _read_batch}
        _say(answers, verbs[request["do"]](store, base, request))
    store.close()
    assert role in ("hold", "read")


def _put(store: Any, base: int, request: dict[str, Any]) -> dict[str, Any]:
    size, failed = request["bytes"], 0
    ctypes.memmove(base, os.urandom(size), size)
    for index in range(request["count"]):
        failed += store.put_from(f"{request['name']}-{index}", base, size) != 0
    return {"failed": failed}


def _read(store: Any, base: int, request: dict[str, Any]) -> dict[str, Any]:
    size, count = request["bytes"], request["count"]
    keys = [f"{request['name']}-{index}" for index in range(count)]
    started, cpu = time.perf_counter(), time.process_time()
    good = 0
    for index, key in enumerate(keys):
        good += store.get_into(key, base + index * size, size) == size
    return _figures(started, cpu, count - good)


def _read_batch(store: Any, base: int, request: dict[str, Any]) -> dict[str, Any]:
    size, count = request["bytes"], request["count"]
    keys = [f"{request['name']}-{index}" for index in range(count)]
    targets = [base + index * size for index in range(count)]
    started, cpu = time.perf_counter(), time.process_time()
    found = store.batch_get_into(keys, targets, [size] * count)
    return _figures(started, cpu, sum(1 for length in found if length != size))


def _figures(started: float, cpu: float, failed: int) -> dict[str, Any]:
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "failed": failed,
    }


def _say(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _version() -> str:
    return version("mooncake-transfer-engine-non-cuda")


if __name__ == "__main__":
    main()
