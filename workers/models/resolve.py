"""From what an operator gives as `--model` to what an engine loads and a namespace names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workers.core.errors import ConfigError
from workers.models import smollm2

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SAMPLE_BYTES = 64 * 1024
_SAMPLES_A_FILE = 16


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`source` is what the engine gets: a folder, or a hub id that the engine fetches itself."""

    served_name: str
    model_id: str
    source: str
    weights_version: str
    is_local: bool


def resolve_model(
    wanted: str, data_folder: Path, *, progress: Callable[[str], None] = lambda _: None
) -> ResolvedModel:
    """Prepare or find the model. Raises ConfigError where it can be none of the three forms."""
    if wanted == smollm2.MODEL_NAME:
        prepared = smollm2.prepare(data_folder, progress=progress)
        return ResolvedModel(
            smollm2.MODEL_NAME,
            prepared.model_id,
            str(prepared.path),
            prepared.weights_version,
            is_local=True,
        )
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        return _local(folder.resolve())
    if _HUB_ID.fullmatch(wanted) and not wanted.startswith((".", "/")):
        # A hub id without a revision: whoever loads it names the same weights by the same id.
        return ResolvedModel(wanted, wanted, wanted, "hub", is_local=False)
    raise ConfigError(
        "model",
        wanted,
        "it is no prepared model's name, no folder and no hub id (ORGANISATION/NAME)",
        f"Use {smollm2.MODEL_NAME!r}, a folder with config.json, or a hub id",
    )


def _local(folder: Path) -> ResolvedModel:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "model", str(folder), "the folder has no config.json", "Point at a model's folder"
        )
    return ResolvedModel(
        folder.name, folder.name, str(folder), weights_digest(folder), is_local=True
    )


def weights_digest(folder: Path) -> str:
    """16 hex digits over config and weights: sizes and samples spread over each weights file.

    Samples, since reading hundreds of gigabytes to name them would cost minutes at each start.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as reader:
            for sample in range(_SAMPLES_A_FILE):
                reader.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES_A_FILE - 1))
                digest.update(reader.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
