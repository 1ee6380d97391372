# cython: language_level=3, boundscheck=False, wraparound=False
"""Rows of a table as columns of bytes: for snapshots, which are sorted by virtual partition."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kdirect.state.table_kernel cimport kd_hash_words, kd_variable_words


def vparts(uintptr_t base, const uint64_t[::1] positions, uint64_t key_at, uint64_t key_words):
    """The virtual partition of each key; keys lie `key_at` words after `positions`."""
    cdef uint64_t i, n = positions.shape[0], words = key_words
    cdef const uint64_t* key
    cdef uint8_t[::1] view
    out = np.empty(n, np.uint8)
    if n:
        view = out
        with nogil:
            for i in range(n):
                key = <const uint64_t*>(base + positions[i]) + key_at
                if not key_words:
                    words = kd_variable_words(key[0])
                view[i] = kd_hash_words(key, words) >> 56
    return out


def words_at(uintptr_t base, const uint64_t[::1] positions, uint64_t at, uint64_t words):
    """`words` words of each state, from word `at` on, one after the other."""
    cdef uint64_t i, n = positions.shape[0]
    cdef uint64_t[::1] view
    out = np.empty(n * words, np.uint64)
    if n and words:
        view = out
        with nogil:
            for i in range(n):
                memcpy(&view[i * words], <const uint64_t*>(base + positions[i]) + at, words * 8)
    return out


def variable_keys(uintptr_t base, const uint64_t[::1] positions, uint64_t at):
    """(words of all keys, where each begins in bytes and the last ends: int64)."""
    cdef uint64_t i, n = positions.shape[0], words
    cdef const uint64_t* key
    cdef int64_t[::1] ends
    cdef uint64_t[::1] view
    offsets = np.zeros(n + 1, np.int64)
    ends = offsets
    with nogil:
        for i in range(n):
            key = <const uint64_t*>(base + positions[i]) + at
            ends[i + 1] = ends[i] + kd_variable_words(key[0]) * 8
    out = np.empty(max(1, ends[n] // 8), np.uint64)
    view = out
    with nogil:
        for i in range(n):
            key = <const uint64_t*>(base + positions[i]) + at
            memcpy(&view[ends[i] // 8], key, ends[i + 1] - ends[i])
    return out, offsets
