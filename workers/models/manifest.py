"""What a prepared model folder must hold, so that a second run can tell in milliseconds."""

from __future__ import annotations

from pathlib import Path

import msgspec

from workers.models.wheel import sha256_of

MANIFEST_NAME = "perilune-manifest.json"
FORMAT = 1


class FileEntry(msgspec.Struct, frozen=True):
    """One file: its size, content digest, and time of writing (the fast check)."""

    size_bytes: int
    sha256: str
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True):
    """Written last; a folder without it is not a prepared model."""

    name: str
    source: str
    source_sha256: str
    weights_version: str
    files: dict[str, FileEntry]
    format: int = FORMAT


def describe(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    """Entries for files just written."""
    entries = {}
    for name in names:
        stat = (folder / name).stat()
        entries[name] = FileEntry(stat.st_size, sha256_of(folder / name), stat.st_mtime_ns)
    return entries


def write(folder: Path, manifest: Manifest) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST_NAME).write_bytes(encoded + b"\n")


def read(folder: Path) -> Manifest | None:
    """The folder's manifest, or None where there is none that we understand."""
    try:
        found = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.format == FORMAT else None


def problem_of(folder: Path, manifest: Manifest, *, full: bool = False) -> str:
    """Empty where every file is as described; else what differs, with both values.

    Fast unless `full`: a file whose size and time are as written is taken as it is.
    """
    for name, entry in manifest.files.items():
        try:
            stat = (folder / name).stat()
        except OSError:
            return f"{name} is missing"
        if stat.st_size != entry.size_bytes:
            return f"{name} has {stat.st_size} bytes, not {entry.size_bytes}"
        if full or stat.st_mtime_ns != entry.mtime_ns:
            found = sha256_of(folder / name)
            if found != entry.sha256:
                return f"{name} has sha256 {found}, not {entry.sha256}"
    return ""
