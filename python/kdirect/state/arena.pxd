"""C interface of arena.pyx."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kdirect.state.table_kernel cimport kd_log

cdef class StateMemory:
    cdef uint8_t* base
    cdef readonly uint64_t limit      # bytes that may be used
    cdef readonly uint64_t top        # end of what was ever allocated
    cdef readonly uint64_t allocated  # bytes in use, free blocks not counted
    cdef readonly str name
    cdef int _fd
    cdef uint64_t _backed             # the file has memory up to here
    cdef list _free                   # of each size (its log): positions, the last freed last
    cdef list _spare                  # (position, bytes): free, of no size
    cdef uint64_t c_allocate(self, int log) except 0
    cdef int c_release(self, uint64_t position, int log) except -1

cdef class PageMemory:
    cdef readonly uint32_t page_bytes
    cdef readonly uint32_t room       # bytes of a page that a delta may use: the rest is the footer
    cdef readonly uint64_t limit
    cdef readonly list chunks
    cdef object _allocate, _on_chunk
    cdef readonly uint32_t chunk_bytes
    cdef list _free                   # addresses of pages, the last freed last
    cdef dict _chunk_of               # address of a chunk -> its number
    cdef list _starts
    cdef uint64_t c_take(self) except 0
    cdef int c_release(self, uint64_t address) except -1

cdef class Log:
    cdef kd_log c
    cdef readonly StateMemory memory
    cdef list _segments               # [position, log, end of what is used]; the last is written
    cdef int _first_log
    cdef int c_room(self, uint64_t need) except -1
    cdef int c_first(self, int log) except -1
    cdef int c_clear(self) except -1
