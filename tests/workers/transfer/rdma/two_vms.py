"""Run in each of two VMs: A holds blocks, B pulls and pushes over the wire between them.

two_vms.py hold            two_vms.py pull ADDRESS
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

from rdma_nodes import KIB, Driver, Nodes, key_of, op_of

from workers.core.transfer_types import Direction
from workers.pool.arena import checksum_of
from workers.transfer.base import PeerAddress
from workers.transfer.push import ReservedSlots

BLOCK = 64 * KIB
COUNT = 64
PORT, DONE_PORT = 7720, 7721


def hold(nodes: Nodes) -> None:
    landed: list[int] = []
    reserved = ReservedSlots(lambda slot, *_: landed.append(slot))
    holder = nodes.make("a", 2 * COUNT, serve=True, push=reserved, host="0.0.0.0", port=PORT)
    holder.fill(range(COUNT), BLOCK)
    for slot in range(COUNT, 2 * COUNT):
        reserved.reserve(slot, 1, key_of(slot - COUNT), BLOCK)
    with socket.create_server(("0.0.0.0", DONE_PORT)) as listener:
        listener.settimeout(200)
        sock, _ = listener.accept()
        sock.close()
    slab = holder.memory.slab
    same = [slab.read_block(slot, 1, key_of(slot)) for slot in range(COUNT)]
    back = [slab.read_block(COUNT + slot, 1, key_of(slot)) for slot in range(COUNT)]
    assert sorted(landed) == list(range(COUNT, 2 * COUNT)), landed
    assert same == back
    print(f"holder: {len(landed)} blocks came back as they went")


def pull(nodes: Nodes, address: str) -> None:
    puller = nodes.make("b", 2 * COUNT)
    peer = PeerAddress("a", {"rdma": f"{address}:{PORT}"}, 1)
    drive = _open(puller.connect, peer)
    started = time.monotonic()
    ended = drive.move([op_of(slot, BLOCK) for slot in range(COUNT)])
    seconds = time.monotonic() - started
    assert all(completion.cause is None for completion in ended.values()), ended
    for slot in range(COUNT):
        puller.memory.slab.write_header(
            slot, 1, BLOCK, checksum_of(puller.memory.range(slot, 0, BLOCK)), key_of(slot)
        )
    pushes = [
        op_of(COUNT + slot, BLOCK, local=slot, direction=Direction.PUSH, key=key_of(slot))
        for slot in range(COUNT)
    ]
    ended = drive.move(pushes)
    assert all(completion.cause is None for completion in ended.values()), ended
    print(f"puller: {COUNT} blocks pulled in {seconds:.2f} s and pushed, all verified")
    socket.create_connection((address, DONE_PORT), timeout=10).close()


def _open(connect, peer: PeerAddress) -> Driver:  # type: ignore[no-untyped-def]
    """The other VM may still be booting."""
    deadline = time.monotonic() + 150
    while True:
        drive = Driver(connect(peer))
        drive.until(lambda drive=drive: drive.opened or drive.down is not None, 30)
        if drive.opened:
            return drive
        assert time.monotonic() < deadline, drive.down
        time.sleep(0.5)


if __name__ == "__main__":
    made = Nodes()
    if sys.argv[1] == "hold":
        hold(made)
    else:
        pull(made, sys.argv[2])
    made.close()
