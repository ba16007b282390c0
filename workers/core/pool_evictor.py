"""The order in which the blocks of one tier go: one policy for each cell of quotas.

Without quotas that is one policy for all. The policies of the cells are siblings: what they say
of blocks compares, so that eviction can choose within one cell or over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from workers.core.ids import BlockHash
from workers.core.policies.base import BlockUse, Eviction, EvictionPolicy, SessionHint, Victim
from workers.core.quotas import NO_QUOTA, Cell

CellOf = Callable[[BlockHash], Cell]
Uncovers = Callable[[BlockHash], BlockHash | None]


class TierEvictor:
    """Blocks are named by key; `cell_of` says where a key belongs."""

    def __init__(self, policy: EvictionPolicy, cell_of: CellOf) -> None:
        self._root = policy
        self._cell_of = cell_of
        self._cells: dict[Cell, EvictionPolicy] = {NO_QUOTA: policy}
        self.label_of: Callable[[str], str] = lambda _request: ""

    @property
    def policy(self) -> EvictionPolicy:
        """The kind in force, with its parameters."""
        return self._root

    @property
    def cells(self) -> Collection[Cell]:
        return self._cells.keys()

    def num_candidates(self) -> int:
        return sum(policy.num_candidates() for policy in self._cells.values())

    def use_of(self, key: BlockHash) -> BlockUse | None:
        """What is known of one block of this tier; None where it is not here."""
        return self._policy_of(key).use_of(key)

    # --- what happens to blocks -------------------------------------------------------------

    def stored(self, key: BlockHash, now: float, request: str) -> None:
        self._policy_of(key).stored(key, now, self.label_of(request), request)

    def adopt(self, use: BlockUse, now: float) -> None:
        """A block comes from elsewhere with its history."""
        self._policy_of(use.key).adopt([use], now)

    def accessed(self, keys: Sequence[BlockHash], now: float, request: str) -> None:
        for policy, part in self._parts(keys):
            policy.accessed(part, now, self.label_of(request), request)

    def hint(self, keys: Sequence[BlockHash], session: SessionHint, now: float) -> None:
        for policy, part in self._parts(keys):
            policy.hint(part, session, now)

    def offer(self, key: BlockHash) -> None:
        self._policy_of(key).offer(key)

    def withhold(self, key: BlockHash) -> None:
        self._policy_of(key).withhold(key)

    def removed(self, key: BlockHash) -> None:
        self._policy_of(key).removed(key)

    # --- evicting ---------------------------------------------------------------------------

    def evict(
        self,
        num_blocks: int,
        uncovers: Uncovers,
        now: float,
        *,
        among: Iterable[Cell] | None = None,
        some: bool = False,
    ) -> list[Victim]:
        """Exactly `num_blocks` victims, forgotten, or none with nothing changed.

        With `some`, as many as there are up to that. `uncovers` as in `EvictionPolicy.evict`.
        """
        chosen = self._cells.values() if among is None else map(self._cells.get, among)
        policies = [policy for policy in chosen if policy is not None]
        eviction = Eviction(now)
        while policies and len(eviction.victims) < num_blocks:
            victim = eviction.take(policies)
            if victim is None:
                break
            parent = uncovers(victim.key)
            if parent is not None:
                eviction.uncover(self._policy_of(parent), parent)
        if len(eviction.victims) < num_blocks and not some:
            eviction.rollback()
            return []
        return eviction.commit()

    # --- settings ---------------------------------------------------------------------------

    def tune(self, params: Mapping[str, float], now: float) -> None:
        """ConfigError, with nothing changed."""
        for policy in self._cells.values():
            policy.tune(params, now)

    def rebuild(self, root: EvictionPolicy, now: float) -> None:
        """Sort all blocks anew: the quotas changed, or `root` is another kind of policy."""
        uses = [use for policy in self._cells.values() for use in policy.export()]
        self._root = root
        self._cells = {NO_QUOTA: root}
        by_cell: dict[Cell, list[BlockUse]] = {}
        for use in sorted(uses, key=lambda use: use.last_use):
            by_cell.setdefault(self._cell_of(use.key), []).append(use)
        for part in by_cell.values():
            self._policy_of(part[0].key).adopt(part, now)

    # --- inside -----------------------------------------------------------------------------

    def _policy_of(self, key: BlockHash) -> EvictionPolicy:
        cell = self._cell_of(key)
        policy = self._cells.get(cell)
        if policy is None:
            policy = self._cells[cell] = self._root.sibling()
        return policy

    def _parts(
        self, keys: Sequence[BlockHash]
    ) -> Iterable[tuple[EvictionPolicy, Sequence[BlockHash]]]:
        """The keys by policy, each part in the order given."""
        if len(self._cells) == 1:
            return [(self._root, keys)]
        parts: dict[int, tuple[EvictionPolicy, list[BlockHash]]] = {}
        for key in keys:
            policy = self._policy_of(key)
            parts.setdefault(id(policy), (policy, []))[1].append(key)
        return list(parts.values())
