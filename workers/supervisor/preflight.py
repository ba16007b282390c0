"""What can be known to fail before anything is started, each as one clear line."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from workers.core.errors import ConfigError
from workers.engines.vllm import CPU_BLOCK_TOKENS, CUDA_BLOCK_TOKENS
from workers.supervisor.home import SHM
from workers.supervisor.procfs import available_memory_bytes
from workers.supervisor.settings import GIB

if TYPE_CHECKING:
    from workers.models.resolve import ResolvedModel
    from workers.supervisor.settings import Settings

ENGINE_BASE_BYTES = int(2.2 * GIB)
"""An idle vLLM worker (API server, core, worker process) without weights and KV cache."""
SERVICES_BYTES = 512 * 1024**2
"""Control plane, gateway, agent and supervisor together."""
MIN_DISK_BYTES = GIB
COMPILERS = ("cc", "gcc", "clang")


def check_compiler(device: str) -> None:
    """CUDA kernels are partly compiled at start; the CPU engine runs eagerly and compiles nothing."""
    if device == "cuda" and not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            "compiler",
            " or ".join(COMPILERS),
            "is not installed, and the engine compiles kernels at start",
            "Debian: apt-get install gcc",
        )


def engine_block_tokens(settings: Settings) -> int:
    """Tokens of one engine block; a role may set its own."""
    usual = CPU_BLOCK_TOKENS if settings.device == "cpu" else CUDA_BLOCK_TOKENS
    if settings.engine == "emulated":
        return CUDA_BLOCK_TOKENS
    return math.lcm(settings.prefill.block_size or usual, settings.decode.block_size or usual)


def check_block_tokens(block_tokens: int, engine_block_tokens: int) -> None:
    """A pool block that no number of engine blocks fills would never be hit."""
    if block_tokens % engine_block_tokens:
        lower = max(block_tokens // engine_block_tokens, 1) * engine_block_tokens
        raise ConfigError(
            "--block-tokens",
            block_tokens,
            f"is no multiple of the engine's block of {engine_block_tokens} tokens",
            f"Choose {lower} or {lower + engine_block_tokens}.",
        )


def check_model_files(folder: str) -> None:
    """The gateway tokenises with the model's own files."""
    for name in ("config.json", "tokenizer.json"):
        if not (Path(folder) / name).is_file():
            raise ConfigError("model", folder, f"has no {name}", "Give a whole model folder.")
        if not _is_object(Path(folder) / name):
            what = f"has a {name} that is no JSON object"
            raise ConfigError("model", folder, what, "Copy or prepare the model again.")


def _is_object(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False


def check_model_length(folder: str, max_model_len: int) -> None:
    """The engine refuses a context that is longer than the model's, after half a minute."""
    try:
        longest = json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # the config does not say: the engine knows better
    if isinstance(longest, int) and max_model_len > longest:
        raise ConfigError(
            "--max-model-len",
            max_model_len,
            f"is more than the {longest} tokens that the model was made for",
            f"Choose {longest} or less.",
        )


def check_disk(settings: Settings) -> None:
    free = shutil.disk_usage(settings.data).free
    if free < MIN_DISK_BYTES:
        raise ConfigError(
            "--data",
            str(settings.data),
            f"has {free / GIB:.2f} GiB free, logs and database want {MIN_DISK_BYTES / GIB:.0f}",
            "Free some space or name another folder.",
        )


def check_shm(settings: Settings) -> None:
    if not SHM.is_dir():
        raise ConfigError("slab folder", str(SHM), "does not exist", "Mount a tmpfs there.")
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    if free < settings.slab_gib * settings.nodes * GIB:
        nodes = f" on each of {settings.nodes} nodes" if settings.nodes > 1 else ""
        raise ConfigError(
            "--slab-gib",
            settings.slab_gib,
            f"does not fit{nodes} into /dev/shm, which has {free / GIB:.2f} GiB free",
            "Choose less, or enlarge it: mount -o remount,size=8G /dev/shm "
            "(containers: --shm-size).",
        )


def check_ssd(settings: Settings) -> str:
    """A warning for a cap that the disk cannot fill, or ""; ConfigError for one that it never can."""
    if settings.ssd_path is None:
        return ""
    try:
        settings.ssd_path.mkdir(parents=True, exist_ok=True)
        usage = shutil.disk_usage(settings.ssd_path)
    except OSError as error:
        raise ConfigError(
            "--ssd-path",
            str(settings.ssd_path),
            f"cannot be used ({error.strerror})",
            "Name a folder on an SSD that you may write to.",
        ) from error
    if settings.ssd_gib is None:
        return ""
    if settings.ssd_gib * GIB > usage.total:
        raise ConfigError(
            "--ssd-gib",
            settings.ssd_gib,
            f"is more than the disk under {settings.ssd_path} has ({usage.total / GIB:.1f} GiB)",
            "Choose less, or leave it out for a tenth of what is free.",
        )
    if settings.ssd_gib * GIB > usage.free:
        return (
            f"--ssd-gib = {settings.ssd_gib:g}: {settings.ssd_path} has only "
            f"{usage.free / GIB:.1f} GiB free; the SSD tier will stop growing there."
        )
    return ""


def check_gpus(settings: Settings) -> str:
    """A warning where both roles run on one GPU, or ""."""
    if settings.num_gpus != 1:
        return ""
    return (
        "prefill and decode share the only GPU: decode stands still while a prompt is computed, so "
        "TTFT and TBT under load say little about two GPUs."
    )


def check_memory(settings: Settings, model: ResolvedModel) -> None:
    available = available_memory_bytes()
    needed = needed_memory_bytes(settings, model)
    if available is not None and available < needed:
        raise ConfigError(
            "memory",
            f"{available / GIB:.1f} GiB available",
            f"{_workers(settings)} workers, pool and services want about {needed / GIB:.1f} GiB",
            "End other programs, or lower --slab-gib, --kv-cache-gib or the number of workers.",
        )


def needed_memory_bytes(settings: Settings, model: ResolvedModel) -> int:
    """An estimate from what was measured: engines, weights, KV caches, slab, services."""
    slab = int(settings.slab_gib * GIB) * settings.nodes
    if settings.engine == "emulated":
        return slab + SERVICES_BYTES
    per_worker = ENGINE_BASE_BYTES + settings.kv_cache_gib * GIB + _weights_bytes(model)
    return slab + SERVICES_BYTES + _workers(settings) * per_worker


def _weights_bytes(model: ResolvedModel) -> int:
    if not model.is_local:
        return 0
    return sum(file.stat().st_size for file in Path(model.source).glob("*.safetensors"))


def _workers(settings: Settings) -> int:
    return settings.prefill.count + settings.decode.count
