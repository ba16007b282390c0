"""A node that holds blocks, in a process of its own: what `perilune bench transfer` reads from.

`python -m workers.bench.transfer_holder SLAB BLOCK_BYTES NUM_BLOCKS` prints its port and serves
until stdin ends.
"""

from __future__ import annotations

import os
import sys

from workers.bench.transfer_nodes import INCARNATION, SECRET, key_of, open_memory
from workers.process import die_with_parent
from workers.transfer.tcp_server import TcpServer


def main() -> None:
    die_with_parent()
    path, block_bytes, num_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = open_memory(path, block_bytes, num_blocks, INCARNATION)
    data = os.urandom(block_bytes)
    for index in range(num_blocks):
        memory.slab.write_block(index, index + 1, key_of(index), data)
    server = TcpServer(memory, "holder", SECRET)
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
