"""Decision records: kept until both legs have reported, then sent, within bounds."""

from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from controlplane.gateway.recording import COMPLETE, Recording, Sampler
from controlplane.gateway.stats import Stats
from controlplane.gateway.telling import Telling
from controlplane.gateway.tracing import Trace
from controlplane.gateway.wire import Decision, Leg
from workers.core.messages import LegReport

MAX_BUFFERED = 2000
"""Decisions that wait for the control plane; beyond it the oldest go, counted."""
MAX_JOINING = 4096
JOIN_SECONDS = 1.0
"""How long a finished record waits for its legs' reports before it is sent without."""
LATE_SECONDS = 15.0
"""How long after that a late report still joins (the record is sent again)."""
MAX_PER_REPORT = 100
"""More than so many in a quarter of a second are several reports."""


_ALL = Recording()


class Joining(msgspec.Struct, eq=False, gc=False):
    """One request's record from its beginning until its legs' reports are there."""

    decision: Decision
    telling: Telling | None = None  # what is still to be put into words
    expects_prefill: bool = False  # leg 1's report may still come
    expects_decode: bool = False
    finished_at: float | None = None
    due: float = 0.0
    sent: bool = False
    has_agent: bool = False  # reports may come, even late
    on_prefill_leg: Callable[[Leg | None], None] | None = None
    trace: Trace | None = None
    kept: bool = True  # or only if it ends badly

    @property
    def is_whole(self) -> bool:
        """No leg's report is to be waited for."""
        return not (self.expects_prefill or self.expects_decode)

    def expect_prefill(self, worker_id: str, learn: Callable[[Leg | None], None]) -> None:
        """Leg 1 was answered: `learn` gets its worker's report, which may have been quicker, or None
        when none is waited for any more."""
        self.has_agent = True
        leg = self.decision.prefill_leg
        if leg is not None and leg.worker_id == worker_id:
            learn(leg)
            return
        self.expects_prefill = True
        self.on_prefill_leg = learn

    def told(self) -> Decision:
        """The record as readers want it; as of now."""
        if self.telling is not None:
            self.telling.tell(self.decision)
            if self.finished_at is not None:
                self.telling = None
        return self.decision


