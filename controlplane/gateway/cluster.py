"""The cluster as this gateway knows it: the last view, and what each worker has shown so far."""

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from time import monotonic
from typing import Any

import msgspec
import structlog

from controlplane.core.expected import ExpectedBlocks
from controlplane.core.fitting import Average
from controlplane.core.handshake import nothing_pairs
from controlplane.core.health import DataPathHealth, FailedLeg
from controlplane.core.pairing import DecodeSlots, Granted, SlotLimit, SlotsBeside
from controlplane.core.prediction import PrefillModel, prior_of, share_priors
from controlplane.core.text_keys import TextIndex
from controlplane.gateway.admission import Desk
from controlplane.gateway.dispatch import Dispatch
from controlplane.gateway.orphans import Orphans
from controlplane.gateway.paths import Paths
from controlplane.gateway.policies import Policies, policies_by_model
from controlplane.gateway.settings import Settings
from controlplane.gateway.stats import Stats
from controlplane.gateway.upstream import Upstream, check_url
from controlplane.gateway.wire import (
    View,
    ViewKey,
    ViewModel,
    ViewWorker,
    WorkerLoad,
)
from controlplane.gateway.worker_state import WorkerState
from workers.core.disaggregation import Geometry
from workers.core.prefix_index import PrefixIndex

log = structlog.get_logger(__name__)

FIRST_OUTPUT_TOKENS = 256
"""Expected of a request before any has ended."""
MAX_MODELS_LEARNED = 256


_NO_POLICIES = Policies()


