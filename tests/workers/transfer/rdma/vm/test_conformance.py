"""What every transport promises, promised by this one: the suite of all transports, in the VM."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.core.transfer_types import Cause
from workers.transfer.base import PeerAddress, SlotMemory, Transport
from workers.transfer.push import ReservedSlots
from workers.transfer.rdma.node import RdmaNode
from workers.transfer.rdma.server import RdmaServer
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.transport import RdmaTransport


def _suite() -> Any:
    file = Path(__file__).parents[2] / "test_conformance.py"
    spec = importlib.util.spec_from_file_location("transfer_conformance", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


suite = _suite()
TestEnds = suite.TestEnds
TestHandshake = suite.TestHandshake
TestPushes = suite.TestPushes


class TestReads(suite.TestReads):  # type: ignore[misc, name-defined]
    @pytest.mark.parametrize(
        ("changes", "cause"),
        [
            ({"remote_generation": 4}, Cause.STALE),
            ({"remote_slot": 7}, Cause.STALE),
            ({"remote_slot": 3}, Cause.STALE),
            ({"remote_slot": 10_000}, Cause.BOUNDS),
            ({"local_slot": 10_000}, Cause.BOUNDS),
            ({"block_length": suite.BLOCK - 1}, Cause.BOUNDS),
            ({"block_length": suite.BLOCK + 10_000}, Cause.BOUNDS),
        ],
    )
    def test_what_is_not_there_is_an_answer_and_no_failure(
        self, rig: Any, op: Any, changes: dict[str, int], cause: Cause
    ) -> None:
        """Header and payload come in one read: the target slot may hold anything then."""
        blocks = rig.fill(2, 3)
        done = rig.finish(rig.open(), [op(1, 2, **changes), op(2, 3)])
        assert done[1].cause is cause
        assert done[2].cause is None
        assert rig.local(3) == blocks[3]


def _rdma_rig(base: type) -> type:
    """The rig of all transports with this one's ways of serving and connecting."""

    class RdmaRig(base):  # type: ignore[misc, valid-type]
        def _node(self, memory: SlotMemory) -> RdmaNode:
            node = RdmaNode(memory, RdmaSettings(devices=("rxe0",)))
            self.__dict__.setdefault("rdma_nodes", []).append(node)
            return node

        def serve(self, **changes: object) -> PeerAddress:
            peer = super().serve(**changes)
            memory = SlotMemory(self.holder.slab, self.holder.facts, self.holder.incarnation)
            assert peer.facts is not None
            memory.facts = peer.facts
            server = RdmaServer(self._node(memory), "holder", suite_secret(self), push=self.push)
            self.servers.append(server)
            host, port = server.address
            return PeerAddress(
                "holder", {"rdma": f"{host}:{port}"}, self.holder.incarnation, peer.facts
            )

        def transport(self, secret: bytes | None = None) -> Transport:
            node = self._node(self.reader)
            return RdmaTransport(node, "reader", secret or suite_secret(self))

        def close(self) -> None:
            for ended in (*self.endpoints, *self.servers):
                ended.close()
            for node in self.__dict__.get("rdma_nodes", []):
                assert node.queue_pairs == 0
                node.close()
            super().close()

    return RdmaRig


def suite_secret(rig: Any) -> bytes:
    return bytes(rig.fabric.nodes["holder"].secret) if rig.fabric.nodes else b"s" * 32


@pytest.fixture
def rig(make_rig: Callable[[str], Any]) -> Any:
    made = make_rig("rdma")
    made.__class__ = _rdma_rig(type(made))
    assert isinstance(made.push, ReservedSlots)
    return made


@pytest.fixture
def wired(rig: Any) -> Any:
    return rig
