# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Idempotent producing: producer id, epoch and sequence numbers, the same over every datapath
(Kafka's KIP-98, KIP-360).

Owns: the identity under which one producer writes one partition, and the stamp that it puts into
batches.  What may not enter: when a batch is sent or repeated.

A batch is stamped once, before it is first sent.  It is repeated with the same stamp, over
whichever path, so the broker recognises the repetition.

A batch that failed for good leaves a gap in the sequence, and the broker takes no batch after a
gap.  Then the identity is renewed: what was refused after the gap, and all that follows, gets the
next epoch and sequences from 0.  A batch that is stamped again this way is known not to be in the
log, because its sequence came after one that was refused.

One thread at a time: the producer's lock.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT32_MAX, uint32_t
from libc.string cimport memcpy

from kdirect.format.batch cimport BATCH_OK, batch_info, parse_batch_header, stamp_producer
from kdirect.format.layout cimport ATTRIBUTE_TRANSACTIONAL, BATCH_ATTRIBUTES, BATCH_CRC
from kdirect.format.wire cimport kd_get16, kd_put16, kd_put32

from kdirect.errors import ProtocolError

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef enum:
    MAX_EPOCH = 32767


cdef void mark_transactional(uint8_t* p, uint32_t size) noexcept nogil:
    kd_put16(p + BATCH_ATTRIBUTES, kd_get16(p + BATCH_ATTRIBUTES) | ATTRIBUTE_TRANSACTIONAL)
    kd_put32(p + BATCH_CRC, kd_crc32c(0, p + BATCH_ATTRIBUTES, size - BATCH_ATTRIBUTES))


cdef inline int32_t add_sequence(int32_t sequence, int32_t delta) noexcept nogil:
    """Sequence numbers run from 0 to INT32_MAX and start again."""
    if sequence > INT32_MAX - delta:
        return delta - (INT32_MAX - sequence) - 1
    return sequence + delta


cdef int32_t add_one(int32_t sequence) noexcept nogil:
    return add_sequence(sequence, 1)


cdef class ProducerIdentity:
    """See the module.  When the epochs of this producer id are used up, `renew()` is called for a
    new (producer id, epoch); it returns None where the broker gives out none.  The batches of a
    `transactional` one belong to a transaction; its epochs come from the coordinator (`restart`),
    and it never renews itself."""

    def __init__(self, int64_t producer_id, int16_t epoch, renew, *, transactional=False):
        self.producer_id = producer_id
        self.epoch = epoch
        self.next_sequence = 0
        self.transactional = transactional
        self._renew = renew

    cdef int32_t c_stamp(self, uint8_t* p, uint64_t length) noexcept nogil:
        cdef batch_info info
        cdef int32_t sequence = self.next_sequence, records
        while length and parse_batch_header(p, length, &info) == BATCH_OK and info.size <= length:
            if info.producer_id == -1:
                stamp_producer(p, info.size, self.producer_id, self.epoch, sequence)
                if self.transactional:
                    mark_transactional(p, info.size)
                records = 1
                if 0 <= info.last_offset_delta < INT32_MAX:
                    records = info.last_offset_delta + 1
                sequence = add_sequence(sequence, records)
            p += info.size
            length -= info.size
        return sequence

    cdef void c_sent(self, int32_t sequence) noexcept nogil:
        self.next_sequence = sequence

    def stamp(self, data):
        """`data` (whole batches) as bytes.  Those that had no stamp get one, and count as
        sent."""
        cdef const uint8_t[::1] view = data
        cdef bytes out = PyBytes_FromStringAndSize(NULL, view.shape[0])
        cdef uint8_t* p = <uint8_t*> PyBytes_AS_STRING(out)
        if view.shape[0]:
            memcpy(p, &view[0], view.shape[0])
            self.c_sent(self.c_stamp(p, <uint64_t> view.shape[0]))
        return out

    def restart(self, int64_t producer_id, int16_t epoch):
        """Go on under this id and epoch, which the coordinator gave; from sequence 0 if they are
        new."""
        if producer_id != self.producer_id or epoch != self.epoch:
            self.producer_id, self.epoch = producer_id, epoch
            self.next_sequence = 0

    def renew(self):
        """Go on under the next epoch, from sequence 0.  Raises what asking for a new producer id
        raises, ProtocolError where there is none to be had; the identity is as before then."""
        if self.epoch < MAX_EPOCH:
            self.epoch += 1
        else:
            fresh = self._renew()
            if fresh is None:
                raise ProtocolError(
                    f"the epochs of producer id {self.producer_id} are used up, and the broker"
                    " gives out no producer ids any more",
                    hint="use a broker that does, or switch enable.idempotence off")
            self.producer_id, self.epoch = fresh
        self.next_sequence = 0

    @staticmethod
    def unstamped(data):
        """`data` (whole batches) as bytes, with no producer id and no sequence in any batch, so
        that `stamp` stamps them."""
        cdef const uint8_t[::1] view = data
        cdef bytes out = PyBytes_FromStringAndSize(NULL, view.shape[0])
        cdef uint8_t* p = <uint8_t*> PyBytes_AS_STRING(out)
        cdef uint64_t length = <uint64_t> view.shape[0]
        cdef batch_info info
        if length:
            memcpy(p, &view[0], length)
        while length and parse_batch_header(p, length, &info) == BATCH_OK and info.size <= length:
            stamp_producer(p, info.size, -1, -1, -1)
            p += info.size
            length -= info.size
        return out
