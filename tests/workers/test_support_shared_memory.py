"""The look at /dev/shm after heavy tests."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import shared_memory
from shared_memory import SHM, nothing_left, remove_slab


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shared_memory, "SETTLE_SECONDS", 0.2)
    path = SHM / f"perilune-test-{secrets.token_hex(4)}.slab"
    monkeypatch.setattr(shared_memory, "OURS", (path.name,))  # others come and go meanwhile
    yield path
    path.unlink(missing_ok=True)


def test_what_nobody_uses_is_named(file: Path) -> None:
    with pytest.raises(AssertionError, match=file.name), nothing_left():
        file.write_bytes(b"left")


def test_what_was_there_before_or_is_in_use_is_no_leak(file: Path) -> None:
    with nothing_left():
        file.write_bytes(b"in use")
        with file.open("r+b") as opened:
            mapping = mmap.mmap(opened.fileno(), 0)
    with nothing_left():
        mapping.close()


def test_a_killed_agents_slab_goes_with_its_journal(file: Path) -> None:
    journal = file.with_name(f"{file.name}.journal")
    with nothing_left():
        file.write_bytes(b"slab")
        journal.write_bytes(b"journal")
        remove_slab(file.name)
        assert not journal.exists()
        remove_slab(file.name)  # of one that left nothing
