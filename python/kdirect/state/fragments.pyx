# cython: language_level=3, boundscheck=False
"""Fragments: what a helper keeps of another executor's keys within an epoch (Slash section 7.2.2).

Owns: the delta log of one leader, whose pages are themselves the message, and the decision which
rows of an epoch are aggregated into entries and which are sent as tuples.  A page is filled from
its start; its header is written when it is handed out, and the channel writes its footer after it.

An epoch begins with entries for all keys.  Where new keys would hardly be met again before it ends,
no more of them become entries: rows of the keys that have one go on to be aggregated there, and all
others leave as tuples.  So hot keys cost an update of a table that stays in the cache, and cold
keys cost a tuple, which is less than an entry that is made, filled, sent and merged.

Invariants: a page belongs to its fragment until `flush`, and to whoever flushed until
`PageMemory.release`.  After `flush` the fragment is empty: the next epoch's updates start from zero
values, so discarding what was sent is safe.  The decision is a function of the rows of this epoch
and of how many are expected, so that a replay decides the same; an entry and tuples of the same key
may go in one epoch, entries first.
"""

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
    SAMPLE_ROWS = 2048   # after so many rows it is looked for the first time at what they met
    FEW_NEW = 16         # of so many rows less than one meets a new key: it does not matter then

cdef double LEAST_HITS = 0.15  # of rows, for which it pays to look for their keys


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
                hint="raise the option slot_bytes, group by shorter keys, or lower "
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


cdef class Fragment:
    """The delta of one leader.

    After SAMPLE_ROWS rows of an epoch, and each time that their number has doubled, it is estimated
    how often a key that is new now will be met again: the share of rows that met a known key rose
    with the number of known keys, and by how much it rose is the chance of a row to meet a key that
    was made an entry lately.  This holds for any distribution of keys.  If the `expected_rows` of
    the epoch leave a new key fewer than `least_ratio` rows, no more entries are made.

    `least_ratio` 0: all rows become entries; `always_tuples`: none does."""

    def __init__(self, StateMemory memory, PageMemory pages, uint32_t sender, uint32_t leader,
                 uint32_t key_words, uint32_t state_words, initial, uint32_t tuple_words,
                 uint32_t shape, always_tuples=False, least_ratio=3.0):
        self.sender, self.leader = sender, leader
        self.table = Table(memory, key_words, state_words, initial, 1, PageLog(pages))
        self.tuples = PageLog(pages)
        self.c.tuples = &self.tuples.c
        self.always_tuples = always_tuples
        self.least_ratio = least_ratio
        self._shape, self._tuple_words = shape, tuple_words
        self._begin()

    def _begin(self):
        self.c.rows = self.c.tuple_rows = 0
        self.c.way = KD_AS_TUPLES if self.always_tuples else KD_AS_ENTRIES
        self.c.look_at = SAMPLE_ROWS if self.least_ratio > 0 else <uint64_t>-1
        self._looked_rows = self._looked_entries = 0
        self._hits = self._known = 0

    @property
    def rows(self):
        return self.c.rows

    @property
    def entries(self):
        return len(self.table)

    cdef int c_look(self, double expected_rows) except -1:
        """Decides how the rows from here on go; called when `rows` has reached `look_at`."""
        cdef double rows = self.c.rows - self._looked_rows
        cdef double new = self.table.c.used - self._looked_entries
        cdef double hits = 1 - new / rows, known = self._looked_entries + new / 2
        cdef double again = 0
        if known > self._known:
            again = (hits - self._hits) / (known - self._known) * (expected_rows - self.c.rows)
        self._looked_rows, self._looked_entries = self.c.rows, self.table.c.used
        self._hits, self._known = hits, known
        self.c.look_at = 2 * self.c.rows
        if new * FEW_NEW >= rows and again < self.least_ratio:
            self.c.way = KD_AS_TUPLES if hits < LEAST_HITS else KD_AS_BOTH
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
