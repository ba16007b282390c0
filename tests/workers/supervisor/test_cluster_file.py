"""The declared file."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.policies.schemas import SPEC_OF_KIND
from workers.core.errors import ConfigError
from workers.supervisor.cluster_file import (
    DecodeSection,
    PrefillSection,
    SchedulerSection,
    merge_settings,
    policies_of,
    read_cluster_file,
)
from workers.transfer_tls import tls_environment

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "cluster.example.toml"


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(write(folder, text))
    return str(caught.value)


def test_the_example_is_valid() -> None:
    settings = merge_settings({"file": EXAMPLE})
    settings.validate()
    assert (settings.prefill.count, settings.decode.count) == (2, 2)
    assert settings.prefill.max_num_batched_tokens == 8192
    assert settings.port_gateway == 8000


def test_a_file_that_names_no_share_of_the_gpu_leaves_it_to_the_plan(tmp_path: Path) -> None:
    """It depends on how many workers a GPU has, which the file does not know."""
    settings = merge_settings({"file": write(tmp_path, "[prefill]\ncount = 2\n")})
    assert settings.prefill.gpu_memory_utilization is None
    assert settings.decode.gpu_memory_utilization is None
    text = "[decode]\ngpu_memory_utilization = 0.3\n"
    assert merge_settings({"file": write(tmp_path, text)}).decode.gpu_memory_utilization == 0.3


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[prefill]\ncount = 4\nmax_num_batched_tokens = 512\n")
    settings = merge_settings({"file": path, "prefill": 1, "port_gateway": 9000})
    assert settings.prefill.count == 1
    assert settings.prefill.max_num_batched_tokens == 512
    assert settings.port_gateway == 9000


def test_its_targets_become_policies(tmp_path: Path) -> None:
    text = "[prefill]\nmax_ttft_ms = 750\n[scheduler]\nreject_on_slo_violation = false\n"
    policies = policies_of(read_cluster_file(write(tmp_path, text)))
    assert policies["slo"] == {"mode": "observe", "max_ttft_ms": 750.0, "max_tbt_ms": 50.0}
    assert policies["scheduling"]["max_concurrent_per_decode"] == 256


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[prefill]\ncuont = 2\n", ["[prefill] cuont = 2: is no key of this file", "Known: count"]),
        ("[prefil]\ncount = 2\n", ["[prefil]", "is no key of this file", "Known: cluster, pref"]),
        ("[prefill]\ncount = 0\n", ["[prefill] count = 0:", "greater than 0"]),
        ("[prefill]\ncount = '2'\n", ["[prefill] count = '2':", "valid integer"]),
        ("[decode]\ngpu_memory_utilization = 1.5\n", ["gpu_memory_utilization = 1.5"]),
        ("[cluster]\ntransfer_engine = 'magic'\n", ["transfer_engine = 'magic'", "'shm'"]),
        ("[cluster\n", ["--file", "is no TOML"]),
        ("[prefill]\nmax_ttft_ms = inf\n", ["[prefill] max_ttft_ms = inf:", "finite"]),
        ("[prefill]\nmax_ttft_ms = 1e9\n", ["max_ttft_ms = 1000000000.0:", "600000"]),
        ("[decode]\nmax_tbt_ms = 0.5\n", ["[decode] max_tbt_ms = 0.5:", "equal to 1"]),
        ("[decode]\nmax_concurrent_requests = 5000\n", ["= 5000:", "4096"]),
        ("[transfer]\ncap_gpbs = 5\n", ["[transfer]", "cap_gpbs is no key", "cap_gbps"]),
        ("[transfer]\nparallelism = 0\n", ["[transfer]", "parallelism", ">= 1"]),
        ("[transfer]\npiece_bytes = 4096\n", ["[transfer]", "piece_bytes = 4096", "65536"]),
    ],
)
def test_a_bad_file_names_key_value_and_way_out(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    message = refusal(tmp_path, text)
    assert [part for part in parts if part not in message] == []


def test_what_is_said_of_transfers_becomes_policy_and_the_rest_stays(tmp_path: Path) -> None:
    text = '[transfer]\ncap_gbps = 5\ntransport_overrides = {"n1>n2" = "tcp"}\n'
    settings = merge_settings({"file": write(tmp_path, text)})
    assert settings.policies["transfer"] == {
        "cap_gbps": 5.0, "transport_overrides": {"n1>n2": "tcp"}
    }  # fmt: skip
    assert "transfer" not in merge_settings({"file": write(tmp_path, "")}).policies


def test_tls_files_go_to_every_process_and_come_together(tmp_path: Path) -> None:
    lines = [f'transfer_tls_{part} = "/etc/{part}.pem"' for part in ("cert", "key", "ca")]
    settings = merge_settings({"file": write(tmp_path, "\n".join(["[cluster]", *lines]))})
    assert settings.transfer_tls is not None
    assert tls_environment(settings.transfer_tls)["PERILUNE_TRANSFER_TLS_CA"] == "/etc/ca.pem"
    with pytest.raises(ConfigError, match="transfer_tls_ca"):
        merge_settings({"file": write(tmp_path, "\n".join(["[cluster]", *lines[:2]]))})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster_file(tmp_path / "none.toml")


def test_a_bad_endpoint(tmp_path: Path) -> None:
    path = write(tmp_path, "[cluster]\nscheduler_endpoint = '8000'\n")
    with pytest.raises(ConfigError, match="is no HOST:PORT"):
        merge_settings({"file": path})


def test_what_the_file_allows_the_policies_allow() -> None:
    """Else a start would hang on a policy that the control plane refuses."""
    for section, name, kind, spec_name in (
        (PrefillSection, "max_ttft_ms", "slo", "max_ttft_ms"),
        (DecodeSection, "max_tbt_ms", "slo", "max_tbt_ms"),
        (DecodeSection, "max_concurrent_requests", "scheduling", "max_concurrent_per_decode"),
        (SchedulerSection, "kv_cache_balancing_threshold", "scheduling", "balancing_threshold"),
    ):
        spec = SPEC_OF_KIND[kind].model_fields[spec_name]
        assert set(map(str, section.model_fields[name].metadata)) == set(map(str, spec.metadata))
