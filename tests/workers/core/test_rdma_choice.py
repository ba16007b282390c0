"""GID, MTU, queues, rails and locked memory, from tables as devices show them."""

import pytest

from workers.core.errors import ConfigError
from workers.core.rdma_choice import (
    FAR_BYTES,
    DeviceLimits,
    GidEntry,
    GidType,
    Port,
    QueueWish,
    Rail,
    Region,
    check_locked_memory,
    check_types,
    choose_gid,
    choose_mtu,
    choose_rails,
    effective_queues,
    is_far,
    leave_out,
    node_of_pages,
    pick_rail,
    plan_regions,
)

V1, V2, IB = GidType.ROCE_V1, GidType.ROCE_V2, GidType.INFINIBAND
RXE = DeviceLimits(max_qp_wr=1 << 20, max_cqe=32767, max_sge=32, max_qp_rd_atom=128)


class TestGid:
    def test_c02_routable_ipv4_before_link_local(self) -> None:
        table = [
            GidEntry(0, "fe80::1", V2, "eth0"),
            GidEntry(1, "::ffff:10.0.0.7", V2, "eth0"),
        ]
        choice = choose_gid(table, ["10.0.0.7", "fe80::1%eth0"])
        assert choice.index == 1
        assert "10.0.0.7" in choice.reason
        assert "routable IPv4 of eth0" in choice.reason
        assert "0 fe80::1 (reaches less far)" in choice.reason
        assert not choice.warning

    def test_c03_the_one_of_an_interface_of_this_host(self) -> None:
        table = [
            GidEntry(2, "::ffff:192.168.9.9", V2, "eth1"),
            GidEntry(3, "::ffff:10.0.0.7", V2, "eth0"),
        ]
        choice = choose_gid(table, ["10.0.0.7"])
        assert choice.index == 3
        assert "no interface here has that address" in choice.reason

    def test_c03_an_interface_that_is_down_is_passed_over(self) -> None:
        table = [
            GidEntry(0, "::ffff:10.0.0.7", V2, "eth0", netdev_up=False),
            GidEntry(1, "::ffff:10.0.1.7", V2, "eth1"),
        ]
        choice = choose_gid(table, ["10.0.0.7", "10.0.1.7"])
        assert choice.index == 1
        assert "eth0 is down" in choice.reason

    def test_c04_ipv6_only(self) -> None:
        table = [GidEntry(0, "fe80::1", V2, "eth0"), GidEntry(1, "fc00::7", V2, "eth0")]
        choice = choose_gid(table, ["fe80::1", "fc00::7"])
        assert choice.index == 1
        assert not choice.warning

    def test_c04_link_local_is_a_last_resort_and_warned_about(self) -> None:
        choice = choose_gid([GidEntry(0, "fe80::1", V2, "eth0")], ["fe80::1"])
        assert choice.index == 0
        assert "link-local is all there is" in choice.warning
        assert "eth0" in choice.warning

    def test_c05_v2_before_v1(self) -> None:
        table = [
            GidEntry(0, "::ffff:10.0.0.7", V1, "eth0"),
            GidEntry(1, "fe80::1", V2, "eth0"),
            GidEntry(2, "::ffff:10.0.0.7", V2, "eth0"),
        ]
        assert choose_gid(table, ["10.0.0.7"]).index == 2
        assert choose_gid(table[:2], ["10.0.0.7"]).index == 1, "even where v2 reaches less far"

    def test_v1_alone_is_taken_with_a_warning(self) -> None:
        choice = choose_gid([GidEntry(0, "::ffff:10.0.0.7", V1, "eth0")], ["10.0.0.7"])
        assert "RoCEv1" in choice.warning

    def test_c05_a_type_mismatch_names_both(self) -> None:
        assert check_types(V2, V2, "a", "b") == ""
        text = check_types(V2, V1, "node-a", "node-b")
        assert "roce_v2 at node-a" in text
        assert "roce_v1 at node-b" in text

    def test_infiniband_needs_no_interface(self) -> None:
        choice = choose_gid([GidEntry(0, "fe80::2c9:300:1:2", IB)], ["10.0.0.7"])
        assert (choice.index, choice.warning) == (0, "")

    def test_empty_table_says_what_to_do(self) -> None:
        with pytest.raises(ConfigError, match="GID table is empty"):
            choose_gid([GidEntry(0, "::", V2)], [])

    def test_an_index_overrides(self) -> None:
        table = [GidEntry(0, "fe80::1", V2), GidEntry(1, "::ffff:10.0.0.7", V2)]
        assert choose_gid(table, [], index=0).index == 0
        with pytest.raises(ConfigError, match=r"gid_index = 5.*Set one of: 0 .*1 "):
            choose_gid(table, [], index=5)


