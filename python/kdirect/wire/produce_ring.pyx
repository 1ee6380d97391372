# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A ring of WRITEs with credits (`kdirect.rdma.credit_ring`) whose WRITEs are produce requests.

Owns: what tells the peer of a WRITE, how the peer gives credits back, and the piece of a WRITE that
the transport takes from where the caller has it.  What may not enter: where the bytes come from and
go to, and what an acknowledgement says beyond "one credit more".  A producer's `FileWriter`
(`kdirect.client.direct_write`) is such a ring: its sources are a send buffer, its targets positions
in a granted head file, and its acknowledgements are entries of their own.

What tells the peer of a WRITE is its immediate data, ``file id << 16 | order``; with `set_notices`
it is a plain WRITE followed by a SEND of file id, order and length, and the SEND's completion
counts as the WRITE's.  The peer gives credits back by a WRITE_WITH_IMM of its own, ``file id << 16
| count``, which the `AckRouter` hands to the ring that is attached under this file id.  The credits
of all rings of a queue pair together are the receives that the peer keeps posted
(`AckRouter.limit`).

Memory.  A notice belongs to the transport from its post to its completion, as the source does;
WRITE number i has entry i of the window, which is deregistered by the ring's owner after the queue
pair has nothing under way.

There is no lock.  One thread at a time calls a ring and its router; see `AckRouter`.
"""

from libc.errno cimport EAGAIN
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kdirect.format.layout cimport (
    IMM_FILE_ID_SHIFT,
    IMM_ORDER_MASK,
    NOTICE_BYTES,
    NOTICE_FILE_ID,
    NOTICE_LENGTH,
    NOTICE_ORDER,
)
from kdirect.rdma.contract cimport MemoryRegion, QueuePair
from kdirect.rdma.credit_ring cimport (
    POST_FAILED, POSTED, QUEUE_FULL, source_of, source_t, target_t,
)
from kdirect.wire.ack_router cimport DATA, AckReceiver, AckRouter

from kdirect.errors import QueuePairError


cdef class ProduceRing(AckReceiver):
    """See the module.  `router`: polls the completions of `qp`."""

    def __init__(self, AckRouter router, QueuePair qp, int window):
        AckReceiver.__init__(self, router, qp, window)
        self._router = router

    def set_notices(self, MemoryRegion notices):
        """Tell the peer of WRITEs by a SEND from this memory, one notice for each slot of the
        window.  Before the first WRITE."""
        if notices.length < self.window * NOTICE_BYTES:
            raise ValueError("the memory for notices is smaller than the window")
        self._notices = notices

    cdef int c_post_request(self, const source_t* source, const target_t* target,
                            large_value_t* value, bint must) noexcept nogil:
        """Post the next request, as `c_post` does: the bytes of `source`, but for those of a large
        value, which the transport may take from where they are.  Where it does not, they are copied
        into the hole, and there is no large value then."""
        self._value = value
        return self.c_post(source, target, must)

    cdef int c_try(self, const source_t* source, const target_t* target) noexcept nogil:
        cdef uint64_t id = target.imm >> IMM_FILE_ID_SHIFT
        cdef large_value_t* value = self._value
        cdef int rc
        if value.hole:
            rc = self._qp.c_post_write_imm_inline(
                id, source.address, source.lkey, source.length, value.hole, value.data,
                value.length, target.address, target.rkey, target.imm)
            if rc != EAGAIN:
                return rc
            memcpy(source.data + value.hole, value.data, value.length)
            value.hole = 0
        if self._notices is None:
            return self._qp.c_post_write_imm(
                id, source.address, source.lkey, source.length, target.address, target.rkey,
                target.imm)
        return self._try_with_notice(source, target)

    cdef int _try_with_notice(self, const source_t* source, const target_t* target) noexcept nogil:
        cdef uint64_t notice = (self.posted & (self.window - 1)) * NOTICE_BYTES
        cdef uint16_t file_id = <uint16_t> (target.imm >> IMM_FILE_ID_SHIFT)
        cdef uint16_t order = <uint16_t> (target.imm & IMM_ORDER_MASK)
        cdef int rc
        if not self._begun:
            memcpy(self._notices.data + notice + NOTICE_FILE_ID, &file_id, 2)
            memcpy(self._notices.data + notice + NOTICE_ORDER, &order, 2)
            memcpy(self._notices.data + notice + NOTICE_LENGTH, &source.length, 4)
            rc = self._qp.c_post_write(
                (<uint64_t> DATA << 32) | file_id, source.address, source.lkey, source.length,
                target.address, target.rkey)
            if rc != 0:
                return rc
            self._queue.sends_under_way += 1
            self._begun = True
        return self._qp.c_post_send(
            file_id, self._notices.address + notice, self._notices.lkey, NOTICE_BYTES)

    def post(self, MemoryRegion source, uint64_t start, uint32_t length, uint64_t address,
             uint32_t rkey, uint16_t file_id, uint16_t order=0):
        """Post the next WRITE: `length` bytes from `start` of registered memory to `address` of the
        peer's.  Returns whether it was posted: it is not while there is no credit, or no room in
        the send queue.  QueuePairError when the queue pair is broken.  A large WRITE or a rare one
        may be posted from Python; a compiled owner calls `c_post_request`."""
        cdef source_t bytes_of
        cdef target_t target
        cdef large_value_t none
        cdef int rc = QUEUE_FULL
        source_of(&bytes_of, source, start, length)
        target.address = address
        target.rkey = rkey
        target.imm = request_imm(file_id, order)
        none.hole = 0
        with nogil:
            if self._queue._status != 0:
                rc = POST_FAILED
            elif self.c_may_post():
                rc = self.c_post_request(&bytes_of, &target, &none, False)
        if rc == POST_FAILED:
            raise QueuePairError(
                f"the queue pair is broken ({self._queue.broken})",
                hint="open a new one; what was not acknowledged may have arrived")
        return rc == POSTED

    cdef int c_take_acks(self, uint16_t file_id, uint16_t count) noexcept nogil:
        """The peer gives `count` credits back.  A ring whose acknowledgements say more overrides
        this."""
        return count if self.c_return_credits(count) else 0
