"""What of the control plane's cache policy acts here; other fields are others' business."""

from __future__ import annotations

import msgspec


class CachePolicy(msgspec.Struct, frozen=True):
    """Fields as in the control plane's spec. None: this agent keeps what it has.

    Quotas are in GiB by tenant ("default" for requests without a salt) and by namespace (hex).
    """

    eviction: str | None = None
    eviction_params: dict[str, float] | None = None
    pin_active_share: float | None = None
    pin_active_tokens: int | None = None
    tenant_quota_gib: dict[str, float] | None = None
    namespace_quota_gib: dict[str, float] | None = None
    ssd_cap_gib: float | msgspec.UnsetType | None = msgspec.UNSET  # None: the agent's own cap
    write_queue_blocks: int | None = None
    lease_seconds: float | None = None
