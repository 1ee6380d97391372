# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The marks of a partition, and the metadata slots that tell readers of them (KafkaDirect §4.4.2).

Law of the room: functions over `kernel_state`, called by `kdirect.log.kernel` and
`kdirect.log.commit` with its mutex held.  No lock, no I/O, no clock, no Python object; the only
allocation grows a table.

A mark is a point in the log, (segment, position, offset), below which records may be read: the high
watermark, and the last stable offset.  A segment may be sealed before everything in it may be read:
until both marks have passed it, the kernel keeps its size, and slots tell of it like those of the
head.  A mark that reaches the end of a sealed segment moves on to position 0 of the next one.

A slot gets SLOT_FLAG_SEALED, as its last update, once the high watermark and the last stable offset
have passed the segment's end: then its last readable position is the end of the file.  Once only
the high watermark has, it has SLOT_FLAG_READABLE.

Memory.  A slot is 64 bytes of a consumer's region.  It may come with a list of aborted
transactions, which is memory of its grant.  Whoever attached it keeps both mapped until it is
detached or got its last update.
"""

from libc.errno cimport ENOENT, ENOMEM
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport realloc

from kdirect.format.layout cimport (
    SLOT_BYTES, SLOT_FILE_ID, SLOT_FLAG_ASSIGNED, SLOT_FLAG_REVOKED,
    SLOT_FLAG_READABLE, SLOT_FLAG_SEALED, SLOT_FLAGS, SLOT_GUARD,
    SLOT_HIGH_WATERMARK, SLOT_LAST_READABLE_POSITION, SLOT_LAST_STABLE_OFFSET,
    SLOT_LAST_STABLE_POSITION, SLOT_LEADER_EPOCH, SLOT_LOG_START_OFFSET, SLOT_SEGMENT_BASE_OFFSET,
    SLOT_UPDATE_COUNT)
from kdirect.log.aborted_list cimport extend_list, start_list
from kdirect.log.producers cimport forget_producers
from kdirect.log.state cimport aborted_list, kernel_state, mark_t, sealed_t, slot_entry
from kdirect.log.transactions cimport cut_transactions, settle_stable

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef extern from *:
    """
    /* Publish one 64-byte slot image as eight atomic words: a concurrent copy mixes whole words of
       the old and the new image, never halves of one, and such a mix does not match its guard. */
    static inline void kd_publish_slot(uint8_t *slot, const uint64_t *image) {
        uint64_t *to = (uint64_t *) slot;
        for (int i = 7; i >= 0; i--)
            __atomic_store_n(to + i, image[i], __ATOMIC_RELEASE);
    }
    """
    void kd_publish_slot(uint8_t* slot, const uint64_t* image) nogil


# -- slots -----------------------------------------------------------------------------------------

cdef inline uint64_t _limit_in(const kernel_state* s, const mark_t* mark,
                               const slot_entry* entry) noexcept nogil:
    """Up to which position the segment of a slot lies below a mark."""
    if mark.base == entry.base:
        return mark.position
    if mark.base < entry.base:
        return 0
    return <uint64_t> entry.size


cdef inline int64_t _end_of(const kernel_state* s, const slot_entry* entry) noexcept nogil:
    """The offset at which the segment of a slot ends; INT64_MAX while it may grow."""
    cdef uint32_t i
    if entry.size >= 0:
        for i in range(s.sealed_count):
            if s.sealed[i].base == entry.base:
                return s.sealed[i].end_offset
    return INT64_MAX


cdef void _fill(kernel_state* s, slot_entry* entry, uint16_t flags) noexcept nogil:
    cdef uint64_t image[SLOT_BYTES / 8]
    cdef uint8_t* p = <uint8_t*> image
    if flags == 0 and entry.size >= 0 and entry.base < s.readable.base:
        flags = SLOT_FLAG_READABLE
    (<uint16_t*> (p + SLOT_FLAGS))[0] = SLOT_FLAG_ASSIGNED | flags
    (<uint16_t*> (p + SLOT_FILE_ID))[0] = entry.file_id
    (<int64_t*> (p + SLOT_SEGMENT_BASE_OFFSET))[0] = entry.base
    if entry.aborted.at != NULL:        # before the slot tells that what they are in is stable
        extend_list(s, &entry.aborted, _end_of(s, entry))
    (<uint64_t*> (p + SLOT_LAST_READABLE_POSITION))[0] = _limit_in(s, &s.readable, entry)
    (<int64_t*> (p + SLOT_HIGH_WATERMARK))[0] = s.readable.offset
    (<uint64_t*> (p + SLOT_LAST_STABLE_POSITION))[0] = _limit_in(s, &s.stable, entry)
    (<int64_t*> (p + SLOT_LAST_STABLE_OFFSET))[0] = s.stable.offset
    (<int32_t*> (p + SLOT_LEADER_EPOCH))[0] = s.leader_epoch
    (<uint32_t*> (p + SLOT_UPDATE_COUNT))[0] = s.updates
    (<int64_t*> (p + SLOT_LOG_START_OFFSET))[0] = s.log_start
    (<uint32_t*> (p + SLOT_GUARD))[0] = kd_crc32c(0, p + SLOT_FLAGS, SLOT_BYTES - SLOT_FLAGS)
    kd_publish_slot(entry.slot, image)


cdef int attach(kernel_state* s, uint8_t* slot, uint16_t file_id, int64_t base,
                const aborted_list* aborted, int64_t start) noexcept nogil:
    cdef aborted_list wanted
    cdef slot_entry* grown
    cdef slot_entry* entry
    cdef uint32_t capacity, i
    cdef int64_t size = -1
    if base != s.base:
        for i in range(s.sealed_count):
            if s.sealed[i].base == base:
                size = <int64_t> s.sealed[i].size
                break
        else:
            return ENOENT
    wanted.at = NULL
    if aborted != NULL:
        wanted = aborted[0]
        if not start_list(s, &wanted, wanted.at, wanted.capacity, file_id, start, INT64_MAX):
            return ENOENT
    for i in range(s.slots_count):
        if s.slots[i].slot == slot:
            break
    else:
        i = s.slots_count
    if i == s.slots_capacity:
        capacity = s.slots_capacity * 2 if s.slots_capacity else 4
        grown = <slot_entry*> realloc(s.slots, capacity * sizeof(slot_entry))
        if grown == NULL:
            return ENOMEM
        s.slots = grown
        s.slots_capacity = capacity
    if i == s.slots_count:
        s.slots_count += 1
    entry = &s.slots[i]
    entry.slot = slot
    entry.file_id = file_id
    entry.base = base
    entry.size = size
    entry.aborted = wanted
    s.updates += 1
    _fill(s, entry, 0)
    return 0


cdef void detach(kernel_state* s, const uint8_t* slot) noexcept nogil:
    cdef uint32_t i
    for i in range(s.slots_count):
        if s.slots[i].slot == slot:
            s.slots_count -= 1
            s.slots[i] = s.slots[s.slots_count]
            break


cdef void update_slots(kernel_state* s) noexcept nogil:
    cdef uint32_t i
    if s.slots_count == 0:
        return
    s.updates += 1
    s.slot_updates += 1
    for i in range(s.slots_count):
        _fill(s, &s.slots[i], 0)


cdef void publish(kernel_state* s) noexcept nogil:
    if s.dirty:
        s.dirty = 0
        update_slots(s)


cdef void drop_slots(kernel_state* s, uint16_t flags, int64_t base) noexcept nogil:
    cdef uint32_t i = 0
    if s.slots_count == 0:
        return
    s.updates += 1
    s.slot_updates += 1
    while i < s.slots_count:
        if base != -1 and s.slots[i].base != base:
            i += 1
            continue
        _fill(s, &s.slots[i], flags)
        s.slots_count -= 1
        s.slots[i] = s.slots[s.slots_count]


# -- marks -----------------------------------------------------------------------------------------

cdef int remember_sealed(kernel_state* s, int64_t base, uint64_t size,
                         int64_t end_offset) noexcept nogil:
    cdef sealed_t* grown
    cdef uint32_t capacity, at, i
    if s.sealed_count == s.sealed_capacity:
        capacity = s.sealed_capacity * 2 if s.sealed_capacity else 4
        grown = <sealed_t*> realloc(s.sealed, capacity * sizeof(sealed_t))
        if grown == NULL:
            return ENOMEM
        s.sealed = grown
        s.sealed_capacity = capacity
    at = s.sealed_count
    while at > 0 and s.sealed[at - 1].base >= base:
        at -= 1
        if s.sealed[at].base == base:
            return 0
    for i in range(s.sealed_count, at, -1):
        s.sealed[i] = s.sealed[i - 1]
    s.sealed[at].base = base
    s.sealed[at].size = size
    s.sealed[at].end_offset = end_offset
    s.sealed_count += 1
    return 0


cdef void _step_over_ends(kernel_state* s, mark_t* mark) noexcept nogil:
    """A mark at the end of a sealed segment lies at the start of the next one."""
    cdef uint32_t i
    for i in range(s.sealed_count):
        if s.sealed[i].base == mark.base and s.sealed[i].size == mark.position:
            mark.base = s.sealed[i + 1].base if i + 1 < s.sealed_count else s.base
            mark.position = 0


cdef void finish_sealed(kernel_state* s) noexcept nogil:
    cdef uint32_t i, done = 0
    _step_over_ends(s, &s.readable)
    _step_over_ends(s, &s.stable)
    while done < s.sealed_count and s.sealed[done].base < s.stable.base \
            and s.sealed[done].base < s.readable.base:
        drop_slots(s, SLOT_FLAG_SEALED, s.sealed[done].base)
        done += 1
    if done:
        s.sealed_count -= done
        for i in range(s.sealed_count):
            s.sealed[i] = s.sealed[i + done]


cdef int end_segment(kernel_state* s) noexcept nogil:
    cdef uint32_t i
    if s.log_end != s.base or s.tail:      # an empty one leaves nothing, not even a slot's file
        if remember_sealed(s, s.base, s.tail, s.log_end) != 0:
            return ENOMEM
        for i in range(s.slots_count):
            if s.slots[i].base == s.base:
                s.slots[i].size = <int64_t> s.tail
    else:
        drop_slots(s, SLOT_FLAG_SEALED, s.base)
    s.base = s.log_end
    s.tail = 0
    finish_sealed(s)
    if s.sealed_count:
        update_slots(s)                    # what is left of them may have become readable
    return 0


cdef bint is_point(const kernel_state* s, const mark_t* mark) noexcept nogil:
    cdef uint32_t i
    if mark.base == s.base:
        return mark.position <= s.tail and s.base <= mark.offset <= s.log_end
    for i in range(s.sealed_count):
        if s.sealed[i].base == mark.base:
            return (mark.position <= s.sealed[i].size
                    and mark.base <= mark.offset <= s.sealed[i].end_offset)
    return False


cdef void move_marks(kernel_state* s, const mark_t* mark) noexcept nogil:
    s.readable = mark[0]
    settle_stable(s)
    if s.sealed_count:
        finish_sealed(s)


cdef void move_to_end(kernel_state* s) noexcept nogil:
    cdef mark_t mark
    mark.base = s.base
    mark.position = s.tail
    mark.offset = s.log_end
    move_marks(s, &mark)


cdef void cut_log(kernel_state* s, const mark_t* end, int32_t epoch, bint empty) noexcept nogil:
    drop_slots(s, SLOT_FLAG_REVOKED, -1)
    while s.sealed_count and (empty or s.sealed[s.sealed_count - 1].base >= end.base):
        s.sealed_count -= 1
    s.base = end.base
    s.tail = end.position
    s.log_end = end.offset
    if empty or s.readable.offset >= end.offset:
        s.readable = end[0]
    if empty or s.stable.offset >= end.offset:
        s.stable = end[0]
    cut_transactions(s, end.offset, empty)
    if empty or s.disk.offset >= end.offset:
        s.disk = end[0]
    if s.log_start > end.offset:
        s.log_start = end.offset
    s.leader_epoch = epoch
    s.last_epoch = epoch
    forget_producers(&s.producers)
