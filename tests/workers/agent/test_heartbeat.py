"""The agent's heartbeat against an HTTP server that checks it by the REST contract."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from heartbeats import ControlPlane

from controlplane.nodes.schemas import HeartbeatReply
from workers.client import AgentClient
from workers.core.messages import LegReport
from workers.core.stats_messages import NamespaceSpec, WorkerStatus

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    made = ControlPlane()
    yield made
    made.close()


def beating(control_plane: ControlPlane) -> list[str]:
    return ["--control-plane", control_plane.url, "--heartbeat-seconds", "0.1"]


class TestHeartbeat:
    def test_tells_the_truth_and_takes_wishes_home(
        self,
        control_plane: ControlPlane,
        make_agent: Callable[..., Any],
        spec: NamespaceSpec,
        tmp_path: Path,
        eventually: Eventually,
    ) -> None:
        token = tmp_path / "token"
        agent = make_agent(*beating(control_plane), "--token-file", str(token))
        agent.start()
        eventually(lambda: bool(control_plane.beats))
        assert control_plane.requests[0] == ("/api/v1/nodes/n1/heartbeat", None)
        token.write_text("secret\n")  # written later than our start, and read all the same

        supervisor: AgentClient = agent.client("supervisor", "s")
        supervisor.report_workers([WorkerStatus("p1", "prefill", "m", "http://x", "ready")])
        worker = agent.worker("p1")
        worker.report_leg(LegReport("t1", "p1", "kv_producer", prompt_tokens=10))
        command = {"worker_id": "p1", "action": "drain", "command_id": "c1"}
        control_plane.reply = HeartbeatReply(
            commands=[command],
            cache_policy={"eviction": "lru", "lease_seconds": 7.5, "write_queue_blocks": 9},
        )
        eventually(lambda: any(beat.leg_reports for beat in control_plane.beats))
        eventually(lambda: worker.stats().write_queue_bound == 9)
        commands = supervisor.report_workers([])
        assert [(c.worker_id, c.action) for c in commands] == [("p1", "drain")]
        eventually(lambda: control_plane.beats[-1].acknowledged_commands == ["c1"])
        eventually(lambda: control_plane.beats[-1].acknowledged_commands == [])
        assert supervisor.report_workers([]) == []

        reports = [report for beat in control_plane.beats for report in beat.leg_reports]
        assert [report["transfer_id"] for report in reports] == ["t1"]
        beat = next(beat for beat in control_plane.beats if beat.leg_reports)
        stats = beat.pool_stats
        assert stats is not None
        json.dumps(stats)
        namespaces: Any = stats["namespaces"]
        assert namespaces[0]["spec"]["model_id"] == spec.model_id
        assert len(bytes.fromhex(namespaces[0]["digest"])) == 32
        assert beat.events_endpoint == f"unix:{agent.socket}"
        assert control_plane.requests[-1][1] == "Bearer secret"

    def test_a_broken_token_file_ends_no_agent(
        self,
        control_plane: ControlPlane,
        make_agent: Callable[..., Any],
        tmp_path: Path,
        eventually: Eventually,
    ) -> None:
        token = tmp_path / "token"
        agent = make_agent(*beating(control_plane), "--token-file", str(token))
        for content in (b"\xff\xfe", "ü".encode(), b"two\nlines"):
            token.write_bytes(content)
            if not control_plane.requests:
                agent.start()
            wanted = len(control_plane.requests) + 2
            eventually(partial(control_plane.has, wanted))
            assert control_plane.requests[-1][1] is None
        token.write_text("secret\n")
        eventually(lambda: control_plane.requests[-1][1] == "Bearer secret")
        assert agent.worker("p1").lookup(b"", []).num_held == 0

    def test_control_plane_down_loses_no_report_and_stops_nothing(
        self, control_plane: ControlPlane, make_agent: Callable[..., Any], eventually: Eventually
    ) -> None:
        control_plane.broken = True
        agent = make_agent(*beating(control_plane))
        agent.start()
        worker = agent.worker("p1")
        worker.report_leg(LegReport("t1", "p1", "kv_producer"))
        eventually(lambda: len(control_plane.requests) >= 2)
        assert worker.lookup(b"", []).num_held == 0
        control_plane.broken = False
        eventually(lambda: any(beat.leg_reports for beat in control_plane.beats))
        assert "heartbeat_failed" in agent.log
        eventually(lambda: "control_plane_back" in agent.log)
