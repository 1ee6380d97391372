# cython: language_level=3, boundscheck=False, wraparound=False
"""Rows on their way to a leader: the pages that a helper sends in place of a partial state.

Owns: the form of chains (ChainShape), writing tuples into pages, and reading them from a page whose
sender is not trusted.  chains_run.h has the diagram of a tuple; layout.py that of a page.

Invariants: a page holds whole tuples; `take` gives every tuple once; a page is copied before it is
read, so that its sender cannot change what was checked; every length in it is checked against what
is left of the page, and its number of tuples against its header.
"""

import zlib

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from kdirect.errors import DeltaError, StateLimitError

from kdirect.state.arena cimport PageMemory
from kdirect.state.keys cimport KeyBlock, KeyShape
from kdirect.state.layout cimport (
    PAGE_AT_COUNT,
    PAGE_AT_KIND,
    PAGE_AT_ROWS,
    PAGE_AT_SENDER,
    PAGE_AT_SHAPE,
    PAGE_AT_USED,
    PAGE_AT_VERSION,
    PAGE_HEADER_BYTES,
    PAGE_TUPLES,
    PAGE_VERSION,
)
from kdirect.state.rows cimport RowBlock, RowShape

cdef extern from "keys_run.h" nogil:
    int kd_key_is_whole(const uint64_t* key, uint32_t strings, uint32_t fixed_words)
    int kd_key_is_text(const uint64_t* key, uint32_t strings, uint32_t fixed_words, uint32_t texts)

cdef enum:
    MOST_PAGE_BYTES = 1 << 24

LONGEST_ROW_BYTES = 32_000     # with the longest key it still fits into a page of 64 KiB


cdef class ChainShape:
    """What is kept: keys of `key_words` words (0: of variable length), rows of one or two sides,
    with their event time if `timed`, and the gap of a session in microseconds, or None.  With
    `interval` rows are intervals with the states of groups (sessions.pyx).  `check` is a CRC of
    what else both sides of a delta must agree on."""

    def __init__(self, uint32_t key_words, rows, bint timed=False, gap=None, bint interval=False,
                 uint32_t check=0):
        cdef RowShape side
        cdef uint32_t i
        self.key_words = key_words
        self.rows = tuple(rows)
        self.timed = timed or gap is not None or interval
        self.gap = gap
        self.interval = interval
        for i, side in enumerate(self.rows):
            self.c_rows[i] = &side.c
        text = repr((key_words, [(s.names, list(map(str, s.types))) for s in self.rows],
                     bool(self.timed), gap, bool(interval), check))
        self.check = zlib.crc32(text.encode())

    @property
    def sides(self):
        return len(self.rows)


cdef class ParsedPage:
    """The tuples of a page.  `sources` are the addresses of the words of their rows."""

    def has_keys_of(self, KeyShape shape):
        """Whether the strings of all keys add up, and are UTF-8 where they are text."""
        cdef const uint64_t* key
        cdef uint32_t i
        if not shape.strings:
            return True
        for i in range(self.count):
            key = self.keys.words + self.keys.offsets[i]
            if not kd_key_is_whole(key, shape.strings, shape.fixed_words) or \
                    not kd_key_is_text(key, shape.strings, shape.fixed_words, shape.texts):
                return False
        return True

    def buckets_of(self):
        """[(bucket, rows)]: the tuples of each bucket; rows are None if all are of one."""
        if not self.count:
            return []
        if (self.buckets == self.buckets[0]).all():
            return [(int(self.buckets[0]), None)]
        order = np.argsort(self.buckets, kind="stable").astype(np.uint32)
        buckets, begins = np.unique(self.buckets[order], return_index=True)
        return list(zip(map(int, buckets), np.split(order, begins[1:]), strict=True))


def parse_page(ChainShape shape, page, sender):
    """The tuples of a page (any buffer).  Raises DeltaError, which names `sender`, unless it is a
    page of this shape that holds what its header says."""
    cdef uint64_t used = memoryview(page).nbytes, most
    cdef const uint8_t* p
    cdef int64_t n
    cdef const uint64_t[::1] copy_view
    cdef uint8_t[::1] flags
    cdef int64_t[::1] buckets, times
    cdef uint32_t[::1] key_at
    cdef uint64_t[::1] hashes, words, sources
    if used < PAGE_HEADER_BYTES or used > MOST_PAGE_BYTES or used % 8:
        raise _forged(sender, f"it has {used} bytes")
    copied = np.frombuffer(page, np.uint64).copy()
    copy_view = copied
    p = <const uint8_t*>&copy_view[0]
    if p[PAGE_AT_KIND] != PAGE_TUPLES or p[PAGE_AT_VERSION] != PAGE_VERSION:
        raise _forged(sender, f"its kind is {p[PAGE_AT_KIND]}, version {p[PAGE_AT_VERSION]}")
    if (<const uint32_t*>(p + PAGE_AT_SHAPE))[0] != shape.check:
        raise _forged(sender, "its rows are of another plan")
    if (<const uint32_t*>(p + PAGE_AT_USED))[0] != used:
        raise _forged(sender, "its length is not the one in its header")
    count = (<const uint32_t*>(p + PAGE_AT_COUNT))[0]
    if count > (used - PAGE_HEADER_BYTES) // 16:
        raise _forged(sender, f"it cannot hold {count} rows")
    most = count
    room = max(1, count)
    b, k, h = np.empty(room, np.int64), np.empty(room, np.uint32), np.empty(room, np.uint64)
    w, t, f = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.uint8)
    s = np.empty(room, np.uint64)
    buckets, key_at, hashes, words, times, flags, sources = b, k, h, w, t, f, s
    with nogil:
        n = kd_tuples_parse(p, PAGE_HEADER_BYTES, used, most, shape.key_words, shape.timed,
                            <uint32_t>(2 if shape.c_rows[1] != NULL else 1), shape.c_rows,
                            &buckets[0], &key_at[0], &hashes[0], &words[0], &times[0], &flags[0],
                            <const uint8_t**>&sources[0])
    if n != <object>count or (<const uint64_t*>(p + PAGE_AT_ROWS))[0] != <uint64_t>n:
        raise _forged(sender, "a length in it leads outside of it, or its text is not UTF-8")
    return _parsed(shape, copied, count, (b, k, h, w, t, f, s))


