"""Records as objects: see message.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kdirect.format.batch cimport batch_info
from kdirect.format.chain cimport chain_t
from kdirect.format.compression cimport Decompressor
from kdirect.format.records cimport record_view

cdef class Message:
    cdef str _topic
    cdef int32_t _partition
    cdef int32_t _leader_epoch
    cdef int _timestamp_type
    cdef int64_t _offset
    cdef int64_t _timestamp
    cdef object _key
    cdef object _value
    cdef object _headers
    cdef object _error
    cdef tuple _fields(self)

cdef class Shown:              # bytes of an owner, as a buffer that nobody can write
    cdef object owner
    cdef const uint8_t* p
    cdef Py_ssize_t length

cdef struct part_t:            # the records of one batch that are still to be handed out
    const uint8_t* p
    const uint8_t* end
    Py_ssize_t record          # number of the next one in `_records`; -1: it lies at `p`
    Py_ssize_t plain           # number in `_plain` of what it lies in; -1: in the bytes loaded
    int32_t count
    int32_t leader_epoch
    int64_t base_offset
    int64_t base_timestamp
    int64_t max_timestamp
    int kind

cdef class MessageQueue:
    cdef readonly str topic
    cdef readonly int32_t partition
    cdef readonly uint64_t popped      # messages since the queue was made, which shows that its
                                       # consumer is alive
    cdef int64_t _next                 # offset of the next record; those before it are skipped
    cdef readonly int64_t after        # offset after the last batch loaded
    cdef readonly bint views           # messages view their values
    cdef object _owner                 # of the bytes that are loaded now, while it views them
    cdef object _data                  # the batches: bytes, or what shows those of an owner
    cdef record_view* _records         # of batches that nobody copied, parsed once
    cdef Py_ssize_t _records_capacity, _records_count
    cdef list _plain                   # decompressed record sections
    cdef uint64_t _plain_bytes         # size of all of them together
    cdef part_t* _parts
    cdef Py_ssize_t _capacity, _count, _at
    cdef Decompressor _decompressor
    cdef part_t* _skip(self) noexcept
    cpdef Message pop(self)
    cdef object _value(self, const part_t* part, const record_view* r)
    cdef void c_own(self, object owner)
    cpdef Py_ssize_t load_address(self, uint64_t address, size_t n, str topic, int32_t partition,
                                  int64_t next_offset,
                                  uint64_t max_decompressed_bytes) except -1
    cdef Py_ssize_t c_load(self, const uint8_t* p, size_t n, str topic, int32_t partition,
                           int64_t next_offset, uint64_t max_decompressed_bytes,
                           chain_t* chain) except -1
    cdef c_pass(self, int64_t after)
    cdef bint _accept(self, const uint8_t* p, const batch_info* info, uint64_t limit) except -1
    cdef int _grow(self) except -1
    cdef int _keep(self, const record_view* r) except -1
    cdef object _refuse(self, bytes data, uint64_t limit)