class Cluster:
    """Applied views act on the next request. All methods are of the event loop's thread."""

    def __init__(self, settings: Settings, stats: Stats) -> None:
        self._settings = settings
        self.model_paths = settings.models
        self.stats = stats
        self.view = View()
        self.has_view = False
        self.workers: dict[str, WorkerState] = {}
        self.retired: list[WorkerState] = []  # listed no more, with requests under way
        self.models: dict[str, ViewModel] = {}
        self.keys: dict[str, ViewKey] = {}  # by sha256
        self.desk = Desk(stats, Random())  # noqa: S311 - draws probes, no secrets
        self.dispatch = Dispatch()
        self.index = PrefixIndex()
        self.health = DataPathHealth()
        self.slots = DecodeSlots(settings.limits.max_waiting, self._may_grant)
        self.paths = Paths()
        self.expected = ExpectedBlocks()
        self.texts = TextIndex()
        self.with_blocks: set[str] = set()  # models whose workers' blocks are known by keys
        self.geometries: dict[str, Geometry] = {}  # by the model's path, as far as read
        self._output_tokens: dict[str, Average] = {}  # by model: what requests generate lately
        self._policies: dict[str, Policies] = {}
        self._ready: dict[tuple[str, str], list[WorkerState]] = {}  # by model and role
        self._waiters: dict[str, asyncio.Future[str]] = {}  # request -> granted worker
        self._bad_url = ""  # said last
        self._orphans = Orphans()
        self.modes: dict[str, str] = {}  # model -> how its requests run
        self.mixed: set[str] = set()  # models whose workers have several handshakes
        self.unpaired: dict[str, str] = {}  # models none of whose workers fit, and why
        self.on_view: list[Callable[[View], None]] = []

    # --- views ---

    def apply(self, view: View) -> None:
        """Take a view in, at once; one that cannot be is as if it had never come, but for its error."""
        old, had_one = self.view, self.has_view
        try:
            self._take_in(view)
        except Exception:
            if view is not old:
                self._take_in(old)
                self.has_view = had_one
            raise

    def _take_in(self, view: View) -> None:
        workers = self._orphans.keep([row for row in view.workers if self._can_be_called(row)])
        if workers != view.workers:
            view = msgspec.structs.replace(view, workers=workers)
        models = {model.id: model for model in view.models}
        for worker in view.workers:
            models.setdefault(
                worker.model, ViewModel(worker.model, self.model_paths.get(worker.model, ""))
            )
        policies = policies_by_model(models, view.policies)  # raises before anything has changed
        self.view, self.has_view = view, True
        self._apply_workers(view.workers)
        self._ready = {}
        self.with_blocks = {row.model for row in view.workers if row.namespace is not None}
        self.models, self._policies = models, policies
        self.keys = {key.key_sha256: key for key in view.client_keys}
        self._apply_limits()
        self._apply_modes()
        self._apply_handshakes()
        for callback in self.on_view:
            callback(view)

    def _can_be_called(self, row: ViewWorker) -> bool:
        """One worker's bad address must not keep the others' news away."""
        try:
            check_url(row.url)
        except ValueError as error:
            if row.url != self._bad_url:
                self._bad_url = row.url
                log.warning("worker_left_out", worker=row.id, url=row.url, error=str(error))
            return False
        return True

    def _apply_workers(self, rows: list[ViewWorker]) -> None:
        timeouts, same = self._settings.timeouts, set[str]()
        for row in rows:
            state = self.workers.get(row.id)
            if state is not None and (state.row.url, state.row.model) == (row.url, row.model):
                same.add(row.id)
            else:  # whatever its name, it is another engine
                if state is not None:
                    self._retire(state)
                upstream = Upstream(row.url, timeouts.connect, timeouts.worker_keep_alive)
                state = self.workers[row.id] = WorkerState(row, upstream)
            state.row = row
            if row.namespace is not None:
                state.namespace = bytes.fromhex(row.namespace)
                state.block_tokens = row.block_tokens
        known = {row.id for row in rows}
        for gone in self.workers.keys() - known:
            self._retire(self.workers.pop(gone))
        self.health.keep(same)
        for gone in self.stats.workers.keys() - known:
            del self.stats.workers[gone]

    def _retire(self, state: WorkerState) -> None:
        """What it was asked it may still answer."""
        state.upstream.retire()
        self.retired = [one for one in self.retired if one.upstream.num_connections]
        self.retired.append(state)

    def _apply_modes(self) -> None:
        """By the roles of the workers alone, however the gateway was started (A50)."""
        roles: dict[str, set[str]] = {model: set() for model in sorted(self.models)}
        for row in self.view.workers:
            roles[row.model].add(row.role)
        modes = {model: _mode(served) for model, served in roles.items()}
        for model in modes.keys() - {m for m in modes if self.modes.get(m) == modes[m]}:
            log.info("serving_mode", model=model, mode=modes[model])
        self.modes = modes

    def _apply_handshakes(self) -> None:
        """Whatever their states: a worker that comes back must not change what is said."""
        names: dict[str, set[str]] = {}
        for row in self.view.workers:
            names.setdefault(row.model, set()).add(row.handshake)
        self.mixed = {model for model, used in names.items() if len(used) > 1}
        unpaired = {model: why for model in self.mixed if (why := self._why_unpaired(model))}
        for model in unpaired.keys() - self.unpaired.keys():
            log.error("handshakes_do_not_pair", model=model, why=unpaired[model])
        self.unpaired = unpaired

    def _why_unpaired(self, model: str) -> str:
        rows = [row for row in self.view.workers if row.model == model]
        if any(row.role == "both" for row in rows):
            return ""  # that one serves alone
        prefill, decode = (
            [row.handshake for row in rows if row.role == role] for role in ("prefill", "decode")
        )
        return nothing_pairs(prefill, decode)

    def _apply_limits(self) -> None:
        for state in self.workers.values():
            state.decode_cap = self.decode_cap(state.row)
        limits = {
            row.id: SlotLimit(row.model, self.decode_cap(row) if row.state == "ready" else 0)
            for row in self.view.workers
            if row.role != "prefill"
        }
        self._granted(self.slots.set_limits(limits))
        self.dispatch.apply({
            row.id: self.policies(row.model).admission.queue
            for row in self.view.workers
            if row.role != "decode" and row.state == "ready"
        })  # fmt: skip

    # --- reading ---

    def policies(self, model: str) -> Policies:
        policies = self._policies.get(model)
        return _NO_POLICIES if policies is None else policies

    def decode_cap(self, row: ViewWorker) -> int:
        policy = self.policies(row.model).scheduling.max_concurrent_per_decode
        return min(row.max_concurrent_requests, policy)

    def serving(self, model: str, role: str, now: float) -> list[WorkerState]:
        """Workers that may take a new leg: right model and role, ready, not paused by failures.
        The list is not the caller's to change."""
        ready = self._ready.get((model, role))
        if ready is None:
            ready = self._find_ready(model, role)
        if self.health.is_sound:
            return ready
        return [state for state in ready if not self.health.is_paused(state.row.id, now)]

    def _find_ready(self, model: str, role: str) -> list[WorkerState]:
        """Kept until the next view, for models that are known."""
        ready = [
            state
            for state in self.workers.values()
            if state.row.model == model
            and state.row.role in (role, "both")
            and state.row.state == "ready"
        ]
        if model in self.models:
            self._ready[model, role] = ready
        return ready

    def leg_failed(
        self, worker_id: str, leg: str, request: int, *, unreachable: bool, answered: bool,
        refused: bool, error: str, sent_at: float,
    ) -> None:  # fmt: skip
        """A leg that was sent came to nothing there. `request`: equal for equal ones. `answered`:
        the engine said so, about this request; `refused`: no request can be why."""
        state = self.workers.get(worker_id)
        if state is None or sent_at < state.since:
            return
        others = self._others(worker_id)
        failed = None if refused else FailedLeg(request, leg, others, answered)
        self.health.failed(worker_id, monotonic(), unreachable=unreachable, error=error, leg=failed)

    def _others(self, worker_id: str) -> list[str]:
        """Who else does what this worker does. Decode workers compute prompts, too."""
        state = self.workers.get(worker_id)
        if state is None:
            return []
        model, is_prefill = state.row.model, state.row.role == "prefill"
        return [
            name
            for name, other in self.workers.items()
            if other is not state
            and other.row.model == model
            and other.row.state == "ready"
            and (is_prefill or other.row.role != "prefill")
        ]

    def has_ready(self, model: str, role: str) -> bool:
        """Whether such a worker is registered and ready, whatever its recent failures."""
        return any(row.state == "ready" for row in self._registered(model, role))

    def _registered(self, model: str, *roles: str) -> Iterator[ViewWorker]:
        """Its workers of these roles, in whatever state."""
        able = (*roles, "both")
        return (row for row in self.view.workers if row.model == model and row.role in able)

    def why_nobody(self, model: str, *roles: str) -> str:
        """Takes a leg of these roles."""
        now, rows = monotonic(), list(self._registered(model, *roles))
        ready = [row.id for row in rows if row.state == "ready"]
        paused = [name for name in ready if self.health.is_paused(name, now)]
        if paused:
            return f"paused after failures: {', '.join(paused)}"
        if not rows:
            return f"none is registered; add a worker of role {', '.join(roles)} or both"
        return "none is ready"

    def by_node(self) -> dict[str, list[WorkerState]]:
        """Made anew each time."""
        nodes: dict[str, list[WorkerState]] = {}
        for state in self.workers.values():
            nodes.setdefault(state.row.node_id, []).append(state)
        return nodes

    def loads(self) -> dict[str, WorkerLoad]:
        """This gateway's load on each worker."""
        return {name: self._load(name, state) for name, state in self.workers.items()}

    def _load(self, worker_id: str, state: WorkerState) -> WorkerLoad:
        counters = self.stats.worker(worker_id)
        prefills = len(state.prefill_queue)
        waiting = max(0, prefills - 1) + self.dispatch.waiting(worker_id)
        verdict = self.health.verdict(worker_id, monotonic())
        if state.row.role != "prefill":
            waiting += self.slots.waiting(state.row.model)
        return WorkerLoad(
            running=prefills + self.slots.running(worker_id),
            waiting=waiting,
            requests_total=counters.requests,
            failures_total=counters.failures,
            queued_tokens=state.prefill_queue.tokens,
            data_path=verdict.state.value,
            data_path_note=verdict.note,
            prefill_samples=state.prefill_times.num_samples,
            prefill_error=state.prefill_times.calibration.median_relative_error(),
            tbt_samples=state.decode_times.num_samples,
            tbt_error=state.decode_times.calibration.median_relative_error(),
            failures_in_a_row=verdict.failures,
            outcomes=verdict.outcomes,
            outcomes_failed=verdict.outcomes_failed,
            pause_seconds=round(verdict.pause_seconds, 1),
        )

    def data_paths(self) -> list[dict[str, Any]]:
        """What legs meet at each worker, beside the state that the view gives it."""
        now = monotonic()
        return [
            {
                "id": name, "role": state.row.role, "state": state.row.state,
                "data_path": (verdict := self.health.verdict(name, now)).state.value,
                "note": verdict.note, "failures_in_a_row": verdict.failures,
                "answers_probe": verdict.answers_probe,
                "connections": state.upstream.num_connections,
            }
            for name, state in self.workers.items()
        ]  # fmt: skip

    # --- learning ---

    def learn(self) -> None:
        """Fit the predictions, off the request path."""
        by_model: dict[str, list[PrefillModel]] = {}
        for state in self.workers.values():
            state.learn()
            by_model.setdefault(state.row.model, []).append(state.prefill_times)
        for model, times in by_model.items():
            share_priors(times)
            geometry = self.geometries.get(self.models[model].path if model in self.models else "")
            if geometry is not None and not any(one.num_samples for one in times):
                prior = prior_of(geometry, self.policies(model).scheduling.prefill_flops)
                for one in times:
                    one.begin_with(prior)
        self.paths.learn()

    def generated(self, model: str, output_tokens: int) -> None:
        """A request has ended with so many tokens of output."""
        mean = self._output_tokens.get(model)
        if mean is None and len(self._output_tokens) < MAX_MODELS_LEARNED:
            mean = self._output_tokens[model] = Average(weight=0.02)
        if mean is not None:
            mean.observe(output_tokens)

    def expected_output(self, model: str, most: int | None) -> int:
        """Tokens that a request will generate: the recent mean (R36), at most what it asks for."""
        mean = self._output_tokens.get(model)
        expected = FIRST_OUTPUT_TOKENS if mean is None or mean.value is None else round(mean.value)
        return expected if most is None else min(expected, most)

    # --- decode slots ---

    async def wait_for_slot(
        self, request_id: str, model: str, seconds: float, kv_tokens: int = 0, rank: int = 0
    ) -> str | None:
        """Worker of the granted slot; None when there is none in time, or the queue is full."""
        if not self.slots.wait(request_id, model, kv_tokens, rank):
            return None
        waiter = self._waiters[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                worker_id: str = await waiter
                return worker_id
        except TimeoutError:
            self._stop_waiting(request_id, model)
            return None
        except BaseException:
            self._stop_waiting(request_id, model)
            raise
        finally:
            del self._waiters[request_id]

    def waits_for_slot(self, request_id: str) -> bool:
        return request_id in self._waiters

    def _stop_waiting(self, request_id: str, model: str) -> None:
        if not self.slots.leave(request_id, model):
            self.free_slot(request_id)  # granted in the same moment

    def set_slots_beside(self, worker_id: str, beside: SlotsBeside | None) -> None:
        """Of other gateways; who may have a slot because of it gets it."""
        self._granted(self.slots.set_beside(worker_id, beside))

    def offer_slots(self, now: float) -> None:
        """Of workers that were paused when those who wait came: nothing that frees a slot may ever
        happen there. One that is due its trial gets one. Where handshakes are mixed, a slot that
        fits is waited for."""
        if not self.slots.num_waiting:
            return
        for name, state in self.workers.items():
            row = state.row
            if row.model in self.mixed or not self.slots.waiting(row.model):
                continue
            if row.state != "ready" or self.health.is_paused(name, now):
                continue
            is_trial = self.health.overdue(name, now) is not None
            if not is_trial:
                self._granted(self.slots.offer(name, self.slots.num_waiting))
            elif self.slots.holder(state.trial) != name:  # else it is still on its way there
                grants = self.slots.offer(name, 1)
                state.trial = grants[0].request_id if grants else ""
                self._granted(grants)

    def _may_grant(self, worker_id: str) -> bool:
        """Not where legs fail while others serve: one by one all who wait would go there."""
        state, now = self.workers.get(worker_id), monotonic()
        if self.health.is_sound or state is None or not self.health.is_paused(worker_id, now):
            return True
        # Where handshakes are mixed nothing is offered later.
        model = state.row.model
        return model in self.mixed or not self.serving(model, "decode", now)

    def free_slot(self, request_id: str) -> None:
        self._granted(self.slots.free(request_id))

    def _granted(self, grants: list[Granted]) -> None:
        for grant in grants:
            waiter = self._waiters.get(grant.request_id)
            if waiter is None or waiter.done():
                self.free_slot(grant.request_id)
            else:
                waiter.set_result(grant.worker_id)

    def close(self) -> None:
        for state in (*self.workers.values(), *self.retired):
            state.upstream.close()


def _mode(roles: set[str]) -> str:
    if "prefill" in roles and roles & {"decode", "both"}:
        return "prefill and decode apart"
    if "both" in roles:
        return "one worker a request" if "decode" not in roles else "prefill and decode apart"
    if "decode" in roles:
        return "decode alone"
    return "no decode worker" if roles else "no workers"
