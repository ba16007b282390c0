"""The seam between the pool and what decides which block goes first.

    Block states, as a policy sees them:  stored -> candidate <-> withheld -> removed | evicted

One eviction takes one or several blocks, from one policy or from several of one kind (a pool that
keeps a policy for each tenant), and is all or nothing: see `Eviction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, Self

import msgspec

from workers.core.ids import BlockHash
from workers.core.policies.params import Param, resolve

SessionHint = Literal["continue", "over"]


class BlockUse(NamedTuple):
    """What one policy tells another of a block. Times are the policy's seconds.

    `heat` is the decayed number of uses as of `last_use`, None where the policy keeps none.
    """

    key: BlockHash
    last_use: float
    uses: int
    candidate: bool
    heat: float | None = None


class Victim(msgspec.Struct, frozen=True, gc=False):
    """A block that is to go. `worth` compares between policies of one kind and parameters."""

    key: BlockHash
    worth: float
    last_use: float
    uses: int


class Entry:
    """What a policy knows of a stored block. What orders it is the policy's own business."""

    __slots__ = (
        "candidate", "group", "heat", "key", "last_use", "prev_use", "queued", "rank", "request",
        "segment", "sharers", "shift", "tick", "uses",
    )  # fmt: skip

    def __init__(self, key: BlockHash, now: float, request: str) -> None:
        self.key = key
        self.candidate = False
        self.request = request  # of the last use
        self.last_use = now
        self.prev_use = now
        self.uses = 1
        self.heat = 1.0  # decayed number of uses, as of `last_use`
        self.sharers = 0  # sketch of the distinct requests
        self.shift = 0.0  # what a hint adds to the rank, until the next use
        self.rank = now
        self.tick = 0  # of the last change of rank; orders equal ranks
        self.queued = 0  # tick of the live heap entry, 0 without one
        self.group = 0  # level or class
        self.segment: object = None  # what a learning policy learns from


