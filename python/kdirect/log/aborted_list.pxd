"""Lists of aborted transactions for readers: see aborted_list.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t

from kdirect.log.state cimport aborted_list, kernel_state

# All of them with the kernel's mutex held.
cdef uint32_t first_aborted(const kernel_state* s, int64_t offset) noexcept nogil
# The first entry of the aborted index whose marker is at `offset` or above.
cdef uint32_t end_aborted(const kernel_state* s, uint32_t first, int64_t end) noexcept nogil
# The entry before which, of those from `first` on, all lie that began below `end`.
cdef bint start_list(kernel_state* s, aborted_list* out, uint8_t* at, uint32_t capacity,
                     uint16_t file_id, int64_t start, int64_t end) noexcept nogil
# Begin a list of `capacity` entries at `at`, with what a reader of offsets [start, end) has to
# know.  False, and nothing done: entries that it would need are forgotten.
cdef uint32_t remove_entries(kernel_state* s, const int64_t* markers, uint32_t count) noexcept nogil
# Take the entries out of the aborted index whose markers are at these offsets, which rise; how many
# there were.  Lists that were written keep them.
cdef void extend_list(kernel_state* s, aborted_list* to, int64_t end) noexcept nogil
# Put into the list what the index has got since, as far as it began below `end`.
