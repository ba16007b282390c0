"""What a record says of a request's plan, put into words only when the record goes out: most of it
is for readers, none for the request."""

from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Final

import msgspec

from controlplane.core.routing import DecodeOption, Priced, decode_candidates, prefill_candidates
from controlplane.gateway.outcome import Outcome
from controlplane.gateway.scheduling import Plan
from controlplane.gateway.wire import Decision

NOT_YET: Final = datetime.fromtimestamp(0, UTC)
"""`Decision.at` before it is told."""


class Telling(msgspec.Struct, eq=False):
    """The plan as it was made: waiting for a turn may change it. Holds nothing of the body."""

    plan: Plan
    outcome: Outcome
    prefill: list[Priced]
    decode: list[DecodeOption]
    chosen_decode: str
    service_seconds: float = 0.0  # of the prefill leg

    def tell(self, decision: Decision) -> None:
        """Fill in what is known so far; again at the request's end."""
        if decision.at is NOT_YET:
            self._tell_plan(decision)
        if decision.e2e_seconds is not None and not decision.phases:
            decision.phases = self.outcome.phases(self.plan, self.service_seconds)

    def _tell_plan(self, decision: Decision) -> None:
        plan, admitted = self.plan, self.plan.admission.admitted
        age = monotonic() - self.outcome.received_at
        decision.at = datetime.now(UTC) - timedelta(seconds=age)
        decision.policy_revisions = plan.policies.revisions
        decision.balancing_threshold = plan.policies.scheduling.rules.balancing_threshold
        decision.prefill_candidates = prefill_candidates(
            self.prefill,
            by_turn=plan.by_turn,
            broken_slo_seconds=None if admitted else self._bound_of_prefill(),
        )
        first = self.chosen_decode if admitted else ""
        decision.decode_candidates = decode_candidates(self.decode, first)
        decision.observed_placement = plan.observed

    def _bound_of_prefill(self) -> float:
        """The TTFT bound less what comes after prefill, which is alike for every candidate."""
        plan, after = self.plan, 0.0
        if self.prefill and plan.predicted_ttft_seconds is not None:
            after = max(0.0, plan.predicted_ttft_seconds - self.prefill[0].ttft_seconds)
        return plan.policies.slo.max_ttft_seconds - after
