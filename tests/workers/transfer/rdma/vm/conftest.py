"""Fixtures of the tests that run in the VM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rdma_nodes import Node, Nodes


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def pair(nodes: Nodes) -> tuple[Node, Node]:
    """(puller, holder), each with 64 slots of 64 KiB."""
    return nodes.pair()
