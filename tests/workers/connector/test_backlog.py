from __future__ import annotations

import pytest
import torch

from workers.connector.backlog import Backlog, KeptRun
from workers.core.messages import PreparedStore, SlotRef

SIZE = 8


def run_of(*hashes, parent=b"", kept_at=0.0, asked=False):
    return KeptRun("owner", b"n", "", parent, list(hashes), kept_at, asked)


def keep(backlog, run, bound=100):
    def gather(first, into):
        for index, payload in enumerate(into, first + 1):
            payload.fill_(index)

    return backlog.keep(run, gather, bound)


@pytest.fixture
def backlog():
    return Backlog(SIZE, 10 * SIZE, max_age_seconds=5.0)


class TestKeep:
    def test_bytes_are_copied(self, backlog):
        assert keep(backlog, run_of(b"a", b"b")) == 2
        seen = []
        backlog.retry(lambda run: seen.extend(p.clone() for p in run.payloads) or 2, 0.0)
        assert [int(payload[0]) for payload in seen] == [1, 2]
        assert backlog.num_blocks == 0

    def test_its_bound_is_kept_and_what_is_cut_off_is_a_hole(self, backlog):
        assert keep(backlog, run_of(*(bytes([i]) for i in range(12)))) == 10
        assert backlog.share == 1.0
        assert backlog.counts.holes == 1
        assert keep(backlog, run_of(b"x")) == 0
        assert backlog.counts.holes == 2

    def test_the_pools_own_bound_holds_too(self, backlog):
        assert keep(backlog, run_of(b"a", b"b", b"c"), bound=2) == 2

    def test_what_another_request_has_here_is_kept_once(self, backlog):
        keep(backlog, run_of(b"a", b"b"))
        assert keep(backlog, run_of(b"a", b"b")) == 2
        assert keep(backlog, run_of(b"a", b"b", b"c")) == 3
        assert backlog.num_blocks == 3
        offered = []
        backlog.retry(lambda run: offered.append((run.parent, list(run.block_hashes))) or 0, 0.0)
        assert offered == [(b"", [b"a", b"b"]), (b"b", [b"c"])]

    def test_it_knows_what_must_follow(self, backlog):
        keep(backlog, run_of(b"a", b"b"))
        assert backlog.follows(b"b")
        assert not backlog.follows(b"z")
        assert not backlog.follows(b"")

    def test_buffers_are_used_again(self, backlog):
        keep(backlog, run_of(b"a"))
        taken = []
        backlog.retry(lambda run: taken.append(run.payloads[0].data_ptr()) or 1, 0.0)
        again = run_of(b"b")
        keep(backlog, again)
        assert again.payloads[0].data_ptr() == taken[0]


class TestRetry:
    def test_without_runs_there_is_nothing_to_do(self, backlog):
        assert backlog.retry(lambda run: 1, 0.0) is None

    def test_a_part_taken_moves_the_parent(self, backlog):
        keep(backlog, run_of(b"a", b"b", b"c"))
        assert backlog.retry(lambda run: 2, 0.0) is True
        offered = []
        assert backlog.retry(lambda run: offered.append(run) or 0, 0.0) is False
        assert (offered[0].parent, offered[0].block_hashes) == (b"b", [b"c"])
        assert backlog.num_blocks == 1
        assert backlog.counts.retried == 2

    def test_what_gets_too_old_is_dropped_and_counted(self, backlog):
        keep(backlog, run_of(b"a", b"b", kept_at=1.0))
        assert backlog.retry(lambda run: 0, 6.0) is False
        assert backlog.retry(lambda run: 0, 6.1) is None
        assert (backlog.counts.expired, backlog.counts.holes) == (2, 1)
        assert not backlog.follows(b"a")

    def test_an_answer_under_way_is_waited_for(self, backlog):
        keep(backlog, run_of(b"a", asked=True))
        assert backlog.retry(lambda run: 1, 1.0) is False
        answer = PreparedStore([SlotRef(3, 4)])
        assert backlog.grant("owner", b"a", answer)
        granted = []
        assert backlog.retry(lambda run: granted.append(run.granted) or 1, 1.0) is True
        assert granted == [answer]

    def test_an_answer_that_does_not_come_is_asked_for_again(self, backlog):
        keep(backlog, run_of(b"a", asked=True))
        assert backlog.retry(lambda run: 1, 3.0) is True

    def test_a_grant_is_used_once(self, backlog):
        keep(backlog, run_of(b"a", b"b", asked=True))
        backlog.grant("owner", b"a", PreparedStore([SlotRef(3, 4), None], 1))
        backlog.retry(lambda run: 1, 0.1)
        left = []
        backlog.retry(lambda run: left.append(run.granted) or 1, 0.2)
        assert left == [None]

    @pytest.mark.parametrize(("owner", "key"), [("other", b"a"), ("owner", b"b")])
    def test_a_grant_for_nobody_here(self, backlog, owner, key):
        keep(backlog, run_of(b"a", asked=True))
        assert not backlog.grant(owner, key, PreparedStore([]))

    def test_nothing_granted_to_who_did_not_ask(self, backlog):
        keep(backlog, run_of(b"a"))
        assert not backlog.grant("owner", b"a", PreparedStore([]))


def test_payloads_are_plain_bytes(backlog):
    run = run_of(b"a")
    keep(backlog, run)
    assert run.payloads[0].dtype is torch.uint8
    assert run.payloads[0].shape == (SIZE,)
