"""How many connections the limit on open files has room for, and what the gateway says of it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from controlplane.gateway.descriptors import connections_for
from workers.core.errors import ConfigError


def test_the_limit_bounds_what_nobody_asked_for() -> None:
    assert connections_for(20_000, 4096, asked=False) == 4096
    assert connections_for(4096, 4096, asked=False) == (4096 - 128) // 3
    assert connections_for(320, 4096, asked=False) == 64


def test_what_was_asked_for_is_not_quietly_less() -> None:
    assert connections_for(20_000, 6000, asked=True) == 6000
    assert connections_for(1024, 100, asked=True) == 100
    with pytest.raises(
        ConfigError, match=r"room for 298 .* 2000 are needed.*ulimit -n 6128.*lower"
    ):
        connections_for(1024, 2000, asked=True)


@pytest.mark.parametrize("num_files", [0, 128, 319])
def test_next_to_none_is_an_error(num_files: int) -> None:
    with pytest.raises(ConfigError, match=r"RLIMIT_NOFILE .* = \d+: has room .*ulimit -n 320"):
        connections_for(num_files, 4096, asked=False)


def test_a_gateway_with_too_few_files_exits_2_and_says_how_many_it_needs() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    done = subprocess.run(
        [sys.executable, "-m", "controlplane.gateway", "--port", "0"],
        capture_output=True, text=True, timeout=60, check=False, preexec_fn=lower,
    )  # fmt: skip
    assert done.returncode == 2
    assert "RLIMIT_NOFILE (ulimit -n) = 200: has room for 24 clients' connections" in done.stderr
