"""What a node evicted lately: which block, when, why and under which policy.

Explains misses ("evicted 40 s before, for room, after 70 s without use") and says whether eviction
is healthy: how old victims are, and how many are wanted again soon.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from workers.core.ids import BlockHash
from workers.core.policies.base import Victim
from workers.core.stats_messages import EvictionStats, TierName

MAX_EVICTED: Final = 65_536
WANTED_WITHIN_SECONDS: Final = 300.0
_AGES_KEPT: Final = 2048


@dataclass(frozen=True, slots=True)
class Evicted:
    """One eviction. `at` is in the pool's seconds, `age_seconds` the time since the last use.

    `trigger` says why: "capacity", "quota", "ssd_capacity", "purge", "corrupt", ...
    """

    key: BlockHash
    at: float
    age_seconds: float
    node: str
    trigger: str
    tier: TierName
    policy: str
    policy_revision: int
    wanted_again: bool


class _Cause(NamedTuple):
    """What many evictions have in common; kept once."""

    trigger: str
    tier: TierName
    policy: str
    policy_revision: int


class _Note(NamedTuple):
    at: float
    age_seconds: float
    cause: _Cause
    wanted_again: bool = False


class EvictionHistory:
    """The last `max_entries` evicted blocks, each once, by its last eviction."""

    def __init__(
        self,
        node: str = "",
        max_entries: int = MAX_EVICTED,
        wanted_within_seconds: float = WANTED_WITHIN_SECONDS,
    ) -> None:
        self.node = node
        self.max_entries = max_entries
        self.wanted_within_seconds = wanted_within_seconds
        self.by_trigger: Counter[str] = Counter()
        self.wanted_again_total = 0
        self._policy = ""
        self._revision = 0
        self._notes: OrderedDict[BlockHash, _Note] = OrderedDict()
        self._ages: deque[float] = deque(maxlen=_AGES_KEPT)
        self._cause = _Cause("", "dram", "", 0)

    def __len__(self) -> int:
        return len(self._notes)

    def under(self, policy: str, revision: int) -> None:
        """Evictions from now on are this policy's, by this revision of the cache policy."""
        self._policy, self._revision = policy, revision

    def note(
        self, victims: Iterable[Victim], now: float, trigger: str, tier: TierName = "dram"
    ) -> None:
        """These blocks left the pool."""
        cause = _Cause(trigger, tier, self._policy, self._revision)
        if cause != self._cause:
            self._cause = cause
        for victim in victims:
            age = max(0.0, now - victim.last_use)
            self._notes[victim.key] = _Note(now, age, self._cause)
            self._notes.move_to_end(victim.key)
            self._ages.append(age)
            self.by_trigger[trigger] += 1
        while len(self._notes) > self.max_entries:
            self._notes.popitem(last=False)

    def wanted(self, keys: Iterable[BlockHash], now: float) -> int:
        """A request lacks these blocks; how many left within `wanted_within_seconds`.

        Each eviction counts once, however often the block is asked for.
        """
        num_wanted = 0
        for key in keys:
            note = self._notes.get(key)
            if note is None or note.wanted_again or now - note.at > self.wanted_within_seconds:
                continue
            self._notes[key] = note._replace(wanted_again=True)
            num_wanted += 1
        self.wanted_again_total += num_wanted
        return num_wanted

    def find(self, key: BlockHash) -> Evicted | None:
        """The block's last eviction, as far as it is remembered."""
        note = self._notes.get(key)
        if note is None:
            return None
        cause = note.cause
        return Evicted(
            key, note.at, note.age_seconds, self.node, cause.trigger, cause.tier, cause.policy,
            cause.policy_revision, note.wanted_again,
        )  # fmt: skip

    def health(
        self,
        params: dict[str, float],
        *,
        attempts: int = 0,
        successes: int = 0,
        pinned_bytes: int = 0,
        leased_bytes: int = 0,
    ) -> EvictionStats:
        """As it goes to the control plane. Ages are of the last couple of thousand victims."""
        ages = sorted(self._ages)
        return EvictionStats(
            policy=self._policy,
            policy_revision=self._revision,
            params=params,
            attempts_total=attempts,
            successes_total=successes,
            pinned_bytes=pinned_bytes,
            leased_bytes=leased_bytes,
            age_p50_seconds=_quantile(ages, 0.50),
            age_p99_seconds=_quantile(ages, 0.99),
            wanted_again_total=self.wanted_again_total,
            wanted_within_seconds=self.wanted_within_seconds,
            evicted_by_reason=dict(self.by_trigger),
            history_entries=len(self._notes),
        )


def _quantile(ascending: list[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else None
