"""Hosts with node agents, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from net_agents import Node, agents


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Four agents, n1 to n4, with slabs of their own."""
    with agents(4, tmp_path_factory.mktemp("net")) as made:
        yield made
