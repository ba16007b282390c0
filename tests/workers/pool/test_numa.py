"""Where a slab lies (B41): spread over the machine's memory nodes, and shown."""

import threading
from pathlib import Path

import pytest

from workers.pool.arena import SlabFile
from workers.pool.numa import interleave_this_thread, memory_nodes, parse_nodes


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", [0]), ("0-1", [0, 1]), ("0,2-3\n", [0, 2, 3]), ("", [])]
)
def test_nodes_as_the_kernel_lists_them(text: str, nodes: list[int]) -> None:
    assert parse_nodes(text) == nodes


def test_b41_nodes_of_a_two_socket_machine_are_found_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_memory").write_text("0-1\n")
    assert memory_nodes(tmp_path) == [0, 1]
    assert memory_nodes(tmp_path / "nowhere") == []
    monkeypatch.setattr("workers.pool.arena.memory_nodes", lambda: memory_nodes(tmp_path))
    asked: list[list[int]] = []

    def note(nodes: list[int]) -> bool:
        asked.append(nodes)
        return True

    monkeypatch.setattr("workers.pool.arena.interleave_this_thread", note)
    slab = SlabFile("slab", 1 << 20, tmp_path)
    assert slab.numa_nodes == [0, 1]
    slab.start_touching(1e12)
    slab.close()
    assert asked == [[0, 1]], "the thread that has the pages allocated spreads them"


def test_one_node_is_left_alone() -> None:
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(interleave_this_thread([0])))
    thread.start()
    thread.join()
    assert done == [False]
