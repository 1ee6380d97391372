# cython: language_level=3, boundscheck=False, wraparound=False
"""Key columns to key words and back.

Owns: the canonical form of keys.  Two rows have the same key words if and only if Spark would put
them into one group: nulls are equal to each other, -0.0 is 0.0, every NaN is one NaN.

A key has a fixed number of words, or, if a string or binary is among its columns, a length in
bytes, the bytes, and zeros up to a whole word.  Every fixed column takes one word, a decimal of
more than 18 digits two, `binary[n]` n/8.  Where a word has values to spare, one of them is null;
where it has none (64-bit integers, timestamps, long decimals, binary[n], strings) null is a bit of
a word of its own, which is there only if the shape is `nullable`.  So one 64-bit column that cannot
be null is used as it lies in Arrow's memory.
"""

import numpy as np
import pyarrow as pa

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from kdirect.errors import ConfigError, StateError

cdef extern from "keys_run.h" nogil:
    enum:
        KD_I8, KD_I16, KD_I32, KD_I64, KD_U8, KD_U16, KD_U32, KD_F32, KD_F64, KD_BOOL
    ctypedef struct kd_strings:
        const uint8_t* bytes
        const void* offsets
        int wide
        const uint8_t* valid
        uint64_t shift
    void kd_widen(int type, const void* values, uint64_t step, const uint8_t* valid, uint64_t shift,
                  uint64_t n, uint64_t null_word, uint64_t* out, uint64_t stride)
    void kd_copy_fixed(const uint8_t* values, uint64_t width, const uint8_t* valid, uint64_t shift,
                       uint64_t n, uint64_t* out, uint64_t stride)
    void kd_mark_nulls(const uint8_t* valid, uint64_t shift, uint64_t n, uint64_t bit,
                       uint64_t* out, uint64_t stride)
    uint64_t kd_string_offsets(const kd_strings* s, uint32_t columns, uint64_t fixed_words,
                               uint64_t n, uint64_t most, uint32_t* offsets)
    void kd_string_keys(const kd_strings* s, uint32_t columns, const uint64_t* fixed,
                        uint64_t fixed_words, uint64_t n, const uint32_t* offsets, uint64_t* out)
    int64_t kd_string_of(const uint64_t* key, uint32_t columns, uint64_t fixed_words,
                         uint32_t column, const uint8_t** bytes)
    void kd_hash_rows(const kd_keys* k, uint32_t key_words, uint32_t n, uint64_t* out)

cdef enum:
    MOST_STRINGS = 16
    LONGEST_KEY = 1 << 15      # bytes: an entry has to fit into a page

ANY_LENGTH = 1 << 40  # of keys that are only hashed

cdef uint64_t NARROW_NULL = <uint64_t>1 << 40
cdef uint64_t WIDE_NULL = <uint64_t>1 << 63
cdef uint64_t FLOAT_NULL = <uint64_t>0x7FF8DEAD00000000

NARROW = {
    pa.int8(): KD_I8, pa.int16(): KD_I16, pa.int32(): KD_I32, pa.uint8(): KD_U8,
    pa.uint16(): KD_U16, pa.uint32(): KD_U32, pa.date32(): KD_I32, pa.bool_(): KD_BOOL,
}


class _Column:
    """How one key column becomes words."""

    def __init__(self, name, type_):
        self.name, self.type = name, type_
        self.code, self.words, self.null_word, self.bit = -1, 1, None, -1
        if type_ in NARROW:
            self.code, self.null_word = NARROW[type_], NARROW_NULL
        elif type_ == pa.float32():
            self.code, self.null_word = KD_F32, FLOAT_NULL
        elif type_ == pa.float64():
            self.code, self.null_word = KD_F64, FLOAT_NULL
        elif type_ in (pa.int64(), pa.uint64()) or pa.types.is_timestamp(type_) \
                or pa.types.is_date64(type_):
            self.code = KD_I64
        elif pa.types.is_decimal128(type_):
            if type_.precision <= 18:
                self.code, self.null_word = KD_I64, WIDE_NULL
            else:
                self.words = 2
        elif pa.types.is_fixed_size_binary(type_):
            self.words = (type_.byte_width + 7) // 8
        elif type_ in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
            self.words = 0
        else:
            raise ConfigError(f"column {name!r} of type {type_} cannot be a key",
                              hint="group by integers, strings, binary, dates, timestamps, "
                              "decimals, floats or booleans")


