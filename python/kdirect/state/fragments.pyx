# cython: language_level=3, boundscheck=False
"""Fragments: what a helper keeps of another executor's keys within an epoch (Slash section 7.2.2).

Owns: the delta log of one leader, whose pages are themselves the message, and the decision whether
an epoch is sent as entries or as tuples.  A page is filled from its start; its header is written
when it is handed out, and the channel writes its footer after it.

Invariants: a page belongs to its fragment until `flush`, and to whoever flushed until
`PageMemory.release`.  After `flush` the fragment is empty: the next epoch's updates start from zero
values, so discarding what was sent is safe.  The decision is a function of the rows of this epoch
alone, so that a replay decides the same.
"""

from libc.math cimport exp
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t

from kdirect.errors import StateError
from kdirect.state.arena cimport Log, PageMemory, StateMemory
from kdirect.state.layout cimport PAGE_ENTRIES, PAGE_HEADER_BYTES, PAGE_TUPLES
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_count_entries, kd_table

cdef extern from "page_run.h" nogil:
    void kd_finish_page(uint8_t* page, uint64_t used, int kind, uint32_t sender, uint32_t count,
                        uint32_t shape, uint32_t entry_words, uint64_t rows)

cdef enum:
    SAMPLE_ROWS = 4096   # after so many rows of an epoch it is decided how they are sent


cdef class PageLog(Log):
    """A log whose segments are pages; positions in it are addresses."""

    def __init__(self, PageMemory pages):
        self.pages = pages
        self.c.base = NULL
        self._segments = []

    cdef int c_room(self, uint64_t need) except -1:
        cdef uint64_t address
        if self.c.end - self.c.tail >= need:
            return 0
        if need > self.pages.room - PAGE_HEADER_BYTES:
            raise StateError(
                f"an entry of {need} bytes does not fit into a page of {self.pages.page_bytes}",
                hint="raise the option state.page.bytes, group by shorter keys, or lower "
                "precision_bits")
        if self._segments:
            self._segments[-1][2] = self.c.tail
        address = self.pages.c_take()
        self._segments.append([address, 0, address])
        self.c.tail = address + PAGE_HEADER_BYTES
        self.c.end = address + self.pages.room
        return 0

    def stretches(self):
        """[(begin, end)] of the entries in each page."""
        if self._segments:
            self._segments[-1][2] = self.c.tail
        return [(address + PAGE_HEADER_BYTES, end) for address, _, end in self._segments]

    cdef list c_take(self):
        """[(address, end)] of the pages, which are the caller's from now on."""
        if self._segments:
            self._segments[-1][2] = self.c.tail
        taken = [(address, end) for address, _, end in self._segments]
        self._segments = []
        self.c.tail = self.c.end = 0
        return taken

    cdef int c_clear(self) except -1:
        for address, _ in self.c_take():
            self.pages.c_release(address)
        return 0


def keys_in_all(uint64_t rows, uint64_t keys):
    """How many keys there are, if `rows` rows drawn evenly from them have met `keys` of them: the
    solution of keys = n (1 - exp(-rows / n))."""
    cdef double low, high, middle
    cdef int i
    if keys >= rows:
        return float("inf")
    low, high = keys, keys
    while high * (1 - exp(-(<double>rows) / high)) < keys * 0.999999:
        high *= 2
        if high > 1e15:
            return float("inf")
    for i in range(60):
        middle = (low + high) / 2
        if middle * (1 - exp(-(<double>rows) / middle)) < keys:
            low = middle
        else:
            high = middle
    return high


cdef class Fragment:
    """The delta of one leader.

    Rows are aggregated into entries; after SAMPLE_ROWS rows of an epoch its keys are counted, and
    if the `expected_rows` of an epoch would have fewer than `least_ratio` rows a key, the rest of
    the epoch goes as tuples: where hardly anything aggregates, a tuple costs less than an entry
    that is found, filled and read again.  `least_ratio` 0: never; `always_tuples`: from the
    first row.
    """

    def __init__(self, StateMemory memory, PageMemory pages, uint32_t sender, uint32_t leader,
                 uint32_t key_words, uint32_t state_words, initial, uint32_t tuple_words,
                 uint32_t shape, always_tuples=False, least_ratio=5.0, expected_rows=1 << 18):
        self.sender, self.leader = sender, leader
        self.table = Table(memory, key_words, state_words, initial, 1, PageLog(pages))
        self.tuples = PageLog(pages)
        self.c.tuples = &self.tuples.c
        self.always_tuples = always_tuples
        self.least_ratio = least_ratio
        self.expected_rows = expected_rows
        self._shape, self._tuple_words = shape, tuple_words
        self._begin()

    def _begin(self):
        self.c.rows = self.c.tuple_rows = 0
        self.c.as_tuples = self.c.decided = self.always_tuples
        if self.least_ratio <= 0:
            self.c.decided = True

    @property
    def rows(self):
        return self.c.rows

    @property
    def entries(self):
        return len(self.table)

    cdef int c_decide(self) except -1:
        """Called after rows were added, as long as it is not decided."""
        cdef double keys, per_key
        if self.c.rows < SAMPLE_ROWS:
            return 0
        self.c.decided = True
        keys = keys_in_all(self.c.rows, self.table.c.used)
        per_key = 1.0
        if keys < 1e15:
            per_key = self.expected_rows / (keys * (1 - exp(-(<double>self.expected_rows) / keys)))
        self.c.as_tuples = per_key < self.least_ratio
        return 0

    def flush(self):
        """([(address, bytes)] of the epoch's pages, rows, entries, tuples).  The pages are the
        caller's, the fragment is empty."""
        cdef Table table = self.table
        cdef kd_table tuple_form = table.c
        cdef uint64_t entries = table.c.used, rows = self.c.rows
        cdef uint64_t tuple_rows = self.c.tuple_rows
        tuple_form.state_words = self._tuple_words
        table.unindex()
        entry_pages = (<PageLog>table.log).c_take()
        pages = self._finished(entry_pages, PAGE_ENTRIES, &table.c, rows - tuple_rows)
        pages += self._finished(self.tuples.c_take(), PAGE_TUPLES, &tuple_form, tuple_rows)
        table.clear()
        self._begin()
        return pages, rows, entries, tuple_rows

    cdef list _finished(self, list pages, int kind, kd_table* form, uint64_t rows):
        """Writes the headers of pages.  The first says how many rows are in all of them."""
        cdef uint64_t address, end
        cdef uint32_t count, words = 0
        if form.key_words:
            words = 1 + form.state_words + form.key_words
        out = []
        for address, end in pages:
            count = kd_count_entries(form, address + PAGE_HEADER_BYTES, end)
            kd_finish_page(<uint8_t*><uintptr_t>address, end - address, kind, self.sender, count,
                           self._shape, words, rows)
            rows = 0
            out.append((address, end - address))
        return out
