"""When one request passed which point, and the waterfall made of it."""

from dataclasses import dataclass

from controlplane.gateway.scheduling import Plan
from controlplane.gateway.wire import Phase


@dataclass(slots=True)
class Outcome:
    """Monotonic seconds; 0 = never got there."""

    received_at: float
    planned_at: float = 0.0
    turn_at: float = 0.0  # after a wait for a turn at prefill
    slot_at: float = 0.0
    slot_asked_at: float = 0.0  # again: its worker had failed or left
    slot_held_at: float = 0.0  # the one that is held now
    prefill_sent_at: float = 0.0
    prefill_done_at: float = 0.0
    decode_sent_at: float = 0.0
    first_byte_at: float = 0.0
    decode_side: bool = False

    @property
    def handover_at(self) -> float:
        """When leg 2 had all it waits for: a leg that is sent early waits for the other one."""
        return max(self.decode_sent_at, self.prefill_done_at)

    def phases(self, plan: Plan, service_seconds: float) -> list[Phase]:
        """Bars in order of time; those not reached are left out."""
        phases = [self._phase("admitted", self.received_at, self.planned_at)]
        first = plan.prefill[0] if plan.prefill else None
        if self.slot_at:
            phases.append(self._queue(plan, service_seconds))
        if first is not None and first.transfer_seconds:
            phases.append(Phase("transfer", predicted_seconds=first.transfer_seconds))
        if self.prefill_done_at:
            start = self.prefill_done_at - service_seconds
            phase = self._phase("prefill", start, self.prefill_done_at)
            phase.predicted_seconds = first.prefill_seconds if first is not None else None
            phases.append(phase)
        if self.decode_sent_at:
            phase = self._phase("handover", self.handover_at, self.first_byte_at)
            phase.predicted_seconds = plan.predicted_handover_seconds
            phase.note = "with the first decode step"
            if self.decode_sent_at < self.prefill_done_at:
                phase.note = "the decode leg went out with the prefill leg"
            if self.decode_side:
                phase.note = "prefill on the decode worker, with the first decode step"
            phases.append(phase)
        return phases

    def _queue(self, plan: Plan, service_seconds: float) -> Phase:
        """Waiting for a decode slot here, then behind other prefills at the worker."""
        waited = self.slot_at - self.planned_at
        if self.prefill_done_at:
            waited += max(0.0, self.prefill_done_at - self.prefill_sent_at - service_seconds)
        predicted = plan.slot_wait_seconds
        if plan.prefill:
            predicted += plan.prefill[0].option.queue_seconds
        start = self.planned_at - self.received_at
        return Phase("queue", predicted, max(0.0, waited), start)

    def _phase(self, name: str, start: float, end: float) -> Phase:
        measured = end - start if end else None
        return Phase(name, None, measured, start - self.received_at)
