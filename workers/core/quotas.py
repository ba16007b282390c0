"""Who holds how much of a node's pool: tenants and namespaces, with their quotas.

A block counts once for its tenant and once for its namespace, whatever tiers it lies in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from workers.core.blocks import Block

MAX_GROUPS_A_KIND: Final = 256
OTHERS: Final = "(others)"

GroupKind = Literal["tenant", "namespace"]


class Cell(NamedTuple):
    """The part of a pool that is ordered for eviction by itself: blocks under the same quotas.

    None stands for all tenants (namespaces) without a quota of their own.
    """

    tenant: str | None
    namespace: str | None


NO_QUOTA: Final = Cell(None, None)


@dataclass(slots=True)
class Group:
    """One tenant or namespace. `quota_blocks` None: no limit of its own."""

    kind: GroupKind
    name: str
    used_blocks: int = 0
    quota_blocks: int | None = None
    evicted_blocks_total: int = 0
    refused_blocks_total: int = 0

    @property
    def is_over(self) -> bool:
        return self.quota_blocks is not None and self.used_blocks > self.quota_blocks

    @property
    def is_idle(self) -> bool:
        return not self.used_blocks and self.quota_blocks is None


class Groups:
    """At most `MAX_GROUPS_A_KIND` tenants and as many namespaces; further ones count as one."""

    def __init__(self) -> None:
        self._tenants: dict[str, Group] = {}
        self._namespaces: dict[str, Group] = {}
        self.has_quotas = False

    def all(self) -> list[Group]:
        return [*self._tenants.values(), *self._namespaces.values()]

    def tenant(self, name: str) -> Group:
        return _group(self._tenants, "tenant", name)

    def namespace(self, name: str) -> Group:
        return _group(self._namespaces, "namespace", name)

    def of(self, tenant: str, namespace: bytes) -> tuple[Group, Group]:
        return self.tenant(tenant), self.namespace(namespace.hex())

    def used_by(self, tenant: str | None, namespace: bytes) -> int:
        """Blocks of a tenant (None: any) and a namespace (b"": any), one of which is given; of
        both, or of one that counts with others, at most this many."""
        names = [(self._tenants, tenant)] if tenant is not None else []
        names += [(self._namespaces, namespace.hex())] if namespace else []
        found = (groups.get(name) or groups.get(OTHERS) for groups, name in names)
        return min(0 if group is None else group.used_blocks for group in found)

    @staticmethod
    def count(block: Block, change: int) -> None:
        """A block came (+1) or went (-1)."""
        for group in block.groups:
            group.used_blocks += change

    def set_quotas(self, tenants: Mapping[str, int], namespaces: Mapping[str, int]) -> bool:
        """Limits in blocks; a group that is not named has none. True: who has one changed.

        "default" is the tenant "". Beyond the bound on groups, further names are left out.
        """
        before = self._limited()
        given = {("" if name == "default" else name): limit for name, limit in tenants.items()}
        _set_quotas(self._tenants, "tenant", given)
        _set_quotas(self._namespaces, "namespace", namespaces)
        self.has_quotas = bool(self._limited())
        return self._limited() != before

    def _limited(self) -> set[tuple[str, str]]:
        return {(g.kind, g.name) for g in self.all() if g.quota_blocks is not None}

    def cell(self, block: Block) -> Cell:
        if not self.has_quotas:
            return NO_QUOTA
        return Cell(*(g.name if g.quota_blocks is not None else None for g in block.groups))

    def over_quota(self) -> list[Group]:
        return [group for group in self.all() if group.is_over] if self.has_quotas else []


def cells_of(group: Group, cells: Iterable[Cell]) -> list[Cell]:
    """The cells whose blocks count for this group."""
    if group.kind == "tenant":
        return [cell for cell in cells if cell.tenant == group.name]
    return [cell for cell in cells if cell.namespace == group.name]


def _group(groups: dict[str, Group], kind: GroupKind, name: str) -> Group:
    known = groups.get(name)
    if known is not None:
        return known
    if len(groups) >= MAX_GROUPS_A_KIND - 1:
        idle = next((other.name for other in groups.values() if other.is_idle), None)
        if idle is not None:
            del groups[idle]
        else:
            name = OTHERS
    return groups.setdefault(name, Group(kind, name))


def _set_quotas(groups: dict[str, Group], kind: GroupKind, limits: Mapping[str, int]) -> None:
    for group in groups.values():
        group.quota_blocks = None
    for name, limit in limits.items():
        group = _group(groups, kind, name)
        if group.name == name:
            group.quota_blocks = limit