class TestMtu:
    def test_equal(self) -> None:
        assert choose_mtu(4096, 4096).statement == ""

    @pytest.mark.parametrize(("mine", "theirs"), [(4096, 1024), (1024, 4096)])
    def test_the_smaller_with_both_named(self, mine: int, theirs: int) -> None:
        choice = choose_mtu(mine, theirs, "node-a", "node-b")
        assert choice.mtu == 1024
        assert f"{mine} at node-a and {theirs} at node-b" in choice.statement
        small = "node-a" if mine == 1024 else "node-b"
        assert f"MTU of {small}'s interface" in choice.statement

    def test_no_mtu_of_verbs(self) -> None:
        with pytest.raises(ValueError, match="1500"):
            choose_mtu(1500, 4096)


class TestQueues:
    def test_the_defaults_fit(self) -> None:
        queues = effective_queues(QueueWish(), RXE)
        assert (queues.send_requests, queues.receive_requests) == (1024, 1024)
        assert queues.completions == 2048
        assert queues.inline_bytes == 256
        assert queues.notes == ()

    def test_c14_a_depth_of_100000_is_clamped_and_said(self) -> None:
        queues = effective_queues(QueueWish(send_requests=100_000), RXE)
        assert queues.send_requests == 16383
        assert queues.completions <= RXE.max_cqe
        assert queues.notes == ("rdma.send_requests = 100000: 16383 is used (16 to 16383 here)",)

    def test_a_depth_of_4_is_raised(self) -> None:
        queues = effective_queues(QueueWish(send_requests=4), RXE)
        assert queues.send_requests == 16
        assert "rdma.send_requests = 4: 16 is used" in queues.notes[0]

    def test_c14_16_is_kept(self) -> None:
        assert effective_queues(QueueWish(send_requests=16), RXE).send_requests == 16

    def test_a_small_device_bounds_all(self) -> None:
        small = DeviceLimits(max_qp_wr=64, max_cqe=100, max_sge=1, max_qp_rd_atom=4, max_inline=64)
        queues = effective_queues(QueueWish(), small)
        assert (queues.send_requests, queues.receive_requests) == (50, 50)
        assert queues.completions <= 100
        assert (queues.segments, queues.inline_bytes, queues.reads) == (1, 64, 4)
        assert len(queues.notes) == 4


class TestRails:
    def test_same_names_are_same_rails(self) -> None:
        ports = [Port("mlx5_0", 1), Port("mlx5_1", 1)]
        choice = choose_rails(ports, list(reversed(ports)), "node-b")
        assert [(rail.mine, rail.theirs) for rail in choice.rails] == [(0, 1), (1, 0)]
        assert not choice.warnings

    def test_c17_off_rail_is_never_silent(self) -> None:
        mine = [Port(f"mlx5_{i}", 1) for i in range(8)]
        choice = choose_rails(mine, mine[:4], "node-b")
        assert [rail.off_rail for rail in choice.rails] == [False] * 4 + [True] * 4
        assert len(choice.warnings) == 4
        assert "mlx5_4/1" in choice.warnings[0]
        assert "node-b has no port" in choice.warnings[0]

    def test_configured_rails_beat_names(self) -> None:
        mine = [Port("mlx5_0", 1, rail="r1"), Port("mlx5_1", 1, rail="r2")]
        theirs = [Port("mlx5_0", 1, rail="r2"), Port("mlx5_1", 1, rail="r1")]
        choice = choose_rails(mine, theirs, "b")
        assert [(rail.mine, rail.theirs) for rail in choice.rails] == [(0, 1), (1, 0)]

    def test_c20_several_queue_pairs_for_a_bonded_port(self) -> None:
        rails = choose_rails([Port("bond0", 1)], [Port("bond0", 1)], "b", queue_pairs=2).rails
        assert [(rail.mine, rail.theirs) for rail in rails] == [(0, 0), (0, 0)]

    def test_no_port_at_all(self) -> None:
        with pytest.raises(ConfigError, match="node-b has no active RDMA port"):
            choose_rails([Port("a", 1)], [], "node-b")


