# cython: language_level=3, boundscheck=False, wraparound=False
"""Append state: the rows of a key in a window, kept until the window ends (Slash section 5.2).

Owns: chains of rows that hang from the entries of a Table, the tuples by which a helper sends rows
to their leader, and the walks that pair and collect them.  What is done with a group of rows is the
caller's business (append.py); which rows are late, and which buckets end, too.

Invariants: an entry counts its rows; a row is linked once; a session table's entry has a deadline
that is at or before the end of its first session.  Adding rows in any order gives the same groups.
A page is checked as a whole before its first row is added, so a forged one changes nothing.
Kernels run without the GIL; one thread uses a table.
"""

import numpy as np

from libc.stdint cimport INT64_MIN, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from kdirect.state.arena cimport Log, PageMemory, StateMemory
from kdirect.state.keys cimport KeyBlock
from kdirect.state.layout cimport VPART_SHIFT
from kdirect.state.rows cimport RowBlock, RowShape, kd_row_fits
from kdirect.state.table cimport Table
from kdirect.state.tuples cimport ChainShape, ParsedPage, TuplePages
from kdirect.state.tuples import parse_page

cdef extern from "table_run.h" nogil:
    uint64_t kd_entry_hash(const kd_table* t, const uint64_t* entry)

cdef enum:
    SNAPSHOT_PAGE_BYTES = 1 << 16
    SNAPSHOT_KEYS = 4096       # that are written before their pages become bytes



