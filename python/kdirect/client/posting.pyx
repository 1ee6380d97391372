# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""How a request gets into the send queue: as a WRITE_WITH_IMM, or as a WRITE and a notice.

Owns: the work requests of one writer's requests, and the memory of their notices.  What may not
enter: where a request goes, and when (`kdirect.client.direct_write`).

Memory.  Each notice belongs to the transport from its post to its completion; request i of the
window has entry i.  The notices are deregistered by the writer, after its queue pair has nothing
under way.
"""

from libc.errno cimport EAGAIN, ENOMEM
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kdirect.client.ack_router cimport DATA, AckRouter
from kdirect.client.send_buffer cimport SendBuffer
from kdirect.machine cimport kd_pause
from kdirect.format.layout cimport (
    IMM_FILE_ID_SHIFT,
    NOTICE_BYTES,
    NOTICE_FILE_ID,
    NOTICE_LENGTH,
    NOTICE_ORDER,
)
from kdirect.rdma.contract cimport MemoryRegion, QueuePair


cdef class Poster:
    """See the module.  `notices`: None when requests have immediate data."""

    def __init__(self, AckRouter router, QueuePair qp, SendBuffer buffer):
        self._router = router
        self._qp = qp
        self._buffer = buffer

    cdef int c_post(self, uint64_t start, uint32_t length, const target_t* target,
                    large_value_t* value, uint64_t sequence, bint must) noexcept nogil:
        """Post the request whose bytes are at `start` of the send buffer, but for those of a large
        value, which the transport may take from where they are.  Where it does not, they are copied
        into the hole, and the request has none then.

        POSTED, QUEUE_FULL (not when the request `must` follow a reservation, nor when its WRITE is
        posted and the notice must follow) or POST_FAILED."""
        cdef uint64_t notice = 0
        cdef bint full = False, written = False
        cdef int rc
        if self.notices is not None:
            notice = (sequence & (self._buffer.window - 1)) * NOTICE_BYTES
            memcpy(self.notices.data + notice + NOTICE_FILE_ID, &target.file_id, 2)
            memcpy(self.notices.data + notice + NOTICE_ORDER, &target.order, 2)
            memcpy(self.notices.data + notice + NOTICE_LENGTH, &length, 4)
        while True:
            rc = self.c_try(start, length, target, value, notice, &written)
            if rc != ENOMEM:
                break
            if full and not (must or written):
                return QUEUE_FULL
            full = True
            self._router.c_drain()
            if self._router._status != 0:
                return POST_FAILED
            kd_pause()
        if rc != 0:
            self._router.c_fail(rc)
            return POST_FAILED
        self._router.sends_under_way += 1
        self._router.requests_under_way += 1
        return POSTED

    cdef int c_try(self, uint64_t start, uint32_t length, const target_t* target,
                   large_value_t* value, uint64_t notice, bint* written) noexcept nogil:
        """Post what is not posted yet; the errno that the transport gave."""
        cdef uint64_t at = self._buffer.region.address + start
        cdef uint32_t lkey = self._buffer.region.lkey
        cdef uint32_t imm = (<uint32_t> target.file_id << IMM_FILE_ID_SHIFT) | target.order
        cdef uint64_t id = target.file_id
        cdef int rc
        if value.hole:
            rc = self._qp.c_post_write_imm_inline(
                id, at, lkey, length, value.hole, value.data, value.length,
                target.address, target.rkey, imm)
            if rc != EAGAIN:
                return rc
            memcpy(self._buffer.region.data + start + value.hole, value.data, value.length)
            value.hole = 0
        if self.notices is None:
            return self._qp.c_post_write_imm(
                id, at, lkey, length, target.address, target.rkey, imm)
        if not written[0]:
            rc = self._qp.c_post_write(
                (<uint64_t> DATA << 32) | id, at, lkey, length, target.address, target.rkey)
            if rc != 0:
                return rc
            self._router.sends_under_way += 1
            written[0] = True
        return self._qp.c_post_send(
            id, self.notices.address + notice, self.notices.lkey, NOTICE_BYTES)
