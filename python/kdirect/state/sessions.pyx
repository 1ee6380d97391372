# cython: language_level=3, boundscheck=False, wraparound=False
"""Aggregates over groups of rows: those of sessions, and those that go with collected lists.

Owns: the intervals of sessions, each with the states of its aggregates, and the use of the
accumulators' kernels (accumulate_run.h) on them.

A session is not known before it ends: two intervals become one when a row comes between them.  Each
executor unites the intervals of its own rows (its lane) as the rows come; the leader keeps the
intervals of all lanes of a key, and unites them when their session has ended, in the order of time
and lane.  So a float sum does not depend on which delta came first.
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kdirect.errors import StateError

from kdirect.state.chains cimport (
    ChainTable,
    kd_deadlines_cover,
    kd_interval_add,
    kd_interval_touching,
)
from kdirect.state.engine cimport kd_accumulator, kd_input, kd_merge, kd_merge_seen, kd_update
from kdirect.state.keys cimport KeyBlock
from kdirect.state.table_kernel cimport kd_keys
from kdirect.state.tuples cimport ParsedPage

from kdirect.state.accumulators import input_of

cdef enum:
    MOST_INPUTS = 64
    HEAD_BYTES = 32            # of an interval: next, start, last, lane


cdef class Cells:
    """The accumulators of a plan, on states wherever they lie.  `layout` is a StateLayout of one
    executor, so that a state has the same cells in a table and in a delta."""

    cdef kd_accumulator* cells
    cdef readonly uint32_t count
    cdef readonly object layout
    cdef kd_input inputs[64]
    cdef object _owners

    def __cinit__(self, layout):
        cdef uint32_t i
        self.layout = layout
        self.count = len(layout.codes)
        self.cells = <kd_accumulator*>calloc(max(1, self.count), sizeof(kd_accumulator))
        if self.cells == NULL:
            raise MemoryError
        if len(layout.inputs) > MOST_INPUTS:
            raise StateError(f"a plan may read at most {MOST_INPUTS} inputs")
        for i, code in enumerate(layout.codes):
            (self.cells[i].kind, self.cells[i].input, self.cells[i].offset, self.cells[i].delta,
             self.cells[i].words, self.cells[i].lanes, self.cells[i].bit, self.cells[i].option,
             self.cells[i].precision) = code

    def __dealloc__(self):
        free(self.cells)

    def point(self, columns, overflow):
        """Read the next rows from `columns`, a mapping of names to Arrow arrays."""
        cdef const uint8_t[::1] view
        cdef uint32_t i
        memset(&self.inputs[0], 0, sizeof(self.inputs))
        kept = []
        for i, (name, form) in enumerate(self.layout.inputs):
            if name is None:
                continue
            counted = all(cell.kernel.name == "COUNT_VALID" for cell in self.layout.cells
                          if cell.aggregate.column == name and cell.form is form)
            values, valid = input_of(columns[name], form, overflow, counted)
            values = np.ascontiguousarray(values)
            kept.append((values, valid))
            self.inputs[i].values = <const uint8_t*><uintptr_t>values.ctypes.data
            self.inputs[i].stride = 8 * form.words
            self.inputs[i].step = 1
            if valid is not None:
                valid = np.ascontiguousarray(valid, np.uint8)
                kept.append(valid)
                if len(valid):
                    view = valid
                    self.inputs[i].valid = &view[0]
        self._owners = kept

    cdef int c_update(self, uint8_t* base, const uint64_t* at, const uint32_t* rows, uint32_t n,
                      const int64_t* times) noexcept nogil:
        """Brings rows into the states at `at`; -1, or the number of a cell that overflowed."""
        cdef uint32_t i
        for i in range(self.count):
            if kd_update(&self.cells[i], self.cells[i].offset, base, at, rows, n,
                         &self.inputs[self.cells[i].input], times, 1, 1, 0):
                return i
        return -1

    cdef int c_merge(self, uint8_t* base, const uint64_t* at, uint32_t n,
                     const uint64_t* sources) noexcept nogil:
        """Merges the states at the addresses `sources` into those at `at`."""
        cdef uint32_t i
        if self.count and self._has_seen():
            kd_merge_seen(base, at, NULL, n, sources)
        for i in range(self.count):
            if kd_merge(&self.cells[i], self.cells[i].offset, base, at, NULL, n, sources,
                        self.cells[i].offset, 0):
                return i
        return -1

    cdef bint _has_seen(self) noexcept nogil:
        """A state begins with seen bits if no cell begins it."""
        cdef uint32_t i
        for i in range(self.count):
            if self.cells[i].offset == 0:
                return False
        return True

    def check(self, int cell):
        if cell >= 0:
            name = self.layout.cells[cell].aggregate.name
            raise StateError(f"aggregate {name}: a sum does not fit into its type",
                             hint="set overflow=wrap, or sum a decimal")

    def reduce(self, lengths, times):
        """States, one a group, of the rows that `point` gave: the first lengths[0] are of group 0,
        and so on.  `times` may be None."""
        cdef const uint64_t[::1] at
        cdef uint64_t[::1] view
        cdef const int64_t[::1] time_view
        cdef const int64_t* time = NULL
        cdef int fault = -1
        states, positions = self._fresh(len(lengths))
        at_rows = np.repeat(positions, lengths)
        if len(at_rows):
            at, view = at_rows, states
            if times is not None:
                time_view = times
                time = &time_view[0]
            with nogil:
                fault = self.c_update(<uint8_t*>&view[0], &at[0], NULL, <uint32_t>at.shape[0], time)
        self.check(fault)
        return states, positions

    def fold(self, lengths, intervals):
        """States, one a group, merged from the intervals at these addresses, in their order."""
        cdef const uint64_t[::1] at, sources
        cdef uint64_t[::1] view
        cdef int fault = -1
        states, positions = self._fresh(len(lengths))
        at_rows = np.repeat(positions, lengths)
        froms = intervals + np.uint64(16)
        if len(at_rows):
            at, sources, view = at_rows, froms, states
            with nogil:
                fault = self.c_merge(<uint8_t*>&view[0], &at[0], <uint32_t>at.shape[0], &sources[0])
        self.check(fault)
        return states, positions

    def _fresh(self, n):
        initial = np.frombuffer(self.layout.initial, np.uint64)
        states = np.empty((max(1, n), max(1, len(initial))), np.uint64)
        states[:, :len(initial)] = initial
        states = states.reshape(-1)
        return states, np.arange(n, dtype=np.uint64) * np.uint64(8 * len(initial))


cdef class IntervalTable(ChainTable):
    """Open sessions of the keys of one leader, as intervals by lane."""

    cdef readonly Cells cells
    cdef const uint64_t* initial
    cdef uint64_t words
    cdef object _initial_words

    def __init__(self, memory, shape, bucket=0, Cells cells=None):
        cdef const uint64_t[::1] view
        ChainTable.__init__(self, memory, shape, bucket)
        self.cells = cells
        self._initial_words = np.frombuffer(cells.layout.initial, np.uint64).copy()
        view = self._initial_words
        self.initial = &view[0]
        self.words = view.shape[0]
        self.longest = [int(2 + self.words), 0]

    def update(self, KeyBlock keys, rows, const int64_t[::1] times, uint64_t lane):
        """Bring in the rows `rows` of what `cells.point` read, as rows of a lane.  `times` are
        those of all rows of the block."""
        cdef const uint32_t[::1] chosen = rows
        cdef uint64_t[::1] states, at
        cdef uint64_t n = chosen.shape[0], i = 0, begun = 0, place
        cdef int64_t t
        cdef int fault = -1
        if not n:
            return
        found, targets = np.empty(n, np.uint64), np.empty(n, np.uint64)
        states, at = found, targets
        with nogil:
            self.table.c_find(&keys.c, &chosen[0], <uint32_t>n, &states[0])
        self._cover()
        while i < n:
            self.log.c_room(HEAD_BYTES + self.words * 8)
            with nogil:
                while i < n:
                    t = times[chosen[i]]
                    place = self.c_interval(states[i], lane, t, t, self.initial)
                    if place == 1:
                        # It joins intervals whose states must first have the rows until here.
                        fault = self.cells.c_update(self.c.base, &at[begun], &chosen[begun],
                                                    <uint32_t>(i - begun), &times[0])
                        if fault >= 0:
                            break
                        begun = i
                        fault = self.c_bridge(states[i], lane, t, t, &place)
                        if fault >= 0:
                            break
                    if place == 0:
                        break
                    at[i] = place + HEAD_BYTES
                    i += 1
            self.cells.check(fault)
        with nogil:
            fault = self.cells.c_update(self.c.base, &at[begun], &chosen[begun],
                                        <uint32_t>(n - begun), &times[0])
        self.cells.check(fault)

    cdef uint64_t c_interval(self, uint64_t entry, uint64_t lane, int64_t start, int64_t last,
                             const uint64_t* state) noexcept nogil:
        """The interval of a lane that takes up [start, last], extended or new with this state.  0:
        the log has no room; 1: several intervals would be united."""
        cdef uint64_t* link = <uint64_t*>(self.c.base + entry)
        cdef uint64_t* row
        cdef uint64_t place = kd_interval_touching(&self.c, &link, lane, start, last)
        cdef uint64_t bytes_ = HEAD_BYTES + self.words * 8
        if place:
            row = <uint64_t*>(self.c.base + place)
            link = row
            if kd_interval_touching(&self.c, &link, lane, min(start, <int64_t>row[1]),
                                    max(last, <int64_t>row[2])):
                return 1
            row[1] = <uint64_t>min(start, <int64_t>row[1])
            row[2] = <uint64_t>max(last, <int64_t>row[2])
            return place
        if self.log.c.end - self.log.c.tail < bytes_:
            return 0
        place = self.log.c.tail
        self.log.c.tail += bytes_
        kd_interval_add(&self.c, entry, place, lane, start, last, state, self.words)
        self.rows += 1
        self._appended += 1
        return place

    cdef int c_bridge(self, uint64_t entry, uint64_t lane, int64_t start, int64_t last,
                      uint64_t* place) noexcept nogil:
        """Unites the intervals of a lane that [start, last] touches into the first of them."""
        cdef uint64_t* link = <uint64_t*>(self.c.base + entry)
        cdef uint64_t* row
        cdef uint64_t* other_row
        cdef uint64_t other, source, to
        cdef int fault
        place[0] = kd_interval_touching(&self.c, &link, lane, start, last)
        row = <uint64_t*>(self.c.base + place[0])
        to = place[0] + HEAD_BYTES
        while True:
            row[1] = <uint64_t>min(start, <int64_t>row[1])
            row[2] = <uint64_t>max(last, <int64_t>row[2])
            link = row
            other = kd_interval_touching(&self.c, &link, lane, <int64_t>row[1], <int64_t>row[2])
            if not other:
                return -1
            other_row = <uint64_t*>(self.c.base + other)
            row[1] = <uint64_t>min(<int64_t>other_row[1], <int64_t>row[1])
            row[2] = <uint64_t>max(<int64_t>other_row[2], <int64_t>row[2])
            source = <uint64_t><uintptr_t>other_row + HEAD_BYTES
            fault = self.cells.c_merge(self.c.base, &to, 1, &source)
            if fault >= 0:
                return fault
            link[0] = other_row[0]
            (<uint64_t*>(self.c.base + entry))[1] -= 1
            self.rows -= 1

    def _cover(self):
        if kd_deadlines_cover(&self.c.deadlines, self.memory.top):
            raise MemoryError

    def add_intervals(self, ParsedPage page, lane):
        """Merge the intervals of a page: of lane `lane`, or with None each of the lane that it
        says, as those of a snapshot."""
        cdef uint64_t[::1] states
        cdef const uint64_t[::1] sources
        cdef const int64_t[::1] starts
        cdef uint64_t n = page.count, i = 0, place, own, to, source
        cdef const uint64_t* row
        cdef int fault = -1
        cdef int64_t given = -1 if lane is None else lane
        if not n:
            return
        found = np.empty(n, np.uint64)
        states, sources, starts = found, page.sources, page.times
        with nogil:
            self.table.c_find(&page.keys, NULL, <uint32_t>n, &states[0])
        self._cover()
        while i < n:
            self.log.c_room(HEAD_BYTES + self.words * 8)
            with nogil:
                while i < n:
                    row = <const uint64_t*>sources[i]
                    own = row[1] if given < 0 else <uint64_t>given
                    place = self.c_interval(states[i], own, starts[i], <int64_t>row[0],
                                            self.initial)
                    if place == 1:
                        fault = self.c_bridge(states[i], own, starts[i], <int64_t>row[0], &place)
                    if fault >= 0 or place == 0:
                        break
                    to, source = place + HEAD_BYTES, sources[i] + 16
                    fault = self.cells.c_merge(self.c.base, &to, 1, &source)
                    if fault >= 0:
                        break
                    i += 1
            self.cells.check(fault)

    def merge(self, page, sender):
        """Add the intervals of pages of `export`."""
        from kdirect.state.tuples import parse_page
        self.add_intervals(parse_page(self.shape, page, sender), None)
