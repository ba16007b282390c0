"""From settings to processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.models.resolve import ResolvedModel
from workers.supervisor.cpus import as_list, split_cores
from workers.supervisor.plan import ClusterPlan, gpus_of, make_plan
from workers.supervisor.ports import Ports
from workers.supervisor.registration import kv_bytes_per_token
from workers.supervisor.settings import RoleSettings, Settings

PORTS = Ports(control_plane=7700, gateway=8000, agents=(7710,), workers=(8101, 8102, 8103))
MODEL = ResolvedModel("m", "org/m", "/models/m", "w1", is_local=True)


def plan_of(folder: Path, **more: object) -> ClusterPlan:
    settings = Settings(data=folder, prefill=RoleSettings(1), decode=RoleSettings(2), **more)  # type: ignore[arg-type]  # fields by name
    return make_plan(settings, MODEL, MODEL.source, PORTS)


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_names_roles_and_order(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    names = [each.name for each in plan.components]
    assert names == [
        "control-plane", "agent-n1", "gateway", "worker-p1", "worker-d1", "worker-d2",
    ]  # fmt: skip
    assert [each.worker.role for each in plan.workers if each.worker] == [
        "prefill", "decode", "decode",
    ]  # fmt: skip
    stages = {each.kind: each.stop_stage for each in plan.components}
    assert stages["gateway"] <= stages["worker"] < stages["agent"] < stages["controlplane"]


def test_everyone_gets_the_same_addresses(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, cluster="demo")
    control_plane, agent, gateway, *workers = plan.components
    assert option(agent.command, "--control-plane") == plan.control_plane_url
    assert option(gateway.command, "--control-plane") == control_plane.url
    assert option(gateway.command, "--agent") == agent.url
    assert option(agent.command, "--slab-name") == "perilune-demo-n1.slab"
    assert str(plan.slab_paths[0]) == "/dev/shm/perilune-demo-n1.slab"
    tokens = {option(each.command, "--token-file") for each in (control_plane, agent, gateway)}
    assert tokens == {str(tmp_path / "token")}
    assert all(str(tmp_path / "run" / "n1.sock") in " ".join(each.command) for each in workers)


@pytest.mark.parametrize(("host", "reach"), [
    ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.5", "10.0.0.5"), ("fd00::1", "[fd00::1]"),
])  # fmt: skip
def test_nobody_is_sent_to_an_address_that_is_no_machine(
    tmp_path: Path, host: str, reach: str
) -> None:
    plan = plan_of(tmp_path, host=host)
    urls = [one.url for one in plan.components if one.url.startswith("http")]
    assert {url.rpartition(":")[0] for url in urls} == {f"http://{reach}"}
    assert plan.control_plane_url.startswith(f"http://{reach}:")


def test_vllm_workers_carry_their_settings(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, dtype="float32", block_tokens=96)
    prefill, decode, _ = plan.workers
    assert option(prefill.command, "--port") == "8101"
    assert option(prefill.command, "--dtype") == "float32"
    assert '"kv_role": "kv_producer"' in option(prefill.command, "--kv-transfer-config")
    assert '"kv_role": "kv_consumer"' in option(decode.command, "--kv-transfer-config")
    assert '"block_tokens": 96' in option(decode.command, "--kv-transfer-config")
    assert prefill.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize(
    ("num_gpus", "gpus", "shares", "after"),
    [
        (1, ["0", "0", "0"], ["0.3", "0.283", "0.283"], ["", "worker-p1", "worker-d1"]),
        (2, ["0", "1", "1"], ["0.9", "0.425", "0.425"], ["", "", "worker-d1"]),
        (4, ["0", "1", "2"], ["0.9", "0.85", "0.85"], ["", "", ""]),
    ],
)
def test_workers_share_the_gpus_that_there_are(
    tmp_path: Path, num_gpus: int, gpus: list[str], shares: list[str], after: list[str]
) -> None:
    workers = plan_of(tmp_path, device="cuda", num_gpus=num_gpus).workers
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in workers] == gpus
    assert [option(each.command, "--gpu-memory-utilization") for each in workers] == shares
    waits = [[name for name in each.after if name != "agent-n1"] for each in workers]
    assert waits == [[name] if name else [] for name in after]


@pytest.mark.parametrize(
    ("counts", "num_gpus", "expected"),
    [
        ((2, 2), 0, [None] * 4),
        ((2, 2), 2, [0, 0, 1, 1]),
        ((1, 5), 2, [0, 1, 1, 1, 1, 1]),
        ((4, 2), 3, [0, 1, 0, 1, 2, 2]),
        ((7, 1), 4, [0, 1, 2, 0, 1, 2, 0, 3]),
        ((2, 2), 8, [0, 1, 2, 3]),
    ],
)
def test_from_two_gpus_on_none_serves_both_roles(
    counts: tuple[int, int], num_gpus: int, expected: list[int | None]
) -> None:
    assert gpus_of(*counts, num_gpus) == expected


def test_emulated_workers_use_the_pool(tmp_path: Path) -> None:
    worker = plan_of(tmp_path, engine="emulated").workers[1]
    assert option(worker.command, "--worker") == "d1:decode:8102"
    assert option(worker.command, "--agent-socket") == str(tmp_path / "run" / "n1.sock")


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ([0, 1], 2, ["0", "1"]),
        ([0, 1, 2, 3, 4], 2, ["0-2", "3-4"]),
        ([2, 3, 8, 9], 1, ["2-3,8-9"]),
        ([4, 7], 3, ["4", "7", "4"]),
    ],
)
def test_cores_are_split(cores: list[int], workers: int, expected: list[str]) -> None:
    assert [as_list(share) for share in split_cores(cores, workers)] == expected


def test_kv_bytes_per_token(tmp_path: Path) -> None:
    config = (
        '{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,'
        ' "hidden_size": 576, "torch_dtype": "bfloat16"}'
    )
    (tmp_path / "config.json").write_text(config)
    assert kv_bytes_per_token(str(tmp_path), "auto") == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(str(tmp_path), "float32") == 2 * 30 * 3 * 64 * 4
    assert kv_bytes_per_token(str(tmp_path / "none"), "auto") is None


def test_agent_gets_the_second_tier_it_is_asked_for(tmp_path: Path) -> None:
    plain = plan_of(tmp_path, cluster="demo")
    assert "--ssd-path" not in plain.components[1].command
    assert [path.name for path in plain.slab_paths] == [
        "perilune-demo-n1.slab", "perilune-demo-n1.slab.journal",
    ]  # fmt: skip
    folder = tmp_path / "ssd"
    agent = plan_of(tmp_path, ssd_path=folder, ssd_gib=0.5).components[1].command
    assert (option(agent, "--ssd-path"), option(agent, "--ssd-bytes")) == (str(folder), "536870912")
    agent = plan_of(tmp_path, ssd_path=folder).components[1].command
    assert option(agent, "--ssd-bytes") == "0"  # the agent's own safe default


def test_two_nodes_have_a_worker_each_so_that_bytes_move(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, cluster="demo", nodes=2)
    ports = Ports(7700, 8000, (7710, 7711), (8101, 8102))
    plan = make_plan(settings, MODEL, MODEL.source, ports)
    names = [each.name for each in plan.components]
    assert names[1:3] == ["agent-n1", "agent-n2"]
    agents = plan.components[1:3]
    assert [option(each.command, "--tcp") for each in agents] == [
        "127.0.0.1:7710",
        "127.0.0.1:7711",
    ]
    assert {option(each.command, "--transports") for each in agents} == {"tcp"}
    assert {option(each.command, "--secret-folder") for each in agents} == {str(tmp_path)}
    sockets = [each.worker.agent_socket.name for each in plan.workers if each.worker]
    assert sockets == ["n1.sock", "n2.sock"]
    assert [each.after for each in plan.workers] == [("agent-n1",), ("agent-n2",)]
    gateway = next(each for each in plan.components if each.kind == "gateway")
    assert [word for word in gateway.command if word.startswith("unix:")] == [
        each.url for each in agents
    ]
    assert [path.name for path in plan.slab_paths if path.suffix == ".slab"] == [
        "perilune-demo-n1.slab", "perilune-demo-n2.slab",
    ]  # fmt: skip


def test_a_directory_is_named_to_agents_and_control_plane(tmp_path: Path) -> None:
    address = "etcd://h1:2379,h2:2379"
    control_plane, agent, *others = plan_of(tmp_path, cluster="demo", directory=address).components
    for command in (control_plane.command, agent.command):
        assert option(command, "--directory") == address
        assert option(command, "--cluster") == "demo"
    assert not any("--directory" in each.command for each in others)
    assert not any("--directory" in each.command for each in plan_of(tmp_path).components)
