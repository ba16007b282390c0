"""A second leg 1 beside one that is late: the first answer wins, the other leg is cut off.

Only where the scheduling policy has `hedge_prefill_after_s`, another prefill worker is free within
its window, and the share of hedged requests allows it; and, leg 2 not having been sent, always
before the client's first byte.
"""

import asyncio
from dataclasses import dataclass
from time import monotonic

from msgspec.structs import replace

from controlplane.core.handshake import owes_release
from controlplane.core.hedging import HedgeBudget, HedgeRules
from controlplane.core.lifecycle import HedgeEnded, HedgeStarted
from controlplane.core.routing import Priced
from controlplane.gateway import first_leg, turns
from controlplane.gateway.legs import LegError, LegRequest, PrefillReply, prefill_reply
from controlplane.gateway.running import Running
from controlplane.gateway.wire import Hedge
from controlplane.gateway.worker_state import WorkerState

_Task = asyncio.Task[PrefillReply]


@dataclass(slots=True)
class _Leg:
    """One of the two."""

    worker: WorkerState
    priced: Priced
    task: _Task
    is_second: bool = False


async def hedged(run: Running, leg: LegRequest, priced: Priced) -> PrefillReply | None:
    """Leg 1 has begun at `worker`: its answer, or that of a second one. None: none of them serves,
    another worker may. Raises `ClientFault`."""
    rules = run.plan.policies.scheduling.hedge
    budget = run.context.hedges.of(run.asked.model)
    budget.came(rules)
    worker = leg.worker
    legs = [_Leg(worker, priced, _send(run, leg))]
    try:
        await asyncio.wait((legs[0].task,), timeout=rules.after_seconds)
        if not legs[0].task.done():
            second = _second(run, worker, rules, budget)
            if second is not None:
                legs.append(second)
        return await _first_answer(run, legs)
    finally:
        await _cut_off(run, legs)


async def _first_answer(run: Running, legs: list[_Leg]) -> PrefillReply | None:
    left = list(legs)
    while True:
        await asyncio.wait([leg.task for leg in left], return_when=asyncio.FIRST_COMPLETED)
        done = next(leg for leg in left if leg.task.done())
        left.remove(done)
        try:
            reply = done.task.result()
        except LegError as error:
            if not left:
                first_leg.failed(run, done.worker, error)
                return None
            run.step(HedgeEnded(done.worker.row.id))
            run.leg_failed("prefill", done.worker.row.id, error)
            run.context.stats.retries_prefill += 1
        else:
            _won(run, done, left)
            return reply


def _second(
    run: Running, first: WorkerState, rules: HedgeRules, budget: HedgeBudget
) -> _Leg | None:
    """The next best worker that is free, if one may be asked."""
    found = _free_worker(run, first)
    if found is None:
        return None
    worker, priced = found
    leg = replace(turns.leg_of(run, priced), request_id=run.hedge_turn)
    if not budget.take():
        return None
    cluster, row, now = run.context.cluster, worker.row, monotonic()
    if not cluster.dispatch.enter_if_free(row.id, leg):
        return None
    asked, decision = run.asked, run.decision
    service = priced.prefill_seconds + priced.transfer_seconds
    worker.prefill_queue.start(asked.request_id, service, decision.prompt_tokens or 0, now)
    decision.hedge = Hedge(row.id, now - run.outcome.prefill_sent_at)
    run.step(HedgeStarted(row.id))
    cluster.health.started(row.id, now)
    run.context.stats.worker(row.id).requests += 1
    run.context.hedges.sent += 1
    sent = first_leg.leg_of(run, worker, first_leg.params(run, worker, priced))
    return _Leg(worker, priced, _send(run, sent), is_second=True)


def _free_worker(run: Running, first: WorkerState) -> tuple[WorkerState, Priced] | None:
    cluster = run.context.cluster
    for priced in run.plan.prefill:
        worker = cluster.workers.get(priced.option.worker_id)
        if worker is None or worker.row.id in (first.row.id, run.life.slot_worker):
            continue  # by name: another engine may have the first one's by now
        if worker.row.handshake != first.row.handshake or not run.may_send(worker):
            continue
        leg = replace(turns.leg_of(run, priced), request_id=run.hedge_turn)
        if cluster.dispatch.is_free(worker.row.id, leg):
            return worker, priced
    return None


def _send(run: Running, leg: LegRequest) -> _Task:
    async def exchange() -> PrefillReply:
        context = run.context
        _, answer = await context.sender.exchange(leg, context.settings.timeouts.prefill)
        return prefill_reply(answer, foreign=leg.worker.row.handshake == "nixl")

    return asyncio.get_running_loop().create_task(exchange())


def _won(run: Running, winner: _Leg, others: list[_Leg]) -> None:
    for other in others:
        run.step(HedgeEnded(other.worker.row.id))
    hedge = run.decision.hedge
    if hedge is not None:
        hedge.winner = "second" if winner.is_second else "first"
        run.context.hedges.won += winner.is_second
    run.decision.prefill_worker = winner.worker.row.id
    if winner.worker.row.engine == "emulated":
        run.decision.emulated = True
    first_leg.served(run, winner.worker, winner.priced, winner.task.result())


async def _cut_off(run: Running, legs: list[_Leg]) -> None:
    """Nothing of them goes on. One that is late by a moment may have staged what nobody takes."""
    late = [leg for leg in legs if not leg.task.done()]
    for leg in late:
        leg.task.cancel()
        run.context.cluster.health.no_verdict(leg.worker.row.id)
    await asyncio.gather(*(leg.task for leg in legs), return_exceptions=True)
    for leg in legs:
        task, row = leg.task, leg.worker.row
        is_lost = row.id != run.decision.prefill_worker and owes_release(row.handshake)
        if is_lost and not task.cancelled() and task.exception() is None:
            params = task.result().params
            taker = run.context.cluster.workers.get(run.decision.decode_worker)
            if params is not None:
                run.context.staged.release(taker, run.asked, params)
