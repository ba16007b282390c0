"""The active policies, as the view gives them, read into what acts on requests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from controlplane.core.admission import AdmissionRules, Slo, Standing
from controlplane.core.hedging import HedgeRules
from controlplane.core.normalisation import Rule
from controlplane.core.placement import Algorithm, Rules
from controlplane.core.prediction import ASSUMED_FLOPS
from controlplane.core.watching import Bounds
from controlplane.gateway.admission import rules_of, slo_of
from controlplane.gateway.recording import Recording, recording_of
from controlplane.gateway.wire import ViewPolicy

DEFAULT_SCOPE = "default"


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The active scheduling policy's spec."""

    rules: Rules = field(default_factory=Rules)
    observe: Algorithm | None = None  # another one, whose choices go into the records
    normalisation: tuple[Rule, ...] = ()
    max_concurrent_per_decode: int = 16
    prefill_flops: float = ASSUMED_FLOPS
    bounds: Bounds = field(default_factory=Bounds)
    hedge: HedgeRules = field(default_factory=HedgeRules)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies that act on one model, and their revisions ("slo/default": 3)."""

    slo: Slo = field(default_factory=Slo)
    scheduling: Scheduling = field(default_factory=Scheduling)
    revisions: dict[str, int] = field(default_factory=dict)
    admission: AdmissionRules = field(default_factory=AdmissionRules)
    recording: Recording = field(default_factory=Recording)
    scoped: Mapping[str, ViewPolicy] = field(default_factory=dict)  # slo policies by their scope
    _made: "dict[str, Policies]" = field(default_factory=dict, compare=False)  # of `scoped`

    def of(self, standing: Standing) -> "Policies":
        """With the slo policy of its tenant or class, where there is one."""
        if not self.scoped:
            return self
        tenant, priority = f"tenant:{standing.tenant}", f"priority:{standing.priority}"
        for scope in (f"{tenant}+{priority}", tenant, priority):
            if scope in self.scoped:
                return self._made.get(scope) or self._make(scope)
        return self

    def _make(self, scope: str) -> "Policies":
        """When it is first asked for: there may be very many scopes, and as many models."""
        made = self._made[scope] = _with_slo(self, self.scoped[scope])
        return made


def policies_by_model(models: Iterable[str], active: Iterable[ViewPolicy]) -> dict[str, Policies]:
    """Raises as reading the specs does."""
    scoped = {p.scope: p for p in active if p.kind == "slo" and ":" in p.scope}
    for policy in scoped.values():
        slo_of(policy.spec)
    plain = [p for p in active if p.scope not in scoped]
    return {model: _policies_of(model, plain, scoped) for model in models}


def _policies_of(
    model: str, active: list[ViewPolicy], scoped: Mapping[str, ViewPolicy]
) -> Policies:
    """A policy for the model goes before the default one."""
    chosen: dict[str, ViewPolicy] = {}
    for policy in active:
        is_specific = policy.scope == model
        if is_specific or (policy.scope == DEFAULT_SCOPE and policy.kind not in chosen):
            chosen[policy.kind] = policy
    slo, admission, records = (chosen.get(kind) for kind in ("slo", "admission", "records"))
    return Policies(
        slo_of(slo.spec if slo is not None else {}),
        _scheduling(chosen.get("scheduling")),
        {f"{p.kind}/{p.scope}": p.revision for p in chosen.values()},
        rules_of(admission.spec if admission is not None else {}),
        recording_of(records.spec if records is not None else {}),
        scoped,
    )


def _with_slo(policies: Policies, policy: ViewPolicy) -> Policies:
    """The same for a tenant or class with an slo policy of its own."""
    kept = {name: n for name, n in policies.revisions.items() if not name.startswith("slo/")}
    revisions = {f"slo/{policy.scope}": policy.revision, **kept}
    return replace(policies, slo=slo_of(policy.spec), revisions=revisions, scoped={}, _made={})


def _scheduling(policy: ViewPolicy | None) -> Scheduling:
    if policy is None:
        return Scheduling()
    spec = policy.spec
    return Scheduling(
        rules=_rules(spec),
        observe=_known(spec, "observe", (None, *get_args(Algorithm)), None),
        normalisation=tuple(_known(spec, "normalisation", get_args(Rule), ())),
        prefill_flops=float(spec.get("prefill_tflops") or ASSUMED_FLOPS / 1e12) * 1e12,
        max_concurrent_per_decode=int(spec.get("max_concurrent_per_decode", 16)),
        bounds=_bounds(spec),
        hedge=_hedge(spec),
    )


def _known(spec: dict[str, Any], name: str, names: Any, usual: Any) -> Any:
    """Raises ValueError: a view of a newer control plane may have what nobody here understands."""
    value = spec.get(name, usual)
    unknown = [
        one for one in (value if isinstance(value, list | tuple) else [value]) if one not in names
    ]
    if unknown:
        known = ", ".join(map(str, names))
        raise ValueError(f"scheduling policy: {name} = {unknown[0]!r} is not among {known}")
    return value


def _hedge(spec: dict[str, Any]) -> HedgeRules:
    usual = HedgeRules()
    after, share = spec.get("hedge_prefill_after_s"), spec.get("hedge_max_share", usual.max_share)
    return HedgeRules(float(after or 0.0), float(share))


def _rules(spec: dict[str, Any]) -> Rules:
    usual = Rules()
    return Rules(
        algorithm=_known(spec, "placement", get_args(Algorithm), usual.algorithm),
        balancing_threshold=float(spec.get("balancing_threshold", usual.balancing_threshold)),
        explore_share=float(spec.get("explore_share", usual.explore_share)),
        load_weight=float(spec.get("load_weight", usual.load_weight)),
    )


def _bounds(spec: dict[str, Any]) -> Bounds:
    """How long requests may wait in each state."""
    usual = Bounds()
    return Bounds(
        ends=spec.get("watchdog", "end") == "end",
        waiting=float(spec.get("max_waiting_s", usual.waiting)),
        prefilling=float(spec.get("max_prefilling_s", usual.prefilling)),
        handing_over=float(spec.get("max_handing_over_s", usual.handing_over)),
        silence=float(spec.get("max_silence_s", usual.silence)),
        reply=float(spec.get("max_reply_s", usual.reply)),
    )
