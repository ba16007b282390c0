"""`perilune up` as an operator runs it: real control plane, gateway and agent, emulated engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from console.status import collect
from workers.client import AgentClient, make_hello
from workers.core.stats_messages import PoolStats
from workers.core.transfer_stats import PairStats
from workers.supervisor.home import Home
from workers.supervisor.procfs import session_members

pytestmark = [
    pytest.mark.heavy, pytest.mark.xdist_group("processes"), pytest.mark.timeout(300),
]  # fmt: skip
WAIT_SECONDS = 60.0
MB = 1_000_000
MEMORY_LIMITS = {"controlplane": 180 * MB, "gateway": 150 * MB, "agent": 120 * MB}
PORTS = [word for name in ("control-plane", "gateway", "agent", "workers")
         for word in (f"--port-{name}", "0")]  # fmt: skip


def until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := holds()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


class Cluster:
    """One data folder, and the command line that works on it."""

    def __init__(self, data: Path, model: Path) -> None:
        self.data, self.model = data, model

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "console", *argv, "--data", str(self.data)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=180, check=False, cwd="/"
        )

    def up_arguments(self) -> list[str]:
        return ["up", "--engine", "emulated", "--model", str(self.model), "--slab-gib", "0.125",
                *PORTS]  # fmt: skip

    def up(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run(*self.up_arguments(), "--detach", *more)

    def status(self) -> dict[str, Any]:
        # What `status --json` prints, without the second that starting Python takes here.
        return collect(Home(self.data))

    def component(self, name: str) -> dict[str, Any]:
        return next(each for each in self.status()["components"] if each["name"] == name)

    def post(self, path: str, body: dict[str, Any], *, to: str = "gateway") -> httpx2.Response:
        token = (self.data / "token").read_text().strip()
        return httpx2.post(
            self.status()["urls"][to] + path,
            json=body,
            headers={"Authorization": f"Bearer {token}"} if to == "control_plane" else {},
            timeout=30,
            trust_env=False,
        )

    def complete(self) -> int:
        body = {"model": self.model.name, "prompt": "a b c d " * 200, "max_tokens": 4}
        return self.post("/v1/completions", body).status_code


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that routing needs of a model: a tokenizer and a geometry."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - slow

    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    words = {word: index for index, word in enumerate(["<unk>", "a", "b", "c", "d"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    geometry = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(geometry))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("up"), model)
    reply = made.up()
    assert reply.returncode == 0, reply.stdout + reply.stderr
    made.first_output = reply.stdout  # type: ignore[attr-defined]  # for the test that reads it
    yield made
    assert made.run("down").returncode == 0


def sessions(cluster: Cluster) -> list[int]:
    return [each["pid"] for each in cluster.status()["components"] if each["pid"]]


def assert_nothing_is_left(cluster: Cluster, before: list[int], slabs: list[str]) -> None:
    assert [session_members(session) for session in before] == [[] for _ in before]
    assert [slab for slab in slabs if Path(slab).exists()] == []
    assert not (cluster.data / "run" / "supervisor.json").exists()


class TestRunning:
    def test_up_says_what_it_does_and_how_to_go_on(self, cluster: Cluster) -> None:
        lines = cluster.first_output.splitlines()  # type: ignore[attr-defined]
        for name in ("control-plane", "agent-n1", "gateway", "worker-p1", "worker-d1"):
            assert f"{name}: starting" in lines
            assert any(line.startswith(f"{name}: ready in ") for line in lines)
        urls = cluster.status()["urls"]
        assert lines[-3].startswith(f"  curl {urls['gateway']}/v1/chat/completions ")
        assert lines[-2].endswith(f"perilune console --url {urls['control_plane']}")
        assert lines[-1] == f"  {urls['control_plane']}/"

    def test_it_answers(self, cluster: Cluster) -> None:
        assert cluster.complete() == 200

    def test_status_is_ready_and_emulated_is_said(self, cluster: Cluster) -> None:
        status = cluster.status()
        assert (status["state"], status["emulated"]) == ("ready", True)
        assert {each["state"] for each in status["components"]} == {"ready"}
        assert "emulated engine" in cluster.run("status").stdout
        assert json.loads(cluster.run("status", "--json").stdout)["state"] == "ready"

    def test_memory_at_rest(self, cluster: Cluster) -> None:
        assert cluster.complete() == 200  # the gateway has its tokenizer loaded
        used = {each["kind"]: each["rss_bytes"] for each in cluster.status()["components"]}
        assert {kind: used[kind] for kind, most in MEMORY_LIMITS.items() if used[kind] > most} == {}

    def test_a_second_up_says_so(self, cluster: Cluster) -> None:
        before = sessions(cluster)
        for reply in (cluster.up(), cluster.run(*cluster.up_arguments())):
            assert reply.returncode == 0
            assert "is running already" in reply.stdout
        assert sessions(cluster) == before

    def test_a_port_in_use_is_named_before_anything_starts(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        port = cluster.status()["urls"]["gateway"].rpartition(":")[2]
        other = Cluster(tmp_path, cluster.model)
        reply = other.up("--port-gateway", port)
        pid = cluster.component("gateway")["pid"]
        assert reply.returncode == 2
        assert f"--port-gateway = {port}: is in use by process {pid} (" in reply.stderr

    def test_an_operator_restarts_a_worker_through_the_control_plane(
        self, cluster: Cluster
    ) -> None:
        before = cluster.component("worker-d1")
        path = "/api/v1/workers/d1/actions"
        body = {"action": "restart", "reason": "test"}
        assert cluster.post(path, body, to="control_plane").status_code < 300
        after = until(
            lambda: (
                (found := cluster.component("worker-d1"))["state"] == "ready"
                and found["pid"] != before["pid"]
                and found
            )
        )
        assert after["restarts"] == before["restarts"] + 1
        until(lambda: cluster.complete() == 200)

    @pytest.mark.parametrize("name", ["control-plane", "gateway", "agent-n1", "worker-p1"])
    def test_a_killed_process_comes_back_and_requests_are_served(
        self, cluster: Cluster, name: str
    ) -> None:
        before = cluster.component(name)
        os.kill(before["pid"], signal.SIGKILL)
        until(
            lambda: (
                (found := cluster.component(name))["state"] == "ready"
                and found["pid"] != before["pid"]
            )
        )
        until(lambda: cluster.complete() == 200)
        assert cluster.component(name)["last_error"] == "killed by SIGKILL"


class TestTwoNodes:
    """The smallest cluster in which bytes move: prefill on one node, decode on the other."""

    def test_blocks_travel_and_are_counted(self, tmp_path: Path, model: Path) -> None:
        cluster = Cluster(tmp_path, model)
        reply = cluster.up("--nodes", "2")
        try:
            assert reply.returncode == 0, reply.stdout + reply.stderr
            until(lambda: self._moved(cluster))
            until(lambda: self._moved_to(cluster) == self._held(cluster))
            pairs = self._pairs(cluster)
            ways = {(pair.source, pair.destination, pair.transport) for pair in pairs}
            assert ways == {("n1", "n2", "tcp")}
            (mode,) = self._stats(cluster, "n2").transfers.modes
            assert (mode.source, mode.failed_pushes_total) == ("n1", 0)
            assert "push" in {pair.mode for pair in pairs}, mode.why
            until(lambda: self._stats(cluster, "n2").pinned_blocks == 0)
            until(lambda: self._stats(cluster, "n1").pinned_blocks == 0)
            until(lambda: any(leg["loaded_blocks"] for leg in self._decode_legs(cluster)))
        finally:
            assert cluster.run("down").returncode == 0
        left = list(Path("/dev/shm").glob(f"perilune-{cluster.status().get('cluster', '?')}-*"))
        assert left == []

    def _moved(self, cluster: Cluster) -> int:
        """The gateway learns the paths between nodes within a second or two: ask until then."""
        assert cluster.complete() == 200
        return self._moved_to(cluster)

    def _moved_to(self, cluster: Cluster) -> int:
        return sum(pair.bytes_total for pair in self._pairs(cluster))

    def _held(self, cluster: Cluster) -> int:
        stats = self._stats(cluster, "n2")
        return stats.used_blocks * stats.block_bytes

    def _pairs(self, cluster: Cluster) -> list[PairStats]:
        """Pulls are booked at the destination, pushes at the source."""
        return [p for node in ("n1", "n2") for p in self._stats(cluster, node).transfers.pairs]

    @staticmethod
    def _decode_legs(cluster: Cluster) -> list[dict[str, Any]]:
        url = cluster.status()["urls"]["control_plane"] + "/api/v1/decisions"
        rows = httpx2.get(url, trust_env=False, timeout=30).json()["items"]
        return [row["decode_leg"] for row in rows if row["decode_leg"]]

    @staticmethod
    def _stats(cluster: Cluster, node: str) -> PoolStats:
        socket = cluster.data / "run" / f"{node}.sock"
        client = AgentClient(f"unix:{socket}", make_hello("cli", "test"), 20.0)
        try:
            return client.stats()
        finally:
            client.close()


class TestEnd:
    def test_down_leaves_nothing(self, tmp_path: Path, model: Path) -> None:
        cluster = Cluster(tmp_path, model)
        assert cluster.up().returncode == 0
        before, slabs = sessions(cluster), cluster.status()["slab_paths"]
        assert Path(slabs[0]).exists()
        reply = cluster.run("down")
        assert (reply.returncode, reply.stdout) == (0, "all processes have ended\n")
        assert_nothing_is_left(cluster, before, slabs)

    def test_ctrl_c_in_the_foreground_leaves_nothing(self, tmp_path: Path, model: Path) -> None:
        cluster = Cluster(tmp_path, model)
        command = [sys.executable, "-m", "console", *cluster.up_arguments()]
        command += ["--data", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as process:
            until(lambda: cluster.status()["state"] == "ready")
            before, slabs = sessions(cluster), cluster.status()["slab_paths"]
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 0
        assert "control-plane: stopped" in output
        assert_nothing_is_left(cluster, before, slabs)

    def test_a_killed_supervisor_takes_everything_along(self, tmp_path: Path, model: Path) -> None:
        cluster = Cluster(tmp_path, model)
        assert cluster.up().returncode == 0
        status = cluster.status()
        before = sessions(cluster)
        os.kill(status["supervisor"]["pid"], signal.SIGKILL)
        until(lambda: not any(session_members(session) for session in before))
        until(lambda: not Path(status["slab_paths"][0]).exists())
        assert cluster.status()["state"] == "down"
        assert cluster.run("down").returncode == 0
        assert_nothing_is_left(cluster, before, status["slab_paths"])

    def test_a_failed_start_cleans_up_and_names_cause_and_log(
        self, tmp_path: Path, model: Path
    ) -> None:
        cluster = Cluster(tmp_path, model)
        (tmp_path / "perilune.db").write_bytes(b"this is no database, and long enough" * 100)
        reply = cluster.up()
        assert reply.returncode == 1
        assert reply.stderr.startswith("perilune: control-plane failed because exit status ")
        assert f"(log: {tmp_path}/logs/control-plane.log)" in reply.stderr
        assert cluster.status()["state"] == "down"
