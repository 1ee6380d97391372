# cython: boundscheck=False, wraparound=False
"""The compiled loops behind `partitioner.py`: Kafka's hash of keys, runs of rows without a key,
rows sorted by partition.

Nothing here holds the GIL over rows, allocates, or keeps a pointer after it returns.  Addresses are
those of Arrow buffers that the caller keeps alive; offsets in them are checked against the data
before they are followed.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.string cimport memcpy

cdef uint32_t SEED = 0x9747B28C
cdef uint32_t M = 0x5BD1E995


cdef inline uint32_t murmur2_of(const uint8_t* p, uint32_t length) noexcept nogil:
    # Kafka's Utils.murmur2: 32-bit MurmurHash2 over little-endian words.
    cdef uint32_t h = SEED ^ length, k
    cdef uint32_t left = length
    while left >= 4:
        memcpy(&k, p, 4)
        k *= M
        k ^= k >> 24
        k *= M
        h *= M
        h ^= k
        p += 4
        left -= 4
    if left == 3:
        h ^= <uint32_t>p[2] << 16
    if left >= 2:
        h ^= <uint32_t>p[1] << 8
    if left >= 1:
        h ^= p[0]
        h *= M
    h ^= h >> 13
    h *= M
    h ^= h >> 15
    return h


cdef uint32_t[256] CRC_TABLE


cdef void _fill_table() noexcept:
    cdef uint32_t c, i
    cdef int bit
    for i in range(256):
        c = i
        for bit in range(8):
            c = (0xEDB88320u ^ (c >> 1)) if c & 1 else c >> 1
        CRC_TABLE[i] = c


_fill_table()


cdef inline uint32_t crc32_of(const uint8_t* p, uint32_t length) noexcept nogil:
    # CRC-32 as in zlib: librdkafka's rule for keys.
    cdef uint32_t c = 0xFFFFFFFFu, i
    for i in range(length):
        c = CRC_TABLE[(c ^ p[i]) & 0xFF] ^ (c >> 8)
    return c ^ 0xFFFFFFFFu


def murmur2(const uint8_t[::1] key):
    """The hash as Java sees it: a signed 32-bit number."""
    return <int32_t>murmur2_of(&key[0] if key.shape[0] else NULL, <uint32_t>key.shape[0])


def hash_rows(uintptr_t validity, uintptr_t offsets, int offset_bytes, uintptr_t data,
              int64_t data_bytes, int64_t first, int64_t rows, int32_t partitions,
              int32_t[::1] out, bint crc=False):
    """Partition of each key to `out`, by murmur2 or CRC-32, -1 for null keys.  `validity` 0: no
    nulls.  `offset_bytes` 4, 8, or 0: keys of `data_bytes` each, side by side.  `first` is the row
    the slice begins at.  Returns (null rows, first row whose offsets are broken or -1)."""
    cdef const uint8_t* valid = <const uint8_t*>validity
    cdef const uint8_t* bytes_ = <const uint8_t*>data
    cdef const int32_t* offsets32 = <const int32_t*>offsets
    cdef const int64_t* offsets64 = <const int64_t*>offsets
    cdef int64_t i, row, start, stop, nulls = 0, broken = -1
    cdef uint32_t count = <uint32_t>partitions, length
    with nogil:
        for i in range(rows):
            row = first + i
            if valid != NULL and not (valid[row >> 3] >> (row & 7)) & 1:
                out[i] = -1
                nulls += 1
                continue
            if offset_bytes == 4:
                start = offsets32[row]
                stop = offsets32[row + 1]
            elif offset_bytes == 8:
                start = offsets64[row]
                stop = offsets64[row + 1]
            else:
                start = row * data_bytes
                stop = start + data_bytes
            if (start < 0 or stop < start or (offset_bytes and stop > data_bytes)
                    or stop - start > 0x7FFFFFFF):
                broken = i
                break
            length = <uint32_t>(stop - start)
            if crc:
                out[i] = <int32_t>(crc32_of(bytes_ + start, length) % count)
            else:
                out[i] = <int32_t>((murmur2_of(bytes_ + start, length) & 0x7FFFFFFF) % count)
    return nulls, broken


def fill_runs(int32_t[::1] out, int32_t partition, int64_t left, int64_t run, int32_t partitions):
    """Replace -1 in `out`: `left` more rows to `partition`, then runs of `run` rows to each
    partition in turn.  Returns the new (partition, left)."""
    cdef int64_t i
    with nogil:
        for i in range(out.shape[0]):
            if out[i] < 0:
                if left == 0:
                    partition = partition + 1 if partition + 1 < partitions else 0
                    left = run
                out[i] = partition
                left -= 1
    return partition, left


def sort_rows(const int32_t[::1] assigned, int64_t[::1] starts, int64_t[::1] order):
    """Counting sort, stable.  `starts` (partitions + 1 zeros) receives where each partition's rows
    begin in `order`.  Returns the first row whose partition is out of range, or -1."""
    cdef int64_t i, at, total = 0, rows = assigned.shape[0], count
    cdef int64_t partitions = starts.shape[0] - 1
    cdef int64_t broken = -1
    with nogil:
        for i in range(rows):
            if assigned[i] < 0 or assigned[i] >= partitions:
                broken = i
                break
            starts[assigned[i]] += 1
        if broken < 0:
            for i in range(partitions + 1):
                count = starts[i]
                starts[i] = total
                total += count
            for i in range(rows):
                at = starts[assigned[i]]
                order[at] = i
                starts[assigned[i]] = at + 1
            for i in range(partitions, 0, -1):
                starts[i] = starts[i - 1]
            starts[0] = 0
    return broken
