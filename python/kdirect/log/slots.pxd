"""Marks and metadata slots: see slots.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

from kdirect.log.state cimport aborted_list, kernel_state, mark_t

# All of them with the kernel's mutex held.
cdef int attach(kernel_state* s, uint8_t* slot, uint16_t file_id, int64_t base,
                const aborted_list* aborted, int64_t start) noexcept nogil
# Fill a slot for the segment that begins at offset `base`, and keep it current: 0, ENOMEM, or
# ENOENT when that segment is finished, or is none.  With `aborted`, of which place and room are
# set (else NULL), there is a list for a reader from offset `start` on; ENOENT also when
# part of that is forgotten.
cdef void detach(kernel_state* s, const uint8_t* slot) noexcept nogil
cdef void update_slots(kernel_state* s) noexcept nogil
cdef void publish(kernel_state* s) noexcept nogil
# Bring the slots up to date if commits have been made since: the last thing before the mutex is
# given back.
cdef void drop_slots(kernel_state* s, uint16_t flags, int64_t base) noexcept nogil
# The slots of the segment `base` (-1: all) get their last update, with `flags`, and are forgotten.
cdef int end_segment(kernel_state* s) noexcept nogil
# The last segment takes no more records: the log goes on at position 0 of a segment that begins at
# its end offset.  0, or ENOMEM, and nothing has changed.
cdef bint is_point(const kernel_state* s, const mark_t* mark) noexcept nogil
# Is it a point of this log, of the last segment or of one in `sealed`?
cdef void move_marks(kernel_state* s, const mark_t* mark) noexcept nogil
# Make everything below a point of this log readable, and stable where no transaction holds that
# back.  The slots are to be updated after.
cdef void move_to_end(kernel_state* s) noexcept nogil
# The same, of the log's end.
cdef void finish_sealed(kernel_state* s) noexcept nogil
# Forget the sealed segments below the marks; their slots get their last update.
cdef int remember_sealed(kernel_state* s, int64_t base, uint64_t size,
                         int64_t end_offset) noexcept nogil
# Note a sealed segment that a mark may lie in, unless it is noted: 0 or ENOMEM.
cdef void cut_log(kernel_state* s, const mark_t* end, int32_t epoch, bint empty) noexcept nogil
# There is no head.  The log ends at that point of the last segment, or of a sealed one; `epoch` is
# that of its last batch.  Slots are revoked, producers and
# transactions forgotten.  `empty`: no record is left.
