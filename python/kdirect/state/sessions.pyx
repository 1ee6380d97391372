# cython: language_level=3, boundscheck=False, wraparound=False
"""Aggregates over groups of rows whose state has no place in a table of cells: those of sessions,
those whose values have a variable length, and those that go with collected lists.

Owns: the intervals of groups, each with the states of its aggregates, and the use of the
accumulators' kernels (accumulate_run.h) and those of texts.pyx on them.

A session is not known before it ends: two intervals become one when a row comes between them.  Each
executor unites the intervals of its own rows (its lane) as the rows come; the leader keeps the
intervals of all lanes of a key, and unites them when their session has ended, in the order of time
and lane.  So a float sum does not depend on which delta came first.  Windows of other kinds are
known: a key has one interval for each lane there, of no time.
"""

import zlib

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from kdirect.errors import StateError

from kdirect.state.chains cimport (
    KD_NO_DEADLINE,
    ChainTable,
    kd_deadline_note,
    kd_deadlines_cover,
    kd_deadlines_due,
    kd_interval_add,
    kd_interval_touching,
    kd_stretch,
)
from kdirect.state.engine cimport kd_accumulator, kd_input, kd_merge, kd_merge_seen, kd_update
from kdirect.state.keys cimport KeyBlock
from kdirect.state.table_kernel cimport kd_keys, kd_variable_words
from kdirect.state.texts cimport (
    TextCells,
    TextStore,
    kd_text,
    kd_text_check,
    kd_text_cursor,
    kd_text_fits,
    kd_text_tail,
)
from kdirect.state.tuples cimport ParsedPage, TuplePages

from kdirect.state.accumulators import Results, input_of
from kdirect.state.keys import gather

cdef enum:
    MOST_INPUTS = 64
    HEAD_BYTES = 32            # of an interval: next, start, last, lane
    MOST_TAIL_BYTES = 16384    # of a tuple with more than one value
    WRITTEN_KEYS = 4096        # that are written at a time


