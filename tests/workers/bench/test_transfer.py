"""The transfer bench in small, without the peer."""

from __future__ import annotations

import pytest

from workers.bench import transfer


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_rows_of_a_small_run(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setattr(transfer, "BLOCK_BYTES", (64 * 1024, 1 << 20))
    monkeypatch.setattr(transfer, "SHM_BLOCK_BYTES", (64 * 1024, 1 << 20))
    monkeypatch.setattr(transfer, "TOTAL_BYTES", 4 << 20)
    monkeypatch.setattr(transfer, "SHM_TOTAL_BYTES", 4 << 20)
    result = transfer.run_transfer_bench(transport, 1, peer=False)
    assert result["peer_version"] is None
    assert [row["bytes"] for row in result["rows"]] == [64 * 1024, 1 << 20]
    for row in result["rows"]:
        assert row["transport"] == transport
        assert row["gb_per_s"] > 0
        assert row["one_by_one_gb_per_s"] > 0
        assert row["peer"] is None
        assert row["over_peer"] is None


def test_shared_memory_stands_beside_memcpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SHM_BLOCK_BYTES", (1 << 20,))
    monkeypatch.setattr(transfer, "SHM_TOTAL_BYTES", 8 << 20)
    result = transfer.run_transfer_bench("shm", 3, peer=None)
    (row,) = result["rows"]
    assert result["threads"] >= 1
    for name in ("memcpy", "memcpy_verified", "first_use", "untouched"):
        assert row[f"{name}_gb_per_s"] > 0
    assert row["over_memcpy_verified"] > 0


def test_ratios_are_of_neighbouring_runs() -> None:
    fast, slow = [(1.0, 1.0), (10.0, 1.0)], [(3.0, 4.0), (30.0, 4.0)]
    row = transfer._row("tcp", 1 << 20, fast, fast, slow, slow)
    assert row["over_peer"] == pytest.approx(3.0)
    assert row["over_peer_batch"] == pytest.approx(3.0)
    assert row["peer_cpu_s_per_gb"] == pytest.approx(4 * row["cpu_s_per_gb"])
