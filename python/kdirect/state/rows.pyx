# cython: language_level=3, boundscheck=False, wraparound=False
"""Columns to rows of bytes, and back: what joins and lists keep of a record.

Owns: the shape of a row (rows_run.h has its diagram) and the loops over Arrow arrays.  It knows
neither keys nor windows nor where rows lie.

A row holds the columns of its shape and nothing else.  Rows that were encoded here and rows that
`kd_row_fits` has checked may be decoded; nothing else may.
"""

import numpy as np
import pyarrow as pa

from libc.stdint cimport INT32_MAX, int32_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc

from kdirect.errors import ConfigError, StateError, StateLimitError

cdef enum:
    MOST_COLUMNS = 512


cdef const uint8_t* _address(buffer) except? NULL:
    return <const uint8_t*><uintptr_t>buffer.address if buffer is not None else NULL


cdef int _kind_of(type_) except -1:
    if pa.types.is_boolean(type_):
        return KD_ROW_BOOL
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        return KD_ROW_STRING
    if pa.types.is_primitive(type_) or pa.types.is_decimal128(type_) \
            or pa.types.is_fixed_size_binary(type_):
        return KD_ROW_FIXED
    raise ConfigError(f"a column of type {type_} cannot be kept in a row",
                      hint="use numbers, booleans, dates, times, decimals, strings or binary")


cdef class RowShape:
    """The form of rows of the columns `fields`, [(name, Arrow type)].  It may have no column: a
    row then has no bytes, and still counts."""

    def __cinit__(self, fields):
        self.c.column = NULL

    def __init__(self, fields):
        cdef uint32_t at, i
        self.names = tuple(name for name, _ in fields)
        self.types = tuple(type_ for _, type_ in fields)
        if len(self.types) > MOST_COLUMNS:
            raise ConfigError(f"a row has {len(self.types)} columns, more than {MOST_COLUMNS}",
                              hint="choose the columns that the result needs")
        self.c.columns = len(self.types)
        self.c.column = <kd_row_column*>calloc(max(1, len(self.types)), sizeof(kd_row_column))
        if self.c.column == NULL:
            raise MemoryError
        self.c.null_bytes = (self.c.columns + 7) // 8
        at = self.c.null_bytes
        for i, type_ in enumerate(self.types):
            kind = _kind_of(type_)
            width = {KD_ROW_BOOL: 1, KD_ROW_STRING: 4}.get(kind) or type_.bit_width // 8
            self.c.column[i].kind = kind
            self.c.column[i].width = width
            self.c.column[i].at = at
            self.c.column[i].utf8 = pa.types.is_string(type_) or pa.types.is_large_string(type_)
            self.c.strings += kind == KD_ROW_STRING
            at += <uint32_t>width
        self.c.fixed_bytes = at

    def __dealloc__(self):
        free(self.c.column)

    @staticmethod
    def of_words(uint32_t words, bint tail=False):
        """Rows of so many words, which mean something to the caller only.  With `tail` the last of
        them is the length in bytes of what comes after them."""
        cdef RowShape shape = RowShape([])
        shape.c.fixed_bytes = words * 8
        if tail:
            shape.c.columns = shape.c.strings = 1
            shape.c.column[0].kind = KD_ROW_STRING
            shape.c.column[0].width = 4
            shape.c.column[0].at = words * 8 - 8
        return shape

    def decode(self, addresses):
        """Arrow arrays of the rows at `addresses` (uint64; 0 is a row of nulls)."""
        cdef const uint64_t[::1] at = np.ascontiguousarray(addresses, np.uint64)
        cdef uint64_t n = at.shape[0]
        cdef const uint8_t** row = <const uint8_t**>(&at[0] if n else NULL)
        return [
            _strings(self, c, row, n) if self.c.column[c].kind == KD_ROW_STRING
            else _fixed(self, c, row, n)
            for c in range(self.c.columns)
        ]


cdef _bitmap(valid):
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


cdef _fixed(RowShape shape, uint32_t c, const uint8_t** row, uint64_t n):
    cdef uint32_t width = shape.c.column[c].width
    cdef uint8_t[::1] valid_view, view
    type_ = shape.types[c]
    valid = np.empty(n, np.uint8)
    values = np.empty(max(1, n * width), np.uint8)
    if n:
        valid_view, view = valid, values
        with nogil:
            kd_row_take_fixed(&shape.c, c, row, n, &valid_view[0], &view[0])
    if shape.c.column[c].kind == KD_ROW_BOOL:
        values = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(type_, n, [_bitmap(valid), pa.py_buffer(values)])


