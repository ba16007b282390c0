from __future__ import annotations

import json
import os
import sys

import pytest

from workers.core.errors import ConfigError
from workers.engines.vllm import PROJECT_ROOT, VllmWorkerSpec, probe_engine


def spec(**changes):
    values = {
        "worker_id": "p1",
        "role": "prefill",
        "model": "/models/m",
        "served_name": "m",
        "port": 8101,
        "engine_python": "/env/bin/python",
        "agent_socket": "/run/n1.sock",
    }
    return VllmWorkerSpec(**(values | changes))


def option(command, name):
    return command[command.index(name) + 1]


def transfer_config(command):
    return json.loads(option(command, "--kv-transfer-config"))


class TestCommand:
    @pytest.mark.parametrize(
        ("role", "kv_role"),
        [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")],
    )
    def test_connector(self, role, kv_role):
        config = transfer_config(spec(role=role, block_tokens=64).command())
        assert config["kv_role"] == kv_role
        assert config["kv_load_failure_policy"] == "recompute"
        assert config["kv_connector_module_path"] == "workers.connector.connector"
        assert config["kv_connector_extra_config"] == {
            "agent_socket": "/run/n1.sock",
            "worker_id": "p1",
            "block_tokens": 64,
            "model_id": "m",
            "weights_version": "",
        }

    def test_plain_has_none(self):
        command = spec(role="plain", agent_socket="").command()
        assert "--kv-transfer-config" not in command
        assert "--enable-prompt-tokens-details" in command

    def test_a15_only_decode_hides_its_cached_tokens(self):
        assert "--enable-prompt-tokens-details" in spec().command()
        assert "--enable-prompt-tokens-details" not in spec(role="decode").command()

    def test_cpu(self):
        command = spec().command()
        assert command[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
        assert "--enforce-eager" in command
        assert option(command, "--block-size") == "32"
        assert option(command, "--shutdown-timeout") == "20"
        assert "--gpu-memory-utilization" not in command

    def test_cuda(self):
        command = spec(device="cuda", gpu_memory_utilization=0.5).command()
        assert "--enforce-eager" not in command
        assert option(command, "--block-size") == "16"
        assert option(command, "--gpu-memory-utilization") == "0.5"

    def test_extra_arguments_come_last(self):
        command = spec(extra_args=("--kv-cache-dtype", "fp8")).command()
        assert command[-2:] == ["--kv-cache-dtype", "fp8"]

    @pytest.mark.parametrize("block", [16, 48, 0])
    def test_b29_pool_block_that_is_no_multiple(self, block):
        with pytest.raises(ConfigError, match="engine's block of 32 tokens") as caught:
            spec(block_tokens=block).command()
        assert caught.value.value == block

    def test_no_agent(self):
        with pytest.raises(ConfigError, match="no node agent"):
            spec(agent_socket="").command()


class TestEnvironment:
    def test_cpu(self, tmp_path):
        environment = spec(model=str(tmp_path), kv_cache_gib=2, cpu_binding="0-1,3").environment()
        assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1,3"
        assert environment["OMP_NUM_THREADS"] == "3"
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert "VLLM_SERVER_DEV_MODE" not in environment

    def test_cuda_has_no_cpu_settings(self):
        environment = spec(device="cuda", dev_mode=True).environment()
        assert not [name for name in environment if name.startswith("VLLM_CPU")]
        assert environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert "HF_HUB_OFFLINE" not in environment

    def test_project_comes_first_and_once(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/x", str(PROJECT_ROOT)]))
        assert spec().environment()["PYTHONPATH"] == os.pathsep.join([str(PROJECT_ROOT), "/x"])

    @pytest.mark.parametrize("binding", ["", "auto", "nobind"])
    def test_a_binding_that_counts_no_cpus(self, binding):
        assert "OMP_NUM_THREADS" not in spec(cpu_binding=binding).environment()


class TestProbe:
    def test_this_environment_has_an_engine(self):
        facts = probe_engine(sys.executable)
        assert facts.vllm_version
        assert facts.device in ("cpu", "cuda")

    def test_missing_packages_and_the_command_that_brings_them(self, tmp_path):
        empty = tmp_path / "python"
        empty.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        empty.chmod(0o755)
        with pytest.raises(ConfigError, match=r"-m pip install vllm msgspec blake3 xxhash"):
            probe_engine(str(empty))

    def test_no_such_interpreter(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be run"):
            probe_engine(str(tmp_path / "gone"))

    def test_something_that_is_no_python(self):
        with pytest.raises(ConfigError, match="the check failed"):
            probe_engine("/bin/true")
