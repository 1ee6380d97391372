# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The head that a kernel is lent: installed, grown, frozen and sealed.

Owns how a kernel comes to the memory that it commits into, and how it loses it; the memory itself
is `kdirect.log.segment`'s, and must stay mapped from `install_head` until `seal_head` has returned.
What is committed there is `kdirect.log.commit`'s.  Each function takes the kernel's mutex.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport INT32_MAX, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from kdirect.format.layout cimport SLOT_FLAG_SEALED
from kdirect.log.commit cimport seal_head as seal_state
from kdirect.log.commit cimport sealed_head
from kdirect.log.kernel cimport CommitKernel
from kdirect.log.slots cimport drop_slots, end_segment
from kdirect.log.state cimport kernel_state
from kdirect.machine cimport pthread_mutex_lock, pthread_mutex_unlock

from kdirect.errors import LogError
from kdirect.log.views import SealedHead


def install_head(CommitKernel kernel, uint64_t address, uint64_t capacity, *,
                 uint64_t position=0,
                 int64_t segment_base_offset, uint64_t offset_index_address=0,
                 uint32_t offset_index_capacity=0, uint32_t offset_index_entries=0,
                 uint64_t time_index_address=0, uint32_t time_index_capacity=0,
                 uint32_t time_index_entries=0, int64_t last_indexed_timestamp=-1,
                 int64_t first_timestamp=-1, int64_t max_timestamp=-1,
                 int64_t max_timestamp_offset=-1, int64_t created_ms=0):
    """Give the kernel a mapped head of `capacity` bytes, `position` of which are records
    already.

    Slots attached to this segment before get their last update with SLOT_FLAG_SEALED: their
    readers were granted a file that is shorter, or none, and ask again.  Index capacities and
    entries count entries; address 0 keeps no index."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef bint refused = False
    if address == 0 or position > capacity or capacity > INT32_MAX:
        raise LogError(f"head of {capacity} bytes at position {position} cannot be installed",
                       hint="segments end below 2 GiB")
    with nogil:
        pthread_mutex_lock(&s.lock)
        if s.data != NULL or s.base != segment_base_offset or s.tail != position:
            refused = True
        else:
            drop_slots(s, SLOT_FLAG_SEALED, s.base)
            s.data = <uint8_t*> <uintptr_t> address
            s.capacity = capacity
            s.offset_index = <uint8_t*> <uintptr_t> offset_index_address
            s.offset_capacity = (
                offset_index_capacity if offset_index_address else <uint32_t> -1)
            s.offset_entries = offset_index_entries
            s.time_index = <uint8_t*> <uintptr_t> time_index_address
            s.time_capacity = time_index_capacity if time_index_address else <uint32_t> -1
            s.time_entries = time_index_entries
            s.last_indexed_timestamp = last_indexed_timestamp
            s.first_timestamp = first_timestamp
            s.max_timestamp = max_timestamp
            s.max_timestamp_offset = max_timestamp_offset
            s.created_ms = created_ms
            s.since_index = 0
            s.over = False
        pthread_mutex_unlock(&s.lock)
    if refused:
        raise LogError(f"a head at offset {segment_base_offset}, position {position} does not"
                       " continue the log", hint="seal the previous head first")


def seal_head(CommitKernel kernel):
    """Take the head away: a SealedHead, or None when there is no head.

    From now on the log ends at position 0 of a segment that begins at log end offset.  The
    slots of the head get their last update with SLOT_FLAG_SEALED once all of it may be read:
    now, or when the marks have passed its end."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef sealed_head head
    cdef int error
    with nogil:
        pthread_mutex_lock(&s.lock)
        error = seal_state(s, &head)
        pthread_mutex_unlock(&s.lock)
    if error == ENOMEM:
        raise MemoryError()
    if error:
        return None
    return SealedHead(head.base, head.size, head.end_offset, head.max_timestamp,
                      head.max_timestamp_offset, head.offset_entries, head.time_entries)


def resize_head(CommitKernel kernel, uint64_t capacity, uint32_t offset_index_capacity,
                uint32_t time_index_capacity):
    """From now on the head has `capacity` bytes, and its indexes have room for so many entries:
    it grew, or what was not used was given back.  False, and nothing changed, when there is no
    head or it holds more than that.

    Bytes below `capacity`, and of the indexes, exist before the call; what goes is freed after
    it."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef bint done = False
    with nogil:
        pthread_mutex_lock(&s.lock)
        if (s.data != NULL and s.tail <= capacity <= <uint64_t> INT32_MAX
                and (s.offset_index == NULL or s.offset_entries <= offset_index_capacity)
                and (s.time_index == NULL or s.time_entries < time_index_capacity)):
            done = True
            s.capacity = capacity
            if s.offset_index != NULL:
                s.offset_capacity = offset_index_capacity
            if s.time_index != NULL:
                s.time_capacity = time_index_capacity
        pthread_mutex_unlock(&s.lock)
    return done


def freeze_head(CommitKernel kernel):
    """Refuse further records in this head (NO_SPACE), so that it can be flushed and sealed; its
    capacity, which `thaw_head` wants back should the roll fail."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef uint64_t capacity
    with nogil:
        pthread_mutex_lock(&s.lock)
        capacity = s.capacity
        if s.data != NULL:
            s.capacity = s.tail
        pthread_mutex_unlock(&s.lock)
    return capacity


def thaw_head(CommitKernel kernel, uint64_t capacity):
    """Undo `freeze_head`."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    with nogil:
        pthread_mutex_lock(&s.lock)
        s.capacity = s.capacity if s.data == NULL else capacity
        pthread_mutex_unlock(&s.lock)


def roll_without_head(CommitKernel kernel):
    """There is no head, and the last segment takes no more records: the log now ends at
    position 0 of a segment that begins at log end offset.  Slots as with `seal_head`."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef bint refused
    cdef int error = 0
    with nogil:
        pthread_mutex_lock(&s.lock)
        refused = s.data != NULL
        if not refused:
            error = end_segment(s)
        pthread_mutex_unlock(&s.lock)
    if refused:
        raise LogError("there is a head", hint="seal it")
    if error:
        raise MemoryError()
