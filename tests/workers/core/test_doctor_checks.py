"""What the doctor makes of facts: each check that is not fine says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from workers.core.disaggregation import bound_by_rate
from workers.core.doctor_checks import clock, node_checks, unreachable
from workers.core.doctor_messages import (
    HostFacts,
    HugePages,
    Interface,
    NodeFacts,
    ProbeReport,
    RdmaPort,
    Space,
    TransportProbe,
)
from workers.core.doctor_pairs import pair_checks
from workers.core.doctor_rdma import roce_mtu
from workers.core.doctor_verdict import Check
from workers.core.rdma_choice import GidEntry, GidType
from workers.core.stats_messages import NamespaceInfo, NamespaceSpec
from workers.core.transfer_stats import LinkStats

GIB = 1 << 30
SPEC = NamespaceSpec("m", "1", "bf16", "LBHNC", "vec", (262_144,), 32, 64, 1, "tp1")
ROUTABLE = GidEntry(1, "::ffff:10.0.0.1", GidType.ROCE_V2, "eth0")
LINK_LOCAL = GidEntry(0, "fe80::1", GidType.ROCE_V2, "eth0")


def host(**changes: Any) -> HostFacts:
    facts = HostFacts(
        host_id="boot-1",
        wall_seconds=1000.0,
        interfaces=[Interface("eth0", ["10.0.0.1"], 9000, True, 100_000)],
        ports=[],
        memlock_limit_bytes=8 << 20,
        memlock_pinned_bytes=0,
        memlock_privileged=False,
        huge_pages=HugePages(0, 0, 2 << 20, "never"),
        spaces=[Space("slab", "/dev/shm/s", 8 * GIB, 16 * GIB, GIB)],
    )
    return msgspec.structs.replace(facts, **changes)


def node(name: str = "n1", address: str = "10.0.0.1", **changes: Any) -> NodeFacts:
    facts = NodeFacts(
        node_id=name,
        incarnation=7,
        host=changes.pop("host", host()),
        slab_bytes=4 * GIB,
        block_tokens=64,
        block_bytes=SPEC.block_bytes,
        has_secret=True,
        transports=["shm", "tcp"],
        addresses={"tcp": f"{address}:7720"},
        endpoint=f"tcp:{address}:7710",
        namespaces=[NamespaceInfo(b"d" * 32, SPEC)],
    )
    return msgspec.structs.replace(facts, **changes)


def port(state: str = "ACTIVE", *gids: GidEntry, device: str = "mlx5_0") -> RdmaPort:
    return RdmaPort(device, 1, state, "Ethernet", 100.0, 0, list(gids or (ROUTABLE,)))


def only(checks: Iterable[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def assert_all_say_what_to_do(checks: Iterable[Check]) -> None:
    for check in checks:
        assert check.value, check
        assert check.state == "ok" or check.what_to_do, check


class TestNode:
    def test_a_sound_node_without_rdma(self) -> None:
        checks = node_checks(node(), 0.001, 0.001)
        assert {check.state for check in checks} == {"ok"}
        devices = only(checks, "rdma.devices")
        assert (devices.value, devices.state) == ("none", "ok")

    def test_rdma_that_is_asked_for_and_not_there(self) -> None:
        checks = node_checks(node(transports=["rdma"]))
        assert only(checks, "rdma.devices").state == "fail"
        assert_all_say_what_to_do(checks)

    def test_c06_the_locked_memory_limit_is_stated_with_need_and_way_out(self) -> None:
        two = host(ports=[port(), port(device="mlx5_1")])
        check = only(node_checks(node(host=two, transports=["rdma"])), "memlock")
        assert check.state == "fail"
        assert "pins 8192 MiB (4096 MiB for each of 2 devices)" in check.value
        assert "the locked-memory limit is 8 MiB" in check.value
        assert "ulimit -l unlimited" in check.what_to_do
        assert "LimitMEMLOCK=infinity" in check.what_to_do

    @pytest.mark.parametrize(
        "changes",
        [
            {"memlock_limit_bytes": None},
            {"memlock_privileged": True},
            {"memlock_limit_bytes": 5 * GIB},
        ],
    )
    def test_a_limit_that_suffices(self, changes: dict[str, Any]) -> None:
        found = host(ports=[port()], **changes)
        assert only(node_checks(node(host=found, transports=["rdma"])), "memlock").state == "ok"

    def test_the_limit_does_not_matter_without_rdma(self) -> None:
        assert only(node_checks(node()), "memlock").state == "ok"

    def test_a_port_that_is_down_and_one_with_a_link_local_gid(self) -> None:
        found = host(ports=[port("DOWN"), port("ACTIVE", LINK_LOCAL, device="mlx5_1")])
        checks = node_checks(node(host=found, transports=["rdma"]))
        assert only(checks, "rdma.port mlx5_0/1").state == "fail"
        gid = only(checks, "rdma.gid mlx5_1/1")
        assert gid.state == "warn"
        assert "link-local" in gid.what_to_do
        assert_all_say_what_to_do(checks)

    def test_the_gid_is_shown_with_its_reason(self) -> None:
        found = host(ports=[port("ACTIVE", LINK_LOCAL, ROUTABLE)])
        gid = only(node_checks(node(host=found, transports=["rdma"])), "rdma.gid mlx5_0/1")
        assert gid.state == "ok"
        assert gid.value.startswith("10.0.0.1: roce_v2")

    def test_devices_that_nobody_uses(self) -> None:
        checks = node_checks(node(host=host(ports=[port()])))
        assert only(checks, "rdma.devices").state == "warn"

    def test_a_small_mtu_under_roce(self) -> None:
        interfaces = [Interface("eth0", ["10.0.0.1"], 1500, True)]
        found = host(ports=[port()], interfaces=interfaces)
        check = only(node_checks(node(host=found)), "rdma.mtu mlx5_0/1")
        assert (check.state, check.value) == ("warn", "1024 (interface 1500)")
        assert (roce_mtu(9000), roce_mtu(1500), roce_mtu(100)) == (4096, 1024, 256)

    def test_room(self) -> None:
        spaces = [
            Space("slab", "/dev/shm/s", GIB, 16 * GIB, 2 * GIB),
            Space("ssd", "/ssd", GIB // 2, 100 * GIB, 0),
            Space("logs", "/logs", 1 << 20, 100 * GIB),
        ]
        checks = node_checks(node(host=host(spaces=spaces)))
        states = [only(checks, f"space.{name}").state for name in ("slab", "ssd", "logs")]
        assert states == ["fail", "warn", "fail"]
        assert_all_say_what_to_do(checks)

    def test_blocks_that_do_not_fit_the_engine(self) -> None:
        odd = msgspec.structs.replace(SPEC, block_tokens=48)
        checks = node_checks(node(namespaces=[NamespaceInfo(b"d" * 32, odd)]))
        assert only(checks, "blocks m").state == "fail"
        small = msgspec.structs.replace(SPEC, page_bytes=(1024,))
        checks = node_checks(node(namespaces=[NamespaceInfo(b"d" * 32, small)]))
        assert only(checks, "blocks m").state == "warn"
        assert_all_say_what_to_do(checks)

    def test_c14_the_effective_queue_depth(self) -> None:
        link = LinkStats("n2", "rdma", "up", "closed", 8, 0, 0, 1, 0, 0, 0, 0)
        check = only(node_checks(node(links=[link])), "queue_depth n2 rdma")
        assert (check.state, check.value) == ("warn", "8 ops")

    @pytest.mark.parametrize(
        "changes",
        [
            {"has_secret": False}, {"transports": []}, {"endpoint": ""}, {"block_bytes": 0},
            {"transfer_problem": "address in use"}, {"alarms": ["no transfers with n2 by tcp: x"]},
        ],
    )  # fmt: skip
    def test_what_keeps_a_node_from_transfers(self, changes: dict[str, Any]) -> None:
        checks = node_checks(node(**changes))
        assert any(c.state != "ok" for c in checks if c.name.startswith("transfers"))
        assert_all_say_what_to_do(checks)

    def test_an_agent_that_does_not_answer(self) -> None:
        (check,) = unreachable("no answer")
        assert (check.state, check.value) == ("fail", "no answer")


@pytest.mark.parametrize(
    ("offset", "error", "state"),
    [(0.05, 0.0, "ok"), (-0.05, 0.0, "ok"), (0.5, 0.45, "ok"), (0.5, 0.1, "warn"),
     (-9.0, 0.1, "fail"), (None, 0.0, "unknown")],
)  # fmt: skip
def test_clocks(offset: float | None, error: float, state: str) -> None:
    assert clock("clock", offset, error).state == state


def probe(*transports: TransportProbe, **changes: Any) -> ProbeReport:
    report = ProbeReport(
        "p", "done", "n1", "n2", 0.002, 0.001, "10.0.0.2", transports=list(transports)
    )
    return msgspec.structs.replace(report, **changes)


def passed(name: str, bytes_per_second: float = 5e9) -> TransportProbe:
    seconds = (8 << 20) / bytes_per_second
    return TransportProbe(name, True, 4096, 0.0002, "", 8 << 20, seconds, "", 256)


ONE = node()
TWO = node("n2", "10.0.0.2", host=host(interfaces=[Interface("eth0", ["10.0.0.2"], 9000, True, 100_000)]))  # fmt: skip


class TestPair:
    def test_a_sound_pair(self) -> None:
        bound = bound_by_rate(100_000, 1000.0, "measured")
        checks = pair_checks(probe(passed("tcp")), ONE, TWO, bound)
        assert {check.state for check in checks} == {"ok"}
        assert only(checks, "tcp.bandwidth").value == "5 GB/s with 8 MiB"
        assert only(checks, "link_speed").value == "100 Gbps"

    def test_c12_a_peer_that_cannot_be_reached_at_all(self) -> None:
        (check,) = pair_checks(probe(error="timed out"), ONE, TWO)
        assert check.state == "fail"
        assert check.value == "n2 cannot reach n1 over tcp: timed out"
        assert "firewalls" in check.what_to_do

    def test_c12_one_transport_that_has_no_path(self) -> None:
        dead = TransportProbe("rdma", small_error="timeout: RETRY_EXC_ERR", large_error="timeout")
        checks = pair_checks(probe(passed("tcp"), dead), ONE, TWO)
        check = only(checks, "rdma.reach")
        assert check.state == "fail"
        assert check.value == "n2 cannot reach n1 over rdma: timeout: RETRY_EXC_ERR"
        assert only(checks, "tcp.reach").state == "ok"
        assert_all_say_what_to_do(checks)

    def test_small_passes_and_large_does_not(self) -> None:
        half = TransportProbe("tcp", True, 4096, 0.001, "", 8 << 20, None, "timeout", 256)
        check = only(pair_checks(probe(half), ONE, TWO), "tcp.large")
        assert check.state == "fail"
        assert "MTU" in check.what_to_do

    def test_mtus_that_differ(self) -> None:
        small = host(interfaces=[Interface("eth1", ["10.0.0.2"], 1500, True)])
        two = msgspec.structs.replace(TWO, host=small)
        check = only(pair_checks(probe(passed("tcp")), ONE, two), "mtu")
        assert (check.state, check.value) == ("warn", "eth1 1500 at n2, eth0 9000 at n1")

    def test_less_than_the_link_has(self) -> None:
        check = only(pair_checks(probe(passed("tcp", 1e9)), ONE, TWO), "tcp.bandwidth")
        assert check.state == "warn"
        assert "100 Gbps" in check.wanted

    def test_a_cap_is_no_slow_link(self) -> None:
        capped = msgspec.structs.replace(passed("tcp", 2e9), cap_bytes_per_second=1e6)
        assert capped.bytes_per_second == 1e6, "a burst is quicker"
        check = only(pair_checks(probe(capped), ONE, TWO), "tcp.bandwidth")
        assert check.state == "ok"
        assert "capped at 1 MB/s" in check.value

    def test_shared_memory_between_machines_is_no_fault(self) -> None:
        two = msgspec.structs.replace(TWO, host=host(host_id="boot-2"))
        dead = TransportProbe("shm", small_error="connection: no such file", large_error="x")
        assert only(pair_checks(probe(dead), ONE, two), "shm.reach").state == "ok"
        assert only(pair_checks(probe(dead), ONE, TWO), "shm.reach").state == "fail"

    def test_a_transport_that_one_end_lacks(self) -> None:
        absent = TransportProbe("rdma", offered=False)
        assert only(pair_checks(probe(absent), ONE, TWO), "rdma.reach").state == "warn"

    def test_the_bound_of_disaggregation(self) -> None:
        bound = bound_by_rate(327_680, 14_500.0, "measured")  # a 70B model: 38 Gbps
        check = only(pair_checks(probe(passed("tcp", 1.5e9)), ONE, TWO, bound), "disaggregation")
        assert (check.state, check.value) == ("warn", "needs 38 Gbps, has 12 Gbps")
        checks = pair_checks(probe(passed("tcp")), ONE, TWO)
        assert only(checks, "disaggregation").state == "unknown"
        assert_all_say_what_to_do(checks)

    def test_facts_that_are_not_known(self) -> None:
        checks = pair_checks(probe(passed("tcp")), None, None)
        assert only(checks, "mtu").state == "unknown"
        assert_all_say_what_to_do(checks)
