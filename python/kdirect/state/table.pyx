# cython: language_level=3, boundscheck=False, wraparound=False
"""A table: a hash index over a dense log of keys and states (Slash section 7.2.1).

Owns: the index, its growth, and the walk over the log.  What a state means is the business of the
accumulators.  `find` is the first of two phases: it gives the positions of the states of a block of
rows, and inserts what is missing; then each accumulator runs over the positions.

Invariants: the log has every entry once, in order of insertion; the index has one word for each of
them; at most half of its slots are used.  Positions stay valid until `clear()` or `drop()`.  Find
and scan run without the GIL; growing takes it.
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kdirect.errors import StateLimitError
from kdirect.state.arena cimport Log, StateMemory
from kdirect.state.arena import block_log
from kdirect.state.keys cimport KeyBlock

from kdirect.state.table_kernel cimport (
    kd_count_entries,
    kd_find,
    kd_index_entries,
    kd_keys,
    kd_scan,
    kd_unindex_entries,
)

cdef enum:
    FIRST_INDEX_LOG = 12       # 4 KiB: 512 slots
    QUADRUPLE_BELOW_LOG = 20   # small indexes grow by 4, large ones by 2
    SPARE_SHARE = 32           # an index of which less is used is larger than it has to be
    LARGEST_FIRST_LOG = 26     # of a log for which room is reserved: 64 MiB
    SPARSE_LOG = 16            # up to 64 KiB a quarter is used, so that the first slot is the one


def index_log(entries):
    """The log of the bytes of the smallest index that takes so many entries."""
    log = FIRST_INDEX_LOG
    while entries > (1 << (log - 3)) >> (2 if log <= SPARSE_LOG else 1):
        log += 1
    return log


cdef class Table:
    """Keys of `key_words` words (0: of variable length) and states of `state_words` words.

    `initial` are the bytes of the state of a new key.  With `prefix` 1 an entry begins with the
    bucket of its row, which is part of the key.  `log` is where entries go: by default a Log of
    `memory`; the pages of a delta have one of their own.  `drop()` gives all memory back; the table
    is empty and usable after that.
    """

    def __init__(self, StateMemory memory, uint32_t key_words, uint32_t state_words, initial=None,
                 uint32_t prefix=0, Log log=None):
        self.memory = memory
        self.log = Log(memory) if log is None else log
        self.c.log = &self.log.c
        self.c.key_words = key_words
        self.c.prefix = prefix
        self.c.state_words = state_words
        self.set_initial(bytes(8 * state_words) if initial is None else initial)
        self.c.index = NULL
        self.c.mask = self.c.used = self.c.most = 0
        self._index_position = 0
        self.first_log = FIRST_INDEX_LOG
        self.bucket = 0

    def set_initial(self, initial):
        """New keys begin with these bytes from now on."""
        if len(initial) != 8 * self.c.state_words:
            raise ValueError("the initial state has another length than states")
        self._initial = bytes(initial)
        self.c.initial = <const uint64_t*><const char*>self._initial

    def __len__(self):
        return self.c.used

    @property
    def key_words(self):
        return self.c.key_words

    @property
    def state_words(self):
        return self.c.state_words

    @property
    def slots(self):
        return self.c.mask + 1 if self._index_position else 0

    cdef int c_index(self, int log) except -1:
        """A new index of 2**log bytes, with all entries of the log in it."""
        cdef uint64_t position = self.memory.c_allocate(log), begin, end
        cdef uint64_t old = self._index_position
        cdef int old_log = self._index_log
        self.c.index = <uint64_t*>(self.memory.base + position)
        self._index_position = position
        self._index_log = log
        self.c.mask = (<uint64_t>1 << (log - 3)) - 1
        self.c.most = (self.c.mask + 1) >> (2 if log <= SPARSE_LOG else 1)
        with nogil:
            memset(self.c.index, 0, <uint64_t>1 << log)
        for begin, end in self.log.stretches():
            with nogil:
                kd_index_entries(&self.c, begin, end)
        if old:
            self.memory.c_release(old, old_log)
        return 0

    def reserve(self, uint64_t entries, uint64_t bytes_):
        """About so many entries come into a table that is empty: its index need not grow then."""
        if not self.c.used and self.c.index == NULL:
            self.first_log = index_log(entries)
            self.log.c_first(min(block_log(bytes_), LARGEST_FIRST_LOG))

    cdef int c_needed(self):
        """The log of the index, or of a smaller one if the entries fill a small part of it."""
        cdef int log = self._index_log
        while log > FIRST_INDEX_LOG and self.c.used * SPARE_SHARE < <uint64_t>1 << (log - 3):
            log -= 1
        return max(log, FIRST_INDEX_LOG)

    cdef int c_grow(self) except -1:
        """What find stopped for: room in the log, or in the index."""
        if self.c.index == NULL:
            try:
                self.c_index(self.first_log)
            except StateLimitError:
                self.c_index(FIRST_INDEX_LOG)
        if self.c.used >= self.c.most:
            self.c_index(self._index_log + (2 if self._index_log < QUADRUPLE_BELOW_LOG else 1))
        return self.log.c_room(self.c.wanted)

    cdef int c_find(self, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                    uint64_t* positions) except -1 nogil:
        """Find or insert.  `positions[i]` becomes the position of the state of row `rows[i]` (of
        row i without `rows`)."""
        cdef uint32_t done = 0
        if self.c.index == NULL:
            self.c.wanted = 8
            with gil:
                self.c_grow()
        while True:
            done = kd_find(&self.c, keys, rows, done, n, positions)
            if done == n:
                return 0
            with gil:
                self.c_grow()

    def find(self, KeyBlock keys, rows=None):
        """Positions of the states of `keys`, or of those at `rows`; missing keys are inserted."""
        cdef const uint32_t[::1] chosen
        cdef uint64_t[::1] out
        cdef uint32_t n = keys.rows
        cdef const uint32_t* r = NULL
        if rows is not None:
            chosen = rows
            n = chosen.shape[0]
            if n and max(rows) >= keys.rows:
                raise IndexError("a row lies outside of the keys")
            r = &chosen[0] if n else NULL
        if (keys.key_words != self.c.key_words) or (self.c.prefix and keys.c.bucket == NULL):
            raise ValueError("these keys have another shape than the table's")
        positions = np.empty(n, np.uint64)
        if n:
            out = positions
            with nogil:
                self.c_find(&keys.c, r, n, &out[0])
        return positions

    def scan(self):
        """Positions of all states, in order of insertion.  The key of a state lies `state_words`
        words after it."""
        cdef uint64_t[::1] out
        cdef uint64_t begin, end, n = 0
        positions = np.empty(self.c.used, np.uint64)
        if not self.c.used:
            return positions
        out = positions
        for begin, end in self.log.stretches():
            if n < self.c.used:
                with nogil:
                    n += kd_scan(&self.c, begin, end, &out[n], self.c.used - n)
        if n != self.c.used:
            raise AssertionError("the log of a table has lost entries")
        return positions

    def unindex(self):
        """Empty the index: slot by slot where few are used, else all of it."""
        cdef uint64_t begin, end
        if self.c.index != NULL:
            if self.c.used * 8 < self.c.mask:
                for begin, end in self.log.stretches():
                    with nogil:
                        kd_unindex_entries(&self.c, begin, end)
            else:
                with nogil:
                    memset(self.c.index, 0, (self.c.mask + 1) * 8)
        self.c.used = 0

    def clear(self):
        """Forget all entries; the index stays, the log's segments go back."""
        if self.c.used:
            self.unindex()
        self.log.c_clear()

    def drop(self):
        """Forget all entries and give all memory back."""
        self.c.used = 0
        self.log.c_clear()
        if self._index_position:
            self.memory.c_release(self._index_position, self._index_log)
        self._index_position = 0
        self.c.index = NULL
        self.c.mask = self.c.most = 0

    def blocks(self):
        """[(position, log)] of the memory that the table uses."""
        index = [(self._index_position, self._index_log)] if self._index_position else []
        return index + [(position, log) for position, log, _ in self.log.segments()]

    def catalogue(self):
        """What `restore` needs to go on with this table in another process."""
        return {"bucket": self.bucket, "used": self.c.used, "index": self._index_position,
                "index_log": self._index_log, "segments": self.log.segments()}

    def restore(self, entry):
        """Go on with a table that a catalogue describes, whose blocks the memory has taken over.
        Its log is walked, and its index is built again from it: no word of the file's index is
        trusted.  ValueError if the log is not a log of such entries; the table is unusable then."""
        cdef uint64_t begin, end
        cdef int64_t n
        cdef int64_t total = 0
        self.bucket = entry["bucket"]
        self.log.restore(entry["segments"])
        for begin, end in self.log.stretches():
            with nogil:
                n = kd_count_entries(&self.c, begin, end)
            if n < 0:
                raise ValueError(f"the log of bucket {self.bucket} is damaged")
            total += n
        if total != entry["used"]:
            raise ValueError(f"the log of bucket {self.bucket} has {total} entries, and its "
                             f"catalogue says {entry['used']}")
        self.c.used = total
        position, log = entry["index"], entry["index_log"]
        if not position:
            if total:
                raise ValueError(f"bucket {self.bucket} has entries and no index")
            return
        if total * 2 > 1 << (log - 3):
            raise ValueError(f"the index of bucket {self.bucket} is too small")
        self._index_position, self._index_log = position, log
        self.c.index = <uint64_t*>(self.memory.base + self._index_position)
        self.c.mask = (<uint64_t>1 << (self._index_log - 3)) - 1
        self.c.most = max(total, (self.c.mask + 1) >> (2 if log <= SPARSE_LOG else 1))
        with nogil:
            memset(self.c.index, 0, (self.c.mask + 1) * 8)
        for begin, end in self.log.stretches():
            with nogil:
                kd_index_entries(&self.c, begin, end)