cdef ParsedPage _parsed(ChainShape shape, copied, uint32_t count, arrays):
    cdef ParsedPage out = ParsedPage.__new__(ParsedPage)
    cdef const uint64_t[::1] words = copied
    cdef const uint32_t[::1] offsets
    cdef const uint64_t[::1] hashes
    b, k, h, w, t, f, s = (a[:count] for a in arrays)
    out.count = count
    out.buckets, out.words, out.times, out.flags, out.sources, out.hashes = b, w, t, f, s, h
    if shape.key_words and count:
        # Keys of a fixed length are looked up by their distance: put them one after the other.
        copied_keys = copied[(k[:, None] + np.arange(shape.key_words)).ravel()]
        words = copied_keys
        out.keys.words, out.keys.stride = &words[0], shape.key_words
        out._owners = (copied, copied_keys, k, h)
    elif count:
        offsets = k
        out.keys.words, out.keys.offsets = &words[0], &offsets[0]
        out._owners = (copied, k, h)
    if count:
        hashes = h
        out.keys.hash = &hashes[0]
    return out


def _forged(sender, reason):
    return DeltaError(f"a page of executor {sender} cannot be read: {reason}",
                      hint="all executors of a job must run the same plan and build of kdirect")


cdef class TuplePages:
    """Pages of tuples for one leader.  `take` ends the epoch: the pages are the caller's, who gives
    each back to `memory` when it has been sent."""

    def __init__(self, ChainShape shape, PageMemory memory, uint32_t sender=0):
        self.shape = shape
        self.memory = memory
        self.sender = sender
        self._full = []
        self._page = 0

    def add(self, KeyBlock keys, rows, RowBlock block, side, buckets, times=None, nulls=None):
        """Add the rows `rows` (uint32) of a block; `buckets` (int64), `times` and `nulls` are of
        these rows, in their order."""
        cdef const uint32_t[::1] chosen = rows
        cdef const int64_t[::1] bucket_view = buckets
        cdef const int64_t[::1] time_view
        cdef const uint8_t[::1] flag_view
        cdef const int64_t* time = NULL
        cdef uint64_t n = chosen.shape[0]
        if n != block.rows or keys.key_words != self.shape.key_words or \
                bucket_view.shape[0] != <object>n:
            raise ValueError("keys, buckets and rows do not go together")
        if not n:
            return
        flags = np.full(n, side, np.uint8)
        if nulls is not None:
            flags |= nulls.astype(np.uint8) << 1
        flag_view = flags
        if self.shape.timed:
            time_view = times
            if time_view.shape[0] != <object>n:
                raise ValueError("every row has one time")
            time = &time_view[0]
        self.c_add(&keys.c, &chosen[0], &bucket_view[0], time, &flag_view[0], block.words, n,
                   block.to)
        with nogil:
            block.c_encode()

    cdef int c_add(self, const kd_keys* keys, const uint32_t* rows, const int64_t* bucket,
                   const int64_t* time, const uint8_t* flags, const uint64_t* words, uint64_t n,
                   uint8_t** to) except -1:
        """Writes tuples; the words of their rows go to where `to` says then."""
        cdef uint64_t done = 0, more
        while done < n:
            if not self._page:
                self._page = self.memory.c_take()
                self._used = PAGE_HEADER_BYTES
                self._count = 0
            with nogil:
                more = kd_tuples_put(self.shape.timed, self.shape.key_words, keys, rows + done,
                                     bucket + done, time + done if time else NULL, flags + done,
                                     words + done, n - done, <uint8_t*>self._page, &self._used,
                                     self.memory.room, to + done)
            self._count += <uint32_t>more
            self.rows += more
            done += more
            if done < n:
                if not self._count:
                    raise StateLimitError(
                        f"a row of {words[done] * 8} bytes does not fit into a page of "
                        f"{self.memory.page_bytes} bytes",
                        hint="choose fewer or shorter columns for the result")
                self.c_close()
        return 0

    cdef int c_close(self) except -1:
        cdef uint8_t* p = <uint8_t*>self._page
        memset(p, 0, PAGE_HEADER_BYTES)
        p[PAGE_AT_KIND] = PAGE_TUPLES
        p[PAGE_AT_VERSION] = PAGE_VERSION
        (<uint16_t*>(p + PAGE_AT_SENDER))[0] = <uint16_t>self.sender
        (<uint32_t*>(p + PAGE_AT_COUNT))[0] = self._count
        (<uint32_t*>(p + PAGE_AT_USED))[0] = <uint32_t>self._used
        (<uint32_t*>(p + PAGE_AT_SHAPE))[0] = self.shape.check
        (<uint64_t*>(p + PAGE_AT_ROWS))[0] = self._count
        self._full.append((self._page, self._used))
        self._page = 0
        return 0

    def take(self):
        """[(address, bytes)] of the pages that were filled since the last call."""
        if self._page:
            self.c_close()
        full, self._full, self.rows = self._full, [], 0
        return full