cdef const uint8_t* _address(buffer) except? NULL:
    return <const uint8_t*><uintptr_t>buffer.address if buffer is not None else NULL


cdef class KeyBlock:
    """The keys of a block of rows: words, and hashes if they were asked for.  Keeps alive what it
    points into."""

    def hashes(self):
        """The hash of each row; the top 8 bits are its virtual partition."""
        cdef uint64_t[::1] view
        out = np.empty(self.rows, np.uint64)
        if self.rows:
            view = out
            with nogil:
                kd_hash_rows(&self.c, self.key_words, self.rows, &view[0])
        return out


cdef class KeyShape:
    """The form of keys of the columns `fields`, [(name, Arrow type)].

    With `nullable` False a null is an error, and 64-bit columns need no word for it.  `words` is
    the length of a key in words, 0 if it varies.  No key may be longer than `longest` bytes.
    """

    def __init__(self, fields, nullable=True, longest=LONGEST_KEY):
        self.names = tuple(name for name, _ in fields)
        self.types = tuple(type_ for _, type_ in fields)
        self.nullable = nullable
        self._longest = longest
        self._columns = [_Column(name, type_) for name, type_ in fields]
        strings = [c for c in self._columns if c.words == 0]
        self.strings = len(strings)
        bits = [c for c in self._columns if c.null_word is None] if nullable else []
        if len(bits) > 64 or self.strings > MOST_STRINGS:
            raise ConfigError("a key has at most 64 columns, 16 of them strings",
                              hint="group by fewer columns")
        texts = (pa.string(), pa.large_string())
        self.texts = sum(1 << i for i, column in enumerate(strings) if column.type in texts)
        for bit, column in enumerate(bits):
            column.bit = bit
        self.fixed_words = bool(bits) + sum(c.words for c in self._columns)
        # A key without columns (a window over everything) is one word that is always 0.
        if not fields:
            self.fixed_words = 1
        self.words = 0 if self.strings else self.fixed_words

    def encode(self, arrays, n=None, hashed=True):
        """The keys of the rows of `arrays`, in the order of the shape's columns.  Raises StateError
        if a key is longer than an entry may be, or null where it cannot be."""
        if n is None:
            n = len(arrays[0])
        return self.c_encode(list(arrays), n, hashed)

    cdef KeyBlock c_encode(self, list arrays, uint32_t n, bint hashed):
        cdef KeyBlock block = KeyBlock.__new__(KeyBlock)
        cdef uint64_t[::1] view
        block.rows = n
        block.key_words = self.words
        arrays = [self._checked(column, array, n)
                  for column, array in zip(self._columns, arrays, strict=True)]
        if self.words == 1 and self._as_it_lies(arrays):
            array = arrays[0]
            block.c.words = <const uint64_t*>_address(array.buffers()[1]) + <size_t>array.offset
            block.c.stride = 1
            block._owners = [array]
        else:
            fixed = self._fixed(arrays, n)
            if self.strings:
                self._variable(block, arrays, fixed)
            else:
                view = fixed
                block.c.words = &view[0] if n else NULL
                block.c.stride = self.fixed_words
                block._owners = [fixed]
        if hashed:
            hashes = block.hashes()
            view = hashes
            block.c.hash = &view[0] if n else NULL
            block._owners.append(hashes)
        return block

    def _checked(self, column, array, n):
        """The array as it is to be read; errors name the column."""
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.type != column.type or len(array) != n:
            raise StateError(f"key column {column.name!r} has {len(array)} rows of {array.type}, "
                             f"not {n} of {column.type}")
        if array.null_count and not self.nullable:
            raise StateError(f"key column {column.name!r} has nulls and was declared without",
                             hint="declare the field as nullable")
        return array

    def _as_it_lies(self, arrays):
        """Whether the only column is its own key words."""
        return bool(arrays) and len(arrays) == 1 and self._columns[0].code == KD_I64 \
            and not pa.types.is_decimal(self._columns[0].type) and not arrays[0].null_count

    def _fixed(self, arrays, uint32_t n):
        """Row-major words of all columns that are not strings, and of the nulls."""
        cdef uint64_t stride = self.fixed_words, at = 0, shift, step, null_word
        cdef uint64_t* out
        cdef const uint8_t* valid
        cdef const uint8_t* values
        cdef uint64_t[:, ::1] view
        cdef int code
        words = np.zeros((n, max(1, self.fixed_words)), np.uint64)
        if not n or not self.fixed_words:
            return words.reshape(-1)
        view = words
        out = &view[0, 0]
        at = any(c.bit >= 0 for c in self._columns)
        for column, array in zip(self._columns, arrays, strict=True):
            buffers = array.buffers()
            valid = _address(buffers[0]) if array.null_count else NULL
            shift = array.offset
            if valid != NULL and column.bit >= 0:
                kd_mark_nulls(valid, shift, n, column.bit, out, stride)
            if column.words == 0:
                continue
            values = _address(buffers[1])
            if column.code < 0:
                kd_copy_fixed(values + shift * <uint64_t>column.type.byte_width,
                              column.type.byte_width, valid, shift, n, out + at, stride)
            else:
                code, null_word = column.code, column.null_word or 0
                step = 2 if pa.types.is_decimal(column.type) else 1
                if code == KD_BOOL:
                    step = shift
                else:
                    values += shift * <uint64_t>(column.type.bit_width // 8)
                kd_widen(code, values, step, valid, shift, n, null_word, out + at, stride)
            at += <uint64_t>column.words
        return words.reshape(-1)

    def _variable(self, KeyBlock block, arrays, fixed):
        cdef kd_strings s[MOST_STRINGS]
        cdef uint32_t c = 0, n = block.rows
        cdef uint64_t[::1] fixed_view = fixed
        cdef uint64_t[::1] out
        cdef uint32_t[::1] offsets
        cdef uint64_t done
        for column, array in zip(self._columns, arrays, strict=True):
            if column.words:
                continue
            buffers = array.buffers()
            s[c].wide = column.type in (pa.large_string(), pa.large_binary())
            s[c].bytes = _address(buffers[2])
            s[c].offsets = _address(buffers[1]) + <uint64_t>array.offset * (8 if s[c].wide else 4)
            s[c].valid = _address(buffers[0]) if array.null_count else NULL
            s[c].shift = array.offset
            c += 1
        offset_array = np.zeros(n + 1, np.uint32)
        offsets = offset_array
        with nogil:
            done = kd_string_offsets(s, c, self.fixed_words, n, self._longest // 8, &offsets[0])
        if done != n:
            raise StateError(f"the key of row {done} has more than {self._longest} bytes",
                             hint="group by a shorter column, or by a hash of it")
        words = np.empty(max(1, offset_array[n]), np.uint64)
        out = words
        if n:
            with nogil:
                kd_string_keys(s, c, &fixed_view[0], self.fixed_words, n, &offsets[0], &out[0])
        block.c.words = &out[0]
        block.c.offsets = &offsets[0]
        block._owners = [words, offset_array]

    def decode(self, uintptr_t base, positions):
        """Arrow arrays of the keys that lie at `positions` (bytes from address `base`)."""
        cdef uint32_t c = 0
        at = bool(self.nullable and any(col.bit >= 0 for col in self._columns))
        first = 1 if self.strings else 0
        nulls = gather(base, positions, first) if at else None
        out = []
        for column in self._columns:
            null = None
            if column.bit >= 0:
                null = (nulls >> np.uint64(column.bit) & np.uint64(1)).astype(bool)
            if column.words == 0:
                out.append(self._decoded_string(base, positions, column, c, null))
                c += 1
                continue
            out.append(_decoded(column, base, positions, first + at, null))
            at += column.words
        return out

    def _decoded_string(self, uintptr_t base, positions, column, uint32_t number, null):
        cdef const uint64_t[::1] at = positions
        cdef uint64_t i, n = at.shape[0]
        cdef int64_t[::1] offsets
        cdef int64_t length
        cdef const uint8_t* bytes_
        cdef uint8_t[::1] out
        offset_array = np.zeros(n + 1, np.int64)
        offsets = offset_array
        for i in range(n):
            length = kd_string_of(<const uint64_t*>(base + at[i]), self.strings, self.fixed_words,
                                  number, &bytes_)
            if length < 0:
                raise StateError(f"a key of column {column.name!r} in the state is damaged")
            offsets[i + 1] = offsets[i] + length
        data = np.empty(max(1, offset_array[n]), np.uint8)
        out = data
        for i in range(n):
            length = kd_string_of(<const uint64_t*>(base + at[i]), self.strings, self.fixed_words,
                                  number, &bytes_)
            copy_bytes(&out[0] + offsets[i], bytes_, length)
        wide = pa.large_string() if pa.types.is_string(column.type) or \
            pa.types.is_large_string(column.type) else pa.large_binary()
        valid = None if null is None or not null.any() else _bitmap(~null)
        array = pa.Array.from_buffers(wide, n, [valid, pa.py_buffer(offset_array),
                                                pa.py_buffer(data)])
        return array.cast(column.type)


cdef extern from *:
    """
    #include <string.h>
    static inline void kd_copy_bytes(void *to, const void *from, int64_t n) { memcpy(to, from, n); }
    static void kd_gather(const uint8_t *base, const uint64_t *at, uint64_t word, uint64_t n,
                          uint64_t *out) {
        for (uint64_t i = 0; i < n; i++) {
            if (i + 16 < n)
                __builtin_prefetch(base + at[i + 16] + word * 8);
            memcpy(out + i, base + at[i] + word * 8, 8);
        }
    }
    """
    void copy_bytes "kd_copy_bytes"(void* to, const void* begin, int64_t n) nogil
    void kd_gather(const uint8_t* base, const uint64_t* at, uint64_t word, uint64_t n,
                   uint64_t* out) nogil


cpdef gather(uintptr_t base, positions, uint64_t word):
    """Word number `word` after each of `positions` (bytes from address `base`), as uint64."""
    cdef const uint64_t[::1] at = positions
    cdef uint64_t n = at.shape[0]
    cdef uint64_t[::1] view
    out = np.empty(n, np.uint64)
    if n:
        view = out
        with nogil:
            kd_gather(<const uint8_t*>base, &at[0], word, n, &view[0])
    return out


def _bitmap(valid):
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _decoded(column, base, positions, word, null):
    """The Arrow array of a column of fixed width, from word `word` of each key."""
    words = gather(base, positions, word)
    type_, n = column.type, len(words)
    if column.null_word is not None:
        null = words == np.uint64(column.null_word)
    valid = None
    if null is not None and null.any():
        valid = _bitmap(~null)
        words[null] = 0
    if column.words > 1 or column.code < 0:
        parts = [words, *(gather(base, positions, word + i) for i in range(1, column.words))]
        data = np.ascontiguousarray(np.stack(parts, 1)).view(np.uint8).reshape(n, -1)
        data = np.ascontiguousarray(data[:, : type_.byte_width])
    elif pa.types.is_boolean(type_):
        data = np.packbits(words.astype(bool), bitorder="little")
    elif pa.types.is_decimal(type_):
        high = (words.view(np.int64) >> 63).view(np.uint64)
        data = np.ascontiguousarray(np.stack([words, high], 1))
    elif type_ == pa.float32():
        data = words.view(np.float64).astype(np.float32)
    else:
        data = words.astype(f"u{type_.bit_width // 8}")
    return pa.Array.from_buffers(type_, n, [valid, pa.py_buffer(data)])
