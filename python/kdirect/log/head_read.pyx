# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Reads of a head, in C and without the GIL: few bytes, which are copied.

Law: what is read is what `kdirect.log.reading.read_nowait` would give, or nothing.  The kernel's
mutex is held while its memory is looked at, so the head stays mapped; a page that is not in memory
is not touched, so nobody waits for a disk.

The records below the high watermark of a head stay what they are as long as it is the head: between
`look_into_head` and `copy_from_head` no more can happen to them than that the head is sealed.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kdirect.format.batch cimport BATCH_OK, batch_info, parse_batch_header
from kdirect.format.chain cimport CHAIN_OK, chain_t, follow_batch, start_chain
from kdirect.format.layout cimport OFFSET_INDEX_ENTRY_BYTES
from kdirect.format.wire cimport kd_get32
from kdirect.log.kernel cimport CommitKernel
from kdirect.log.state cimport kernel_state
from kdirect.machine cimport pthread_mutex_lock, pthread_mutex_unlock

cdef extern from "<sys/mman.h>" nogil:
    int mincore(void* address, size_t length, unsigned char* vec)

cdef enum:
    PAGE_BYTES = 4096
    RESIDENT_PAGES = 256       # asked for at once
    SEARCH_BYTES = 64 << 10    # walked at most from the index entry to the offset
    TRANSACTIONAL = 0x30       # attributes of a batch: it is of a transaction, or its marker


cdef bint _is_resident(const uint8_t* data, uint64_t length) noexcept nogil:
    """Are the pages in memory?  True where the system does not tell."""
    cdef unsigned char found[RESIDENT_PAGES]
    cdef uintptr_t at = <uintptr_t> data & ~<uintptr_t> (PAGE_BYTES - 1)
    cdef uintptr_t end = <uintptr_t> data + length
    cdef uint64_t piece, i
    while at < end:
        piece = min(<uint64_t> (end - at), <uint64_t> RESIDENT_PAGES * PAGE_BYTES)
        if mincore(<void*> at, piece, found) != 0:
            return True
        for i in range((piece + PAGE_BYTES - 1) // PAGE_BYTES):
            if not found[i] & 1:
                return False
        at += piece
    return True


cdef uint64_t _indexed_position(const kernel_state* s, int64_t offset) noexcept nogil:
    """Position of a batch at or before the one that holds `offset`."""
    cdef uint32_t low = 0, high = s.offset_entries, middle
    cdef int64_t relative = offset - s.base
    while low < high:
        middle = low + (high - low) // 2
        if <int64_t> kd_get32(s.offset_index
                              + <size_t> middle * OFFSET_INDEX_ENTRY_BYTES) <= relative:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return 0
    return kd_get32(s.offset_index + <size_t> (low - 1) * OFFSET_INDEX_ENTRY_BYTES + 4)


cdef bint _find(const kernel_state* s, int64_t offset, uint64_t most,
                head_read* out) noexcept nogil:
    """Set `position` to where the batch begins that holds `offset`."""
    cdef uint64_t at, end = s.readable.position
    cdef uint64_t stop
    cdef batch_info info
    if s.offset_index == NULL or not _is_resident(
            s.offset_index, <uint64_t> s.offset_entries * OFFSET_INDEX_ENTRY_BYTES):
        return False
    at = _indexed_position(s, offset)
    if at >= end or not _is_resident(s.data + at, min(end - at, most + SEARCH_BYTES)):
        return False
    stop = min(end, at + SEARCH_BYTES)
    while at < stop:
        if (parse_batch_header(s.data + at, end - at, &info) != BATCH_OK
                or info.size > end - at or info.base_offset > offset
                or info.last_offset_delta < 0):
            return False
        if info.base_offset + info.last_offset_delta >= offset:
            out.position = at
            return True
        at += info.size
    return False


cdef bint _measure(const kernel_state* s, int64_t offset, uint64_t limit, uint64_t most,
                   bint committed_only, int64_t dense_from, head_read* out) noexcept nogil:
    """Set `size` to that of the whole batches from `position` on."""
    cdef chain_t chain
    cdef batch_info info
    cdef const uint8_t* data = s.data + out.position
    cdef uint64_t left = s.readable.position - out.position
    cdef uint64_t at = 0
    start_chain(&chain)
    chain.dense_from = dense_from
    chain.end_offset = s.readable.offset
    chain.greatest_epoch = s.leader_epoch
    while at < left:
        if parse_batch_header(data + at, left - at, &info) != BATCH_OK or info.size > left - at:
            return False
        if at == 0:
            chain.next_offset = info.base_offset
        elif at + info.size > limit:
            break
        if at + info.size > most or follow_batch(&chain, &info) != CHAIN_OK:
            return False
        if committed_only and info.attributes & TRANSACTIONAL:
            return False
        at += info.size
    out.size = at
    return at < left or chain.next_offset == s.readable.offset


cdef bint _names_aborted(const kernel_state* s, int64_t offset) noexcept nogil:
    """Was a transaction aborted of which a reader from `offset` on may have to be told?"""
    return s.aborted_count > 0 and s.aborted[s.aborted_count - 1].last_offset >= offset


cdef bint _look(const kernel_state* s, int64_t offset, uint64_t limit, uint64_t most,
                bint committed_only, int64_t dense_from, head_read* out) noexcept nogil:
    out.high_watermark = s.readable.offset
    out.last_stable = s.stable.offset
    out.log_start = s.log_start
    out.log_end = s.log_end
    out.leader_epoch = s.leader_epoch
    out.base = s.base
    out.position = out.size = 0
    if not s.log_start <= offset <= s.log_end:
        return False
    if committed_only and (s.stable.offset != s.readable.offset or _names_aborted(s, offset)):
        return False
    if offset >= s.readable.offset:
        return True
    if s.data == NULL or offset < s.base or s.readable.base != s.base or offset < dense_from:
        return False
    return (_find(s, offset, most, out)
            and _measure(s, offset, limit, most, committed_only, dense_from, out))


cdef bint look_into_head(CommitKernel kernel, int64_t offset, uint64_t limit, uint64_t most,
                         bint committed_only, int64_t dense_from, head_read* out) noexcept nogil:
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef bint found
    pthread_mutex_lock(&s.lock)
    found = _look(s, offset, limit, most, committed_only, dense_from, out)
    pthread_mutex_unlock(&s.lock)
    return found


cdef bint copy_from_head(CommitKernel kernel, const head_read* what, uint8_t* out) noexcept nogil:
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef bint same
    pthread_mutex_lock(&s.lock)
    same = (s.data != NULL and s.base == what.base
            and what.position + what.size <= s.readable.position)
    if same:
        memcpy(out, s.data + what.position, what.size)
    pthread_mutex_unlock(&s.lock)
    return same


cdef int64_t log_start_of(CommitKernel kernel) noexcept nogil:
    return (<kernel_state*> kernel._state).log_start
