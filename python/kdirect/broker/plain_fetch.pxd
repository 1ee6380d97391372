"""Plain Fetch requests: see plain_fetch.pyx."""
from libc.stdint cimport int64_t

from kdirect.broker.plain_table cimport PlainTable, request_t

cdef int answer_fetch(PlainTable table, request_t* r, int64_t room) except -1
# What became of the request, whose header was read.  `room`: most bytes of records in an answer.
