# cython: language_level=3, boundscheck=False, wraparound=False
"""The entries of a window table as bytes: a copy for a snapshot, which batches do not wait for."""

import numpy as np

from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kdirect.state.table import index_log
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_table

cdef extern from "snapshot_run.h" nogil:
    void kd_stretch_bytes(const kd_table* t, uint64_t begin, uint64_t end, uint64_t mask,
                          uint32_t shift, uint64_t* bytes)
    void kd_copy_stretches(const kd_table* t, uint64_t begin, uint64_t end, uint64_t mask,
                           uint32_t shift, uint64_t* at, uint8_t* out)

cdef enum:
    STRETCH_LOG = 15  # slots of a stretch: 256 KiB of index, which a core's cache holds


def entries_of(Table table):
    """All entries of a table, states and keys, as they lie in its log, ordered by stretches of the
    index that a table of as many entries has (uint64).  The table may change afterwards."""
    cdef uint64_t begin, end, at = 0, size, mask = (1 << (index_log(table.c.used) - 3)) - 1
    cdef uint64_t i, stretches = (mask >> STRETCH_LOG) + 1
    cdef uint64_t[::1] place
    cdef uint8_t[::1] out
    copy = np.empty(table.log.used // 8, np.uint64)
    if not len(copy):
        return copy
    out = copy.view(np.uint8)
    ends = np.zeros(stretches, np.uint64)
    place = ends
    for begin, end in table.log.stretches() if stretches > 1 else ():
        with nogil:
            kd_stretch_bytes(&table.c, begin, end, mask, STRETCH_LOG, &place[0])
    for i in range(stretches):
        size = place[i]
        place[i] = at
        at += size
    for begin, end in table.log.stretches():
        with nogil:
            if stretches > 1:
                kd_copy_stretches(&table.c, begin, end, mask, STRETCH_LOG, &place[0], &out[0])
            else:
                memcpy(&out[at], table.memory.base + begin, end - begin)
                at += end - begin
    return copy
