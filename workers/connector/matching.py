"""How much of a prompt the pool can give now, and what is worth waiting for.

Questions to the agent are few: an answer lasts a moment, and one round trip asks for all requests
that wait. Blocks that another leg is still writing are waited for, blocks on SSD are asked for once
and waited for as long as that beats computing them. Time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from workers.connector.promotion import Promotion, PromotionJudge
from workers.connector.request import Found, PoolCalls, RequestState
from workers.connector.settings import ConnectorSettings
from workers.core.hashing import block_hashes, root_hash
from workers.core.ids import OwnerId, load_owner, request_of, transfer_owner
from workers.core.messages import LookupReply
from workers.core.transfer_messages import HolderRef

_BATCH_CHAINS = 32
_BATCH_BLOCKS = 8192
_EARLY_PROMOTIONS = 8  # a step, for requests that the engine has not come to yet


class Matcher:
    """Follows the requests that wait to be scheduled. Not thread-safe."""

    def __init__(self, settings: ConnectorSettings, pool: PoolCalls, judge: PromotionJudge) -> None:
        self._settings = settings
        self._pool = pool
        self._judge = judge
        self._waiting: dict[str, RequestState] = {}
        self._step = 0
        self._epoch = 0
        self.counts: Counter[str] = Counter()

    def add(self, state: RequestState) -> None:
        self._waiting[state.info.request_id] = state

    def remove(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def forget_answers(self) -> None:
        self._epoch += 1

    def hash(self, state: RequestState) -> None:
        """Keys need the namespace, which comes with the worker half's start."""
        namespace = self._pool.namespace
        if not namespace or state.hashed_namespace == namespace:
            return
        info = state.info
        root = root_hash(namespace, info.cache_salt, info.lora)
        state.hashes = block_hashes(
            root, info.prompt_token_ids, self._settings.block_tokens, info.extras
        )
        state.hashed_namespace = namespace

    def external_tokens(self, state: RequestState, num_tokens: int, now: float) -> int | None:
        """Tokens after `state.local_tokens` that can be loaded; None: come back later.

        Never the whole of `num_tokens`, never part of a pool block.
        """
        state.matched_in = self._step
        block_tokens = self._settings.block_tokens
        cap = min(len(state.hashes), (num_tokens - 1) // block_tokens)
        if state.load_failed or cap * block_tokens <= state.local_tokens:
            return self._matched(state, 0, now)
        found = self._lookup(state, cap, now)
        if found is None:
            return self._matched(state, 0, now)
        if self._awaits_fetch(state, found, cap, now):
            if state.wait_began is None:
                state.wait_began = now
            return None
        found = state.found or self._lookup(state, cap, now)
        if found is None:
            return self._matched(state, 0, now)
        promotes = self._awaits_promotion(state, found, cap, now)
        if promotes or self._awaits_writer(state, found, cap, now):
            if state.wait_began is None:
                state.wait_began = now
            return None
        assert state.found is not None
        external = min(state.found.held, cap) * block_tokens - state.local_tokens
        return self._matched(state, max(0, external), now)

    def end_step(self, now: float) -> None:
        """The engine has asked for all that it could take into this step."""
        step, self._step = self._step, self._step + 1
        early = (
            state
            for state in islice(self._waiting.values(), _BATCH_CHAINS)
            if state.matched_in != step and not state.promoted
        )
        for state in islice(early, _EARLY_PROMOTIONS):
            self._promote_early(state, now)

    def load_owner(self, state: RequestState) -> OwnerId:
        info = state.info
        return load_owner(self._settings.worker_id, info.request_id, info.transfer_id)

    # --- lookups ------------------------------------------------------------------------------

    def _lookup(self, state: RequestState, cap: int, now: float) -> Found | None:
        """Of what the device lacks; with it, of others whose turn comes soon."""
        first = state.local_tokens // self._settings.block_tokens
        found = state.found
        if found and found.first <= first and found.end >= cap and not self._stale(state, now):
            return found
        asked = [(state, first, cap), *self._others(state, now)]
        chains = [one.hashes[start:end] for one, start, end in asked]
        requests = [request_of(self.load_owner(one)) for one, _, _ in asked]
        replies = self._pool.lookup(chains, requests)
        if replies is None:
            state.found = None
            return None
        for (one, start, end), reply in zip(asked, replies, strict=True):
            self._remember(one, reply, start, end, now)
        return state.found

    def _others(self, state: RequestState, now: float) -> Iterator[tuple[RequestState, int, int]]:
        room = _BATCH_BLOCKS - len(state.hashes)
        for other in islice(self._waiting.values(), _BATCH_CHAINS):
            waits = other.found_epoch < 0 or other.wait_began is not None
            if other is state or not waits or not self._stale(other, now):
                continue
            self.hash(other)
            first = other.local_tokens // self._settings.block_tokens
            room -= len(other.hashes) - first
            if room < 0:
                return
            if first < len(other.hashes) and not other.info.skip:
                yield other, first, len(other.hashes)

    def _stale(self, state: RequestState, now: float) -> bool:
        age = now - state.found_at
        return state.found_epoch != self._epoch or age >= self._settings.lookup_ttl_seconds

    def _remember(
        self, state: RequestState, reply: LookupReply, first: int, end: int, now: float
    ) -> None:
        state.found = Found.of(reply, first, end)
        state.found_at = now
        state.found_epoch = self._epoch

    # --- waits --------------------------------------------------------------------------------

    def _matched(self, state: RequestState, num_tokens: int, now: float) -> int:
        if state.wait_began is not None:
            state.wait_seconds += now - state.wait_began
            state.wait_began = None
        return num_tokens

    def _awaits_writer(self, state: RequestState, found: Found, cap: int, now: float) -> bool:
        """Leg 2 waits, bounded, for blocks that leg 1 is still writing."""
        wanted = min(cap, state.info.expected_blocks)
        if state.info.leg != "decode" or found.held >= wanted or not found.pending:
            return False
        began = now if state.wait_began is None else state.wait_began
        return state.wait_seconds + now - began < self._settings.load_timeout_seconds

    def _awaits_fetch(self, state: RequestState, found: Found, cap: int, now: float) -> bool:
        """What another node has is asked for once, and waited for while it comes, bounded."""
        holder, wanted = state.info.holder, min(cap, state.info.expected_blocks)
        if holder is None:
            return False
        if not state.fetched:
            state.fetched = True
            return max(found.held, found.on_disk) < wanted and self._fetch(
                state, holder, wanted, now
            )
        began = state.fetch_began
        if began is None:
            return False
        if found.pending and found.held < wanted:
            if now - began < self._settings.load_timeout_seconds:
                return True
            self.counts["fetches_given_up"] += 1
        state.fetch_began = None
        state.fetch_seconds += now - began
        return False

    def _fetch(self, state: RequestState, holder: HolderRef, wanted: int, now: float) -> bool:
        """Ask for it; whether anything is under way."""
        owner, chain = self.load_owner(state), state.hashes[:wanted]
        reply = self._pool.fetch(owner, chain, holder, state.tenant)
        state.found = None  # it was asked about another part of the chain
        if reply is None:
            return False
        state.holds_pins = True
        self.counts["fetches"] += 1
        if not reply.num_pending:
            return False
        state.fetch_began = now
        return True

    def _awaits_promotion(self, state: RequestState, found: Found, cap: int, now: float) -> bool:
        goal = min(found.on_disk, cap)
        promotion = state.promotion
        if found.held >= goal:
            if promotion is not None:
                self._promoted(state, promotion, found.held, now)
            return False
        if state.gave_up:
            return False
        if promotion is None:
            return self._promote(state, found, goal, now)
        if now - promotion.began >= promotion.patience:
            self._judge.note_promotion(promotion.num_blocks, now - promotion.began, now)
            self.counts["promotions_given_up"] += 1
            state.promotion, state.gave_up = None, True
            return False
        promotion.last_seen = now
        return True

    def _promote(self, state: RequestState, found: Found, goal: int, now: float) -> bool:
        """Ask for it, if that pays; whether to wait."""
        num_blocks = goal - found.held
        num_tokens = num_blocks * self._settings.block_tokens
        if not self._judge.pays(num_blocks, num_tokens, now):
            self.counts["promotions_skipped"] += 1
            state.gave_up = True
            if state.info.leg == "prefill":  # leg 2 will want them, and has time until then
                owner = transfer_owner(state.info.transfer_id)
                self._pool.promote_later(owner, state.hashes[found.first : goal])
            return False
        chain = state.hashes[found.first : goal]
        reply = self._pool.promote(self.load_owner(state), chain, "first_token")
        state.promoted = True
        if reply is None:
            state.gave_up = True
            return False
        state.holds_pins = True
        patience = self._judge.patience(num_tokens)
        state.promotion = Promotion(now, found.held, num_blocks, patience, now)
        self._remember(state, reply, found.first, found.end, now)
        assert state.found is not None
        if state.found.held < min(state.found.on_disk, goal):
            return True
        state.promotion = None  # it was there already: nothing to learn
        return False

    def _promote_early(self, state: RequestState, now: float) -> None:
        """What lies on SSD can come while the engine computes others."""
        found = state.found
        if found is None or found.held >= found.on_disk or self._stale(state, now):
            return
        num_blocks = found.on_disk - found.held
        if self._judge.pays(num_blocks, num_blocks * self._settings.block_tokens, now):
            state.promoted = state.holds_pins = True
            chain = state.hashes[found.first : found.on_disk]
            self._pool.promote_later(self.load_owner(state), chain)

    def _promoted(self, state: RequestState, promotion: Promotion, held: int, now: float) -> None:
        """It is in memory now, or as far as it still exists."""
        num_blocks = held - promotion.first
        self._judge.note_promotion(num_blocks, promotion.seconds(now), now)
        self.counts["promoted_blocks"] += num_blocks
        state.promotion = None
