# cython: language_level=3, boundscheck=False, wraparound=False
"""Aggregates whose values have a variable length: extremes of strings and bytes, and sets.

Owns: which words such a cell has in the state of a group, where its bytes lie, the loops over
columns, and the way from cells to Arrow.  texts_run.h has the diagrams.

A cell keeps the value that won, or each value once, however many rows there were.  It is a CRDT
under merge: associative, commutative and idempotent, and its result depends on no order of arrival.
Strings have the order of their bytes in UTF-8, and bytes that of unsigned numbers, as in Spark.
"""

import zlib

import numpy as np
import pyarrow as pa

from libc.stdint cimport (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    int32_t,
    int64_t,
    uint8_t,
    uint32_t,
    uint64_t,
    uintptr_t,
)
from libc.stdlib cimport calloc, free, realloc

from kdirect.errors import ConfigError, StateLimitError

from kdirect.state.arena cimport Log
from kdirect.state.keys import gather
from kdirect.state.schema import arrow_type

cdef enum:
    MOST_TEXTS = 64

KINDS = {"min": KD_TEXT_MIN, "max": KD_TEXT_MAX, "first": KD_TEXT_FIRST, "last": KD_TEXT_LAST,
         "collect_set": KD_TEXT_SET}
LONGEST_VALUE_BYTES = KD_LONGEST_TEXT


cdef class TextStore:
    """Where the bytes of cells lie: in a log of mapped memory, or, without one, in memory of this
    object, whose values are of no use after it."""

    def __cinit__(self, Log log=None):
        self.log = log
        self.room = 0
        self.own.base = NULL
        self.own.tail = self.own.end = 8  # position 0 is none
        self.c = &self.own if log is None else &log.c

    def __dealloc__(self):
        free(self.own.base)

    cdef int c_room(self, uint64_t need) except -1:
        cdef uint8_t* base
        if self.log is not None:
            return self.log.c_room(need)
        self.room = max(2 * self.room, self.own.tail + need, <uint64_t>65536)
        base = <uint8_t*>realloc(self.own.base, self.room)
        if base == NULL:
            raise MemoryError
        self.own.base, self.own.end = base, self.room
        return 0


cdef class TextCells:
    """The cells of some aggregates.  `texts` are (Aggregate, name of its column's type); the first
    cell lies at word `at` of a state, and what `initial` has goes there."""

    def __cinit__(self, texts, uint32_t at):
        cdef uint32_t i
        self.texts = tuple(texts)
        self.count = len(self.texts)
        if self.count > MOST_TEXTS:
            raise ConfigError(f"a plan may have at most {MOST_TEXTS} aggregates of strings or sets")
        self.cells = <kd_text*>calloc(max(1, self.count), sizeof(kd_text))
        if self.cells == NULL:
            raise MemoryError
        first = at
        initial = []
        for i, (aggregate, kind) in enumerate(self.texts):
            edge = {"first": INT64_MAX, "last": INT64_MIN}.get(aggregate.kind)
            words = [0, 0] if edge is None else [edge, 0, 0]
            self.cells[i].kind = KINDS[aggregate.kind]
            self.cells[i].input = i
            self.cells[i].offset = at
            self.cells[i].words = len(words)
            self.cells[i].width = _width(kind)
            self.cells[i].utf8 = pa.types.is_string(arrow_type(kind))
            at += len(words)
            initial += words
        self.words = at - first
        self.initial = np.array(initial, np.int64).tobytes()
        described = repr([(a.kind, a.column, kind) for a, kind in self.texts])
        self.check = zlib.crc32(described.encode())

    def __dealloc__(self):
        free(self.cells)

    def point(self, columns):
        """Read the next rows from `columns`, a mapping of names to Arrow arrays.  Raises
        StateLimitError for a value that would not fit into a page."""
        cdef uint32_t i
        cdef kd_text_input* to
        kept = []
        for i, (aggregate, kind) in enumerate(self.texts):
            to = &self.inputs[i]
            array, values, offsets, width = _source(columns[aggregate.column], aggregate.name)
            to.bytes = <const uint8_t*><uintptr_t>values
            to.offsets = <const int32_t*><uintptr_t>offsets
            to.width = width
            to.valid = NULL
            kept.append(array)
            if array.null_count:
                valid = np.ascontiguousarray(array.is_valid().to_numpy(zero_copy_only=False)
                                             ).view(np.uint8)
                to.valid = <const uint8_t*><uintptr_t>valid.ctypes.data
                kept.append(valid)
        self._owners = kept

    cdef int c_update(self, uint8_t* base, const uint64_t* at, const uint32_t* rows, uint32_t n,
                      const int64_t* times, TextStore store) except -1 nogil:
        """Brings rows into the states at `at`."""
        cdef uint32_t c, done
        cdef uint64_t wants = 0
        for c in range(self.count):
            done = 0
            while True:
                done = kd_text_update(&self.cells[c], base, store.c, at, rows, done, n,
                                      &self.inputs[c], times, &wants)
                if done == n:
                    break
                with gil:
                    store.c_room(wants)
        return 0

    cdef int c_merge(self, uint8_t* base, const uint64_t* at, uint32_t n, const uint64_t* sources,
                     const uint8_t* from_base, TextStore store) except -1 nogil:
        """Merges the states at the addresses `sources` into those at `at`."""
        cdef uint32_t c, i
        cdef uint64_t wants
        for c in range(self.count):
            for i in range(n):
                while True:
                    wants = kd_text_merge(
                        &self.cells[c], <uint64_t*>(base + at[i]) + self.cells[c].offset, store.c,
                        <const uint64_t*>sources[i] + self.cells[c].offset, from_base)
                    if not wants:
                        break
                    with gil:
                        store.c_room(wants)
        return 0

    cdef int c_take_tail(self, uint64_t* state, const uint64_t* words, const uint8_t* tail,
                         TextStore store) except -1 nogil:
        """Merges the tail of a tuple, which was checked, into a state."""
        cdef uint64_t wants
        while True:
            wants = kd_text_take_tail(self.cells, self.count, state, store.c, words, tail)
            if not wants:
                return 0
            with gil:
                store.c_room(wants)

    def results(self, uintptr_t base, positions, TextStore store):
        """An Arrow array for each cell, of the states at `positions` (bytes from `base`)."""
        cdef uint32_t c
        return [
            _sets(&self.cells[c], base, positions, store, aggregate.name, kind)
            if self.cells[c].kind == KD_TEXT_SET
            else _singles(&self.cells[c], base, positions, store, aggregate.name, kind)
            for c, (aggregate, kind) in enumerate(self.texts)
        ]


