"""One request's walk: plan, slot, leg 1, leg 2, record. Every way out releases what it held."""

import asyncio
from time import monotonic

from controlplane.core.dispatch_queue import Offer
from controlplane.core.lifecycle import ENDS
from controlplane.gateway import turns
from controlplane.gateway.answers import AnswerError, CancelledByOperatorError
from controlplane.gateway.asked import Asked
from controlplane.gateway.decode import decode
from controlplane.gateway.learning import expect
from controlplane.gateway.legs import ClientFault
from controlplane.gateway.prefill import prefill
from controlplane.gateway.running import Context, Running


async def walk(context: Context, asked: Asked) -> None:
    """Answers the client, or raises `AnswerError` for the server to answer."""
    run = Running(context, asked)
    stats = context.stats
    stats.in_flight += 1
    context.running[asked.request_id] = run
    try:
        if not run.plan.admission.admitted:
            raise _turned_down(run)
        if context.cluster.unpaired:
            _check_paired(run)
        if run.plan.held.keys and run.plan.prefill and not run.unsplit:
            expect(run, run.plan.prefill[0].option.node_id)
        offer = turns.enter(run)
        if offer is not Offer.GO:
            await turns.wait(run, offer)
        await _take_slot(run)
        prefilled = await prefill(run)
        if prefilled is not None:
            await decode(run, prefilled)
    except AnswerError as error:
        run.fail(error)
        raise
    except ClientFault as fault:
        run.refused_by_engine(fault)
    except asyncio.CancelledError:
        if run.cause is None:
            run.client_left()
            raise
        _interrupted(run, run.cause)
    finally:
        stats.in_flight -= 1
        run.ensure_ended()
        context.running.pop(asked.request_id, None)


def _interrupted(run: Running, cause: AnswerError | ClientFault) -> None:
    """Ended from outside: its client is told why, unless a stream has said so already."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
    if run.life.state in ENDS:
        return
    if isinstance(cause, ClientFault):
        run.refused_by_engine(cause)
        return
    if isinstance(cause, CancelledByOperatorError):
        run.cancelled(cause)
    else:
        run.fail(cause)
    run.cause = None  # its traceback holds the request, which only the collector would find
    try:
        raise cause
    finally:
        del cause


def _turned_down(run: Running) -> AnswerError:
    """By admission."""
    admission = run.plan.admission
    revisions = run.plan.policies.revisions
    named = ", ".join(f"{k} revision {v}" for k, v in revisions.items() if k.startswith("slo/"))
    message = f"rejected: {admission.reason} ({named or 'no slo policy'}); try again later"
    code, seconds = f"slo_{admission.breaks}", admission.retry_after_seconds
    error = AnswerError(429, message, code, retry_after=seconds)
    run.reject(error)
    return error


def _check_paired(run: Running) -> None:
    """One worker alone may still serve what is not split."""
    why = run.context.cluster.unpaired.get(run.asked.model)
    if why is not None and not run.unsplit:
        message = f"no two workers of model {run.asked.model} fit: {why}"
        raise AnswerError(503, message, "handshakes_do_not_pair", retry_after=30)


async def _take_slot(run: Running) -> None:
    plan = run.plan
    if plan.free_decode:
        health = run.context.cluster.health
        worker_id = plan.free_decode[0].worker_id if health.is_sound else _first(run)
        run.context.cluster.slots.take(run.asked.request_id, worker_id, plan.kv_tokens)
    elif plan.decode:
        worker_id = await _wait_for_slot(run)
    else:
        raise _nobody(run, "decode")
    run.hold_slot(worker_id)
    run.outcome.slot_at = run.outcome.slot_held_at


def _first(run: Running) -> str:
    """The best free decode worker, or one that is due its trial."""
    health, free = run.context.cluster.health, run.plan.free_decode
    if health.has_ejected:
        now = monotonic()
        for option in free:
            if health.overdue(option.worker_id, now) is not None:
                return option.worker_id
    return free[0].worker_id


async def _wait_for_slot(run: Running) -> str:
    asked, cluster = run.asked, run.context.cluster
    longest = run.context.settings.timeouts.slot
    plan, seconds = run.plan, min(longest, turns.seconds_left(run))
    rank = plan.standing.rank
    worker_id = await cluster.wait_for_slot(
        asked.request_id, asked.model, seconds, plan.kv_tokens, rank
    )
    if worker_id is None and seconds < longest:
        raise turns.no_slot_in_time(run)
    if worker_id is None:
        waiting = cluster.slots.num_waiting
        message = (
            f"all decode slots of {asked.model} are taken ({waiting} requests wait,"
            f" at most {cluster.slots.max_waiting}, {seconds:g} s each)"
        )
        raise AnswerError(503, message, "no_slot", retry_after=5)
    return worker_id


def _nobody(run: Running, role: str) -> AnswerError:
    model = run.asked.model
    why = run.context.cluster.why_nobody(model, role)
    message = f"no {role} worker of model {model} takes requests: {why}"
    run.decision.failed_leg = "decode"
    return AnswerError(503, message, f"no_{role}_worker", retry_after=1)