class TestLockedMemory:
    def test_c06_names_limit_need_and_way_out(self) -> None:
        found = check_locked_memory(64 << 20, 2, 8 << 20, privileged=False)
        assert not found.ok
        assert "128 MiB (64 MiB for each of 2 devices)" in found.statement
        assert "limit is 8 MiB" in found.statement
        assert "ulimit -l unlimited" in found.statement

    def test_what_is_locked_already_counts(self) -> None:
        assert check_locked_memory(4 << 20, 1, 8 << 20, privileged=False).ok
        assert not check_locked_memory(4 << 20, 1, 8 << 20, privileged=False, locked=6 << 20).ok

    def test_privilege_and_no_limit(self) -> None:
        assert check_locked_memory(64 << 30, 8, 8 << 20, privileged=True).ok
        assert check_locked_memory(64 << 30, 8, None, privileged=False).ok


class TestStriping:
    def test_c20_bytes_spread_evenly(self) -> None:
        outstanding = [0, 0]
        for _ in range(100):
            outstanding[pick_rail(outstanding, [1.0, 1.0], [1, 1])] += 1 << 20
        assert outstanding == [50 << 20, 50 << 20]

    def test_a_faster_rail_takes_more(self) -> None:
        outstanding = [0, 0]
        for _ in range(90):
            outstanding[pick_rail(outstanding, [200.0, 100.0], [1, 1])] += 1
        assert outstanding == [60, 30]

    def test_a_full_rail_is_passed_over(self) -> None:
        assert pick_rail([0, 5], [0.0, 0.0], [0, 1]) == 1
        assert pick_rail([0, 5], [0.0, 0.0], [0, 0]) == -1


class TestMemoryNodes:
    """Slots near ports."""

    def test_an_equal_part_for_each_port_in_whole_slots(self) -> None:
        regions = plan_regions(10 * 4096 + 100, 4096, [0, 1, 2], [2, 0, 0])
        assert regions == [Region(0, 5 * 4096, 0), Region(5 * 4096, 5 * 4096 + 100, 2)]

    @pytest.mark.parametrize(
        ("memory", "ports"), [([0], [0]), ([], [0]), ([0, 1], []), ([0, 1], [0, -1]), ([0, 1], [7])]
    )
    def test_where_it_makes_no_difference_nothing_is_placed(
        self, memory: list[int], ports: list[int]
    ) -> None:
        assert plan_regions(1 << 20, 4096, memory, ports) == []

    def test_a_slot_of_many_nodes_is_near_none(self) -> None:
        assert node_of_pages([1, 1, 1]) == 1
        assert node_of_pages([0, 1]) == -1
        assert node_of_pages([-2, -2]) == -1
        assert node_of_pages([]) == -1

    def test_the_near_rail_is_taken_until_it_is_much_deeper_in_work(self) -> None:
        far = [is_far(1, node) for node in (0, 1)]
        assert far == [True, False]
        assert pick_rail([0, 0], [100.0, 100.0], [9, 9], far) == 1
        assert pick_rail([0, FAR_BYTES - 1], [100.0, 100.0], [9, 9], far) == 1
        assert pick_rail([0, FAR_BYTES + 1], [100.0, 100.0], [9, 9], far) == 0
        assert pick_rail([0, 0], [100.0, 100.0], [9, 0], far) == 0, "no room on the near one"

    def test_what_is_not_known_is_not_far(self) -> None:
        assert not is_far(-1, 0)
        assert not is_far(0, -1)


class TestBrokenRails:
    def test_c12_they_are_passed_over_where_others_are_left(self) -> None:
        rails = (Rail(0, 0), Rail(1, 1), Rail(1, 1))
        assert leave_out(rails, {(0, 0)}) == (Rail(1, 1), Rail(1, 1))
        assert leave_out(rails, {(0, 0), (1, 1)}) == rails, "a bad path is better than none"
        assert leave_out(rails, set()) == rails
