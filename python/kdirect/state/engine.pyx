# cython: language_level=3, boundscheck=False, wraparound=False
"""The update path: a block of rows to window tables of this executor and fragments of the others.

Owns: the tables of the windows that this executor leads, one a bucket, its fragments, and the loop
over both.  A block goes through in pieces of PIECE_ROWS rows, so that what one phase writes is
still in the cache for the next: hashes, then targets (whose partition, which window), then for each
target the positions of its states, then each accumulator over these positions.

Invariants: no row is applied twice or half, unless an error ends the job.  Rows of one executor
touch its own lane only.  Everything here runs without the GIL except for growing tables and making
them; one thread uses an engine.
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from kdirect.errors import StateError, StateLimitError
from kdirect.state.arena cimport PageMemory, StateMemory
from kdirect.state.fragments cimport KD_AS_ENTRIES, KD_AS_TUPLES, Fragment
from kdirect.state.keys cimport KeyBlock, KeyShape
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_find, kd_keys, kd_part_known, kd_table

cdef extern from "keys_run.h" nogil:
    void kd_hash_rows(const kd_keys* k, uint32_t key_words, uint32_t n, uint64_t* out)

cdef extern from "page_run.h" nogil:
    uint32_t kd_write_tuples(void* log, const kd_tuple* f, const kd_keys* k, uint32_t key_words,
                             const uint32_t* rows, uint32_t i, uint32_t n, const int64_t* buckets,
                             const kd_input* inp, const int64_t* times, uint32_t* wanted)
    uint64_t kd_stamp_rows(uint8_t* base, const uint64_t* at, uint32_t n, uint32_t offset,
                           uint64_t batch, uint64_t* changed, uint64_t known)

cdef enum:
    PIECE_ROWS = 4096
    MOST_TARGETS = 65535
    MOST_FIRST_LOGS = 64

NOBODY = KD_DROP  # as the owner of a virtual partition: its rows are not wanted
BLOCK_ROWS = 1 << 16
EXPECTED_ROWS = 1 << 18  # in an epoch, where nobody says


cdef class Engine:
    """Tables and fragments of one executor.

    `owners[v]` is the executor that leads virtual partition v, or NOBODY.  `origin` and `size` are
    those of buckets in microseconds; size 0 puts everything into bucket 0.  `expected_rows` is how
    many rows this epoch will have, of all leaders together; whoever knows it sets it.
    """

    def __cinit__(self):
        self.route = <kd_route*>calloc(1, sizeof(kd_route))
        self.targets = <kd_table**>calloc(MOST_TARGETS, sizeof(kd_table*))
        self.deltas = <kd_fragment**>calloc(MOST_TARGETS, sizeof(kd_fragment*))
        self.counts = <uint32_t*>calloc(MOST_TARGETS + 1, 4)
        self.shares = <double*>calloc(MOST_TARGETS, sizeof(double))
        self.cells = NULL
        if 0 in (<uintptr_t>self.route, <uintptr_t>self.targets, <uintptr_t>self.deltas,
                 <uintptr_t>self.counts, <uintptr_t>self.shares):
            raise MemoryError()

    def __init__(self, StateMemory memory, PageMemory pages, KeyShape keys, layout, int executor,
                 owners, int64_t origin=0, int64_t size=0, always_tuples=False,
                 least_ratio=3.0):
        cdef uint32_t executors = layout.executors
        if len(owners) != 256 or any(o != NOBODY and not 0 <= o < executors for o in owners):
            raise ValueError("every virtual partition has one owner, an executor or NOBODY")
        if len(layout.inputs) > KD_MOST_INPUTS:
            raise StateError(f"a plan may read at most {KD_MOST_INPUTS} inputs")
        self.memory, self.pages, self.keys, self.layout = memory, pages, keys, layout
        self.lanes, self.lane, self.stamp = executors, executor, layout.stamp
        self.slots, self._tables, self._free_slots, self._first_logs = {}, [], [], []
        self._set_cells(layout)
        self.route.self, self.route.executors = executor, executors
        self.route.origin, self.route.size = origin, size
        self.route.least_bucket = -(1 << 63)
        self.route.most_time = (1 << 63) - 1
        self.own(owners)
        kd_route_forget(self.route)
        self.fragments = [
            None if leader == executor or leader not in owners else Fragment(
                memory, pages, executor, leader, keys.words, layout.delta_words,
                self._delta_initial(layout), layout.tuple_words, layout.check, always_tuples,
                least_ratio)
            for leader in range(executors)]
        self.expected_rows = EXPECTED_ROWS
        for leader, fragment in enumerate(self.fragments):
            if fragment is not None:
                self.shares[leader] = owners.count(leader) / 256
                self.targets[leader] = &(<Table>(<Fragment>fragment).table).c
                self.deltas[leader] = &(<Fragment>fragment).c
        self.c_scratch(PIECE_ROWS)

    def _set_cells(self, layout):
        cdef uint32_t i, number
        self.cell_count = len(layout.codes)
        self.cells = <kd_accumulator*>calloc(max(1, len(layout.codes)), sizeof(kd_accumulator))
        for i, code in enumerate(layout.codes):
            (self.cells[i].kind, self.cells[i].input, self.cells[i].offset, self.cells[i].delta,
             self.cells[i].words, self.cells[i].lanes, self.cells[i].bit, self.cells[i].option,
             self.cells[i].precision) = code
        self.count_cell, self.counted_cell = -1, 0
        for i in range(self.cell_count):
            if kd_goes_with_count(self.cells[i].kind):
                self.counted_cell = i
                for number in range(self.cell_count):
                    if self.cells[number].kind == KD_COUNT:
                        self.count_cell = number
                break
        # A new state has all its seen bits set as long as no null was met.
        self._initial = layout.initial
        self._initial_seen = layout.initial
        if layout.has_seen:
            self._initial_seen = b"\xff" * 8 + layout.initial[8:]
        self.tuple_form.inputs = len(layout.inputs)
        self.tuple_form.words = layout.tuple_words
        self.time_input = -1
        for number, (column, form) in enumerate(layout.inputs):
            self.tuple_form.width[number] = form.words
            self.tuple_form.at[number] = layout.tuple_inputs_at[number]
            if form.name == "TIME":
                self.time_input = number
        self.tuple_form.time = self.time_input

    def _delta_initial(self, layout):
        if layout.has_seen:
            return b"\xff" * 8 + layout.delta_initial[8:]
        return layout.delta_initial

    def own(self, owners):
        """Give the virtual partitions other owners: NOBODY's rows are dropped and not counted."""
        cdef int i
        for i in range(256):
            self.route.owners[i] = owners[i]
        self.route.all_own = all(o == self.lane for o in owners)
        self.route.leads = any(o == self.lane for o in owners)

    def __dealloc__(self):
        for p in (<uintptr_t>self.route, <uintptr_t>self.targets, <uintptr_t>self.deltas,
                  <uintptr_t>self.counts, <uintptr_t>self.shares,
                  <uintptr_t>self.cells, <uintptr_t>self.hash, <uintptr_t>self.positions,
                  <uintptr_t>self.addresses, <uintptr_t>self.buckets, <uintptr_t>self.order,
                  <uintptr_t>self.offsets, <uintptr_t>self.row_targets, <uintptr_t>self.present,
                  <uintptr_t>self.numbers, <uintptr_t>self.known, <uintptr_t>self.unknown,
                  <uintptr_t>self.changed, <uintptr_t>self.heads):
            free(<void*><uintptr_t>p)

    cdef int c_scratch(self, uint32_t room) except -1:
        """Scratch for `room` rows; what was in it is lost."""
        if room <= self.room:
            return 0
        self.room = 0
        for p in (<uintptr_t>self.hash, <uintptr_t>self.positions, <uintptr_t>self.addresses,
                  <uintptr_t>self.buckets, <uintptr_t>self.order, <uintptr_t>self.offsets,
                  <uintptr_t>self.row_targets, <uintptr_t>self.present, <uintptr_t>self.numbers,
                  <uintptr_t>self.known, <uintptr_t>self.unknown):
            free(<void*><uintptr_t>p)
        self.hash = <uint64_t*>malloc(room * 8)
        self.positions = <uint64_t*>malloc(room * 8)
        self.addresses = <uint64_t*>malloc(room * 8)
        self.buckets = <int64_t*>malloc(room * 8)
        self.order = <uint32_t*>malloc(<uint64_t>(room + 1) * 4)
        self.offsets = <uint32_t*>malloc(room * 4)
        self.row_targets = <uint16_t*>malloc(room * 2)
        self.present = <uint16_t*>malloc(room * 2)
        self.numbers = <uint32_t*>malloc(room * 4)
        self.known = <uint32_t*>malloc(room * 4)
        self.unknown = <uint32_t*>malloc(room * 4)
        if 0 in (<uintptr_t>self.hash, <uintptr_t>self.positions, <uintptr_t>self.addresses,
                 <uintptr_t>self.buckets, <uintptr_t>self.order, <uintptr_t>self.offsets,
                 <uintptr_t>self.row_targets, <uintptr_t>self.present, <uintptr_t>self.numbers,
                 <uintptr_t>self.known, <uintptr_t>self.unknown):
            raise MemoryError()
        self.room = room
        return 0

    cdef int c_heads(self, uint64_t room) except -1:
        """Room for the heads of tuples of different lengths."""
        free(self.heads)
        self.heads_room = 0
        self.heads = <uint8_t*>malloc(room)
        if self.heads == NULL:
            raise MemoryError()
        self.heads_room = room
        return 0

    # -- window tables -----------------------------------------------------------------------------
    cdef uint16_t c_slot(self, int64_t bucket) except? 0xFFFF:
        """The slot of a bucket's table, which is made if it does not exist."""
        slot = self.slots.get(bucket)
        if slot is None:
            table = self.new_table(bucket)
            if self._first_logs:
                (<Table>table).first_log = self._first_logs.pop()
            slot = self._add(table)
        kd_route_learn(self.route, bucket, slot)
        return slot

    def new_table(self, bucket=0):
        """An empty table of this plan's states, which is not one of the windows."""
        cdef Table table = Table(self.memory, self.keys.words, self.layout.words,
                                 self._initial if self.track else self._initial_seen)
        table.bucket = bucket
        return table

    def _add(self, Table table):
        if self._free_slots:
            slot = self._free_slots.pop()
            self._tables[slot] = table
        else:
            slot = len(self._tables)
            if slot + self.lanes >= MOST_TARGETS:
                raise StateLimitError(f"{slot} windows are open at once",
                                      hint="make windows longer, or the allowed delay shorter")
            self._tables.append(table)
        self.targets[self.lanes + <uint64_t>slot] = &table.c
        self.slots[table.bucket] = slot
        return slot

    def adopt(self, Table table):
        """A table that was restored from a catalogue becomes the table of its bucket."""
        if table.bucket in self.slots:
            raise ValueError(f"bucket {table.bucket} occurs twice")
        self._add(table)

    def table(self, int64_t bucket):
        """The table of a bucket, or None."""
        slot = self.slots.get(bucket)
        return None if slot is None else self._tables[slot]

    def drop(self, int64_t bucket):
        """Give the memory of a bucket's table back."""
        slot = self.slots.pop(bucket)
        # A later window is likely to have as many keys.  It begins with the size that this index
        # has grown to, in memory that this one gives back: no more is taken than was in use.
        if len(self._first_logs) < MOST_FIRST_LOGS:
            self._first_logs.append((<Table>self._tables[slot]).c_needed())
        (<Table>self._tables[slot]).drop()
        self._tables[slot] = None
        self.targets[self.lanes + <uint64_t>slot] = NULL
        self._free_slots.append(slot)
        kd_route_forget(self.route)

    def limit_times(self, int64_t least_bucket, int64_t most_time):
        """Rows of buckets before `least_bucket` are late, rows after `most_time` are refused."""
        self.route.least_bucket = least_bucket
        self.route.most_time = most_time

    def begin_tracking(self):
        """A null was met: from now on seen bits are written for each value."""
        cdef Table table
        if self.track or not self.layout.has_seen:
            return
        self.track = True
        for table in self._tables:
            if table is not None:
                table.set_initial(self._initial)
        for fragment in self.fragments:
            if fragment is not None:
                (<Fragment>fragment).table.set_initial(self.layout.delta_initial)

    # -- rows --------------------------------------------------------------------------------------
    def update(self, KeyBlock keys, list inputs, times=None, time_valid=None, mask=None):
        """Bring in a block of rows.

        `inputs` are (values, validity bytes or None) in the order of the layout's inputs, without
        the event time; `times` is an int64 array; `time_valid` and `mask` are (address, bit of
        row 0) of Arrow bitmaps.  Returns the counts of rows that were dropped, the row number of
        the first with a bad time (-1), and the newest usable time (None)."""
        cdef kd_input c_inputs[64]
        cdef kd_input* given = c_inputs
        cdef kd_rows rows
        cdef const int64_t[::1] time_view
        cdef uint64_t begin = 0, n = keys.rows
        cdef uint32_t piece
        memset(&rows, 0, sizeof(rows))
        memset(given, 0, sizeof(c_inputs))
        if times is not None and n:
            time_view = times
            rows.times = &time_view[0]
        if time_valid is not None:
            rows.time_valid = <const uint8_t*><uintptr_t>time_valid[0]
            rows.time_shift = time_valid[1]
        if mask is not None:
            rows.mask = <const uint8_t*><uintptr_t>mask[0]
            rows.mask_shift = mask[1]
        self._point(given, inputs, n)
        if n and times is None and (self.route.size or self.time_input >= 0):
            raise StateError("rows without event time cannot be put into windows")
        kd_route_begin(self.route)
        with nogil:
            while begin < n:
                piece = min(n - begin, PIECE_ROWS)
                self.c_block(&keys.c, &rows, begin, piece, given)
                begin += piece
        return {"late": self.route.late, "null_time": self.route.null_time,
                "early": self.route.early, "ahead": self.route.ahead,
                "filtered": self.route.filtered, "other": self.route.other,
                "first_bad": self.route.first_bad,
                "newest": None if self.route.newest == -(1 << 63) else self.route.newest}

    cdef _point(self, kd_input* given, list inputs, uint64_t n):
        """The C form of the inputs; the arrays stay the caller's."""
        cdef const uint8_t[::1] valid
        if len(inputs) != self.tuple_form.inputs - (self.time_input >= 0):
            raise ValueError("the plan has another number of inputs")
        for i, (values, nulls) in enumerate(inputs):
            if values.nbytes != n * 8 * self.tuple_form.width[i]:
                raise ValueError(f"input {i} has another number of rows than the keys")
            given[i].values = <const uint8_t*><uintptr_t>values.ctypes.data
            given[i].stride = 8 * self.tuple_form.width[i]
            given[i].step = 1
            if nulls is not None:
                self.begin_tracking()
                valid = nulls
                if valid.shape[0] != <Py_ssize_t>n:
                    raise ValueError(f"the validity of input {i} has another number of rows")
                given[i].valid = &valid[0] if n else NULL

    cdef int c_block(self, const kd_keys* keys, const kd_rows* rows, uint64_t begin, uint32_t n,
                     const kd_input* inputs) except -1 nogil:
        """Rows [begin, begin + n) of a block, at most PIECE_ROWS."""
        cdef kd_keys k = keys[0]
        cdef kd_input piece[64]
        cdef const int64_t* times = rows.times + begin if rows.times else NULL
        cdef uint32_t i, done = 0, targets, at = 0
        cdef uint16_t target
        if k.offsets:
            k.offsets += begin
        else:
            k.words += begin * k.stride
        kd_hash_rows(&k, self.keys.words, n, self.hash)
        k.hash = self.hash
        for i in range(self.tuple_form.inputs):
            piece[i] = inputs[i]
            piece[i].values += begin * piece[i].stride
            if piece[i].valid:
                piece[i].valid += begin
        if ((self.route.all_own or self.route.executors <= KD_FEW_EXECUTORS)
                and kd_route_same(self.route, rows, begin, n)):
            if self.route.all_own:
                return self.c_own(self.route.executors + self.route.slot, &k, NULL, n, piece, times,
                                  1, self.lane)
            targets = kd_split_rows(self.route, n, self.hash, self.row_targets, self.buckets,
                                    self.present, self.numbers, self.order)
        else:
            while True:
                done = kd_route_rows(self.route, rows, begin, done, n, self.hash,
                                     self.row_targets, self.buckets)
                if done == n:
                    break
                with gil:
                    self.c_slot(self.route.bucket)
            targets = kd_sort_rows(self.row_targets, n, self.counts, self.present, self.numbers,
                                   self.order)
        k.bucket, k.bucket_stride = self.buckets, 1
        for i in range(targets):
            target = self.present[i]
            if target >= self.route.executors:
                self.c_own(target, &k, self.order + at, self.numbers[i], piece, times, 1, self.lane)
            else:
                self.c_other(target, &k, self.order + at, self.numbers[i], piece, times)
            at += self.numbers[i]
        return 0

    cdef int c_find(self, uint16_t target, const kd_keys* keys, const uint32_t* rows,
                    uint32_t n) except -1 nogil:
        """The positions of the states of n rows in the table of a target."""
        cdef kd_table* table = self.targets[target]
        cdef uint32_t done = 0
        if table.index == NULL:
            table.wanted = 8
            with gil:
                self._grow(target)
        while True:
            done = kd_find(table, keys, rows, done, n, self.positions)
            if done == n:
                return 0
            with gil:
                self._grow(target)

    cdef _grow(self, uint16_t target):
        if target >= self.lanes:
            (<Table>self._tables[target - self.lanes]).c_grow()
        else:
            (<Fragment>self.fragments[target]).table.c_grow()

    cdef int c_own(self, uint16_t target, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                   const kd_input* inputs, const int64_t* times, uint64_t step,
                   uint32_t lane) except -1 nogil:
        """Rows into a window table, as rows of executor `lane`."""
        self.c_find(target, keys, rows, n)
        self.c_apply(self.memory.base, rows, n, inputs, times, step, lane, False)
        return self.c_changed(n)

    cdef int c_apply(self, uint8_t* base, const uint32_t* rows, uint32_t n, const kd_input* inputs,
                     const int64_t* times, uint64_t step, uint32_t lane,
                     bint delta) except -1 nogil:
        """Rows into the states at `positions`: those of a fragment if `delta`, else of a table."""
        cdef uint32_t i, offset
        cdef kd_accumulator* cell
        cdef kd_accumulator* count
        cdef bint fused = (self.count_cell >= 0 and not self.track
                           and inputs[self.cells[self.counted_cell].input].valid == NULL)
        for i in range(self.cell_count):
            cell = &self.cells[i]
            if fused and <int>i == self.count_cell:
                continue
            offset = cell.delta if delta else cell.offset
            if cell.lanes and not delta:
                offset += lane * cell.words
            if fused and i == self.counted_cell:
                count = &self.cells[self.count_cell]
                if kd_update_counted(cell, offset, count.delta if delta else count.offset, base,
                                     self.positions, rows, n, &inputs[cell.input]):
                    self.c_overflow(i)
            elif kd_update(cell, offset, base, self.positions, rows, n, &inputs[cell.input], times,
                           step, self.track, 0):
                self.c_overflow(i)
        return 0

    cdef int c_changed(self, uint32_t n) except -1 nogil:
        """Notes that the states at `positions` changed, where that matters."""
        if self.stamp >= 0:
            self.c_room_for_changed(n)
            self.changed_count = kd_stamp_rows(self.memory.base, self.positions, n, self.stamp,
                                               self.batch, self.changed, self.changed_count)
        return 0

    cdef int c_other(self, uint16_t leader, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                     const kd_input* inputs, const int64_t* times) except -1 nogil:
        """Rows into the fragment of another leader."""
        cdef kd_fragment* delta = self.deltas[leader]
        cdef uint32_t known = 0
        delta.rows += n
        if delta.way == KD_AS_ENTRIES:
            self.c_find(leader, keys, rows, n)
            self.c_apply(NULL, rows, n, inputs, times, 1, 0, True)
            if delta.rows >= delta.look_at:
                with gil:
                    (<Fragment>self.fragments[leader]).c_look(
                        self.expected_rows * self.shares[leader])
            return 0
        if delta.way == KD_AS_TUPLES:
            delta.tuple_rows += n
            return self.c_tuples(leader, keys, rows, n, inputs, times)
        known = kd_part_known(self.targets[leader], keys, rows, n, self.positions, self.known,
                              self.unknown)
        self.c_apply(NULL, self.known, known, inputs, times, 1, 0, True)
        delta.tuple_rows += n - known
        return self.c_tuples(leader, keys, self.unknown, n - known, inputs, times)

    cdef int c_tuples(self, uint16_t leader, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                      const kd_input* inputs, const int64_t* times) except -1 nogil:
        cdef uint32_t done = 0, wanted = 0
        while True:
            done = kd_write_tuples(self.deltas[leader].tuples, &self.tuple_form, keys,
                                   self.keys.words, rows, done, n, self.buckets, inputs, times,
                                   &wanted)
            if done == n:
                return 0
            with gil:
                (<Fragment>self.fragments[leader]).tuples.c_room(wanted)

    cdef int c_overflow(self, uint32_t cell) except -1 nogil:
        with gil:
            name = self.layout.cells[cell].aggregate.name
            raise StateError(f"aggregate {name}: a sum does not fit into its type",
                             hint="set overflow=wrap, or sum a decimal")

    cdef int c_room_for_changed(self, uint32_t n) except -1 nogil:
        cdef uint64_t room = self.changed_room
        cdef void* more
        if self.changed_count + n <= room:
            return 0
        while room < self.changed_count + n:
            room = room * 2 if room else 1 << 16
        more = realloc(self.changed, room * 8)
        if more == NULL:
            with gil:
                raise MemoryError()
        self.changed = <uint64_t*>more
        self.changed_room = room
        return 0

    def take_changed(self):
        """Positions of the states of bucket 0 that changed since the last call."""
        cdef uint64_t[::1] out
        cdef uint64_t i
        positions = np.empty(self.changed_count, np.uint64)
        if self.changed_count:
            out = positions
            for i in range(self.changed_count):
                out[i] = self.changed[i]
        self.changed_count = 0
        return positions
