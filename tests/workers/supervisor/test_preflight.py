"""What is refused before anything starts: cause, value and way out in one line."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from workers.core.errors import ConfigError
from workers.models.resolve import ResolvedModel
from workers.supervisor import preflight
from workers.supervisor.settings import GIB, RoleSettings, Settings

MODEL = ResolvedModel("m", "m", "/nowhere", "1", is_local=True)


def test_block_that_no_engine_block_divides() -> None:
    with pytest.raises(ConfigError) as caught:
        preflight.check_block_tokens(80, 32)
    assert str(caught.value) == (
        "--block-tokens = 80: is no multiple of the engine's block of 32 tokens. Choose 64 or 96."
    )
    preflight.check_block_tokens(96, 32)


def test_engine_block_by_device_and_role() -> None:
    settings = Settings(device="cuda")
    assert preflight.engine_block_tokens(Settings()) == 32
    assert preflight.engine_block_tokens(settings) == 16
    wider = replace(settings, prefill=RoleSettings(block_size=48))
    assert preflight.engine_block_tokens(wider) == 48


def test_one_gpu_for_both_roles_is_said() -> None:
    assert "share the only GPU" in preflight.check_gpus(Settings(num_gpus=1))
    assert preflight.check_gpus(Settings(num_gpus=2)) == preflight.check_gpus(Settings()) == ""


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: 3 * GIB)
    with pytest.raises(ConfigError, match=r"memory = '3.0 GiB available': 2 workers, pool"):
        preflight.check_memory(Settings(), MODEL)
    preflight.check_memory(Settings(engine="emulated", slab_gib=1), MODEL)


def test_weights_count_once_a_worker(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(GIB)
    settings = Settings(prefill=RoleSettings(2))
    without = preflight.needed_memory_bytes(settings, MODEL)
    model = replace(MODEL, source=str(tmp_path))
    assert preflight.needed_memory_bytes(settings, model) - without == 3 * GIB


def test_shared_memory_too_small() -> None:
    with pytest.raises(ConfigError, match="does not fit into /dev/shm, which has"):
        preflight.check_shm(Settings(slab_gib=65000.0))


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(ConfigError, match=r"has 0.00 GiB free"):
        preflight.check_disk(Settings(data=tmp_path))


def test_compiler_is_wanted_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    preflight.check_compiler("cpu")
    with pytest.raises(ConfigError, match="apt-get install gcc"):
        preflight.check_compiler("cuda")


def test_a_model_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        preflight.check_model_files(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["{", "[]", "", "\0"])
def test_a_damaged_model_folder(tmp_path: Path, name: str, content: str) -> None:
    for each in ("config.json", "tokenizer.json"):
        (tmp_path / each).write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"has a {name} that is no JSON object"):
        preflight.check_model_files(str(tmp_path))


def test_a_context_longer_than_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    preflight.check_model_length(str(tmp_path), 8192)
    with pytest.raises(ConfigError, match=r"--max-model-len = 9000: is more than the 8192"):
        preflight.check_model_length(str(tmp_path), 9000)
    (tmp_path / "config.json").write_text("{}")
    preflight.check_model_length(str(tmp_path), 9000)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(prefill=RoleSettings(0)), "--prefill = 0"),
        (Settings(port_gateway=70000), "--port-gateway = 70000"),
        (Settings(slab_gib=-1), "--slab-gib = -1"),
        (Settings(nodes=17), "--nodes = 17"),
        (Settings(cluster="No Good"), "--cluster = 'No Good'"),
    ],
)
def test_settings_out_of_range(settings: Settings, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings.validate()


def test_b20_a_cap_beyond_the_disk_is_refused_and_one_beyond_what_is_free_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=10 << 30, free=2 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    settings = Settings(data=tmp_path, ssd_path=tmp_path / "ssd")
    assert preflight.check_ssd(Settings(data=tmp_path)) == ""
    assert preflight.check_ssd(settings) == ""  # the agent's own default cap
    assert preflight.check_ssd(replace(settings, ssd_gib=1.0)) == ""
    assert "only 2.0 GiB free" in preflight.check_ssd(replace(settings, ssd_gib=5.0))
    with pytest.raises(ConfigError, match="--ssd-gib"):
        preflight.check_ssd(replace(settings, ssd_gib=11.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--ssd-path"):
        preflight.check_ssd(replace(settings, ssd_path=tmp_path / "file"))


def test_ssd_cap_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Add --ssd-path"):
        Settings(data=tmp_path, ssd_gib=1.0).validate()