cdef _strings(RowShape shape, uint32_t c, const uint8_t** row, uint64_t n):
    cdef uint64_t sum_ = 0
    cdef uint8_t[::1] valid_view, view
    cdef int32_t[::1] offset_view
    cdef uint64_t[::1] begin_view
    valid = np.empty(n, np.uint8)
    offsets = np.zeros(n + 1, np.int32)
    data = np.empty(1, np.uint8)
    if n:
        begins = np.empty(n, np.uint64)
        valid_view, offset_view, begin_view = valid, offsets, begins
        with nogil:
            sum_ = kd_row_find_strings(&shape.c, c, row, n, &valid_view[0],
                                       <const uint8_t**>&begin_view[0], &offset_view[0])
        if sum_ > INT32_MAX:
            raise StateLimitError(
                f"column {shape.names[c]!r} of one block of a result has more than 2 GiB of text",
                hint="make windows shorter, or keep fewer or shorter strings")
        data = np.empty(max(1, sum_), np.uint8)
        view = data
        with nogil:
            kd_row_copy_strings(<const uint8_t**>&begin_view[0], &offset_view[0], n, &view[0])
    return pa.Array.from_buffers(shape.types[c], n,
                                 [_bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data)])


cdef class RowBlock:
    """The chosen rows of a block of columns, ready to be written to wherever `to` says.

    `arrays` are the columns of the shape, in its order; `rows` (uint32) are the chosen ones.  Keeps
    alive what it reads from."""

    def __cinit__(self, *_):
        self.source = NULL
        self.words = NULL
        self.to = NULL
        self.cursor = NULL

    def __init__(self, RowShape shape, list arrays, rows):
        cdef const uint32_t[::1] chosen = rows
        cdef uint32_t c
        cdef uint64_t n = chosen.shape[0]
        self.shape = shape
        self.rows = n
        self.chosen = &chosen[0] if n else NULL
        self.source = <kd_row_source*>calloc(max(1, len(arrays)), sizeof(kd_row_source))
        self.words = <uint64_t*>malloc(max(<uint64_t>1, n) * 8)
        self.to = <uint8_t**>malloc(max(<uint64_t>1, n) * 8)
        self.cursor = <uint32_t*>malloc(max(<uint64_t>1, n) * 4)
        if self.source == NULL or self.words == NULL or self.to == NULL or self.cursor == NULL:
            raise MemoryError
        arrays = [_plain(shape, i, array) for i, array in enumerate(arrays)]
        if len(arrays) != len(shape.types):
            raise ValueError("rows of this shape have another number of columns")
        top = int(rows.max()) if n else -1
        for c, array in enumerate(arrays):
            if len(array) <= top:
                raise IndexError("a row lies outside of its columns")
            buffers = array.buffers()
            self.source[c].valid = _address(buffers[0]) if array.null_count else NULL
            self.source[c].shift = array.offset
            self.source[c].values = _address(buffers[len(buffers) - 1])
            if shape.c.column[c].kind == KD_ROW_STRING:
                self.source[c].offsets = <const int32_t*>_address(buffers[1])
        self._owners = (arrays, rows)
        with nogil:
            self.longest = kd_row_words(&shape.c, self.source, self.chosen, n, self.words)

    def write(self, addresses):
        """Write the rows to these addresses (uint64), each of which has room for its row."""
        cdef const uint64_t[::1] view = addresses
        cdef uint64_t i
        if len(addresses) != self.rows:
            raise ValueError("every row has one address")
        for i in range(self.rows):
            self.to[i] = <uint8_t*><uintptr_t>view[i]
        with nogil:
            self.c_encode()

    cdef void c_encode(self) noexcept nogil:
        """Writes the rows to the addresses in `to`."""
        kd_row_encode(&self.shape.c, self.source, self.chosen, self.rows, self.words, self.to,
                      self.cursor)

    def __dealloc__(self):
        free(self.source)
        free(self.words)
        free(self.to)
        free(self.cursor)


def _plain(RowShape shape, uint32_t c, array):
    """The array as it is to be read."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.type != shape.types[c]:
        raise StateError(f"column {shape.names[c]!r} is of type {array.type}, not {shape.types[c]}")
    return array
