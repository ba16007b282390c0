"""How several agents share one disk."""

from workers.core.disk_shares import default_cap, fair_shares, floor_bytes


def test_disk_shares_are_fair_and_leave_a_floor() -> None:
    assert default_cap(1000) == 100
    assert floor_bytes(1 << 40) == 1 << 30
    assert floor_bytes(1000) == 50
    assert fair_shares(90, [100, 100, 100]) == [30, 30, 30]
    assert fair_shares(90, [10, 100, 100]) == [10, 40, 40]
    assert fair_shares(1000, [10, 20]) == [10, 20]
    assert fair_shares(-5, [10, 20]) == [0, 0]
