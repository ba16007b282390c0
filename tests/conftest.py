"""What every test run shares: skips that count as failures in CI, and one summary for two runs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uneven_loop
from network import missing_for_networks
from shared_memory import nothing_left

# A busy machine is no reason to fail: what is bounded is asserted where it is bounded. The same code
# is tried with the same examples, so that a change is judged by what it changed; PERILUNE_SEARCH=1
# draws new ones.
hypothesis.settings.register_profile(
    "perilune",
    deadline=None,
    derandomize=os.environ.get("PERILUNE_SEARCH") != "1",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("perilune")
if "PERILUNE_UNEVEN" in os.environ:
    uneven_loop.install(os.environ["PERILUNE_UNEVEN"])
NO_SKIPS = os.environ.get("PERILUNE_NO_SKIPS") == "1"
COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "deselected")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """In parallel runs that go by groups, files stay whole and long groups begin first."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from lanes import Lanes  # noqa: PLC0415 - the VM's tests run without xdist

    return Lanes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if NO_SKIPS and report.skipped:
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"skipped where every test must run (PERILUNE_NO_SKIPS=1): {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Carries the counts of the first run of `scripts/test` into the second one's last line."""
    yield  # all that looks at single reports has run after this
    stats = terminalreporter.stats
    if target := os.environ.get("PERILUNE_COUNTS_OUT"):
        counts = {key: len(stats.get(key, [])) for key in COUNTED[:-1]}
        Path(target).write_text(json.dumps(counts))
    source = os.environ.get("PERILUNE_COUNTS_IN")
    if not source or not Path(source).stat().st_size:
        return
    first = json.loads(Path(source).read_text())
    second = {key: len(stats.get(key, [])) for key in first}
    terminalreporter.section("both parts")
    terminalreporter.write_line(f"in parallel: {_words(first)}; one at a time: {_words(second)}")
    # What the first run deselected is what the second one ran, and the other way round.
    stats.pop("deselected", None)
    for key, count in first.items():
        stats.setdefault(key, []).extend(_Counted() for _ in range(count))


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {key}" for key, count in counts.items() if count) or "none"


class _Counted:
    """Stands for a report of the first run in the second run's summary line."""

    count_towards_summary = True


@pytest.fixture(scope="session", autouse=True)
def clean_shared_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that start whole clusters leave nothing in /dev/shm: looked at when all has ended."""
    markers = ("vllm", "heavy", "soak")
    starts = any(
        item.get_closest_marker(name) for item in request.session.items for name in markers
    )
    with nothing_left() if starts else nullcontext():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("netns") and (missing := missing_for_networks()):
        pytest.skip(missing)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives a port of 127.0.0.1 that was free a moment ago."""

    def pick() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return pick
