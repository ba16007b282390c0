"""The doctor without a control plane: this machine, and the agents whose sockets lie here."""

from __future__ import annotations

from pathlib import Path

from controlplane.doctor.schemas import DoctorNode, DoctorReport
from controlplane.doctor.verdicts import counts_of, node_of, node_order
from workers.client import AgentClient, make_hello
from workers.clock import SystemClock
from workers.core.doctor_checks import host_checks, node_checks, unreachable
from workers.core.doctor_messages import GetNodeFacts, NodeFacts
from workers.core.doctor_verdict import Check
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.transfer.host_facts import read_host

CALL_SECONDS = 5.0
HERE = "this machine"


def local_report(data: Path, slab_bytes: int = 0) -> DoctorReport:
    """Every agent of the data folder; where there is none, the machine as an agent would find it.

    `slab_bytes`: of the agent that is to be started, for the locked-memory limit.
    """
    sockets = sorted((data / "run").glob("*.sock"))
    nodes = [_node(path, data) for path in sockets] or [_machine(data, slab_bytes)]
    report = DoctorReport(state="done", done=len(nodes), total=len(nodes), nodes=sorted(nodes, key=node_order))  # fmt: skip
    return report.model_copy(update={"counts": counts_of(report)})


def _node(socket: Path, data: Path) -> DoctorNode:
    client = AgentClient(f"unix:{socket}", make_hello("cli", "doctor"), CALL_SECONDS)
    clock, body = SystemClock(), GetNodeFacts(str(data / "logs"))
    try:
        client.call(body, NodeFacts)
        sent, wall = clock.monotonic(), clock.wall()
        facts = client.call(body, NodeFacts)
        took = clock.monotonic() - sent
    except (AgentUnavailableError, RefusedError, ProtocolError) as error:
        return node_of(socket.stem, unreachable(str(error)))
    finally:
        client.close()
    offset = facts.host.wall_seconds - wall - took / 2
    return node_of(facts.node_id, node_checks(facts, offset, took / 2))


def _machine(data: Path, slab_bytes: int) -> DoctorNode:
    folders = {"slab": ("/dev/shm", slab_bytes), "logs": (str(data / "logs"), 0)}  # noqa: S108  slabs belong there
    host = read_host(SystemClock(), {"slab": folders["slab"], "logs": folders["logs"]})
    none = Check(
        "agent", "warn", f"none runs from {data}", "one",
        "perilune up starts one; another data folder: $PERILUNE_HOME.",
    )  # fmt: skip
    uses_rdma = bool(host.ports)
    return node_of(HERE, [none, *host_checks(host, slab_bytes, uses_rdma=uses_rdma)])