class _Chunk:
    """Memory of this process for pages that are written to a file."""

    def __init__(self, length):
        self.words = np.empty(length // 8, np.uint64)
        self.address = self.words.ctypes.data
        self.length = length


def _bytes_of(PageMemory memory, TuplePages writer):
    """The pages that were filled, as bytes; their memory is free again."""
    out = []
    for address, used in writer.take():
        out.append((<const char*><uintptr_t>address)[:used])
        memory.release(address)
    return out


HOWS = {"inner": KD_INNER, "left": KD_LEFT, "right": KD_RIGHT, "full": KD_FULL}


cdef class Walk:
    """A walk over the groups of some entries of a table."""

    def __cinit__(self, ChainTable table, positions, closes):
        cdef const uint64_t[::1] view = positions
        self._positions = positions
        self.rows, self.room = NULL, 0
        memset(&self.c, 0, sizeof(kd_pairs))
        self.c.groups.chains = &table.c
        self.c.groups.entries = &view[0] if len(positions) else NULL
        self.c.groups.count = len(positions)
        self.c.groups.closes = max(min(closes, (1 << 63) - 1), -(1 << 63))

    def __dealloc__(self):
        kd_groups_free(&self.c.groups)
        free(self.rows)

    cdef uint64_t c_rows(self) noexcept:
        """Rows that hang from the entries now; `empty` is how many entries have none."""
        cdef uint64_t i, rows, n = 0
        cdef const uint64_t* entry
        self.empty = 0
        for i in range(self.c.groups.count):
            entry = <const uint64_t*>(self.c.groups.chains.base + self.c.groups.entries[i])
            rows = (entry[1] & ~KD_NULL_KEY) + entry[3]
            self.empty += not rows
            n += rows
        return n


cdef class ChainTable:
    """The chains of one bucket, or, for sessions, of all open sessions."""

    def __cinit__(self, *_, **__):
        self.c.deadlines.least = NULL
        self.c.deadlines.first = NULL
        self.c.deadlines.blocks = 0

    def __init__(self, StateMemory memory, ChainShape shape, int64_t bucket=0):
        session = shape.gap is not None
        initial = np.zeros(5 if session or shape.interval else 4, np.int64)
        initial[4:] = KD_NO_DEADLINE
        self.memory = memory
        self.shape = shape
        self.table = Table(memory, shape.key_words, len(initial), initial.tobytes())
        self.table.bucket = bucket
        self.log = Log(memory)
        self.longest = [0, 0]
        self.c.base = memory.base
        self.c.timed = shape.timed
        self.c.session = session
        self.c.gap = shape.gap if session else 0
        self.c.interval = shape.interval

    def __dealloc__(self):
        free(self.c.deadlines.least)
        free(self.c.deadlines.first)

    @property
    def bucket(self):
        return self.table.bucket

    @property
    def keys(self):
        """How many entries there are.  Those of ended sessions count until `compact`."""
        return len(self.table)

    # -- adding ------------------------------------------------------------------------------------

    cdef int c_append(self, kd_keys* keys, const uint32_t* chosen, uint64_t n,
                      const uint64_t* words, const int64_t* time, const uint8_t* flags,
                      uint64_t* place) except -1:
        """Makes room for rows, links them, and says in `place` where their words go."""
        cdef uint64_t done = 0, more, used = 0, need
        cdef uint64_t[::1] states
        if not n:
            return 0
        found = np.empty(n, np.uint64)
        states = found
        with nogil:
            self.table.c_find(keys, chosen, <uint32_t>n, &states[0])
        if self.c.session and kd_deadlines_cover(&self.c.deadlines, self.memory.top):
            raise MemoryError
        while done < n:
            need = kd_chain_head_bytes(&self.c) + words[done] * 8
            if self.log.c.end - self.log.c.tail < need:
                self.log.c_room(max(need, <uint64_t>4096))
            more = kd_chain_place(&self.c, words + done, n - done, self.log.c.tail,
                                  self.log.c.end - self.log.c.tail, place + done, &used)
            self.log.c.tail += used
            done += more
        with nogil:
            kd_chain_link(&self.c, &states[0], place, time, flags, n)
        self.rows += n
        self._appended += n
        return 0

    def append(self, KeyBlock keys, rows, RowBlock block, side, times=None, nulls=None):
        """Add the rows `rows` (uint32) of a block, whose words are those of `block`, to one side.
        `times` (int64) and `nulls` (bool: the key has a null) are of these rows, in their order."""
        cdef const uint32_t[::1] chosen = rows
        cdef uint64_t n = chosen.shape[0], i, head = kd_chain_head_bytes(&self.c)
        cdef uint64_t[::1] places
        cdef const int64_t[::1] time_view
        cdef const uint8_t[::1] flag_view
        cdef const int64_t* time = NULL
        if n != block.rows or keys.key_words != self.shape.key_words:
            raise ValueError("keys and rows do not go together")
        if not n:
            return
        flags = np.full(n, side, np.uint8)
        if nulls is not None:
            flags |= nulls.astype(np.uint8) << 1
        place = np.empty(n, np.uint64)
        places, flag_view = place, flags
        if self.c.timed:
            time_view = times
            if time_view.shape[0] != <object>n:
                raise ValueError("every row has one time")
            time = &time_view[0]
        self.c_append(&keys.c, &chosen[0], n, block.words, time, &flag_view[0], &places[0])
        self.longest[side] = max(self.longest[side], block.longest)
        with nogil:
            for i in range(n):
                block.to[i] = self.c.base + places[i] + head
            block.c_encode()

    # -- ending ------------------------------------------------------------------------------------

    def due(self, closes):
        """Positions of the entries that may have a session which ends before `closes`; all of them
        where windows have a fixed length.  Blocks of entries whose least deadline is later are not
        looked at."""
        cdef uint64_t[::1] out
        cdef uint64_t begin, end, n = 0
        cdef int64_t limit = max(min(closes, (1 << 63) - 1), -(1 << 63))
        if not self.c.session:
            return self.table.scan()
        positions = np.empty(max(1, len(self.table)), np.uint64)
        out = positions
        for begin, end in self.table.log.stretches():
            with nogil:
                kd_deadlines_due(&self.table.c, &self.c.deadlines, begin, end, limit, &out[0], &n,
                                 &self.visited)
        return positions[:n]

    def pairs(self, how, closes, most_rows=1 << 16, most_bytes=1 << 25):
        """Yields (left, right, start, end): addresses of the rows of pairs, 0 for a row of nulls,
        and the bounds of their sessions.  Ended sessions leave the table as they are reached, so
        the generator must be run to its end before anything else uses the table."""
        cdef Walk walk = Walk(self, self.due(closes), closes)
        cdef uint64_t before = walk.c_rows() if self.c.session else 0
        cdef uint64_t most
        cdef int64_t n
        cdef uint64_t[::1] left_view, right_view
        cdef int64_t[::1] start_view, end_view
        walk.c.how = HOWS[how]
        most = max(1, min(most_rows, most_bytes // (8 * (2 + sum(self.longest)))))
        while True:
            left, right = np.empty(most, np.uint64), np.empty(most, np.uint64)
            start, end = np.empty(most, np.int64), np.empty(most, np.int64)
            left_view, right_view, start_view, end_view = left, right, start, end
            with nogil:
                n = kd_pairs_next(&walk.c, most, &left_view[0], &right_view[0], &start_view[0],
                                  &end_view[0])
            if n < 0:
                raise MemoryError
            if n:
                yield left[:n], right[:n], start[:n], end[:n]
            if <uint64_t>n < most:
                break
        self._settle(walk, before)

    def groups(self, closes, most_rows=1 << 16):
        """Yields (entries, lengths, rows, start, end): positions of the entries of ended groups,
        how many rows each has, their addresses, and the bounds of their sessions.  A group is never
        split.  As with `pairs`, run it to its end."""
        cdef Walk walk = Walk(self, self.due(closes), closes)
        cdef uint64_t before = walk.c_rows() if self.c.session else 0
        cdef uint64_t most = most_rows, used = 0
        cdef int64_t n
        cdef uint64_t[::1] entry_view
        cdef int64_t[::1] length_view, start_view, end_view
        while True:
            entries, lengths = np.empty(most, np.uint64), np.empty(most, np.int64)
            start, end = np.empty(most, np.int64), np.empty(most, np.int64)
            entry_view, length_view, start_view, end_view = entries, lengths, start, end
            with nogil:
                n = kd_groups_fill(&walk.c.groups, most, &entry_view[0], &length_view[0],
                                   &start_view[0], &end_view[0], &walk.rows, &walk.room, &used)
            if n < 0:
                raise MemoryError
            if not n:
                break
            rows = np.empty(used, np.uint64)
            if used:
                entry_view = rows
                memcpy(&entry_view[0], walk.rows, used * 8)
            yield entries[:n], lengths[:n], rows, start[:n], end[:n]
        self._settle(walk, before)

    def _settle(self, Walk walk, uint64_t before):
        """Counts the rows that are left after sessions have ended, of `before` in the entries that
        were walked; writes the rest again when most of the entries or rows are garbage."""
        if not self.c.session:
            return
        self.rows -= before - walk.c_rows()
        self._ended += walk.empty
        garbage = self.log.used > (1 << 20) and self.rows * 2 < self._appended
        if garbage or (self._ended > 1024 and self._ended * 2 > <uint64_t>len(self.table)):
            self.compact()

    def compact(self):
        """Write what is left into other memory and give the old one back."""
        pages = self.export(self._living(self.table.scan()))
        self.drop()
        for page in pages:
            self.merge(page, "itself")

    def _living(self, positions):
        """Those of the entries that have rows."""
        cdef const uint64_t[::1] at = positions
        cdef uint8_t[::1] view
        cdef uint64_t i
        cdef const uint64_t* entry
        lives = np.empty(len(positions), np.uint8)
        view = lives
        for i in range(<uint64_t>at.shape[0]):
            entry = <const uint64_t*>(self.c.base + at[i])
            view[i] = (entry[1] & ~KD_NULL_KEY) != 0 or entry[3] != 0
        return positions[lives.astype(bool)]

    def drop(self):
        """Forget everything and give all memory back."""
        cdef uint64_t i
        self.table.drop()
        self.log.clear()
        self.rows = self._appended = self._ended = 0
        for i in range(self.c.deadlines.blocks):
            self.c.deadlines.least[i] = KD_NO_DEADLINE
            self.c.deadlines.first[i] = 0

    # -- snapshots ---------------------------------------------------------------------------------

    def vparts(self, positions):
        """The virtual partition of the key of each entry."""
        cdef const uint64_t[::1] at = positions
        cdef uint64_t i
        cdef uint8_t[::1] view
        out = np.empty(len(positions), np.uint8)
        view = out
        for i in range(at.shape[0]):
            view[i] = kd_entry_hash(&self.table.c,
                                    <const uint64_t*>(self.c.base + at[i])) >> VPART_SHIFT
        return out

    def export(self, positions):
        """Pages (bytes) with the rows of these entries, as `merge` takes them."""
        longest = 8 * max(self.longest) + (1 << 15)
        size = (max(SNAPSHOT_PAGE_BYTES, 2 * longest) + 4095) // 4096 * 4096
        memory = PageMemory(lambda n: _Chunk(n), size, 0, 1 << 62, chunk_bytes=size)
        writer = TuplePages(self.shape, memory)
        out = []
        for begin in range(0, len(positions), SNAPSHOT_KEYS):
            self.write(writer, positions[begin:begin + SNAPSHOT_KEYS])
            out += _bytes_of(memory, writer)
        return out

    def write(self, TuplePages writer, positions):
        """Write the rows of these entries as tuples into pages."""
        cdef Walk walk = Walk(self, positions, INT64_MIN)
        cdef bint session = self.c.session
        cdef int found
        self.c.session = False  # groups are whole entries then, and nothing is taken out
        try:
            while True:
                found = kd_groups_next(&walk.c.groups)
                if found < 0:
                    raise MemoryError
                if not found:
                    break
                self._export_group(&walk.c.groups, writer)
        finally:
            self.c.session = session

    cdef int _export_group(self, kd_groups* g, TuplePages writer) except -1:
        cdef kd_keys keys
        cdef uint64_t n, i, head = kd_chain_head_bytes(&self.c)
        cdef uint64_t[::1] words, to
        cdef int64_t[::1] buckets, times
        cdef uint8_t[::1] flags
        cdef uint32_t[::1] rows
        cdef const uint8_t* row
        memset(&keys, 0, sizeof(kd_keys))
        keys.words = <const uint64_t*>(self.c.base + g.entry) + self.table.c.state_words
        for side in range(self.shape.sides):
            n = g.length[<int>side]
            if not n:
                continue
            words, to = np.empty(n, np.uint64), np.empty(n, np.uint64)
            buckets, times = np.full(n, self.bucket, np.int64), np.zeros(n, np.int64)
            flags = np.full(n, side | g.null_key << 1, np.uint8)
            rows = np.zeros(n, np.uint32)
            for i in range(n):
                row = self.c.base + g.list[<int>side][i]
                if self.c.timed:
                    times[i] = (<const int64_t*>row)[1]
                words[i] = kd_row_fits(self.shape.c_rows[<int>side], row + head, 1 << 40)
            writer.c_add(&keys, &rows[0], &buckets[0], &times[0], &flags[0], &words[0], n,
                         <uint8_t**>&to[0])
            for i in range(n):
                memcpy(<void*>to[i], self.c.base + g.list[<int>side][i] + head, words[i] * 8)
        return 0

    # -- deltas ------------------------------------------------------------------------------------

    def merge(self, page, sender):
        """Add the tuples of a page, all of which belong to this table."""
        parsed = parse_page(self.shape, page, sender)
        self.add_parsed(parsed, None)

    def add_parsed(self, ParsedPage page, rows):
        """Add the tuples `rows` (uint32; None: all) of a parsed page."""
        cdef const uint32_t[::1] chosen
        cdef const uint64_t[::1] words
        cdef const int64_t[::1] times
        cdef const uint8_t[::1] flags
        cdef const uint64_t[::1] sources
        cdef uint64_t[::1] places
        cdef uint64_t n, i, head = kd_chain_head_bytes(&self.c)
        rows = np.arange(page.count, dtype=np.uint32) if rows is None else rows
        n = len(rows)
        if not n:
            return
        place = np.empty(n, np.uint64)
        w, t, f, s = page.words[rows], page.times[rows], page.flags[rows], page.sources[rows]
        chosen, places, words, times, flags, sources = rows, place, w, t, f, s
        self.c_append(&page.keys, &chosen[0], n, &words[0], &times[0], &flags[0], &places[0])
        for side in range(self.shape.sides):
            mine = w[(f & 1) == side]
            if len(mine):
                self.longest[side] = max(self.longest[side], int(mine.max()))
        with nogil:
            for i in range(n):
                memcpy(self.c.base + places[i] + head, <const void*>sources[i], words[i] * 8)

    # -- another process ---------------------------------------------------------------------------

    def blocks(self):
        """[(position, log)] of the memory that is used."""
        return self.table.blocks() + [(p, log) for p, log, _ in self.log.segments()]

    def catalogue(self):
        """What `restore` needs to go on with these chains in another process."""
        return {"table": self.table.catalogue(), "segments": self.log.segments(),
                "rows": self.rows, "longest": list(self.longest)}

    def restore(self, entry):
        """Go on with chains that a catalogue describes.  Every chain is walked; ValueError if one
        leaves the rows of the log.  The table is unusable then."""
        cdef uint64_t begin, end, count
        cdef uint64_t[::1] view
        cdef uint64_t[:, ::1] stretches
        cdef int64_t deadline
        cdef int fault
        cdef uint32_t sides
        cdef uint64_t most, i
        self.table.restore(entry["table"])
        self.log.restore(entry["segments"])
        self.rows = entry["rows"]
        if entry["rows"] * kd_chain_head_bytes(&self.c) > self.log.used:
            raise ValueError(f"bucket {self.bucket} has more rows than its log has room for")
        self.longest = [int(n) for n in entry["longest"]]
        if len(self.longest) != 2 or any(not 0 <= n < 1 << 21 for n in self.longest):
            raise ValueError("the longest rows of a catalogue are out of range")
        positions = self.table.scan()
        spans = np.array(self.log.stretches() or [(0, 0)], np.uint64)
        count, most, sides = len(positions), self.rows, self.shape.sides
        if count:
            view, stretches = positions, spans
            with nogil:
                fault = kd_chain_check(&self.c, self.shape.c_rows, sides, &view[0], count,
                                       <const kd_stretch*>&stretches[0, 0],
                                       stretches.shape[0], most)
            if fault:
                raise ValueError(f"a chain of bucket {self.bucket} leaves its log")
        if self.c.session:
            if kd_deadlines_cover(&self.c.deadlines, self.memory.top):
                raise MemoryError
            for i in range(count):
                deadline = (<int64_t*>(self.c.base + view[i]))[4]
                kd_deadline_note(&self.c.deadlines, view[i], deadline)

