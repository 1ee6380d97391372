"""Plain Produce requests: see plain_produce.pyx."""
from libc.stdint cimport int64_t

from kdirect.broker.plain_table cimport PlainTable, request_t

cdef int answer_produce(PlainTable table, connection, request_t* r, int64_t now_ms) except -1
# What became of the request, whose header was read.
