"""Which prefill worker and which decode worker take a request."""

import math
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from workers.core.numbers import duration

DEFAULT_BALANCING_THRESHOLD: Final = 1.25
_TBT_STEP: Final = math.log(1.1)
_LEAST_TBT_SECONDS: Final = 1e-4


class PrefillTimes(Protocol):
    """What routing asks of a prediction."""

    def predict(self, uncached_tokens: int, cached_tokens: int) -> float: ...


class TransferCost(msgspec.Struct, frozen=True, gc=False):
    """Time to bring KV from another node's pool. None instead of it: no path between nodes."""

    seconds_per_token: float
    base_seconds: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.base_seconds + self.seconds_per_token * tokens


class Source(msgspec.Struct, frozen=True, gc=False):
    """The node that holds the longest prefix. `costs`: for each node that has a path from it."""

    node_id: str
    prefix_tokens: int
    costs: Mapping[str, TransferCost]


NO_COSTS: Final[Mapping[str, TransferCost]] = {}


class PrefillOption(msgspec.Struct, frozen=True, gc=False):
    """A prefill worker that may take the request."""

    worker_id: str
    node_id: str
    own_prefix_tokens: int
    queue_seconds: float
    running: int
    times: PrefillTimes
    coming_tokens: int = 0  # of the own prefix: not there yet, with prompts on their way


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """Terms of R31 for one worker, as the decision record shows them."""

    worker_id: str
    node_id: str
    own_prefix_tokens: int
    used_prefix_tokens: int
    queue_seconds: float
    transfer_seconds: float
    prefill_seconds: float
    ttft_seconds: float
    verdict: str
    coming_prefix_tokens: int = 0


class DecodeOption(msgspec.Struct, frozen=True, gc=False):
    """A decode worker that may take the request.

    `predicted_tbt_seconds` is with this request, `kv_tokens` without it; `kv_capacity_tokens` None:
    the engine has not said how many fit.
    """

    worker_id: str
    node_id: str
    running: int
    cap: int
    predicted_tbt_seconds: float | None = None
    handover_seconds: float = 0.0  # to bring the prompt's KV here from the first prefill choice
    kv_tokens: int = 0
    kv_capacity_tokens: int | None = None


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """Why a decode worker was or was not taken."""

    worker_id: str
    node_id: str
    running: int
    cap: int
    predicted_tbt_seconds: float | None
    verdict: str


class Priced(msgspec.Struct, frozen=True, gc=False):
    """One option with its terms. `note`: why it stands where it does, if not by its TTFT alone."""

    option: PrefillOption
    used_prefix_tokens: int
    transfer_seconds: float
    prefill_seconds: float
    ttft_seconds: float
    note: str = ""


def price(
    option: PrefillOption,
    prompt_tokens: int,
    best_prefix_tokens: int,
    threshold: float,
    transfer: TransferCost | None,
) -> Priced:
    """R31: fetch the longer prefix only if it is more than `threshold` times the own one."""
    own = min(option.own_prefix_tokens, prompt_tokens)
    used, transfer_seconds = own, 0.0
    if transfer is not None and is_far_behind(own, best_prefix_tokens, threshold):
        used = min(best_prefix_tokens, prompt_tokens)
        transfer_seconds = transfer.seconds(used - own)
    prefill_seconds = option.times.predict(prompt_tokens - used, used)
    ttft = option.queue_seconds + transfer_seconds + prefill_seconds
    return Priced(option, used, transfer_seconds, prefill_seconds, ttft)


def order_by_cost(
    options: list[PrefillOption],
    prompt_tokens: int,
    threshold: float = DEFAULT_BALANCING_THRESHOLD,
    source: Source | None = None,
) -> list[Priced]:
    """Cheapest predicted TTFT first; equals by what runs there, then by id."""
    best, costs = (source.prefix_tokens, source.costs) if source is not None else (0, NO_COSTS)
    priced = [
        price(option, prompt_tokens, best, threshold, costs.get(option.node_id))
        for option in options
    ]
    if len(priced) > 1:
        priced.sort(key=lambda p: (p.ttft_seconds, p.option.running, p.option.worker_id))
    return priced


def order_by_turn(options: list[PrefillOption], prompt_tokens: int, turn: int) -> list[Priced]:
    """Round robin, the baseline: worker number `turn` of the ids in order, then the next ones."""
    if not options:
        return []
    by_id = sorted(options, key=lambda option: option.worker_id)
    start = turn % len(by_id)
    rotated = by_id[start:] + by_id[:start]
    return [price(option, prompt_tokens, 0, 1.0, None) for option in rotated]


def prefill_candidates(
    ordered: list[Priced], *, by_turn: bool = False, broken_slo_seconds: float | None = None
) -> list[PrefillCandidate]:
    """Every candidate's terms, the chosen one first, with the reason in words.

    `broken_slo_seconds` is what the TTFT bound that led to a rejection leaves for these terms:
    the bound without handover and first decode step.
    """
    return [
        PrefillCandidate(
            worker_id=priced.option.worker_id,
            node_id=priced.option.node_id,
            own_prefix_tokens=priced.option.own_prefix_tokens,
            used_prefix_tokens=priced.used_prefix_tokens,
            queue_seconds=priced.option.queue_seconds,
            transfer_seconds=priced.transfer_seconds,
            prefill_seconds=priced.prefill_seconds,
            ttft_seconds=priced.ttft_seconds,
            verdict=_verdict(priced, ordered[0], by_turn, broken_slo_seconds),
            coming_prefix_tokens=priced.option.coming_tokens,
        )
        for priced in ordered
    ]


