"""The seam between the pool and what decides which block goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from workers.core.ids import BlockHash


class EvictionPolicy(ABC):
    """Chooses victims among the candidates that the pool offers.

    The pool offers a block when it is readable, unpinned and without children, and withholds it
    when one of these ends; so a policy never meets a pinned, pending or needed block, and the
    tail of a chain goes before its head whatever the policy. Blocks are told by `stored` before
    anything else. No call blocks, reads a clock or keeps an argument. Not thread-safe.
    """

    @abstractmethod
    def stored(self, key: BlockHash, now: float) -> None:
        """A block became readable. It is no candidate yet."""

    @abstractmethod
    def accessed(self, keys: Sequence[BlockHash], now: float) -> None:
        """A request uses this chain, head first. Keys never stored are to be ignored."""

    @abstractmethod
    def removed(self, key: BlockHash) -> None:
        """A block left without the policy's doing. Idempotent."""

    @abstractmethod
    def offer(self, key: BlockHash) -> None:
        """The block is a candidate from now on. Idempotent."""

    @abstractmethod
    def withhold(self, key: BlockHash) -> None:
        """The block is no candidate any more. Idempotent."""

    @abstractmethod
    def evict(
        self, num_blocks: int, uncovers: Callable[[BlockHash], BlockHash | None]
    ) -> list[BlockHash] | None:
        """Exactly `num_blocks` victims in order, each forgotten; or None, with nothing changed.

        `uncovers(victim)` must be called once for each victim as it is chosen: it names the
        parent where that becomes a candidate by it. Such a parent stays one if it is not taken.
        """

    @abstractmethod
    def num_candidates(self) -> int: ...
