"""What must hold of all transfers between any two events. Called by tests after each step."""

from __future__ import annotations

from workers.core.transfer_job import ARRIVED, DONE, MISSING, PENDING, Job
from workers.core.transfer_link import Link, LinkState
from workers.core.transfer_state import Transfers
from workers.core.transfer_types import Priority


def check_integrity(transfers: Transfers) -> None:
    """AssertionError names what is wrong. Reads only."""
    for link in transfers.links.values():
        _check_link(link)
    for name, job in transfers.jobs.items():
        assert job.request.transfer_id == name
        assert transfers.links[job.link].jobs.get(name) is job, "its link does not know it"
        _check_job(job)
    flying = sum(len(link.flights) for link in transfers.links.values())
    assert flying == sum(len(job.in_flight) for job in transfers.jobs.values()), "ops of nobody"
    assert len(transfers.jobs) <= transfers.limits.max_transfers
    assert len(transfers.links) <= transfers.limits.max_links


def _check_link(link: Link) -> None:
    flights = list(link.flights.values())
    assert link.flying_bytes == sum(flight.part.length for flight in flights), "bytes in flight"
    batch = [f for f in flights if f.job.request.priority is Priority.BATCH]
    assert link.flying_batch_bytes == sum(flight.part.length for flight in batch)
    assert len(flights) <= max(link.window_ops, link.widest_ops), "more ops than the device takes"
    widest = max(link.limits.window_bytes, link.widest_bytes)
    assert link.flying_bytes <= widest or len(flights) == 1, "window"
    assert link.state is LinkState.UP or not flights, "ops on a closed endpoint"
    for priority, queue in link.ready.items():
        for job in queue:
            assert job.queued, "in the queue, and does not know"
            assert job.request.priority is priority
            assert link.jobs.get(job.request.transfer_id) is job, "an ended transfer is queued"
        assert len(set(map(id, queue))) == len(queue), "queued twice"
    for job in link.jobs.values():
        assert job.delayed == sum(1 for entry in link.delayed if entry[2] is job)


def _check_job(job: Job) -> None:
    pieces, status = job.request.pieces, job.status
    unsettled = sum(1 for state in status if state in (PENDING, ARRIVED))
    assert unsettled == job.unsettled, f"{unsettled} pieces are open, counted {job.unsettled}"
    assert {i for i, state in enumerate(status) if state == MISSING} == set(job.missing)
    done = sum(pieces[i].num_bytes for i, state in enumerate(status) if state == DONE)
    assert done == job.num_bytes, "bytes are not accounted for"
    assert not job.done, "it is done and has not ended"
    sealing = [gather for gather in job.gathers.values() if gather.sealing]
    assert len(sealing) == job.sealing
    for gather in job.gathers.values():
        assert 0 <= gather.left <= gather.wanted
        flying = sum(part.length for part in job.in_flight.values() if part.piece in gather.indices)
        assert flying <= gather.left or job.ending or job.missing, "a byte is asked for twice"