def order_decode(options: list[DecodeOption], tokens: int = 0) -> list[DecodeOption]:
    """Free slots only; those first in whose memory the request's `tokens` fit (prompt and expected
    output, R36). Of these the least predicted TBT, alike within `_TBT_STEP`; then the smallest
    share in use, of cap or memory; then the nearest to the KV."""
    free = [option for option in options if option.running < option.cap]
    if len(free) > 1:
        by_tbt = _goes_by_tbt(free)
        free.sort(key=lambda option: _decode_rank(option, tokens, by_tbt=by_tbt))
    return free


def _goes_by_tbt(free: list[DecodeOption]) -> bool:
    """Only where it is known of all: an unknown one is neither short nor long."""
    return all(option.predicted_tbt_seconds is not None for option in free)


def decode_candidates(options: list[DecodeOption], chosen: str) -> list[DecodeCandidate]:
    """Every decode option with the reason in words."""
    winner = next((option for option in options if option.worker_id == chosen), None)
    by_tbt = _goes_by_tbt([option for option in options if option.running < option.cap])
    return [
        DecodeCandidate(
            option.worker_id,
            option.node_id,
            option.running,
            option.cap,
            option.predicted_tbt_seconds,
            _decode_verdict(option, winner, by_tbt=by_tbt),
        )
        for option in options
    ]


def is_far_behind(own: int, best: int, threshold: float) -> bool:
    """Whether `best` is more than `threshold` times the own prefix."""
    if best <= own:
        return False
    return own == 0 or best / own > threshold


def _verdict(
    priced: Priced, winner: Priced, by_turn: bool, broken_slo_seconds: float | None
) -> str:
    if broken_slo_seconds is not None:
        over = priced.ttft_seconds - broken_slo_seconds
        return f"breaks TTFT SLO by {duration(over)}" if over > 0 else "breaks the SLO"
    if priced is winner:
        return f"chosen: {priced.note}" if priced.note else "chosen"
    if priced.note:
        return priced.note
    if by_turn:
        return "not its turn"
    slower = priced.ttft_seconds - winner.ttft_seconds
    terms = {
        "queue": priced.option.queue_seconds - winner.option.queue_seconds,
        "transfer": priced.transfer_seconds - winner.transfer_seconds,
        "prefill": priced.prefill_seconds - winner.prefill_seconds,
    }
    if slower < 0 and duration(-slower) != duration(0.0):
        return f"{duration(-slower)} quicker, but at more work"
    if slower <= 0:
        return "equal: more running or a later id"
    return f"{duration(slower)} slower: {max(terms, key=terms.__getitem__)}"


def _decode_rank(
    option: DecodeOption, tokens: int, *, by_tbt: bool
) -> tuple[bool, int, float, float, str]:
    capacity = option.kv_capacity_tokens
    crowded = bool(capacity and option.kv_tokens + tokens > capacity)
    step = _tbt_step(option) if by_tbt else 0
    return (crowded, step, _share(option), option.handover_seconds, option.worker_id)


def _tbt_step(option: DecodeOption) -> int:
    tbt = option.predicted_tbt_seconds or 0.0
    return round(math.log(max(tbt, _LEAST_TBT_SECONDS)) / _TBT_STEP)


def _share(option: DecodeOption) -> float:
    """In use, of cap or memory."""
    capacity = option.kv_capacity_tokens
    memory = option.kv_tokens / capacity if capacity else 0.0
    return max(option.running / option.cap if option.cap else 1.0, memory)


def _decode_verdict(option: DecodeOption, winner: DecodeOption | None, *, by_tbt: bool) -> str:
    if option is winner:
        return "chosen"
    if option.running >= option.cap:
        return f"full: {option.running} of {option.cap} run"
    capacity = option.kv_capacity_tokens
    if capacity and option.kv_tokens > 0.9 * capacity:
        return _memory_words("memory", option)
    if winner is None:  # nobody is chosen for a request that is rejected
        return f"free: {option.running} of {option.cap} run"
    return _behind(option, winner, by_tbt=by_tbt)


def _behind(option: DecodeOption, winner: DecodeOption, *, by_tbt: bool) -> str:
    """In which term of `_decode_rank` it comes after the winner."""
    slower = (option.predicted_tbt_seconds or 0.0) - (winner.predicted_tbt_seconds or 0.0)
    if by_tbt and _tbt_step(option) > _tbt_step(winner):
        return f"{duration(slower)} slower a token"
    if _share(option) > _share(winner):
        if option.running / option.cap < _share(option):
            return _memory_words("less memory", option)
        return f"busier: {option.running} of {option.cap} run"
    later = option.handover_seconds - winner.handover_seconds
    if later > 0 and duration(later) != duration(0.0):
        return f"handover {duration(later)} longer"
    return "equal: a later id or less room"


def _memory_words(word: str, option: DecodeOption) -> str:
    return f"{word}: {option.kv_tokens} of {option.kv_capacity_tokens} KV tokens in use"
