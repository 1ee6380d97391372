"""C interface of chains.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kdirect.state.arena cimport Log, StateMemory
from kdirect.state.rows cimport kd_row_shape
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_keys, kd_table
from kdirect.state.tuples cimport ChainShape, TuplePages

cdef extern from "chains_run.h" nogil:
    uint64_t KD_NULL_KEY
    int64_t KD_NO_DEADLINE
    enum:
        KD_INNER
        KD_LEFT
        KD_RIGHT
        KD_FULL

    ctypedef struct kd_deadlines:
        int64_t* least
        uint64_t* first
        uint64_t blocks

    ctypedef struct kd_chains:
        uint8_t* base
        uint32_t timed
        uint32_t session
        uint32_t interval
        int64_t gap
        kd_deadlines deadlines

    ctypedef struct kd_groups:
        kd_chains* chains
        const uint64_t* entries
        uint64_t count
        uint64_t next
        int64_t closes
        uint64_t* list[2]
        uint64_t length[2]
        int64_t start
        int64_t end
        uint64_t entry
        int null_key

    ctypedef struct kd_pairs:
        kd_groups groups
        int how
        int busy

    ctypedef struct kd_stretch:
        uint64_t begin
        uint64_t end

    int kd_deadlines_cover(kd_deadlines* d, uint64_t top)
    uint64_t kd_deadlines_due(const kd_table* t, kd_deadlines* d, uint64_t begin, uint64_t end,
                              int64_t closes, uint64_t* out, uint64_t* count, uint64_t* visited)
    void kd_deadline_note(kd_deadlines* d, uint64_t entry, int64_t deadline)
    uint64_t kd_chain_head_bytes(const kd_chains* c)
    uint64_t kd_chain_place(const kd_chains* c, const uint64_t* words, uint64_t n, uint64_t tail,
                            uint64_t room, uint64_t* place, uint64_t* used)
    void kd_chain_link(kd_chains* c, const uint64_t* state, const uint64_t* place,
                       const int64_t* time, const uint8_t* flags, uint64_t n)
    void kd_groups_free(kd_groups* g)
    int kd_groups_next(kd_groups* g)
    int64_t kd_groups_fill(kd_groups* g, uint64_t most, uint64_t* entries, int64_t* lengths,
                           int64_t* start, int64_t* end, uint64_t** rows, uint64_t* room,
                           uint64_t* count)
    uint64_t kd_interval_touching(const kd_chains* c, uint64_t** link, uint64_t lane,
                                  int64_t start, int64_t last)
    void kd_interval_add(kd_chains* c, uint64_t entry_at, uint64_t at, uint64_t lane,
                         int64_t start, int64_t last, const uint64_t* state, uint64_t words)
    int64_t kd_pairs_next(kd_pairs* p, uint64_t most, uint64_t* left, uint64_t* right,
                          int64_t* start, int64_t* end)
    int kd_chain_check(const kd_chains* c, const kd_row_shape** shape, uint32_t sides,
                       const uint64_t* entries, uint64_t count, const kd_stretch* stretches,
                       uint64_t n, uint64_t most)

cdef class ChainTable:
    cdef readonly ChainShape shape
    cdef readonly Table table
    cdef readonly Log log
    cdef readonly StateMemory memory
    cdef readonly list longest         # words of the longest row of each side
    cdef readonly uint64_t rows        # that are linked
    cdef readonly uint64_t visited     # entries that looking for ended sessions has touched
    cdef uint64_t _appended            # rows since the last `compact`
    cdef uint64_t _ended               # entries that lost all rows since then
    cdef kd_chains c
    cdef int c_append(self, kd_keys* keys, const uint32_t* chosen, uint64_t n,
                      const uint64_t* words, const int64_t* time, const uint8_t* flags,
                      uint64_t* place) except -1
    cdef int _export_group(self, kd_groups* g, TuplePages writer) except -1

cdef class Walk:
    cdef kd_pairs c
    cdef object _positions
    cdef uint64_t* rows
    cdef uint64_t room
    cdef uint64_t empty                # entries that had no rows when they were counted
    cdef uint64_t c_rows(self) noexcept
