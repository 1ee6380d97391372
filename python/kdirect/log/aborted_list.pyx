# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What of the aborted index a reader of committed records READs beside a granted file.

Law of the room: functions over `kernel_state`, called by `kdirect.log.kernel`, `kdirect.log.slots`
and `kdirect.log.kernel_transactions` with its mutex held.  No lock, no I/O, no clock, no Python
object, no allocation.

A list begins with all entries that a reader of a range has to know, by their markers.  That of a
slot grows: the kernel extends it each time before it writes the slot, so a reader who sees a last
stable offset, and READs the list after that, finds every abort below that offset.  A list without
room for an entry is full and grows no more; see the layout for what it still tells.

An entry that cleaning takes out of the middle of the index (`remove_entries`) stays in the lists
that have it: whoever has such a list may READ old bytes.  No list gets it any more.

Memory.  A list is memory of one grant (`kdirect.broker.aborted_regions`).  The kernel writes it
only as long as the slot is attached that it belongs to; the reader may READ it at any time.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.layout cimport (
    ABORTED_COUNT, ABORTED_ENTRY_BYTES, ABORTED_ENTRY_FIRST_OFFSET, ABORTED_ENTRY_LAST_OFFSET,
    ABORTED_ENTRY_NUMBER, ABORTED_ENTRY_PRODUCER_ID, ABORTED_ENTRY_STABLE_OFFSET, ABORTED_FILE_ID,
    ABORTED_FLAG_FULL, ABORTED_FLAGS, ABORTED_HEAD_BYTES)
from kdirect.log.state cimport aborted_list, aborted_t, kernel_state

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef extern from *:
    """
    /* Publish the 16 bytes of a list's head after the entries that they cover: two atomic words, of
       which a mixed copy does not match its guard. */
    static inline void kd_publish_list_head(uint8_t *list, const uint64_t *image) {
        uint64_t *to = (uint64_t *) list;
        __atomic_store_n(to + 1, image[1], __ATOMIC_RELEASE);
        __atomic_store_n(to, image[0], __ATOMIC_RELEASE);
    }
    """
    void kd_publish_list_head(uint8_t* list, const uint64_t* image) nogil


cdef uint32_t first_aborted(const kernel_state* s, int64_t offset) noexcept nogil:
    cdef uint32_t low = 0, high = s.aborted_count, middle
    while low < high:
        middle = low + (high - low) // 2
        if s.aborted[middle].last_offset < offset:
            low = middle + 1
        else:
            high = middle
    return low


cdef uint32_t end_aborted(const kernel_state* s, uint32_t first, int64_t end) noexcept nogil:
    cdef uint32_t i
    for i in range(first, s.aborted_count):
        if s.aborted[i].stable_offset >= end:
            return i + 1                # no later one began below
    return s.aborted_count


cdef void _publish(const aborted_list* a) noexcept nogil:
    cdef uint64_t image[ABORTED_HEAD_BYTES / 8]
    cdef uint8_t* p = <uint8_t*> image
    image[0] = image[1] = 0
    (<uint32_t*> (p + ABORTED_COUNT))[0] = a.count
    (<uint16_t*> (p + ABORTED_FLAGS))[0] = ABORTED_FLAG_FULL if a.full else 0
    (<uint16_t*> (p + ABORTED_FILE_ID))[0] = a.file_id
    (<uint32_t*> p)[0] = kd_crc32c(0, p + ABORTED_COUNT, ABORTED_HEAD_BYTES - ABORTED_COUNT)
    kd_publish_list_head(a.at, image)


cdef void _write(aborted_list* a, const aborted_t* entry) noexcept nogil:
    cdef uint8_t* p = a.at + ABORTED_HEAD_BYTES + <uint64_t> a.count * ABORTED_ENTRY_BYTES
    (<uint32_t*> (p + ABORTED_ENTRY_NUMBER))[0] = a.count
    (<int64_t*> (p + ABORTED_ENTRY_PRODUCER_ID))[0] = entry.producer_id
    (<int64_t*> (p + ABORTED_ENTRY_FIRST_OFFSET))[0] = entry.first_offset
    (<int64_t*> (p + ABORTED_ENTRY_LAST_OFFSET))[0] = entry.last_offset
    (<int64_t*> (p + ABORTED_ENTRY_STABLE_OFFSET))[0] = entry.stable_offset
    (<uint32_t*> p)[0] = kd_crc32c(0, p + ABORTED_ENTRY_NUMBER,
                                   ABORTED_ENTRY_BYTES - ABORTED_ENTRY_NUMBER)
    a.count += 1


cdef bint start_list(kernel_state* s, aborted_list* out, uint8_t* at, uint32_t capacity,
                     uint16_t file_id, int64_t start, int64_t end) noexcept nogil:
    if start < s.aborted_from:
        return False
    out.at = at
    out.capacity = capacity
    out.count = 0
    out.file_id = file_id
    out.full = False
    out.next = s.aborted_gone + first_aborted(s, start)
    _publish(out)
    extend_list(s, out, end)
    return True


cdef uint32_t remove_entries(kernel_state* s, const int64_t* markers,
                             uint32_t count) noexcept nogil:
    cdef uint32_t i, j, at = 0, kept = 0
    cdef uint64_t number
    for i in range(s.aborted_count):
        while at < count and markers[at] < s.aborted[i].last_offset:
            at += 1
        if at == count or markers[at] != s.aborted[i].last_offset:
            s.aborted[kept] = s.aborted[i]
            kept += 1
            continue
        number = s.aborted_gone + kept      # it has this one now, and those after it one less
        for j in range(s.slots_count):
            if s.slots[j].aborted.at != NULL and s.slots[j].aborted.next > number:
                s.slots[j].aborted.next -= 1
    i = s.aborted_count - kept
    s.aborted_count = kept
    return i


cdef void extend_list(kernel_state* s, aborted_list* to, int64_t end) noexcept nogil:
    cdef uint64_t stop = s.aborted_gone + s.aborted_count
    cdef const aborted_t* entry
    cdef uint32_t before = to.count
    if to.full or to.next >= stop:
        return
    while to.next < stop:
        entry = &s.aborted[to.next - s.aborted_gone]
        if entry.first_offset < end:
            if to.count == to.capacity:
                to.full = True
                break
            _write(to, entry)
        to.next += 1
    if to.count != before or to.full:
        _publish(to)
