"""Paths between nodes as the control plane reports them: transfers of a pair, and the doctor's run."""

from __future__ import annotations

from datetime import datetime, timedelta

from controlplane.doctor.schemas import (
    CheckState,
    DoctorBound,
    DoctorCheck,
    DoctorNode,
    DoctorPair,
    DoctorReport,
    DoctorTransport,
)
from controlplane.stats.schemas import Pair
from controlplane.transfers.schemas import (
    NodeAlarm,
    NodeLink,
    NodeMode,
    NodeTransferList,
    NodeTransfers,
    SlowestTransfer,
    TransferStage,
)

STAGES = (
    ("queue_wait", 0.00003, 0.014, 0.6), ("setup", 0.00003, 0.003, 0.3), ("wire", 0.071, 2.59, 56.0),
    ("verify", 0.0008, 0.0021, 0.4), ("total", 0.072, 2.61, 57.3),
)  # fmt: skip


def make_node_pair(source: str, target: str, seconds: float, **changes: object) -> Pair:
    """A cell of the matrix of nodes; `seconds` is its P99."""
    values: dict[str, object] = {
        "source": source, "destination": target, "path": "tcp", "kind": "node", "transfers": 81,
        "bytes": 9_600_000_000, "seconds": 25.0, "p50_seconds": seconds * 0.5,
        "p95_seconds": seconds * 0.9, "p99_seconds": seconds,
    }  # fmt: skip
    return Pair.model_validate(values | changes)


def make_transfers(source: str, target: str, **changes: object) -> NodeTransfers:
    values: dict[str, object] = {
        "source": source, "destination": target, "transport": "tcp", "priority": "first_token",
        "reported_by": target, "transfers": 812, "bytes": 96_000_000_000, "pieces": 2860,
        "retries": 41, "missing": {"timeout": 2, "corrupt": 1}, "in_flight": 2,
        "stages": [
            TransferStage.model_validate({"stage": n, "p50_seconds": p50, "p99_seconds": p99, "sum_seconds": total})
            for n, p50, p99, total in STAGES
        ],
        "slowest": [make_slow(1, 2.61), make_slow(2, 1.4, error="", missing=0, retries=0)],
    }  # fmt: skip
    return NodeTransfers.model_validate(values | changes)


def make_slow(number: int, seconds: float, **changes: object) -> SlowestTransfer:
    values: dict[str, object] = {
        "transfer_id": f"fetch:{number}", "age_seconds": 30.0 + 60 * number, "bytes": 1_610_612_736,
        "pieces": 48, "missing": 2, "retries": 9, "queue_wait_seconds": 0.014, "setup_seconds": 0.003,
        "wire_seconds": seconds - 0.02, "verify_seconds": 0.003, "total_seconds": seconds,
        "error": "timed out after 3 tries",
    }  # fmt: skip
    return SlowestTransfer.model_validate(values | changes)


def make_link(node: str, peer: str, **changes: object) -> NodeLink:
    values: dict[str, object] = {
        "node": node, "peer": peer, "transport": "tcp", "state": "up", "breaker": "closed",
        "window_ops": 256, "in_flight_ops": 12, "in_flight_bytes": 786_432, "opens": 1, "small_ops": 3,
        "resent_bytes": 640_000_000, "retries_refused": 0, "late_completions": 0,
        "latency_seconds": 0.0004, "bytes_per_second": 3.8e8, "chosen": True,
    }  # fmt: skip
    return NodeLink.model_validate(values | changes)


def make_report(source: str, target: str, **changes: object) -> NodeTransferList:
    """What the control plane says of one pair: two classes, a link each way, one shut path."""
    batch = make_transfers(
        source, target, priority="batch", missing={}, retries=0, slowest=[], transfers=12
    )
    values: dict[str, object] = {
        "rows": [make_transfers(source, target), batch],
        "total": 2,
        "links": [
            make_link(source, target, chosen=False, override=True, bytes_per_second=4e9),
            make_link(target, source, cost_seconds=0.0032, why="tcp 3.16 ms, rdma 1.02 s for 1.05 MB"),
            make_link(target, source, transport="rdma", chosen=False, breaker="open", last_error="retry exceeded"),
        ],
        "modes": [
            NodeMode(source=source, destination=target, mode="pull", why="pulls took less of late", bytes=1_600_000_000, pull_seconds=0.9, push_seconds=1.4, pulled=120, pushed=9, failed_pushes=0)
        ],
        "alarms": [NodeAlarm(node=target, text=f"no transfers with {source} by rdma: retry exceeded")],
    }  # fmt: skip
    return NodeTransferList.model_validate(values | changes)


def make_check(
    name: str, state: CheckState = "ok", value: str = "well", **more: str
) -> DoctorCheck:
    return DoctorCheck(name=name, state=state, value=value, **more)


def make_doctor(
    at: datetime, nodes: tuple[str, ...], ends: tuple[str, str] | None = None, **changes: object
) -> DoctorReport:
    """A run that ended a minute and a half before `at`: one failing pair, one node with a warning."""
    first, last = ends or (nodes[0], nodes[-1])
    warned = make_check(
        "hugepages", "warn", "none reserved; shared memory: never", wanted="within_size",
        what_to_do="echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )  # fmt: skip
    broken = make_check(
        "tcp.large", "fail", f"{last} cannot reach {first} over tcp with 8 MB, though 1.02 kB pass",
        wanted="small and large transfers pass", what_to_do="Compare `ip link` at both ends and the switch.",
    )  # fmt: skip
    slow = make_check("disaggregation", "warn", "needs 38 Gbps, has 12 Gbps", wanted="38 Gbps",
                      what_to_do="Give the pair a faster link (RDMA).")  # fmt: skip
    well = [
        make_check("agent", value="incarnation 4"),
        make_check("clock", value="0.2 ms +- 0.5 ms"),
    ]
    pair = DoctorPair(
        source=first, destination=last, state="fail", checks=[broken, slow, make_check("control")],
        transports=[DoctorTransport(transport="tcp", offered=True, bytes_per_second=1.5e9)],
        control_seconds=0.0004,
    )  # fmt: skip
    back = DoctorPair(
        source=last, destination=first, state="ok", checks=[make_check("control"), make_check("tcp.reach")],
        transports=[DoctorTransport(transport="tcp", offered=True, bytes_per_second=5.4e9)],
    )  # fmt: skip
    values: dict[str, object] = {
        "number": 3, "state": "done", "actor": "ana", "started_at": at - timedelta(seconds=94),
        "finished_at": at - timedelta(seconds=90), "done": len(nodes) + 2, "total": len(nodes) + 2,
        "counts": {"fail": 1, "warn": 2, "unknown": 0, "ok": 2 * len(nodes) + 2},
        "nodes": [
            DoctorNode(node_id=nodes[0], state="warn", checks=[warned, *well]),
            *(DoctorNode(node_id=name, state="ok", checks=well) for name in nodes[1:]),
        ],
        "pairs": [pair, back],
        "bound": DoctorBound(bytes_per_second=4.75e9, kv_bytes_per_token=131_072, tokens_per_second=36_200.0, origin="measured"),
    }  # fmt: skip
    return DoctorReport.model_validate(values | changes)
