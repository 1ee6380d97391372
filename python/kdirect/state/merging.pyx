# cython: language_level=3, boundscheck=False, wraparound=False
"""The merge path: what others computed comes into the tables of this executor.

Owns: the merge of a delta's pages, of one table into another (slices into a window), and of the
entries of a snapshot.  A page is bytes of another process: its length, sender, shape, every bucket,
key and virtual partition are checked before the first of its entries is applied, so that a page
that is refused has changed nothing.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kdirect.errors import DeltaError, StateError
from kdirect.state.engine cimport (
    KD_DROP,
    KD_PAGE_ENTRIES,
    Engine,
    kd_accumulator,
    kd_input,
    kd_merge,
    kd_merge_seen,
    kd_page,
    kd_route_bucket,
    kd_sort_rows,
    kd_update,
)
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_keys, kd_scan, kd_table, kd_variable_words

cdef extern from "page_run.h" nogil:
    int kd_check_page(kd_page* p, const uint8_t* page, uint64_t length, uint64_t* begin,
                      int64_t* buckets, uint64_t* hash, uint32_t* offsets)

cdef extern from "snapshot_run.h" nogil:
    enum:
        KD_ENTRY_CUT, KD_ENTRY_KEY, KD_ENTRY_FOREIGN, KD_ENTRY_TWICE
    ctypedef struct kd_section:
        uint32_t state_words, key_words, strings, fixed_words, texts, first, last, self
        const uint16_t* owners
        int has_seen
        uint64_t unseen
    int64_t kd_check_entries(kd_section* s, const uint64_t* data, uint64_t* at, uint64_t end,
                             uint32_t most, uint64_t* entries, uint64_t* hash, uint32_t* key_at)
    int64_t kd_insert_entries(kd_table* t, const uint64_t* entries, const uint64_t* hash,
                              uint32_t i, uint32_t n, int32_t stamp)

cdef extern from "keys_run.h" nogil:
    void kd_hash_rows(const kd_keys* k, uint32_t key_words, uint32_t n, uint64_t* out)

cdef enum:
    PIECE_ROWS = 4096

MOST_RESERVED = 1 << 32  # entries; a table that cannot be so large begins with a small one

FAULTS = (
    "", "its header is not that of a page of this version", "its length is wrong",
    "it names another sender", "it belongs to another plan", "its count of entries is wrong",
    "an entry lies in a window that is closed or too far ahead", "the length of a key is wrong",
    "a key belongs to another executor", "it is not aligned to words",
    "a string in a key is not UTF-8",
)
ENTRY_FAULTS = {
    KD_ENTRY_CUT: "is cut off",
    KD_ENTRY_KEY: "has a key whose strings do not add up or are not UTF-8",
    KD_ENTRY_FOREIGN: "is of a virtual partition that is none of its part's",
    KD_ENTRY_TWICE: "has a key that was there before",
}


cdef class MergingEngine(Engine):
    """An engine that takes the deltas of others, too: what an executor has."""

    cdef readonly uint64_t merged_entries, merged_tuples, merged_pages

    def __init__(self, *args, **options):
        cdef kd_page* form = &self.page_form
        Engine.__init__(self, *args, **options)
        form.owners = self.route.owners
        form.self = self.lane
        form.shape = self.layout.check
        form.key_words = self.keys.words
        form.fixed_words, form.strings = self.keys.fixed_words, self.keys.strings
        form.texts = self.keys.texts
        form.state_words = self.layout.delta_words
        form.tuple_words = self.layout.tuple_words
        form.inputs = self.tuple_form.inputs
        form.has_seen = self.layout.has_seen

    def merge(self, uint32_t sender, uint64_t address, uint64_t length):
        """Merge the page of `length` bytes at `address`, which executor `sender` sent.  Returns
        (entries, rows in tuples).  Raises DeltaError, which names the sender, and then nothing has
        changed."""
        cdef kd_page* form = &self.page_form
        cdef int fault
        cdef uint64_t room = length // 16 + 1
        cdef uint64_t[::1] private
        if sender >= self.lanes or sender == self.lane:
            raise DeltaError(f"executor {sender} sent a delta and is no helper of {self.lane}")
        if length > 1 << 24:
            raise DeltaError(f"a page of executor {sender} has {length} bytes")
        self.c_scratch(room)
        if not form.key_words:
            # The sender can still write into the page; lengths that were checked must stay so.
            copy = np.empty(length // 8 + 1, np.uint64)
            private = copy
            memcpy(&private[0], <const void*><uintptr_t>address, length)
            address = <uint64_t><uintptr_t>&private[0]
        form.sender = sender
        form.least_bucket, form.most_bucket = self._buckets()
        with nogil:
            fault = kd_check_page(form, <const uint8_t*><uintptr_t>address, length, self.addresses,
                                  self.buckets, self.hash, self.offsets)
        if fault:
            raise DeltaError(f"executor {sender} sent a page of a delta that is damaged: "
                             f"{FAULTS[fault]}", hint="the job starts again from its snapshot")
        if form.unseen:
            self.begin_tracking()
        with nogil:
            self._apply(sender, <const uint64_t*><uintptr_t>address)
        self.merged_pages += 1
        if form.kind == KD_PAGE_ENTRIES:
            self.merged_entries += form.count
            return form.count, 0
        self.merged_tuples += form.count
        return 0, form.count

    cdef tuple _buckets(self):
        """The least and the greatest bucket that an entry may have."""
        if not self.route.size:
            return 0, 0
        size, origin = <object>self.route.size, <object>self.route.origin
        first = -origin // size  # that of 1970: the start of no earlier one may fit into 64 bits
        return max(self.route.least_bucket, first), (self.route.most_time - origin) // size

    cdef int _apply(self, uint32_t sender, const uint64_t* page) except -1 nogil:
        cdef kd_page* form = &self.page_form
        cdef kd_keys k
        cdef uint32_t n = form.count, i, targets, at = 0
        k.hash, k.bucket, k.bucket_stride = self.hash, self.buckets, 1
        if form.key_words:
            k.offsets = NULL
            k.stride = 1 + form.head + form.key_words
            k.words = page + 4 + 1 + form.head
        else:
            k.offsets, k.stride, k.words = self.offsets, 0, page
        if not n:
            return 0
        self._targets(n)
        targets = kd_sort_rows(self.row_targets, n, self.counts, self.present, self.numbers,
                               self.order)
        for i in range(targets):
            if form.kind == KD_PAGE_ENTRIES:
                self._entries(self.present[i], &k, NULL if targets == 1 else self.order + at,
                              self.numbers[i], sender)
            else:
                self._tuples(self.present[i], &k, self.order + at, self.numbers[i], sender, n)
            at += self.numbers[i]
        return 0

    cdef int _targets(self, uint32_t n) except -1 nogil:
        """The target of each of n entries, from their buckets."""
        cdef uint32_t i
        for i in range(n):
            if self.buckets[i] != self.route.bucket:
                kd_route_bucket(self.route, self.buckets[i])
            if self.route.slot == KD_DROP:
                with gil:
                    self.c_slot(self.buckets[i])
            self.row_targets[i] = self.route.executors + self.route.slot
        return 0

    cdef int _entries(self, uint16_t target, const kd_keys* k, const uint32_t* rows, uint32_t n,
                      uint32_t sender) except -1 nogil:
        """States of one lane, at `addresses`, into a table."""
        cdef kd_accumulator* cell
        cdef uint32_t i
        self.c_find(target, k, rows, n)
        if self.page_form.has_seen:
            kd_merge_seen(self.memory.base, self.positions, rows, n, self.addresses)
        for i in range(self.cell_count):
            cell = &self.cells[i]
            if kd_merge(cell, cell.offset + (sender * cell.words if cell.lanes else 0),
                        self.memory.base, self.positions, rows, n, self.addresses, cell.delta, 0):
                self.c_overflow(i)
        self.c_changed(n)
        return 0

    cdef int _tuples(self, uint16_t target, const kd_keys* k, const uint32_t* rows, uint32_t n,
                     uint32_t sender, uint32_t count) except -1 nogil:
        """Rows of another executor, whose values lie in the page at `addresses`."""
        cdef kd_input inputs[64]
        cdef const uint8_t* head = <const uint8_t*>self.addresses[0]
        cdef const int64_t* times = NULL
        cdef uint64_t stride = (1 + self.page_form.tuple_words + self.page_form.key_words) * 8
        cdef uint32_t i, c
        if not self.page_form.key_words and self.page_form.tuple_words:
            head = self._gathered(count)
            stride = self.page_form.tuple_words * 8
        for c in range(self.tuple_form.inputs):
            inputs[c].values = head + self.tuple_form.at[c] * 8
            inputs[c].stride = stride
            inputs[c].valid = head + c
            inputs[c].step = stride
        if self.time_input >= 0:
            times = <const int64_t*>(head + self.tuple_form.at[self.time_input] * 8)
        return self.c_own(target, k, rows, n, inputs, times, stride // 8, sender)

    cdef const uint8_t* _gathered(self, uint32_t count) except NULL nogil:
        """The heads of tuples of different lengths, one after the other."""
        cdef uint64_t words = self.page_form.tuple_words
        cdef uint8_t* out
        cdef uint32_t i
        if self.heads_room < count * words * 8:
            with gil:
                self.c_heads(count * words * 8)
        out = self.heads
        for i in range(count):
            memcpy(out + i * words * 8, <const void*>self.addresses[i], words * 8)
        return out

    # -- tables and snapshots ----------------------------------------------------------------------
    def merge_table(self, Table into, Table table):
        """Merge all states of `table` into `into`, lane by lane."""
        cdef kd_keys k
        cdef uint64_t begin, end, done
        cdef uint32_t n, i
        cdef uint64_t base = <uint64_t><uintptr_t>self.memory.base
        cdef uint32_t words = table.c.state_words + table.c.key_words
        if table.c.state_words != into.c.state_words or table.c.prefix or into.c.prefix:
            raise ValueError("these tables have different states")
        for begin, end in table.log.stretches():
            while begin < end:
                with nogil:
                    n = kd_scan(&table.c, begin, end, self.addresses, PIECE_ROWS)
                    k.bucket, k.bucket_stride = NULL, 0
                    k.hash, k.offsets, k.stride = self.hash, NULL, words
                    k.words = <const uint64_t*>(self.memory.base + begin) + table.c.state_words
                    done = self.addresses[n - 1] - begin
                    if not table.c.key_words:
                        k.offsets = self.offsets
                        for i in range(n):
                            self.offsets[i] = (self.addresses[i] - begin) // 8
                    kd_hash_rows(&k, table.c.key_words, n, self.hash)
                    for i in range(n):
                        self.addresses[i] += base
                begin += done + self._entry_bytes(table, begin + done)
                into.c_find(&k, NULL, n, self.positions)
                with nogil:
                    self._states(n, self.cells, self.lanes, 0)

    cdef uint64_t _entry_bytes(self, Table table, uint64_t position) noexcept:
        """The bytes of the entry whose state lies at `position`."""
        cdef uint64_t words = table.c.key_words
        if not words:
            words = kd_variable_words((<uint64_t*>(self.memory.base + position))[
                table.c.state_words])
        return (table.c.state_words + words) * 8

    cdef int _states(self, uint32_t n, const kd_accumulator* cells, uint64_t lanes,
                     int fold) except -1 nogil:
        """Whole states, at `addresses`, with the cells' offsets of `cells` and so many lanes, into
        those at `positions`.  With `fold` all lanes come into lane 0, in order."""
        cdef kd_accumulator* cell
        cdef uint32_t i, lane, offset
        if self.page_form.has_seen:
            kd_merge_seen(self.memory.base, self.positions, NULL, n, self.addresses)
        for i in range(self.cell_count):
            cell = &self.cells[i]
            for lane in range(lanes if cell.lanes else 1):
                offset = cell.offset + (0 if fold else lane * cell.words)
                if kd_merge(cell, offset, self.memory.base, self.positions, NULL, n, self.addresses,
                            cells[i].offset + lane * cell.words, 0):
                    self.c_overflow(i)
        return 0

    def restore(self, int64_t bucket, data, uint64_t entries, layout, vparts):
        """Take the entries of a snapshot (`data`: uint64) into the table of a bucket: about
        `entries` of the virtual partitions [vparts[0], vparts[1]), of which those that this
        executor leads are used, with states in `layout`, that of the executors that wrote them.
        With another number of executors, lanes are folded into the first.  Returns how many were
        used.  Raises StateError; some of the entries are in the table then."""
        cdef const uint64_t[::1] view = data
        cdef kd_section section
        cdef kd_accumulator cells[256]
        cdef uint64_t[::1] packed
        cdef uint64_t at = 0, end = view.shape[0], used = 0, lanes = layout.executors, i
        cdef int64_t n = 0
        cdef bint fold = layout.executors != self.layout.executors
        cdef bint copied = layout.words == self.layout.words and layout.codes == self.layout.codes
        cdef Table table
        if self.cell_count > 256:
            raise StateError("a plan of more than 256 aggregates cannot be restored")
        if not self._is_bucket(bucket):
            raise StateError(f"a snapshot has a window that cannot be: bucket {bucket}",
                             hint="the snapshot is damaged")
        for i in range(self.cell_count):
            cells[i] = self.cells[i]
            cells[i].offset = layout.codes[i][2]
        section.state_words, section.key_words = layout.words, self.keys.words
        section.strings, section.fixed_words = self.keys.strings, self.keys.fixed_words
        section.texts = self.keys.texts
        section.first, section.last = vparts
        section.owners, section.self = self.route.owners, self.lane
        section.has_seen, section.unseen = self.layout.has_seen, 0
        if not end:
            return 0
        self.c_slot(bucket)
        table = self.table(bucket)
        most = min(entries, MOST_RESERVED)
        table.reserve(most, most * 8 * (layout.words + max(1, self.keys.words)))
        packed = np.empty(PIECE_ROWS * max(1, self.keys.words), np.uint64)
        with nogil:
            while at < end:
                i = at
                n = kd_check_entries(&section, &view[0], &at, end, PIECE_ROWS, self.addresses,
                                     self.hash, self.offsets)
                if n < 0:
                    break
                if section.unseen:
                    with gil:
                        self.begin_tracking()
                n = (self._copied(table, n) if copied else
                     self._folded(table, &view[i], n, cells, lanes, fold, &packed[0]))
                if n < 0:
                    break
                used += n
        if n < 0:
            raise StateError(f"an entry of bucket {bucket} of a snapshot {ENTRY_FAULTS[n]}",
                             hint="the snapshot is damaged")
        return used

    cdef bint _is_bucket(self, int64_t bucket):
        """Whether rows may fall into this bucket: their times are not before 1970."""
        if not self.route.size:
            return bucket == 0
        size, origin = <object>self.route.size, <object>self.route.origin
        return -origin // size <= bucket <= ((1 << 63) - 1 - origin) // size

    cdef int64_t _copied(self, Table table, uint32_t n) except? -100 nogil:
        """The n entries at `addresses` as they are; n, or what is wrong."""
        cdef int64_t done = 0
        if table.c.index == NULL:
            table.c.wanted = 8
            with gil:
                table.c_grow()
        while True:
            done = kd_insert_entries(&table.c, self.addresses, self.hash, done, n, self.stamp)
            if done < 0 or done == n:
                return done
            with gil:
                table.c_grow()

    cdef int64_t _folded(self, Table table, const uint64_t* words, uint32_t n,
                         const kd_accumulator* cells, uint64_t lanes,
                         bint fold, uint64_t* packed) except? -100 nogil:
        """The n entries at `addresses`, with their keys at `offsets` from `words`, merged into new
        states; n, or what is wrong.  `packed` has room for their keys."""
        cdef kd_keys k
        cdef uint64_t before = table.c.used
        cdef uint32_t i
        k.bucket, k.bucket_stride, k.hash = NULL, 0, self.hash
        k.words, k.stride, k.offsets = words, 0, self.offsets
        if table.c.key_words:
            k.words, k.stride, k.offsets = &packed[0], table.c.key_words, NULL
            for i in range(n):
                memcpy(&packed[i * k.stride], words + self.offsets[i], k.stride * 8)
        table.c_find(&k, NULL, n, self.positions)
        if table.c.used != before + n:
            return KD_ENTRY_TWICE
        self._states(n, cells, lanes, fold)
        return n