class EvictionPolicy(ABC):
    """Chooses victims among the candidates that the pool offers.

    The pool offers a block when it is readable, unpinned and without children, and withholds it
    when one of these ends; so a policy never meets a pinned, pending or needed block, and the
    tail of a chain goes before its head whatever the policy. Blocks are told by `stored` before
    anything else. `now` is in seconds and never goes back. No call blocks, reads a clock or keeps
    an argument. Not thread-safe.

    `request` says who uses a block: the same one again is the same use, "" is always a new one.
    `label` is what the gateway knows of the request's kind; policies that learn by it say so.
    """

    name: ClassVar[str] = ""
    declared: ClassVar[Mapping[str, Param]] = {}
    keeps_partial_blocks: ClassVar[bool] = False
    """Whether a bench on traces lets it store the partly filled last block; the pool never does."""

    def __init__(self, params: Mapping[str, float] | None = None) -> None:
        self.params = resolve(self.name, self.declared, params or {})
        self._entries: dict[BlockHash, Entry] = {}
        self._num_candidates = 0
        self._tick = 0
        self._picked: list[Entry] = []
        self._uncovered: list[Entry] = []

    # --- what happens to blocks -------------------------------------------------------------

    def stored(self, key: BlockHash, now: float, label: str = "", request: str = "") -> None:
        """A block became readable. It is no candidate yet."""
        if key in self._entries:
            self.removed(key)
        entry = self._entries[key] = Entry(key, now, request)
        self._arrive(entry, now, label)

    @abstractmethod
    def accessed(
        self, keys: Sequence[BlockHash], now: float, label: str = "", request: str = ""
    ) -> None:
        """A request uses this chain, head first. Keys that are not stored are ignored."""

    @abstractmethod
    def hint(self, keys: Sequence[BlockHash], session: SessionHint, now: float) -> None:
        """The session of this chain goes on, or is over: its blocks are worth more, or less.

        Never more than a change of order: no block becomes a candidate or leaves by it.
        """

    def removed(self, key: BlockHash) -> None:
        """A block left without the policy's doing. Idempotent."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            if entry.candidate:
                entry.candidate = False
                self._num_candidates -= 1
            self._leave(entry)

    def offer(self, key: BlockHash) -> None:
        """The block is a candidate from now on. Idempotent."""
        entry = self._entries.get(key)
        if entry is not None and not entry.candidate:
            entry.candidate = True
            self._num_candidates += 1
            self._enqueue(entry)

    def withhold(self, key: BlockHash) -> None:
        """The block is no candidate any more. Idempotent."""
        entry = self._entries.get(key)
        if entry is not None and entry.candidate:
            entry.candidate = False
            self._num_candidates -= 1

    def num_candidates(self) -> int:
        return self._num_candidates

    # --- evicting ---------------------------------------------------------------------------

    def evict(
        self,
        num_blocks: int,
        uncovers: Callable[[BlockHash], BlockHash | None],
        now: float = 0.0,
    ) -> list[BlockHash] | None:
        """Exactly `num_blocks` victims in order, each forgotten; or None, with nothing changed.

        `uncovers(victim)` is called once for each victim as it is chosen: it names the parent
        where that becomes a candidate by it. Such a parent stays one if it is not taken.
        """
        victims: list[BlockHash] = []
        for _ in range(num_blocks):
            entry = self._take(now)
            if entry is None:
                self.rollback()
                return None
            victims.append(entry.key)
            parent = uncovers(entry.key)
            if parent is not None:
                self.uncover(parent)
        self.commit()
        return victims

    @abstractmethod
    def next_worth(self, now: float) -> float | None:
        """What the next victim is worth; None without a candidate. Changes no choice.

        Compares between policies of one kind and equal parameters that share one clock.
        """

    def pick(self, now: float) -> Victim | None:
        """Take the candidate that is worth least; `commit` or `rollback` must follow."""
        entry = self._take(now)
        if entry is None:
            return None
        return Victim(entry.key, self._worth(entry, now), entry.last_use, entry.uses)

    def uncover(self, key: BlockHash) -> None:
        """`offer`, as part of an eviction that may be rolled back."""
        entry = self._entries.get(key)
        if entry is not None and not entry.candidate:
            self._uncovered.append(entry)
            entry.candidate = True
            self._num_candidates += 1
            self._enqueue(entry)

    def commit(self) -> None:
        """Forget what was picked."""
        for entry in self._picked:
            del self._entries[entry.key]
        self._evicted(self._picked)
        self._picked.clear()
        self._uncovered.clear()

    def rollback(self) -> None:
        """As if nothing had been picked or uncovered since the last commit."""
        for entry in reversed(self._picked):
            self.offer(entry.key)
        for entry in self._uncovered:
            self.withhold(entry.key)
        self._picked.clear()
        self._uncovered.clear()

    # --- settings and switching -------------------------------------------------------------

    def tune(self, params: Mapping[str, float], now: float) -> None:
        """Take new values of these parameters; the order of blocks changes at once. ConfigError."""
        old = self.params
        self.params = resolve(self.name, self.declared, {**old, **params})
        if self.params != old:
            self._tuned(old, now)

    def sibling(self) -> Self:
        """Another policy of this kind and these parameters, without blocks, for a part of a pool.

        What is remembered of evicted blocks and learned of requests is shared with this one.
        """
        return type(self)(self.params)

    def use_of(self, key: BlockHash) -> BlockUse | None:
        """What is known of one stored block; None where it is not stored."""
        entry = self._entries.get(key)
        return None if entry is None else self._export(entry)

    def export(self) -> list[BlockUse]:
        """All stored blocks, least recently used first."""
        entries = sorted(self._entries.values(), key=lambda entry: (entry.last_use, entry.tick))
        return [self._export(entry) for entry in entries]

    def adopt(self, blocks: Iterable[BlockUse], now: float) -> None:
        """Take blocks over from another policy, in its order, with its candidates. No use of them.

        Blocks may come at once, when policies are switched, or one by one between tiers.
        """
        for block in blocks:
            if block.key in self._entries:
                self.removed(block.key)
            entry = self._entries[block.key] = Entry(block.key, block.last_use, "")
            entry.uses = block.uses
            entry.heat = float(block.uses) if block.heat is None else block.heat
            self._adopted(entry, now)
            if block.candidate:
                self.offer(block.key)

    # --- for policies -----------------------------------------------------------------------

    def _take(self, now: float) -> Entry | None:
        """`pick`, as an entry."""
        entry = self._pop(now)
        if entry is not None:
            entry.candidate = False
            self._num_candidates -= 1
            self._picked.append(entry)
        return entry

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def _export(self, entry: Entry) -> BlockUse:
        return BlockUse(entry.key, entry.last_use, entry.uses, entry.candidate)

    @abstractmethod
    def _arrive(self, entry: Entry, now: float, label: str) -> None:
        """Give the entry of a block stored `now` its place."""

    @abstractmethod
    def _adopted(self, entry: Entry, now: float) -> None:
        """Give an entry with a past its place."""

    @abstractmethod
    def _enqueue(self, entry: Entry) -> None:
        """The entry became a candidate."""

    @abstractmethod
    def _pop(self, now: float) -> Entry | None:
        """Take the least candidate out of the order; it stays an entry."""

    @abstractmethod
    def _worth(self, entry: Entry, now: float) -> float: ...

    @abstractmethod
    def _tuned(self, old: Mapping[str, float], now: float) -> None:
        """`params` were `old` until now."""

    @abstractmethod
    def _leave(self, entry: Entry) -> None:
        """The entry is gone, not by eviction."""

    @abstractmethod
    def _evicted(self, entries: Sequence[Entry]) -> None:
        """These entries are gone by eviction, in this order."""


class Eviction:
    """Victims from one or several policies of one kind, all or none.

    Take victims one by one, uncovering parents as they become childless; then `commit`, or
    `rollback`, by which every policy is as it was. Nothing else may be asked of the policies
    between the first `take` and the end.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._policies: dict[int, EvictionPolicy] = {}
        self.victims: list[Victim] = []

    def take(self, among: Sequence[EvictionPolicy]) -> Victim | None:
        """The candidate worth least among these policies; None where none has one."""
        policy = among[0] if len(among) == 1 else self._least(among)
        victim = policy.pick(self._now) if policy is not None else None
        if policy is not None and victim is not None:
            self._policies[id(policy)] = policy
            self.victims.append(victim)
        return victim

    def uncover(self, policy: EvictionPolicy, key: BlockHash) -> None:
        """A victim's parent became a candidate of this policy."""
        self._policies[id(policy)] = policy
        policy.uncover(key)

    def commit(self) -> list[Victim]:
        for policy in self._policies.values():
            policy.commit()
        return self.victims

    def rollback(self) -> None:
        for policy in self._policies.values():
            policy.rollback()

    def _least(self, among: Sequence[EvictionPolicy]) -> EvictionPolicy | None:
        worths = ((policy.next_worth(self._now), policy) for policy in among)
        known = [(worth, policy) for worth, policy in worths if worth is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None