cdef class Cells:
    """The aggregates of a plan, on states wherever they lie.  `layout` is a StateLayout of one
    executor, so that a state has the same cells in a table and in a delta; the cells of `texts`
    (texts.pyx) come after those, and then, if there are any, a word for the bytes of a tail."""

    cdef kd_accumulator* cells
    cdef readonly uint32_t count
    cdef readonly object layout
    cdef readonly TextCells texts
    cdef readonly bytes initial
    cdef readonly uint64_t words
    cdef uint64_t layout_words
    cdef readonly uint32_t check
    cdef kd_input inputs[64]
    cdef object _owners

    def __cinit__(self, layout, texts=()):
        cdef uint32_t i
        self.layout = layout
        self.texts = TextCells(texts, layout.words)
        self.initial = layout.initial + self.texts.initial + bytes(8 if self.texts.count else 0)
        self.words = len(self.initial) // 8
        self.layout_words = layout.words
        self.check = zlib.crc32(repr((layout.check, self.texts.check)).encode())
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
        self.texts.point(columns)
        cdef const uint8_t[::1] view
        cdef uint32_t i
        memset(&self.inputs[0], 0, sizeof(self.inputs))
        kept = []
        for i, (name, form) in enumerate(self.layout.inputs):
            if name is None:
                continue
            counted = all(cell.kernel.name == "COUNT_VALID" for cell in self.layout.cells
                          if cell.aggregate.column == name and cell.form is form)
            values, valid = input_of(name, columns[name], form, overflow, counted)
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
                      const int64_t* times, TextStore store) except -2 nogil:
        """Brings rows into the states at `at`; -1, or the number of a cell that overflowed."""
        cdef uint32_t i
        for i in range(self.count):
            if kd_update(&self.cells[i], self.cells[i].offset, base, at, rows, n,
                         &self.inputs[self.cells[i].input], times, 1, 1, 0):
                return i
        self.texts.c_update(base, at, rows, n, times, store)
        return -1

    cdef int c_merge(self, uint8_t* base, const uint64_t* at, uint32_t n,
                     const uint64_t* sources) noexcept nogil:
        """Merges the cells of fixed width of the states at the addresses `sources` into those at
        `at`; -1, or the number of a cell that overflowed."""
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

    def check_sums(self, int cell):
        """Raise StateError for the number of a cell that overflowed; -1 is none."""
        if cell >= 0:
            name = self.layout.cells[cell].aggregate.name
            raise StateError(f"aggregate {name}: a sum does not fit into its type",
                             hint="set overflow=wrap, or sum a decimal")

    def whole(self, ParsedPage page):
        """Whether every tuple of a page has the tail that its cells have."""
        cdef const uint64_t[::1] sources
        cdef const uint64_t* words
        cdef uint64_t i
        if not self.texts.count or not page.count:
            return True
        sources = page.sources
        for i in range(page.count):
            words = <const uint64_t*>sources[i] + 2
            if not kd_text_fits(self.texts.cells, self.texts.count, words,
                                <const uint8_t*>(words + self.words),
                                <uint32_t>words[self.words - 1]):
                return False
        return True

    def reduce(self, lengths, times, overflow):
        """The results, by the names of the aggregates, of the groups of the rows that `point` gave:
        the first lengths[0] are of group 0, and so on.  `times` may be None."""
        cdef const uint64_t[::1] at
        cdef uint64_t[::1] view
        cdef const int64_t[::1] time_view
        cdef const int64_t* time = NULL
        cdef int fault = -1
        cdef TextStore store = TextStore()
        states, positions = self._fresh(len(lengths))
        at_rows = np.repeat(positions, lengths)
        if len(at_rows):
            at, view = at_rows, states
            if times is not None:
                time_view = times
                time = &time_view[0]
            with nogil:
                fault = self.c_update(<uint8_t*>&view[0], &at[0], NULL, <uint32_t>at.shape[0], time,
                                      store)
        self.check_sums(fault)
        return self._results(states.ctypes.data, positions, store, overflow)

    def fold(self, lengths, intervals, TextStore texts, overflow):
        """The results of groups that are merged from the intervals at these addresses, in their
        order; `texts` is where their texts lie."""
        cdef const uint64_t[::1] at, sources
        cdef uint64_t[::1] view
        cdef int fault = -1
        cdef TextStore store = TextStore()
        froms = intervals + np.uint64(16)
        if len(froms) == len(lengths):  # a group has an interval at least
            return self._results(0, froms, texts, overflow)
        states, positions = self._fresh(len(lengths))
        at_rows = np.repeat(positions, lengths)
        at, sources, view = at_rows, froms, states
        with nogil:
            fault = self.c_merge(<uint8_t*>&view[0], &at[0], <uint32_t>at.shape[0], &sources[0])
            self.texts.c_merge(<uint8_t*>&view[0], &at[0], <uint32_t>at.shape[0], &sources[0],
                               texts.c.base, store)
        self.check_sums(fault)
        return self._results(states.ctypes.data, positions, store, overflow)

    def _results(self, uintptr_t base, positions, TextStore store, overflow):
        columns = Results(self.layout, base, positions, overflow).columns()
        found = {cell.aggregate.name: column
                 for cell, column in zip(self.layout.cells, columns, strict=True)}
        texts = self.texts.results(base, positions, store)
        return found | {text[0].name: column
                        for text, column in zip(self.texts.texts, texts, strict=True)}

    def _fresh(self, n):
        initial = np.frombuffer(self.initial, np.uint64)
        states = np.empty((max(1, n), max(1, len(initial))), np.uint64)
        states[:, :len(initial)] = initial
        states = states.reshape(-1)
        return states, np.arange(n, dtype=np.uint64) * np.uint64(8 * len(initial))


