"""Which adapter a request runs under, said so that no two adapters are taken for one."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from blake3 import blake3

_FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
_MAX_KNOWN = 1024
_known: OrderedDict[tuple[object, ...], str] = OrderedDict()
_lock = Lock()


def lora_identity(lora: Any) -> str | None:
    """Name and what lies under the path: a name may stand for other weights elsewhere or later.

    Files are read once, and again when their size or time changes. A path that is no folder here
    (the name of a repository, say) counts by its text.
    """
    if lora is None:
        return None
    name = lora.lora_name or f"id {lora.lora_int_id}"
    return f"{name}\0{_content(lora.lora_path)}"


def _content(path: str) -> str:
    folder = Path(path)
    try:
        files = [file for pattern in _FILES for file in sorted(folder.glob(pattern))]
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return f"path {path}"
    if not files:
        return f"path {path}"
    known = (path, *((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats))
    with _lock:
        if known in _known:
            _known.move_to_end(known)
            return _known[known]
    digest = _digest(files) or f"path {path}"
    with _lock:
        _known[known] = digest
        while len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)
    return digest


def _digest(files: list[Path]) -> str:
    """Over names and whole contents: 100 MB take some 30 ms. Empty where one cannot be read."""
    total = blake3()
    try:
        for file in files:
            content = blake3().update_mmap(file).digest()
            total.update(file.name.encode() + b"\0" + content)
    except OSError:
        return ""
    return f"files {total.hexdigest()}"
