# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""For each key of a section of a log, the offset of its last record, within a bound of memory.

Law of the room: a table of cells of one size, without growth, without deletion.  A cell holds a
hash of the key (128 bits, keyed with a secret of this table) and not the key itself, so its size
does not depend on what producers send; two keys of one hash would be taken for one, which is as
likely as a guess of the secret.  Kafka's SkimpyOffsetMap is the same with MD5.
"""

import os

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

from kdirect.errors import ConfigError
from kdirect.format.wire cimport kd_get_le64, kd_put_le64

CELL_BYTES = sizeof(key_cell)


# -- the hash: SipHash-2-4 of 128 bits, by Aumasson and Bernstein ---------------------------------

cdef inline uint64_t _rotate(uint64_t x, int bits) noexcept nogil:
    return (x << bits) | (x >> (64 - bits))


cdef inline void _rounds(uint64_t* v, int rounds) noexcept nogil:
    cdef int i
    for i in range(rounds):
        v[0] += v[1]
        v[2] += v[3]
        v[1] = _rotate(v[1], 13) ^ v[0]
        v[3] = _rotate(v[3], 16) ^ v[2]
        v[0] = _rotate(v[0], 32)
        v[2] += v[1]
        v[0] += v[3]
        v[1] = _rotate(v[1], 17) ^ v[2]
        v[3] = _rotate(v[3], 21) ^ v[0]
        v[2] = _rotate(v[2], 32)


cdef inline void _take_word(uint64_t* v, uint64_t word) noexcept nogil:
    v[3] ^= word
    _rounds(v, 2)
    v[0] ^= word


cdef void _hash(const uint64_t* key, const uint8_t* p, size_t n, uint64_t* out) noexcept nogil:
    """The hash of n bytes, in two words."""
    cdef uint64_t[4] v
    cdef uint64_t last = <uint64_t> n << 56
    cdef size_t i
    v[0] = key[0] ^ <uint64_t> 0x736F6D6570736575u
    v[1] = key[1] ^ <uint64_t> 0x646F72616E646F6Du ^ 0xEE
    v[2] = key[0] ^ <uint64_t> 0x6C7967656E657261u
    v[3] = key[1] ^ <uint64_t> 0x7465646279746573u
    for i in range(n // 8):
        _take_word(v, kd_get_le64(p + 8 * i))
    for i in range(n % 8):
        last |= <uint64_t> p[n - n % 8 + i] << (8 * i)
    _take_word(v, last)
    v[2] ^= 0xEE
    _rounds(v, 4)
    out[0] = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    _rounds(v, 4)
    out[1] = v[0] ^ v[1] ^ v[2] ^ v[3]


# -- the table -------------------------------------------------------------------------------------


cdef class KeyOffsets:
    """Room for `slots` cells, of which a part of `load_factor` is used.

    Life: one cleaning of one log.  One thread at a time; it owns its memory, and pages of it that
    are not used are not allocated."""

    def __cinit__(self, int64_t slots, double load_factor=0.9, bytes secret=None):
        slots = min(slots, 0xFFFFFFFE)     # a place is drawn by 32 bits of a hash
        if slots < 1 or not 0 < load_factor <= 1 or slots * load_factor < 1:
            raise ConfigError(f"a table of {slots} cells, {load_factor} of them used, holds no key",
                              hint="raise log.cleaner.dedupe.buffer.size, or use fewer threads")
        secret = os.urandom(16) if secret is None else secret
        self.secret[0] = kd_get_le64(<const uint8_t*> secret)
        self.secret[1] = kd_get_le64(<const uint8_t*> secret + 8)
        self.slots = slots
        # One cell at least stays free, or a search for what is not there would not end.
        self.limit = max(1, min(<int64_t> (slots * load_factor), slots - 1))
        self.slots = max(slots, self.limit + 1)
        self.latest_offset = -1
        self.cells = <key_cell*> calloc(self.slots, sizeof(key_cell))
        if self.cells == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.cells)

    cdef key_cell* _cell(self, const uint8_t* key, int64_t length, uint64_t* h) noexcept nogil:
        """The cell of the key, or the free one where it belongs."""
        cdef uint64_t at
        _hash(self.secret, key, <size_t> length, h)
        at = ((h[0] >> 32) * <uint64_t> self.slots) >> 32
        while self.cells[at].after and (self.cells[at].hash_low != h[0]
                                        or self.cells[at].hash_high != h[1]):
            at += 1
            if at == <uint64_t> self.slots:
                at = 0
        return &self.cells[at]

    cdef bint note(self, const uint8_t* key, int64_t length, int64_t offset) noexcept nogil:
        """The key has a record at `offset`, which is above those noted before; False, and nothing
        has changed: the table is full.  (A key that is known could still be noted then; Kafka ends
        there, too, so that the end does not depend on which keys come.)"""
        cdef uint64_t[2] h
        cdef key_cell* cell
        if self.used >= self.limit:
            return False
        cell = self._cell(key, length, h)
        if cell.after == 0:
            cell.hash_low = h[0]
            cell.hash_high = h[1]
            self.used += 1
        cell.after = offset + 1
        self.reach(offset)
        return True

    cdef int64_t find(self, const uint8_t* key, int64_t length) noexcept nogil:
        """The offset of the key's last record; -1: it has none."""
        cdef uint64_t[2] h
        return self._cell(key, length, h).after - 1

    cdef void reach(self, int64_t offset) noexcept nogil:
        """Every record up to `offset` has been noted."""
        if offset > self.latest_offset:
            self.latest_offset = offset

    def put(self, bytes key not None, int64_t offset):
        """`note` for a key of Python."""
        return bool(self.note(<const uint8_t*> key, len(key), offset))

    def get(self, bytes key not None):
        """`find` for a key of Python."""
        return self.find(<const uint8_t*> key, len(key))

    def reach_offset(self, int64_t offset):
        """`reach` for Python."""
        self.reach(offset)


def siphash128(bytes secret not None, bytes data not None):
    """The hash of the table, 16 bytes, for a secret of 16 bytes."""
    cdef uint64_t[2] key
    cdef uint64_t[2] h
    cdef uint8_t[16] out
    key[0] = kd_get_le64(<const uint8_t*> secret)
    key[1] = kd_get_le64(<const uint8_t*> secret + 8)
    _hash(key, <const uint8_t*> data, len(data), h)
    kd_put_le64(out, h[0])
    kd_put_le64(out + 8, h[1])
    return (<char*> out)[:16]
