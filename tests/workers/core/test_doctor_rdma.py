"""What the doctor makes of RDMA in use: ports, counters, and the paths between two nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from workers.core.doctor_checks import node_checks
from workers.core.doctor_messages import (
    HostFacts,
    HugePages,
    Interface,
    NodeFacts,
    ProbeReport,
    RdmaPort,
    TransportProbe,
)
from workers.core.doctor_pairs import pair_checks
from workers.core.doctor_rdma import roce_mtu, split_problem
from workers.core.doctor_verdict import Check
from workers.core.rdma_choice import GidEntry, GidType
from workers.core.transfer_stats import RdmaPortStats, RdmaRailStats

NO_MEMLOCK = (
    "rdma = 17179869184: registering the slab pins 16384 MiB, the locked-memory limit is 8 MiB. "
    "Raise it for the agent: `ulimit -l unlimited` before its start."
)


def port(**changes: Any) -> RdmaPortStats:
    made = RdmaPortStats(
        name="mlx5_0/1", state="ACTIVE", gid="::ffff:10.0.0.1", gid_index=3, gid_type="roce_v2",
        gid_reason="", active_mtu=4096, queue_depth=1024, inline_bytes=256, reads=16, numa_node=0,
        queue_pairs=1, work_requests_total=1_000_000,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def node(name: str = "n1", *ports: RdmaPortStats, **changes: Any) -> NodeFacts:
    host = HostFacts(
        host_id="boot", wall_seconds=1.0, ports=[], memlock_limit_bytes=None,
        memlock_pinned_bytes=0, memlock_privileged=False, spaces=[],
        interfaces=[Interface("eth0", ["10.0.0.1"], 9000, True, 100_000)],
        huge_pages=HugePages(0, 0, 2 << 20),
    )  # fmt: skip
    facts = NodeFacts(
        node_id=name, incarnation=1, host=changes.pop("host", host), slab_bytes=1 << 30,
        block_tokens=64, block_bytes=1 << 20, has_secret=True, transports=["tcp", "rdma"],
        addresses={}, endpoint="tcp:10.0.0.1:7710", rdma_ports=list(ports),
    )  # fmt: skip
    return msgspec.structs.replace(facts, **changes)


def of_node(facts: NodeFacts) -> dict[str, Check]:
    return {check.name: check for check in node_checks(facts)}


def of_pair(source: NodeFacts, destination: NodeFacts, *rails: RdmaRailStats) -> dict[str, Check]:
    probe = TransportProbe("rdma", small_seconds=1e-3, small_bytes=1024, rails=list(rails))
    report = ProbeReport("p", "done", "n1", "n2", 1e-3, 0.0, "10.0.0.1", transports=[probe])
    return {check.name: check for check in pair_checks(report, source, destination)}


class TestReady:
    def test_c06_a_node_that_must_have_rdma_says_limit_need_and_way_out(self) -> None:
        facts = node(not_ready=NO_MEMLOCK, rdma_problem=NO_MEMLOCK, transports=["rdma"])
        checks = of_node(facts)
        ready = checks["ready"]
        assert ready.state == "fail"
        assert "pins 16384 MiB, the locked-memory limit is 8 MiB" in ready.value
        assert "ulimit -l unlimited" in ready.what_to_do
        assert "add tcp" in ready.what_to_do
        assert "rdma" not in checks, "said once"

    def test_c06_where_others_do_it_that_is_a_warning(self) -> None:
        checks = of_node(node(rdma_problem=NO_MEMLOCK))
        assert checks["ready"].state == "ok"
        assert checks["rdma"].state == "warn"
        assert "blocks go by tcp" in checks["rdma"].value

    def test_a_problem_without_a_way_out(self) -> None:
        assert split_problem("no device") == ("no device", "")


class TestCounters:
    def test_c14_effective_depths_are_shown(self) -> None:
        value = of_node(node("n1", port(queue_depth=32)))["rdma.queues mlx5_0/1"].value
        assert value.startswith("32 work requests, 256 bytes inline, 16 reads")

    @pytest.mark.parametrize(
        ("total", "state"), [(0, "ok"), (10, "ok"), (900, "ok"), (5000, "warn")]
    )
    def test_c19_receivers_that_are_late_are_counted(self, total: int, state: str) -> None:
        checks = of_node(node("n1", port(receiver_not_ready_total=total, retries_total=total)))
        for name in ("receiver_not_ready", "retries"):
            check = checks[f"rdma.{name} mlx5_0/1"]
            assert check.state == state
            assert (check.what_to_do != "") == (state == "warn")

    def test_c17_off_rail_bytes_are_a_warning(self) -> None:
        assert "rdma.off_rail mlx5_0/1" not in of_node(node("n1", port()))
        checks = of_node(node("n1", port(off_rail_bytes_total=1 << 30)))
        assert checks["rdma.off_rail mlx5_0/1"].state == "warn"

    def test_slots_far_from_every_port(self) -> None:
        assert "rdma.numa" not in of_node(node("n1", port()))
        near = node("n1", port(numa_node=1), slots_by_memory_node={1: 90, -1: 10})
        assert of_node(near)["rdma.numa"].state == "ok"
        far = node("n1", port(numa_node=1), slots_by_memory_node={0: 90, -1: 10})
        assert of_node(far)["rdma.numa"].state == "warn"
        assert "at the ports' memory nodes (1)" in of_node(far)["rdma.numa"].wanted


class TestPairs:
    def test_both_ends_alike(self) -> None:
        checks = of_pair(node("n1", port()), node("n2", port()))
        assert checks["rdma.gid mlx5_0/1>mlx5_0/1"].state == "ok"
        assert checks["rdma.mtu mlx5_0/1>mlx5_0/1"].state == "ok"

    def test_c05_another_gid_type_at_one_end(self) -> None:
        checks = of_pair(node("n1", port(gid_type="roce_v1")), node("n2", port()))
        check = checks["rdma.gid mlx5_0/1>mlx5_0/1"]
        assert check.state == "fail"
        assert check.value == "roce_v2 at n2, roce_v1 at n1"
        assert "rdma.gid_index" in check.what_to_do

    def test_another_mtu_at_one_end(self) -> None:
        check = of_pair(node("n1", port(active_mtu=1024)), node("n2", port()))[
            "rdma.mtu mlx5_0/1>mlx5_0/1"
        ]
        assert (check.state, check.value) == ("warn", "4096 at n2, 1024 at n1")
        assert "Raise the MTU of n1's interface" in check.what_to_do

    def test_from_the_host_where_no_agent_has_opened_the_port(self) -> None:
        gids = [GidEntry(1, "::ffff:10.0.0.1", GidType.ROCE_V2, "eth0")]
        shown = RdmaPort("mlx5_0", 1, "ACTIVE", "Ethernet", 100.0, 0, gids)
        closed = node("n1")
        closed = msgspec.structs.replace(
            closed, host=msgspec.structs.replace(closed.host, ports=[shown])
        )
        checks = of_pair(closed, node("n2", port()))
        assert checks["rdma.mtu mlx5_0/1>mlx5_0/1"].state == "ok"
        assert roce_mtu(1500) == 1024

    def test_c12_the_device_without_a_path_is_named(self) -> None:
        error = "n2 cannot reach n1 over mlx5_1/1 (to mlx5_1/1): RETRY_EXC_ERR: no answer"
        checks = of_pair(
            node("n1", port()), node("n2", port()),
            RdmaRailStats("n1", "mlx5_0/1", "mlx5_0/1", False, 4096, 1 << 20),
            RdmaRailStats("n1", "mlx5_1/1", "mlx5_1/1", False, 4096, 0, error),
            RdmaRailStats("n1", "mlx5_2/1", "mlx5_0/1", True, 4096, 1 << 20),
        )  # fmt: skip
        assert checks["rdma.rail mlx5_0/1>mlx5_0/1"].state == "ok"
        assert checks["rdma.rail mlx5_1/1>mlx5_1/1"].value == error
        assert checks["rdma.rail mlx5_1/1>mlx5_1/1"].state == "fail"
        assert checks["rdma.rail mlx5_2/1>mlx5_0/1"].state == "warn", "off the rail (C17)"
