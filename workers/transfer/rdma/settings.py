"""What can be set about RDMA."""

from __future__ import annotations

import msgspec

from workers.core.rdma_choice import QueueWish


class RdmaSettings(msgspec.Struct, frozen=True):
    """Everything has a default that works.

    `devices`: names like "mlx5_0" or "mlx5_0/2", empty for all active ports.
    `rails`: which network a port hangs on, by its name; empty: equal names are equal rails.
    `gid_index`: by port's or device's name, where the choice is to be overridden.
    `mtu`: at most this path MTU; 0 for what both ends have active.
    `queue_pairs`: for each pair of ports; more than one for bonded ports.
    `segment_bytes`: of one work request; longer blocks spread over rails.
    `spin_seconds`: how long completions are polled for before their event is waited for.
    """

    devices: tuple[str, ...] = ()
    rails: dict[str, str] = {}
    gid_index: dict[str, int] = {}
    mtu: int = 0
    queue_pairs: int = 1
    queues: QueueWish = QueueWish()
    segment_bytes: int = 1 << 20
    spin_seconds: float = 50e-6

    def includes(self, device: str, port: str) -> bool:
        return not self.devices or device in self.devices or port in self.devices