cdef class IntervalTable(ChainTable):
    """The groups of the keys of one leader, as intervals by lane: of all open sessions, or of one
    window.  With `changes` keys that a row or delta changed are `due` until they have been."""

    cdef readonly Cells cells
    cdef readonly TextStore texts      # where the texts of the states lie
    cdef bint changes
    cdef const uint64_t* initial
    cdef uint64_t words
    cdef object _initial_words

    def __init__(self, memory, shape, bucket=0, Cells cells=None, changes=False):
        cdef const uint64_t[::1] view
        ChainTable.__init__(self, memory, shape, bucket)
        self.cells = cells
        self.changes = changes
        self.texts = TextStore(self.log)
        self._initial_words = np.frombuffer(cells.initial or bytes(8), np.uint64).copy()
        view = self._initial_words
        self.initial = &view[0]
        self.words = cells.words
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
        self._note(found)
        while i < n:
            self.log.c_room(HEAD_BYTES + self.words * 8)
            with nogil:
                while i < n:
                    t = times[chosen[i]] if self.c.session else 0
                    place = self.c_interval(states[i], lane, t, t, self.initial)
                    if place == 1:
                        # It joins intervals whose states must first have the rows until here.
                        fault = self.cells.c_update(self.c.base, &at[begun], &chosen[begun],
                                                    <uint32_t>(i - begun), &times[0], self.texts)
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
            self.cells.check_sums(fault)
        with nogil:
            fault = self.cells.c_update(self.c.base, &at[begun], &chosen[begun],
                                        <uint32_t>(n - begun), &times[0], self.texts)
        self.cells.check_sums(fault)

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
                      uint64_t* place) except -2 nogil:
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
            self.cells.texts.c_merge(self.c.base, &to, 1, &source, self.c.base, self.texts)
            link[0] = other_row[0]
            (<uint64_t*>(self.c.base + entry))[1] -= 1
            self.rows -= 1

    def _note(self, states):
        """Rows or deltas come into these entries."""
        cdef uint64_t i, n = len(states)
        cdef const uint64_t[::1] view = states
        cdef uint64_t* entry
        if not self.c.session and not self.changes:
            return
        if kd_deadlines_cover(&self.c.deadlines, self.memory.top):
            raise MemoryError
        if not self.changes:
            return
        with nogil:
            for i in range(n):
                entry = <uint64_t*>(self.c.base + view[i])
                if entry[4]:
                    entry[4] = 0
                    kd_deadline_note(&self.c.deadlines, view[i], 0)

    def due(self, closes):
        """Positions of the entries that may have a session which ends before `closes`; of all, in a
        window; or of those that have changed, which count as not changed then."""
        cdef uint64_t[::1] out
        cdef uint64_t begin, end, n = 0, i
        if not self.changes:
            return ChainTable.due(self, closes)
        if kd_deadlines_cover(&self.c.deadlines, self.memory.top):
            raise MemoryError
        positions = np.empty(max(1, len(self.table)), np.uint64)
        out = positions
        for begin, end in self.table.log.stretches():
            with nogil:
                kd_deadlines_due(&self.table.c, &self.c.deadlines, begin, end, 1, &out[0], &n,
                                 &self.visited)
        for i in range(n):
            (<uint64_t*>(self.c.base + out[i]))[4] = <uint64_t>KD_NO_DEADLINE
        return positions[:n]

    def add_intervals(self, ParsedPage page, rows, lane):
        """Merge the intervals `rows` (uint32; None: all) of a page: of lane `lane`, or with None
        each of the lane that it says, as those of a snapshot."""
        cdef uint64_t[::1] states
        cdef const uint64_t[::1] sources
        cdef const int64_t[::1] starts
        cdef const uint32_t[::1] chosen
        cdef uint64_t n, i = 0, place, own, to, source
        cdef const uint64_t* row
        cdef int fault = -1
        cdef int64_t given = -1 if lane is None else lane
        rows = np.arange(page.count, dtype=np.uint32) if rows is None else rows
        n = len(rows)
        if not n:
            return
        found, s, t = np.empty(n, np.uint64), page.sources[rows], page.times[rows]
        states, sources, starts, chosen = found, s, t, rows
        with nogil:
            self.table.c_find(&page.keys, &chosen[0], <uint32_t>n, &states[0])
        if lane is not None or self.c.session:
            self._note(found)
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
                    self.cells.texts.c_take_tail(
                        <uint64_t*>(self.c.base + to), row + 2,
                        <const uint8_t*>(row + 2 + self.words), self.texts)
                    i += 1
            self.cells.check_sums(fault)

    def merge(self, page, sender):
        """Add the intervals of pages of `export`."""
        from kdirect.state.tuples import parse_page
        self.add_intervals(parse_page(self.shape, page, sender), None, None)

    def folded(self, lengths, intervals, overflow):
        """The results of groups, by the names of the aggregates: the first lengths[0] of the
        intervals at these addresses are of group 0, and so on."""
        if not self.c.session and len(intervals) > len(lengths):
            group = np.repeat(np.arange(len(lengths)), lengths)
            intervals = intervals[np.lexsort((gather(0, intervals, 1), group))]
        return self.cells.fold(lengths, intervals, self.texts, overflow)

    # -- pages -------------------------------------------------------------------------------------

    def write(self, TuplePages writer, positions):
        """Write the intervals of these entries as tuples into pages."""
        for begin in range(0, len(positions), WRITTEN_KEYS):
            self._write(writer, positions[begin:begin + WRITTEN_KEYS])

    def _write(self, TuplePages writer, const uint64_t[::1] positions):
        cdef uint64_t n, key_words = 0
        cdef uint64_t most = min(<uint64_t>MOST_TAIL_BYTES, <uint64_t>writer.memory.room // 4)
        cdef uint64_t[::1] keys_view, items, words, to
        cdef uint32_t[::1] offsets, rows
        cdef int64_t[::1] times, buckets
        cdef uint8_t[::1] flags
        cdef kd_keys keys
        n = self.c_tuples(positions, most, NULL, NULL, NULL, NULL, NULL, &key_words)
        if not n:
            return
        keys_view, items = np.empty(key_words, np.uint64), np.empty(n, np.uint64)
        words, to = np.empty(n, np.uint64), np.empty(n, np.uint64)
        offsets, rows = np.empty(n, np.uint32), np.arange(n, dtype=np.uint32)
        times, buckets = np.empty(n, np.int64), np.full(n, self.bucket, np.int64)
        flags = np.zeros(n, np.uint8)
        with nogil:
            self.c_tuples(positions, most, &keys_view[0], &offsets[0], &items[0], &times[0],
                          &words[0], &key_words)
        memset(&keys, 0, sizeof(kd_keys))
        keys.words, keys.offsets = &keys_view[0], &offsets[0]
        writer.c_add(&keys, &rows[0], &buckets[0], &times[0], &flags[0], &words[0], n,
                     <uint8_t**>&to[0])
        with nogil:
            self.c_fill(&items[0], &words[0], &to[0], n, most)

    cdef uint64_t c_tuples(self, const uint64_t[::1] positions, uint64_t most, uint64_t* keys,
                           uint32_t* offsets, uint64_t* items, int64_t* times, uint64_t* words,
                           uint64_t* key_words) noexcept nogil:
        """The tuples of the intervals of entries: how many there are, and how many words of keys
        they have.  If `keys` is not NULL, of each the words of its key, where they begin, its
        interval, its time and its words."""
        cdef uint64_t i, at, k, n = 0, key_used = 0, used
        cdef const uint64_t* entry
        cdef const uint64_t* row
        cdef kd_text_cursor cursor
        cdef const kd_text* texts = self.cells.texts.cells
        cdef uint32_t count = self.cells.texts.count
        for i in range(<uint64_t>positions.shape[0]):
            entry = <const uint64_t*>(self.c.base + positions[i])
            k = self.c_key_words(entry)
            at = entry[0]
            while at:
                cursor.cell, cursor.slot = 0, 0
                row = <const uint64_t*>(self.c.base + at)
                while True:
                    used = 0
                    if count:
                        used = kd_text_tail(texts, count, row + 4, self.c.base, most,
                                            &cursor, NULL, NULL)
                    if keys != NULL:
                        memcpy(keys + key_used, entry + self.table.c.state_words, k * 8)
                        offsets[n] = <uint32_t>key_used
                        items[n], times[n] = at, <int64_t>row[1]
                        words[n] = 2 + self.words + (used + 7) // 8
                    key_used += k
                    n += 1
                    if cursor.cell == count:
                        break
                at = row[0]
        key_words[0] = key_used
        return n

    cdef void c_fill(self, const uint64_t* items, const uint64_t* words, const uint64_t* to,
                     uint64_t n, uint64_t most) noexcept nogil:
        """Writes tuples to where `to` says.  Those of an interval after its first have values only,
        and else the state of a new key."""
        cdef uint64_t i, before = 0, fixed = self.cells.layout_words
        cdef uint64_t* out
        cdef const uint64_t* row
        cdef kd_text_cursor cursor
        cdef const kd_text* texts = self.cells.texts.cells
        cdef uint32_t count = self.cells.texts.count
        for i in range(n):
            out = <uint64_t*>to[i]
            row = <const uint64_t*>(self.c.base + items[i])
            out[0], out[1] = row[2], row[3]
            out[words[i] - 1] = 0  # the last word of a tail may be a part of one
            memcpy(out + 2, self.initial, self.words * 8)
            if items[i] != before:
                cursor.cell, cursor.slot = 0, 0
                memcpy(out + 2, row + 4, fixed * 8)
            before = items[i]
            if count:
                out[1 + self.words] = kd_text_tail(texts, count, row + 4, self.c.base,
                                                   most, &cursor, out + 2,
                                                   <uint8_t*>(out + 2 + self.words))

    cdef uint64_t c_key_words(self, const uint64_t* entry) noexcept nogil:
        """Words of the key of an entry."""
        if self.table.c.key_words:
            return self.table.c.key_words
        return kd_variable_words(entry[self.table.c.state_words])

    # -- another process ---------------------------------------------------------------------------

    def restore(self, entry):
        """Go on with intervals that a catalogue describes; ValueError if what belongs to one lies
        outside of the log."""
        cdef const uint64_t[::1] at
        cdef uint64_t[:, ::1] stretches
        cdef uint64_t i, place
        cdef TextCells texts = self.cells.texts
        ChainTable.restore(self, entry)
        positions = self.table.scan()
        spans = np.array(self.log.stretches() or [(0, 0)], np.uint64)
        at, stretches = positions, spans
        if self.changes and kd_deadlines_cover(&self.c.deadlines, self.memory.top):
            raise MemoryError
        for i in range(<uint64_t>at.shape[0]):
            if self.changes:
                kd_deadline_note(&self.c.deadlines, at[i],
                                 (<int64_t*>(self.c.base + at[i]))[4])
            place = (<uint64_t*>(self.c.base + at[i]))[0]
            while place and texts.count:
                if not kd_text_check(texts.cells, texts.count,
                                     <uint64_t*>(self.c.base + place) + 4, self.c.base,
                                     <const kd_stretch*>&stretches[0, 0], stretches.shape[0]):
                    raise ValueError(f"a value of bucket {self.bucket} leaves its log")
                place = (<uint64_t*>(self.c.base + place))[0]
