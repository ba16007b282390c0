"""What `perilune up` is asked to run."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workers.core.errors import ConfigError
from workers.core.hosts import in_url, is_anywhere
from workers.data_dir import default_data_dir
from workers.directory.address import parse_directory
from workers.supervisor.home import Home, default_cluster_name
from workers.transfer_tls import TlsFiles

GIB = 1024**3
MAX_NODES = 16
MAX_WORKERS = 64
CLUSTER_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """One role's workers; None leaves a setting to the engine's default."""

    count: int = 1
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str | None = None
    block_size: int | None = None  # tokens of the engine's own block
    engine_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster on this machine. Sizes in GiB and tokens; port 0 takes a free one."""

    data: Path = field(default_factory=default_data_dir)
    cluster: str = ""
    model: str = "smollm2"
    engine: Literal["vllm", "emulated"] = "vllm"
    engine_python: str = sys.executable
    prefill: RoleSettings = RoleSettings()
    decode: RoleSettings = RoleSettings()
    host: str = "127.0.0.1"
    port_control_plane: int = 7700
    port_gateway: int = 8000
    port_agent: int = 7710
    port_workers: int = 8101
    slab_gib: float = 2.0
    ssd_path: Path | None = None  # a folder; None = no second tier
    ssd_gib: float | None = None  # None = a tenth of what is free there
    directory: str = ""  # etcd://host:port,...; "" = none, which one host does without
    kv_cache_gib: int = 1
    block_tokens: int = 64
    dtype: str = "auto"
    max_model_len: int = 8192
    nodes: int = 1  # agents, each with a slab of its own
    transfer_engine: Literal["tcp", "shm", "rdma", "auto"] = "tcp"  # between nodes
    transfer_tls: TlsFiles | None = None  # for agents and who speaks to them; None: as they find it
    device: Literal["cpu", "cuda"] = "cpu"  # found by asking the engine's environment
    num_gpus: int = 0  # likewise
    dev_mode: bool = False
    policies: dict[str, dict[str, object]] = field(default_factory=dict)

    @property
    def home(self) -> Home:
        return Home(self.data)

    @property
    def reach(self) -> str:
        """The host in this machine's own URLs: what is bound to all addresses is at loopback too."""
        if not is_anywhere(self.host):
            return in_url(self.host)
        return "[::1]" if ":" in self.host else "127.0.0.1"

    @property
    def cluster_name(self) -> str:
        return self.cluster or default_cluster_name(self.data)

    def validate(self) -> None:
        """Raise ConfigError for what can be refused without looking at the machine."""
        if not CLUSTER_PATTERN.fullmatch(self.cluster_name):
            raise ConfigError(
                "--cluster",
                self.cluster_name,
                "is no cluster name",
                "Use up to 64 of a-z, 0-9, dot, dash and underscore.",
            )
        for field_name, value, least, most in (
            ("--prefill", self.prefill.count, 1, MAX_WORKERS),
            ("--decode", self.decode.count, 1, MAX_WORKERS),
            ("--nodes", self.nodes, 1, MAX_NODES),
            ("--slab-gib", self.slab_gib, 0.03125, 65536),
            ("--ssd-gib", 1 if self.ssd_gib is None else self.ssd_gib, 0.03125, 1048576),
            ("--kv-cache-gib", self.kv_cache_gib, 1, 65536),
            ("--block-tokens", self.block_tokens, 1, 65536),
            ("--max-model-len", self.max_model_len, 64, 10_000_000),
            ("--port-control-plane", self.port_control_plane, 0, 65535),
            ("--port-gateway", self.port_gateway, 0, 65535),
            ("--port-agent", self.port_agent, 0, 65535),
            ("--port-workers", self.port_workers, 0, 65535 - 2 * MAX_WORKERS),
        ):
            if not least <= value <= most:
                raise ConfigError(
                    field_name, value, f"is not between {least} and {most}", "Choose one in range."
                )
        if self.directory:
            parse_directory(self.directory)
        if self.ssd_gib is not None and self.ssd_path is None:
            raise ConfigError(
                "--ssd-gib", self.ssd_gib, "has no folder to go to", "Add --ssd-path FOLDER."
            )
        for role, settings in (("prefill", self.prefill), ("decode", self.decode)):
            share = settings.gpu_memory_utilization
            if share is not None and not 0 < share <= 1:
                raise ConfigError(
                    f"[{role}] gpu_memory_utilization",
                    share,
                    "is no share between 0 and 1",
                    "Write 0.9 for 90 %.",
                )
