# cython: language_level=3, boundscheck=False, wraparound=False
"""What Python calls of the accumulators' kernels: results that numpy cannot compute, and the order
of floats.  The kernels that update and merge are called by the engine."""

from enum import IntEnum

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

cdef extern from "accumulate_run.h" nogil:
    enum:
        KD_COUNT, KD_COUNT_VALID, KD_SUM_I64, KD_SUM_F64, KD_SUM_I128, KD_MIN_I64, KD_MAX_I64
        KD_MIN_I128, KD_MAX_I128, KD_AVG_I64, KD_AVG_F64, KD_AVG_I128, KD_MOMENTS, KD_FIRST
        KD_LAST, KD_FIRST_I128, KD_LAST_I128, KD_DISTINCT, KD_STAMP
    void kd_order_doubles(const double* values, uint64_t n, int64_t* out)
    double kd_estimate_distinct(const uint8_t* registers, uint32_t precision)

cdef extern from *:
    """
    /* (low, high) of sum * 10^shift / count, rounded half away from zero; KD_LOST if it overflows
     * or the sum has. */
    static void kd_average_decimal(const uint64_t *state, uint64_t scale, uint64_t *out) {
        __int128 sum, count = (__int128)state[2], quotient, rest, x;
        memcpy(&sum, state, 16);
        quotient = sum / count;
        rest = (sum % count) * (__int128)scale * 2;
        rest = (rest + (rest < 0 ? -count : count)) / (count * 2);
        int lost = sum == KD_LOST || __builtin_mul_overflow(quotient, (__int128)scale, &x) ||
                   __builtin_add_overflow(x, rest, &x);
        kd_store128(out, lost ? KD_LOST : x);
    }
    """
    void kd_average_decimal(const uint64_t* state, uint64_t scale, uint64_t* out) nogil


class Kernel(IntEnum):
    """The kinds of accumulators, as accumulate_run.h numbers them."""

    COUNT = KD_COUNT
    COUNT_VALID = KD_COUNT_VALID
    SUM_I64 = KD_SUM_I64
    SUM_F64 = KD_SUM_F64
    SUM_I128 = KD_SUM_I128
    MIN_I64 = KD_MIN_I64
    MAX_I64 = KD_MAX_I64
    MIN_I128 = KD_MIN_I128
    MAX_I128 = KD_MAX_I128
    AVG_I64 = KD_AVG_I64
    AVG_F64 = KD_AVG_F64
    AVG_I128 = KD_AVG_I128
    MOMENTS = KD_MOMENTS
    FIRST = KD_FIRST
    LAST = KD_LAST
    FIRST_I128 = KD_FIRST_I128
    LAST_I128 = KD_LAST_I128
    DISTINCT = KD_DISTINCT
    STAMP = KD_STAMP


def order_doubles(const double[::1] values):
    """Integers of the same order: -0.0 before 0.0, one NaN after everything."""
    cdef int64_t[::1] view
    out = np.empty(values.shape[0], np.int64)
    if values.shape[0]:
        view = out
        with nogil:
            kd_order_doubles(&values[0], values.shape[0], &view[0])
    return out


def estimate_distinct(uintptr_t base, const uint64_t[::1] positions, uint32_t word,
                      uint32_t precision):
    """The estimates of the registers at `word` of each state, rounded to int64."""
    cdef uint64_t i, n = positions.shape[0]
    cdef int64_t[::1] view
    out = np.empty(n, np.int64)
    if n:
        view = out
        with nogil:
            for i in range(n):
                view[i] = <int64_t>(kd_estimate_distinct(
                    <const uint8_t*>(base + positions[i] + word * 8), precision) + 0.5)
    return out


def average_decimals(uintptr_t base, const uint64_t[::1] positions, uint32_t word, int shift):
    """((low, high) of each average with `shift` more digits, which ones are null), from states
    (sum, count) at `word`.  An average that 128 bits cannot hold is -2**127."""
    cdef uint64_t i, n = positions.shape[0]
    cdef uint64_t scale = int("1" + "0" * shift)
    cdef const uint64_t* state
    cdef uint64_t[:, ::1] view
    cdef uint8_t[::1] null_view
    out = np.zeros((n, 2), np.uint64)
    null = np.zeros(n, np.uint8)
    if n:
        view, null_view = out, null
        with nogil:
            for i in range(n):
                state = <const uint64_t*>(base + positions[i] + word * 8)
                if state[2] == 0:
                    null_view[i] = 1
                else:
                    kd_average_decimal(state, scale, &view[i, 0])
    return out, null.astype(bool)
