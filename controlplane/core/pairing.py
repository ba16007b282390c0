"""Decode slots: at most `cap` requests a worker; a freed slot goes to the next waiting at once.

Gateways share a worker's slots by what they tell each other: all of them while nobody waits at
another, equal parts while somebody does.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Granted:
    """`request_id` now holds a slot of `worker_id`."""

    request_id: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class SlotLimit:
    """What a decode worker serves and how many at a time; 0 = no new ones (draining)."""

    model: str
    cap: int


@dataclass(frozen=True, slots=True)
class SlotsBeside:
    """Of other gateways at a worker: slots held, their KV tokens, at how many gateways requests wait
    for its model, and how many requests these are."""

    slots: int = 0
    kv_tokens: int = 0
    gateways_waiting: int = 0
    waiting: int = 0


_ALONE = SlotsBeside()


def _any_worker(_: str) -> bool:
    return True


@dataclass(slots=True)
class DecodeSlots:
    """Who holds which slot, and who waits. Waiting is by priority class, then first come, first
    served, for each model."""

    max_waiting: int = 1024
    may_grant: Callable[[str], bool] = _any_worker  # what comes free there, to those who wait
    _limits: dict[str, SlotLimit] = field(default_factory=dict)
    _running: dict[str, int] = field(default_factory=dict)
    _holders: dict[str, str] = field(default_factory=dict)  # request -> worker
    _tokens: dict[str, int] = field(default_factory=dict)  # request -> prompt and expected output
    _kv_tokens: dict[str, int] = field(default_factory=dict)  # worker -> of its holders
    _waiting: dict[str, deque[str]] = field(default_factory=dict)  # model -> requests
    _ranks: dict[str, int] = field(default_factory=dict)  # waiting request -> 0: highest class
    num_waiting: int = 0
    _beside: dict[str, SlotsBeside] = field(default_factory=dict)

    def running(self, worker_id: str) -> int:
        """This gateway's alone."""
        return self._running.get(worker_id, 0)

    def holder(self, request_id: str) -> str | None:
        """The worker whose slot the request has."""
        return self._holders.get(request_id)

    def beside(self, worker_id: str) -> SlotsBeside:
        return self._beside.get(worker_id, _ALONE)

    def room(self, worker_id: str, cap: int) -> int:
        """Slots that this gateway may still take of `cap`; below 0: it holds more than its part."""
        beside = self._beside.get(worker_id)
        if beside is not None:
            part = max(1, cap // (1 + beside.gateways_waiting))
            cap = min(part, cap - beside.slots)
        return cap - self.running(worker_id)

    def set_beside(self, worker_id: str, beside: SlotsBeside | None) -> list[Granted]:
        """What other gateways have there, None: nothing; who is granted a slot because of it."""
        if beside is None:
            self._beside.pop(worker_id, None)
        else:
            self._beside[worker_id] = beside
        return self._grant(worker_id) if self._waiting else []

    def kv_tokens(self, worker_id: str) -> int:
        """Tokens whose KV its holders keep there, as far as they have said."""
        return self._kv_tokens.get(worker_id, 0)

    def waiting(self, model: str) -> int:
        return len(self._waiting.get(model, ()))

    def set_limits(self, limits: dict[str, SlotLimit]) -> list[Granted]:
        """A new view of the workers. Holders of vanished workers keep what they hold."""
        self._limits = limits
        return [grant for worker_id in limits for grant in self._grant(worker_id)]

    def take(self, request_id: str, worker_id: str, tokens: int | None = None) -> None:
        """Hold a slot of `worker_id`, which must be free or be the holder's move (a retry).

        `tokens`: prompt and expected output; None: what was said before.
        """
        old = self._holders.pop(request_id, None)
        if old is not None:
            self._lower(request_id, old)
        self._holders[request_id] = worker_id
        if tokens is not None:
            self._tokens[request_id] = tokens
        kept = self._tokens.get(request_id, 0)
        self._kv_tokens[worker_id] = self._kv_tokens.get(worker_id, 0) + kept
        self._running[worker_id] = self._running.get(worker_id, 0) + 1

    def wait(self, request_id: str, model: str, tokens: int = 0, rank: int = 0) -> bool:
        """Queue for any slot of `model`; False when the queue is full."""
        if self.num_waiting >= self.max_waiting:
            return False
        self._tokens[request_id] = tokens
        queue = self._waiting.setdefault(model, deque())
        place = len(queue)
        while place and self._ranks[queue[place - 1]] > rank:
            place -= 1
        queue.insert(place, request_id)
        self._ranks[request_id] = rank
        self.num_waiting += 1
        return True

    def leave(self, request_id: str, model: str) -> bool:
        """Stop waiting; False if it did not wait (it was granted already)."""
        queue = self._waiting.get(model)
        if queue is None or request_id not in queue:
            return False
        queue.remove(request_id)
        self._shrunk(model, queue)
        del self._tokens[request_id], self._ranks[request_id]
        return True

    def free(self, request_id: str) -> list[Granted]:
        """Give the slot back; idempotent. Whoever gets it next is in the result."""
        worker_id = self._holders.pop(request_id, None)
        if worker_id is None:
            return []
        self._lower(request_id, worker_id)
        self._tokens.pop(request_id, None)
        return self._grant(worker_id) if self.num_waiting else []

    def offer(self, worker_id: str, most: int) -> list[Granted]:
        """Of a worker's room, if those who wait did not come for it: it took nothing then."""
        return self._granted(worker_id, most) if self._waiting else []

    def check_integrity(self) -> None:
        """Counts agree with holders, no queue is empty, nobody both holds and waits."""
        counted: dict[str, int] = {}
        for worker_id in self._holders.values():
            counted[worker_id] = counted.get(worker_id, 0) + 1
        assert counted == self._running, (counted, self._running)
        tokens: dict[str, int] = {}
        for request_id, worker_id in self._holders.items():
            tokens[worker_id] = tokens.get(worker_id, 0) + self._tokens.get(request_id, 0)
        assert tokens == self._kv_tokens, (tokens, self._kv_tokens)
        assert all(self._waiting.values()), "an empty queue is left"
        assert self.num_waiting == sum(len(queue) for queue in self._waiting.values())
        waiting = [request_id for queue in self._waiting.values() for request_id in queue]
        assert not set(waiting) & self._holders.keys(), "a holder waits"
        assert self._tokens.keys() <= self._holders.keys() | set(waiting), "tokens of nobody"
        assert len(waiting) == len(set(waiting)) <= self.max_waiting
        assert self._ranks.keys() == set(waiting)
        for queue in self._waiting.values():
            ranks = [self._ranks[request_id] for request_id in queue]
            assert ranks == sorted(ranks), "a lower class goes first"
        for worker_id, limit in self._limits.items():
            idle = self.room(worker_id, limit.cap) > 0
            skipped = idle and self.may_grant(worker_id) and self.waiting(limit.model)
            assert not skipped, f"{worker_id} idles, others wait"

    def _grant(self, worker_id: str) -> list[Granted]:
        return self._granted(worker_id, None) if self.may_grant(worker_id) else []

    def _granted(self, worker_id: str, most: int | None) -> list[Granted]:
        limit = self._limits.get(worker_id)
        grants: list[Granted] = []
        while limit is not None and self.room(worker_id, limit.cap) > 0 and len(grants) != most:
            queue = self._waiting.get(limit.model)
            if not queue:
                break
            request_id = queue.popleft()
            del self._ranks[request_id]
            self._shrunk(limit.model, queue)
            self.take(request_id, worker_id)
            grants.append(Granted(request_id, worker_id))
        return grants

    def _lower(self, request_id: str, worker_id: str) -> None:
        left = self._running[worker_id] - 1
        assert left >= 0, f"{worker_id}: more slots freed than taken"
        if left:
            self._running[worker_id] = left
            self._kv_tokens[worker_id] -= self._tokens.get(request_id, 0)
        else:
            del self._running[worker_id], self._kv_tokens[worker_id]

    def _shrunk(self, model: str, queue: deque[str]) -> None:
        self.num_waiting -= 1
        if not queue:
            del self._waiting[model]