class Records:
    """`begin` at admission, `leg` when a report comes, `end` once; `take` for the next report."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.sampler = Sampler()
        self._joining: OrderedDict[str, Joining] = OrderedDict()
        self._due: deque[Joining] = deque()  # have ended; in the order of their ends
        self._late: deque[Joining] = deque()  # were due; a late report may still come
        self._buffer: deque[Joining] = deque()
        self._unannounced: dict[str, Joining] = {}
        self.on_news: Callable[[], None] = lambda: None
        self.on_traced: Callable[[Trace, Decision], None] = lambda _trace, _decision: None

    @property
    def num_buffered(self) -> int:
        return len(self._buffer) + len(self._unannounced)

    @property
    def num_joining(self) -> int:
        return len(self._joining)

    def begin(
        self, decision: Decision, recording: Recording = _ALL, telling: Telling | None = None
    ) -> Joining:
        """A running request: told with the next report, if it still runs then, and at its end."""
        entry = Joining(decision, telling)
        self._joining[decision.request_id] = entry
        if recording.one_in > 1:
            entry.kept = self.sampler.keeps(recording)
            decision.sampled_one_in = recording.one_in if entry.kept else 1
        if entry.kept:
            self._unannounced[decision.request_id] = entry
        if len(self._joining) > MAX_JOINING:
            _, oldest = self._joining.popitem(last=False)
            if oldest.finished_at is not None:
                self._forget(oldest)
        self.on_news()
        return entry

    def end(self, entry: Joining, now: float) -> None:
        """The request is over; its record goes out when its legs have reported, or soon."""
        entry.finished_at = now
        entry.due = now + JOIN_SECONDS
        self._unannounced.pop(entry.decision.request_id, None)  # to be told once, when it is whole
        if not entry.expects_prefill:
            entry.on_prefill_leg = None
        if entry.is_whole:
            self._send(entry)
            if not entry.has_agent:
                self._joining.pop(entry.decision.request_id, None)
                return
        self._due.append(entry)
        if len(self._due) + len(self._late) > MAX_JOINING:
            self._forget((self._late or self._due).popleft())

    def once(self, decision: Decision, telling: Telling | None = None) -> None:
        """A request that ran no leg."""
        self._put(Joining(decision, telling))

    def leg(self, report: LegReport) -> None:
        """A connector's report; unknown transfers are another gateway's."""
        entry = self._joining.get(report.transfer_id)
        if entry is None:
            return
        decision = entry.decision
        if _is_prefill(report, decision):
            leg = _joined(decision.prefill_leg, report, decision.prefill_worker)
            if leg is decision.prefill_leg:
                return  # another worker serves it
            decision.prefill_leg = leg
            decision.hit_tokens = leg.device_hit_tokens + leg.pool_hit_tokens
            if decision.prefill_worker in ("", leg.worker_id):  # else of one that was asked in vain
                entry.expects_prefill = False
                if entry.on_prefill_leg is not None:
                    entry.on_prefill_leg(leg)
        else:
            decision.decode_leg = _joined(decision.decode_leg, report, decision.decode_worker)
            entry.expects_decode = False
        if entry.sent or (entry.finished_at is not None and entry.is_whole):
            self._send(entry)

    def sweep(self, now: float) -> None:
        """Send what has waited long enough; forget what is past late reports too."""
        while self._due and now >= self._due[0].due:
            entry = self._due.popleft()
            if not entry.sent:
                self._send(entry)
            learn, entry.on_prefill_leg = entry.on_prefill_leg, None
            if learn is not None and entry.expects_prefill:
                learn(None)
            self._late.append(entry)
        while self._late and now >= self._late[0].due + LATE_SECONDS - JOIN_SECONDS:
            self._forget(self._late.popleft())

    def _forget(self, entry: Joining) -> None:
        """No report joins it any more."""
        if not entry.sent:
            self._send(entry)
        if self._joining.get(entry.decision.request_id) is entry:
            del self._joining[entry.decision.request_id]

    def announce(self) -> int:
        """Have the next report tell of running requests that none has told of; how many records it
        has."""
        for entry in self._unannounced.values():
            self._put(entry)
        self._unannounced.clear()
        return len(self._buffer)

    def take(self) -> Decision | None:
        """The oldest decision of the report that `announce` has begun; `put_back` when it did not
        arrive.

        It is to be encoded at once: a running one goes on changing.
        """
        return self._buffer.popleft().told() if self._buffer else None

    def arrived(self, decisions: list[Decision]) -> None:
        """The control plane has these as they ended; a late report sends one again, without its
        prompt."""
        for decision in decisions:
            self.sampler.forget_prompt(decision)

    def put_back(self, decisions: list[Decision]) -> None:
        self._buffer.extendleft(Joining(decision) for decision in reversed(decisions))
        self._bound()

    def _send(self, entry: Joining) -> None:
        """One that has ended."""
        first, entry.sent, decision = not entry.sent, True, entry.decision
        if first:
            self._count(decision)
            if entry.trace is not None:
                self.on_traced(entry.trace, entry.told())
        if decision.status not in COMPLETE:
            decision.sampled_one_in = 1  # all such are recorded
        elif not entry.kept:
            self.sampler.sampled_out += first
            self.sampler.forget_prompt(decision)
            entry.telling = None
            return
        self._put(entry)

    def _count(self, decision: Decision) -> None:
        """Prompt and hit tokens are counted together, once, so that shares add up."""
        leg = decision.prefill_leg
        if leg is not None:
            prompt, hits = leg.prompt_tokens, leg.device_hit_tokens + leg.pool_hit_tokens
        else:
            prompt = decision.engine_prompt_tokens or decision.prompt_tokens or 0
            hits = decision.hit_tokens or 0
        self._stats.prompt_tokens += prompt
        self._stats.hit_tokens += min(hits, prompt)

    def _put(self, entry: Joining) -> None:
        self._buffer.append(entry)
        if len(self._buffer) > MAX_BUFFERED:
            self._bound()
        self.on_news()

    def _bound(self) -> None:
        while len(self._buffer) > MAX_BUFFERED:
            self.sampler.forget_prompt(self._buffer.popleft().decision)
            self._stats.decisions_dropped += 1


def _is_prefill(report: LegReport, decision: Decision) -> bool:
    if report.kv_role == "kv_producer":
        return True
    if report.kv_role == "kv_consumer":
        return False
    return report.worker_id == decision.prefill_worker != decision.decode_worker


def _joined(leg: Leg | None, report: LegReport, worker_id: str) -> Leg:
    """Reports of one leg add up: a body with several prompts is several engine requests. Of several
    workers that tried, the one that serves counts, and until it has reported the last."""
    fields = {name: getattr(report, name) for name in Leg.__struct_fields__}
    if leg is None:
        return Leg(**fields)
    if leg.worker_id != report.worker_id:
        return leg if leg.worker_id == worker_id else Leg(**fields)
    for name, value in fields.items():
        before = getattr(leg, name)
        if isinstance(value, list):
            fields[name] = [a + b for a, b in zip(before, value, strict=False)] or value
        elif isinstance(value, dict):
            fields[name] = {k: before.get(k, 0.0) + value.get(k, 0.0) for k in {*before, *value}}
        elif not isinstance(value, str):
            fields[name] = before + value
    return Leg(**fields)