def _width(kind):
    """Bytes of a value of a type in a cell; 0: they differ."""
    type_ = arrow_type(kind)
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        return 0
    return 1 if pa.types.is_boolean(type_) else type_.bit_width // 8


def _source(array, name):
    """(array, address of the values, address of the offsets or 0, width or 0) of a column."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_floating(array.type):
        # Values are compared by their bytes: one zero, and one NaN.
        floats = array.fill_null(0).to_numpy(zero_copy_only=False) + array.type.to_pandas_dtype()(0)
        floats[np.isnan(floats)] = np.nan
        array = pa.array(floats, array.type, mask=array.is_null().to_numpy(zero_copy_only=False))
    buffers = array.buffers()
    data = buffers[len(buffers) - 1]
    values = 0 if data is None else data.address
    if not (pa.types.is_string(array.type) or pa.types.is_binary(array.type)):
        width = array.type.bit_width // 8
        return array, values + array.offset * width, 0, width
    offsets = buffers[1].address + 4 * array.offset if len(array) else 0
    if len(array):
        ends = np.frombuffer(buffers[1], np.int32, len(array) + 1, 4 * array.offset)
        longest = int(np.diff(ends).max())
        if longest > LONGEST_VALUE_BYTES:
            raise StateLimitError(
                f"aggregate {name}: a value has {longest} bytes",
                hint=f"a value that is kept may have {LONGEST_VALUE_BYTES}")
    return array, values, offsets, 0


cdef _copied(bytes_, lengths, uint64_t n):
    """The bytes of values, one after the other."""
    cdef const uint64_t[::1] from_view = bytes_
    cdef const int64_t[::1] length_view = lengths
    cdef uint8_t[::1] view
    out = np.empty(max(1, int(lengths.sum())), np.uint8)
    if n:
        view = out
        with nogil:
            kd_text_copy(<const uint8_t**>&from_view[0], &length_view[0], n, &view[0])
    return out


cdef _array(bytes_, lengths, name, kind, nulls):
    """An Arrow array of values at the addresses `bytes_`; with `nulls` 0 stands for a null."""
    cdef uint64_t n = len(lengths)
    type_ = arrow_type(kind)
    valid = bytes_ != 0 if nulls else np.ones(n, bool)
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    width = _width(kind)
    if not width:
        ends = np.concatenate([[0], np.cumsum(lengths)])
        if ends[n] > INT32_MAX:
            raise StateLimitError(
                f"aggregate {name}: one block of a result has more than 2 GiB",
                hint="make windows shorter, or values")
        offsets = pa.py_buffer(ends.astype(np.int32))
        data = pa.py_buffer(_copied(bytes_, lengths, n))
        return pa.Array.from_buffers(type_, n, [bits, offsets, data])
    if bits is not None:
        # A null has bytes too.
        none = np.zeros(width, np.uint8)
        bytes_ = np.where(valid, bytes_, np.uint64(none.ctypes.data))
        lengths = np.full(n, width, np.int64)
    data = _copied(bytes_, lengths, n)
    if pa.types.is_boolean(type_):
        data = np.packbits(data, bitorder="little")
    return pa.Array.from_buffers(type_, n, [bits, pa.py_buffer(data)])


cdef _singles(const kd_text* cell, uintptr_t base, positions, TextStore store, name, kind):
    cdef const uint64_t[::1] at = positions
    cdef uint64_t[::1] begin_view
    cdef int64_t[::1] length_view
    cdef uint64_t n = at.shape[0]
    begins, lengths = np.zeros(n, np.uint64), np.zeros(n, np.int64)
    if n:
        begin_view, length_view = begins, lengths
        with nogil:
            kd_text_values(cell, <const uint8_t*>base, &at[0], n, store.c.base,
                           <const uint8_t**>&begin_view[0], &length_view[0])
    return _array(begins, lengths, name, kind, True)


cdef _sets(const kd_text* cell, uintptr_t base, positions, TextStore store, name, kind):
    cdef const uint64_t[::1] at = positions
    cdef uint64_t[::1] begin_view
    cdef int64_t[::1] length_view
    cdef uint64_t n = at.shape[0], total
    counts = gather(base, positions, cell.offset).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)])
    total = int(ends[n])
    begins, lengths = np.zeros(total, np.uint64), np.zeros(total, np.int64)
    if total:
        begin_view, length_view = begins, lengths
        with nogil:
            kd_set_values(cell, <const uint8_t*>base, &at[0], n, store.c.base,
                          <const uint8_t**>&begin_view[0], &length_view[0])
    values = _array(begins, lengths, name, kind, False)
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32), pa.int32()), values)
