# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Which ring a completion is for: the completions of one queue pair (KafkaDirect §4.2.2).

Owns: the two completion queues of a queue pair whose rings (`kdirect.wire.produce_ring`) send
WRITEs and get acknowledgements, the receives that are kept posted for these, and the table of file
ids.  A file id is the 16 bits that name a ring to both sides; a producer's ring has that of the
file that was granted.  What may not enter: what an acknowledgement says, which its receiver reads.

A completion on the send queue carries in its work request's id the file id that the WRITE, or an
atomic, was for.  The immediate data of one on the receive queue, ``file id << 16 | count``, says
for which ring how many acknowledgements are new.

One thread at a time calls a router and the rings on it: a producer's, with the producer's lock
held.
"""

import time

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.layout cimport IMM_FILE_ID_SHIFT
from kdirect.rdma.contract cimport (
    WC_RECV_RDMA_WITH_IMM,
    WC_SUCCESS,
    CompletionQueue,
    QueuePair,
    work_completion,
)
from kdirect.rdma.credit_ring cimport ERRNO_STATUS, CreditRing, WriteQueue

cdef enum:
    POLL = 64


cdef class AckReceiver(CreditRing):
    """A ring that acknowledgements under its file ids are handed to, and its completions."""

    cdef int c_take_acks(self, uint16_t file_id, uint16_t count) noexcept nogil:
        """`count` acknowledgements are new under this file id; the number of answers among
        them."""
        return 0

    cdef void c_atomic_done(self) noexcept nogil:
        """An atomic has completed."""


cdef class AckRouter(WriteQueue):
    """Polls one queue pair's completions and hands them, and acknowledgements, to the receiver
    whose file id they are for.

    `receives` are posted at once; `limit`: WRITEs that may be unacknowledged over all rings, which
    the peer keeps receives posted for; `spin_us`: how long a wait polls before it sleeps;
    `monotonic`: the clock (seconds) of waits.
    """

    def __init__(self, QueuePair qp, CompletionQueue send_cq, CompletionQueue recv_cq,
                 int receives, int limit, spin_us=50, monotonic=time.monotonic):
        WriteQueue.__init__(self, qp, send_cq, limit, monotonic)
        self._recv_cq = recv_cq
        self._receivers = {}
        self._spin_ns = int(spin_us) * 1000
        for _ in range(receives):
            qp.post_recv(0)

    def attach(self, int file_id, AckReceiver receiver):
        """Hand what comes for `file_id` to `receiver`."""
        self._receivers[file_id] = receiver
        self._by_file[file_id] = <void*> receiver
        self._stray[file_id] = 0

    def take_stray(self, uint16_t file_id):
        """Has news come under a file id that no receiver had?  Nobody can say any more which
        acknowledgements are new, so the file is not to be opened."""
        stray, self._stray[file_id] = self._stray[file_id] != 0, 0
        return stray

    def detach(self, int file_id):
        """Drop what comes for `file_id` from now on."""
        if self._receivers.pop(file_id, None) is not None:
            self._by_file[file_id] = NULL

    cdef int c_drain(self) noexcept nogil:
        """Take every completion there is.  Returns the number of acknowledgements, or -1 when the
        queue pair broke."""
        cdef work_completion wcs[POLL]
        cdef int i, n, got = 0
        cdef uint16_t file_id
        cdef void* w
        while self.sends_under_way > 0:
            n = self._send_cq.c_poll(wcs, POLL)
            if n <= 0:
                break
            for i in range(n):
                if wcs[i].status != WC_SUCCESS and self._status == 0:
                    self._status = wcs[i].status
                w = self._by_file[<uint16_t> wcs[i].wr_id]
                if w != NULL:
                    if wcs[i].wr_id >> 32 == ATOMIC:
                        (<AckReceiver> w).c_atomic_done()
                    elif wcs[i].wr_id >> 32 != DATA:
                        (<AckReceiver> w).c_send_done()
            self.sends_under_way -= <uint64_t> n
        while True:
            n = self._recv_cq.c_poll(wcs, POLL)
            if n <= 0:
                if n < 0 and self._status == 0:
                    self._status = <uint32_t> (ERRNO_STATUS - n)
                break
            for i in range(n):
                if wcs[i].status != WC_SUCCESS:
                    if self._status == 0:
                        self._status = wcs[i].status
                    continue
                self._qp.c_post_recv(0, 0, 0, 0)
                if wcs[i].opcode == WC_RECV_RDMA_WITH_IMM:
                    file_id = <uint16_t> (wcs[i].imm_data >> IMM_FILE_ID_SHIFT)
                    w = self._by_file[file_id]
                    if w != NULL:
                        got += (<AckReceiver> w).c_take_acks(file_id, <uint16_t> wcs[i].imm_data)
                    else:
                        self._stray[file_id] = 1
                        self.strays += 1
            if n < POLL:
                break
        return -1 if self._status != 0 else got

    def drain(self):
        """Take what is there without waiting; the number of acknowledgements."""
        cdef int n
        with nogil:
            n = self.c_drain()
        return n

    def wait(self, int timeout_ms):
        """Sleep until a completion comes; True if one may have come."""
        return self._recv_cq.wait(timeout_ms, 0)
