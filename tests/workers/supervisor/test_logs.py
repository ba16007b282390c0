"""Bounded logs, and the line that says best why a process ended."""

import errno
from pathlib import Path

import pytest

from workers.supervisor.logs import BoundedLog, last_error_line


def test_the_file_has_a_bound(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=1000)
    for number in range(500):
        log.write(f"line {number}\n".encode())
    log.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert max(sizes) <= 1000
    assert (tmp_path / "a.log").read_text().endswith("line 499\n")


def test_a_log_that_could_not_begin_anew_does_so_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = BoundedLog(tmp_path / "a.log", max_bytes=100)
    log.write(b"x" * 90 + b"\n")

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "open", no_room)
        for _ in range(2):
            assert log.write(b"lost, but for who reads its last lines\n")
    log.write(b"there again\n")
    assert (tmp_path / "a.log").read_bytes() == b"there again\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 90 + b"\n"
    log.close()


def test_lines_split_over_reads_come_whole(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log")
    assert log.write(b"one\ntw") == ["one"]
    assert log.write(b"o\n") == ["two"]
    log.close()


def test_a_new_process_does_not_inherit_its_predecessors_error(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log")
    log.write(b"ValueError: old\n")
    log.begin("python -m again")
    assert list(log.lines) == []
    log.close()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ""),
        (["hello", "bye"], "bye"),
        (
            ["Traceback (most recent call last):", "  File x", "ValueError: bad", ""],
            "ValueError: bad",
        ),
        (
            [
                "(EngineCore pid=7) ERROR 11-29 12:00:00 [core.py:1] ValueError: no KV cache room",
                "(APIServer pid=3) RuntimeError: Engine core initialization failed. "
                "See root cause above. Failed core proc(s): {}",
            ],
            "ValueError: no KV cache room",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, max_model_len (9) is greater than 8 [type=value_error]",
                "    For further information visit a page",
            ],
            "max_model_len (9) is greater than 8 [type=value_error]",
        ),
        (["starting", "[error] cannot listen", "shutting down"], "[error] cannot listen"),
    ],
)
def test_last_error_line(lines: list[str], expected: str) -> None:
    assert last_error_line(lines) == expected
