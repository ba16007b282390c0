"""One reliable connection with its completion queue and channel, guarded against pyverbs."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from workers.core.rdma_choice import Queues
from workers.transfer.rdma.send_queue import HeadRequest
from workers.transfer.rdma.verbs import close_once, made_with_descriptor

if TYPE_CHECKING:
    from workers.transfer.rdma.port import OpenPort

ACK_TIMEOUT: Final = 14  # 4.096 us * 2^14 = 67 ms
RETRIES: Final = 6  # 7 would be without end on some devices
RNR_RETRIES: Final = 6
RNR_TIMER: Final = 22  # 20 ms: six of them outlast a receiver that is late by 100 ms
HOP_LIMIT: Final = 64
POLL_BATCH: Final = 64
RECEIVE_IDS: Final = 1 << 62
"""Ids of receives start here, those of sends count up from 1."""
MTU_CODES: Final = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}


class Address(msgspec.Struct, frozen=True):
    """What the other end needs to connect to a queue pair."""

    gid: str
    lid: int
    qp_num: int
    psn: int


class Done(NamedTuple):
    """A work completion. In an error only `wr_id` and `status` can be relied on."""

    wr_id: int
    status: int
    byte_len: int

    @property
    def received(self) -> bool:
        """Of a receive: told by its id, since an error leaves the opcode undefined."""
        return self.wr_id >= RECEIVE_IDS


class ClosedError(Exception):
    """Use after close, which pyverbs would answer with a segmentation fault."""


class QueuePair:
    """Made in RESET; `connect` makes it ready to send. `close` is idempotent.

    `descriptor` is readable when there are completions, after `arm`.
    """

    def __init__(
        self, port: OpenPort, queues: Queues, *, remote_read: bool, remote_write: bool
    ) -> None:
        self._verbs = verbs = port.verbs
        self._port = port
        self._objects: list[Any] = []
        self.queues = queues
        self._access = (
            verbs.constant("IBV_ACCESS_LOCAL_WRITE")
            | (verbs.constant("IBV_ACCESS_REMOTE_READ") if remote_read else 0)
            | (verbs.constant("IBV_ACCESS_REMOTE_WRITE") if remote_write else 0)
        )
        try:
            self._make()
        except BaseException:
            close_once(self._objects)
            raise
        port.count(1)

    def _make(self) -> None:
        verbs, port, queues = self._verbs, self._port, self.queues
        self._channel, self.descriptor = made_with_descriptor(
            lambda: verbs.cq.CompChannel(port.context)
        )
        self._objects.append(self._channel)
        self._cq = verbs.cq.CQ(port.context, queues.completions, None, self._channel)
        self._objects.append(self._cq)
        cap = verbs.qp.QPCap(
            max_send_wr=queues.send_requests,
            max_recv_wr=queues.receive_requests,
            max_send_sge=queues.segments,
            max_recv_sge=1,
            max_inline_data=queues.inline_bytes,
        )
        self._qp = verbs.qp.QP(
            port.pd,
            verbs.qp.QPInitAttr(
                qp_type=verbs.constant("IBV_QPT_RC"), scq=self._cq, rcq=self._cq, cap=cap,
                sq_sig_all=0,
            ),
        )  # fmt: skip
        self._objects.append(self._qp)
        self._head = HeadRequest(verbs.wr.SGE, verbs.wr.SendWR)
        self._bad = HeadRequest(verbs.wr.SGE, verbs.wr.SendWR)
        self._objects += [self._head, self._bad]
        self.qp_num = int(self._qp.qp_num)

    @property
    def closed(self) -> bool:
        return not self._objects

    def address(self, psn: int) -> Address:
        return Address(self._port.gid.gid, self._port.lid, self.qp_num, psn)

    def connect(self, peer: Address, *, psn: int, mtu: int, reads: int) -> None:
        """RESET -> RTS. `mtu` in bytes, the smaller of both ends' active ones."""
        self._check()
        verbs = self._verbs
        attributes = verbs.qp.QPAttr(port_num=self._port.number)
        attributes.pkey_index = 0
        attributes.qp_access_flags = self._access
        attributes.path_mtu = MTU_CODES[mtu]
        attributes.dest_qp_num = peer.qp_num
        attributes.rq_psn = peer.psn
        attributes.sq_psn = psn
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = reads
        attributes.min_rnr_timer = RNR_TIMER
        attributes.timeout = ACK_TIMEOUT
        attributes.retry_cnt = RETRIES
        attributes.rnr_retry = RNR_RETRIES
        try:
            route = verbs.addr.GlobalRoute(
                dgid=verbs.addr.GID(peer.gid), sgid_index=self._port.gid.index, hop_limit=HOP_LIMIT
            )
            attributes.ah_attr = verbs.addr.AHAttr(
                port_num=self._port.number, is_global=1, gr=route, dlid=peer.lid
            )
            self._qp.to_rts(attributes)
        except verbs.error as error:
            raise as_os_error(error) from error

    def post(self, chain: int, count: int) -> int:
        """See `send_queue.Poster`. OSError: refused for another reason than a full queue."""
        self._check()
        self._head.load(chain)
        first = self._head.wr_id
        try:
            self._qp.post_send(self._head.object, self._bad.object)
        except self._verbs.error as error:
            if getattr(error, "error_code", 0) != errno.ENOMEM:
                raise as_os_error(error) from error
            return max(0, min(count, self._bad.wr_id - first))
        return count

    def post_receive(self, request: Any) -> None:
        """A prebuilt `RecvWR`, to be posted again after each completion."""
        self._check()
        try:
            self._qp.post_recv(request)
        except self._verbs.error as error:
            raise as_os_error(error) from error

    def poll(self) -> list[Done]:
        """Up to `POLL_BATCH` completions."""
        self._check()
        try:
            count, found = self._cq.poll(POLL_BATCH)
        except self._verbs.error as error:
            raise as_os_error(error) from error
        if not count:
            return []
        return [Done(int(wc.wr_id), int(wc.status), int(wc.byte_len)) for wc in found]

    def arm(self) -> None:
        """Ask for one event at the next completion. Poll once more after it."""
        self._check()
        try:
            self._cq.req_notify()
        except self._verbs.error as error:
            raise as_os_error(error) from error

    def take_events(self) -> int:
        """Acknowledge what made `descriptor` readable."""
        self._check()
        count = 0
        with contextlib.suppress(self._verbs.error):  # EAGAIN: the descriptor does not block
            while True:
                self._channel.get_cq_event(self._cq)
                count += 1
        if count:
            self._cq.ack_events(count)
        return count

    def fail(self) -> None:
        """Into ERR: what is posted comes back flushed, and nothing more goes out."""
        self._check()
        with contextlib.suppress(self._verbs.error):
            attributes = self._verbs.qp.QPAttr(
                qp_state=self._verbs.constant("IBV_QPS_ERR"), cur_qp_state=self._state()
            )
            self._qp.modify(attributes, self._verbs.constant("IBV_QP_STATE"))

    @property
    def state(self) -> int:
        """IBV_QPS_*: 0 RESET, 3 RTS, 6 ERR."""
        self._check()
        return self._state()

    def close(self) -> None:
        """Nothing of it reads or writes memory after this."""
        if self._objects:
            self._port.count(-1)
        close_once(self._objects)

    def _state(self) -> int:
        attributes, _ = self._qp.query(self._verbs.constant("IBV_QP_STATE"))
        return int(attributes.qp_state)

    def _check(self) -> None:
        if not self._objects:
            raise ClosedError("this queue pair is closed")


def as_os_error(error: Exception) -> OSError:
    code = int(getattr(error, "error_code", 0) or 0)
    return OSError(code, str(error))
