"""What plain requests are answered from, and the bytes of requests and answers: see
plain_table.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t

from kdirect.log.kernel cimport CommitKernel

cdef enum:
    # what became of a request
    DECLINED = 0          # nothing has changed: it is for the general handlers
    ANSWERED = 1          # its answer is in the table's bytes
    TOLD = 2              # its answer is `PlainTable.told`, which the general handlers have made

cdef struct request_t:    # a request, read from `at` on
    const uint8_t* at
    const uint8_t* end    # of its frame
    bint bad              # something did not fit, or is not plain: it is to be declined
    bint flexible         # it has compact lengths and tagged fields
    int16_t version
    int32_t correlation_id

cdef class PlainPartition:
    cdef object tp                # its TopicPartition
    cdef object partition         # its log
    cdef object topic             # whose partition it is
    cdef object config            # that of the log when `appends` was found out
    cdef int64_t dense_from       # see `Partition.dense_from`
    cdef bint appends             # an append to it needs nothing but the kernel
    cdef CommitKernel kernel

cdef class PlainTable:
    cdef object _handlers
    cdef object _counters
    cdef object _partitions       # of the log manager, by TopicPartition
    cdef dict _by_id
    cdef dict _by_topic           # name, or id, as bytes -> {number: PlainPartition}
    cdef Py_ssize_t _count        # of entries in it
    cdef tuple _busy              # tables of partitions to which nothing is appended at once
    cdef dict _waiting            # Fetches that wait, by TopicPartition
    cdef object _notify
    cdef object told              # see TOLD
    # Answers, one after the other, each with its size before it.
    cdef uint8_t* out
    cdef size_t used
    cdef size_t _capacity
    # Counted since `settle`.
    cdef int64_t appends
    cdef int64_t append_bytes
    cdef int64_t produces
    cdef int64_t fetches

    cdef PlainPartition find(self, const uint8_t* topic, Py_ssize_t length, int32_t number,
                             bint by_id)
    # A partition that this broker leads; None: ask the general handlers.  `topic` is a name, or,
    # `by_id`, the bytes of an id.
    cdef PlainPartition _look_up(self, bytes key, int32_t number, bint by_id)
    cdef bint may_append(self, PlainPartition place) except -1
    # May an append be made at once, and acknowledged at once?
    cdef int notify(self, PlainPartition place, int64_t size) except -1
    # The log has grown by `size` bytes: wake who waits for them.
    cdef int reserve(self, size_t size) except -1
    # Have room for `size` more bytes of answers.
    cdef bytes take(self)
    # The answers so far, which are the caller's from now on.
    cdef int settle(self) except -1
    # Add what was counted to the broker's counters.


# Fields of a request, in their order.  After something that does not fit, `bad` is set and all of
# them are 0 or empty.

cdef int16_t take_8(request_t* r) noexcept nogil
cdef int16_t take_16(request_t* r) noexcept nogil
cdef int32_t take_32(request_t* r) noexcept nogil
cdef int64_t take_64(request_t* r) noexcept nogil
cdef const uint8_t* take_id(request_t* r) noexcept nogil
# Of a topic; NULL: it did not fit.
cdef int64_t take_uvarint(request_t* r) noexcept nogil
cdef int64_t take_count(request_t* r) noexcept nogil
# Of an array; -1 for null.
cdef int64_t take_text(request_t* r, const uint8_t** text) noexcept nogil
# Length of a string, -1 for null.
cdef int64_t take_records(request_t* r, const uint8_t** records) noexcept nogil
# Length of record bytes, -1 for null.
cdef void take_no_tags(request_t* r) noexcept nogil
# The end of a structure of a flexible version; tagged fields are not plain.

# Fields of an answer; each returns the position after it.

cdef uint8_t* put_8(uint8_t* p, uint8_t value) noexcept nogil
cdef uint8_t* put_16(uint8_t* p, int16_t value) noexcept nogil
cdef uint8_t* put_32(uint8_t* p, int32_t value) noexcept nogil
cdef uint8_t* put_64(uint8_t* p, int64_t value) noexcept nogil
cdef uint8_t* put_uvarint(uint8_t* p, uint32_t value) noexcept nogil
cdef uint8_t* put_bytes(uint8_t* p, const uint8_t* data, size_t length) noexcept nogil
cdef uint8_t* put_count(uint8_t* p, int32_t count, bint flexible) noexcept nogil
# Of an array.
cdef uint8_t* put_text(uint8_t* p, const uint8_t* text, int16_t length,
                       bint flexible) noexcept nogil
