"""The declared file of `perilune up --file`: TOML, strict, every unknown key refused by name."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from workers.core.errors import ConfigError
from workers.core.transfer_policy import TransferPolicy
from workers.supervisor.settings import RoleSettings, Settings
from workers.transfer_tls import PARTS, tls_files

Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
# The bounds of the policies that these become (controlplane/policies/schemas.py; a test compares).
TtftMs = Annotated[float, Field(ge=1, le=600_000)]
TbtMs = Annotated[float, Field(ge=1, le=60_000)]
Concurrency = Annotated[int, Field(ge=1, le=4096)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClusterSection(_Section):
    """[cluster]: what holds for the whole cluster."""

    name: str = ""
    model: str = "smollm2"
    engine: Literal["vllm", "emulated"] = "vllm"
    scheduler_endpoint: str = "127.0.0.1:8000"
    nodes: Positive = 1
    transfer_engine: Literal["tcp", "shm", "rdma", "auto"] = "tcp"
    backend: Literal["dram"] = "dram"
    transfer_tls_cert: str = ""  # PEM files; all three or none
    transfer_tls_key: str = ""
    transfer_tls_ca: str = ""
    bandwidth_gbps: PositiveNumber = 100
    block_tokens: Positive = 64
    slab_gib: PositiveNumber = 2
    ssd_path: str = ""
    ssd_gib: PositiveNumber | None = None
    directory: str = ""  # etcd://host:port,...
    dtype: str = "auto"
    max_model_len: Positive = 8192


class PrefillSection(_Section):
    """[prefill]: workers that read prompts."""

    count: Positive = 1
    gpu_memory_utilization: Share | None = None  # 0.90, divided by the workers of one GPU
    max_num_batched_tokens: Positive = 8192
    enable_prefix_caching: bool = True
    block_size: Positive | None = None
    max_ttft_ms: TtftMs = 2000
    min_mfu: Annotated[float, Field(ge=0, le=1)] = 0.35
    kv_cache_dtype: str = "auto"


class DecodeSection(_Section):
    """[decode]: workers that write answers."""

    count: Positive = 1
    gpu_memory_utilization: Share | None = None  # 0.85, likewise
    max_num_batched_tokens: Positive = 2048
    block_size: Positive | None = None
    max_tbt_ms: TbtMs = 50
    max_concurrent_requests: Concurrency = 256
    kv_cache_dtype: str = "auto"


class SchedulerSection(_Section):
    """[scheduler]: how requests are placed and refused."""

    kv_cache_balancing_threshold: Annotated[float, Field(ge=1, le=100)] = 1.25
    estimate_model: Literal["empirical"] = "empirical"
    reject_on_slo_violation: bool = True


def _transfer_section(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of the policy `transfer`, by its own rules; those that were given, and no others."""
    unknown = [name for name in given if name not in TransferPolicy.__struct_fields__]
    if unknown:
        known = ", ".join(TransferPolicy.__struct_fields__)
        raise ValueError(f"{unknown[0]} is no key of it; known: {known}")
    try:
        policy = msgspec.convert(given, TransferPolicy)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    spec: dict[str, Any] = msgspec.to_builtins(policy)
    return {name: spec[name] for name in given}


class ClusterFile(_Section):
    """The whole file; a section may be missing."""

    cluster: ClusterSection = ClusterSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    scheduler: SchedulerSection = SchedulerSection()
    transfer: Annotated[dict[str, Any], AfterValidator(_transfer_section)] = {}


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises ConfigError naming the file, section, key and value."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "--file", str(path), f"cannot be read ({error.strerror})", "Check the path."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--file", str(path), f"is no TOML: {error}", "Correct it.") from error
    try:
        return ClusterFile.model_validate(content)
    except ValidationError as error:
        raise _first_error(path, error) from error


def merge_settings(options: dict[str, Any]) -> Settings:
    """Defaults, then the file of `options["file"]`, then the other options given."""
    given = dict(options)
    file: Path | None = given.pop("file", None)
    settings = Settings() if file is None else apply_file(Settings(), read_cluster_file(file))
    for role in ("prefill", "decode"):
        if role in given:
            given[role] = replace(getattr(settings, role), count=given[role])
    if os.sep in given.get("engine_python", ""):
        # Not resolved: a virtual environment's interpreter is a link that must be called as such.
        given["engine_python"] = os.path.abspath(given["engine_python"])
    return replace(settings, **given)


def apply_file(settings: Settings, file: ClusterFile) -> Settings:
    """Settings with what the file says."""
    host, port = _endpoint(file.cluster.scheduler_endpoint)
    return replace(
        settings,
        cluster=file.cluster.name or settings.cluster,
        model=file.cluster.model,
        engine=file.cluster.engine,
        host=host,
        port_gateway=port,
        nodes=file.cluster.nodes,
        transfer_engine=file.cluster.transfer_engine,
        transfer_tls=tls_files(
            *(_folder(getattr(file.cluster, f"transfer_tls_{part}")) for part in PARTS)
        ),
        block_tokens=file.cluster.block_tokens,
        slab_gib=float(file.cluster.slab_gib),
        ssd_path=_folder(file.cluster.ssd_path),
        directory=file.cluster.directory,
        ssd_gib=None if file.cluster.ssd_gib is None else float(file.cluster.ssd_gib),
        dtype=file.cluster.dtype,
        max_model_len=file.cluster.max_model_len,
        prefill=_role(file.prefill, enable_prefix_caching=file.prefill.enable_prefix_caching),
        decode=_role(file.decode, enable_prefix_caching=True),
        policies=policies_of(file),
    )


def policies_of(file: ClusterFile) -> dict[str, dict[str, object]]:
    """The part of the file that is policy: kind -> fields of its spec."""
    return {
        "slo": {
            "mode": "enforce" if file.scheduler.reject_on_slo_violation else "observe",
            "max_ttft_ms": float(file.prefill.max_ttft_ms),
            "max_tbt_ms": float(file.decode.max_tbt_ms),
        },
        "scheduling": {
            "balancing_threshold": float(file.scheduler.kv_cache_balancing_threshold),
            "max_concurrent_per_decode": file.decode.max_concurrent_requests,
        },
        **({"transfer": file.transfer} if file.transfer else {}),
    }


def _role(section: PrefillSection | DecodeSection, *, enable_prefix_caching: bool) -> RoleSettings:
    return RoleSettings(
        count=section.count,
        gpu_memory_utilization=section.gpu_memory_utilization,
        max_num_batched_tokens=section.max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_dtype=None if section.kv_cache_dtype == "auto" else section.kv_cache_dtype,
        block_size=section.block_size,
    )


def _folder(text: str) -> Path | None:
    return Path(text).expanduser().absolute() if text else None


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(
            "[cluster] scheduler_endpoint", text, "is no HOST:PORT", 'Write "127.0.0.1:8000".'
        )
    return host, int(port)


def _first_error(path: Path, error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    section, *keys = (str(part) for part in first["loc"])
    name = f"{path}: [{section}] {'.'.join(keys)}".rstrip()
    value: Any = first["input"]
    if first["type"] == "extra_forbidden":
        return ConfigError(name, value, "is no key of this file", f"Known: {_known(section)}.")
    return ConfigError(name, value, first["msg"].lower(), "Correct it.")


def _known(section: str) -> str:
    found = ClusterFile.model_fields.get(section)
    model = ClusterFile if found is None else found.annotation
    assert model is not None
    return ", ".join(model.model_fields)
