/* The loop that reads most records: short numbers, no headers, and columns that need no conversion.
 *
 * It keeps the law of records.pyx: nothing outside [p, end) is read, and every length is read once
 * and compared with what is left before it is used.  A record that is not of this kind, or that is
 * broken, ends the run; the general code in records.pyx then handles it.  The loop is in C because
 * register allocation decides its speed: the numbers of a record must not go through the stack, and
 * values are copied with the widest registers that pay, chosen once at load.
 *
 *   int64_t kd_run_records(kd_run *run)    values are copied
 *   int64_t kd_run_views(kd_run *run)      16 bytes for each value are written; see views.h
 *
 * Returns the number of records appended, and moves run->p, value_used, key_used and offset_delta
 * on.  For views [p, end) lies in one data buffer, less than 2^31 bytes after its beginning, so
 * each value that the loop accepts does.
 *
 * A record is taken when
 *   - its numbers have at most three bytes (so lengths and the offset delta are below 2^20),
 *   - its offset delta is the one that is due,
 *   - its key is null exactly when run->key_data is NULL,
 *   - it has no headers, and
 *   - at least KD_RUN_SLACK bytes follow it: room for reading a number or a short value without a
 *     check, and for copies that write past their end.
 */
#ifndef KD_RECORDS_RUN_H
#define KD_RECORDS_RUN_H

#include "copies.h"
#include "views.h"
#include "wire.h"

#define KD_RUN_SLACK 64
#define KD_RUN_SHORT 256

typedef struct {
    const uint8_t *p, *end;
    int64_t count;        /* records to take at most */
    int64_t offset_delta; /* due next */
    int64_t base_offset;
    int64_t base_us;
    uint8_t *value_data; /* of views: that of the next row */
    int64_t value_used;
    int32_t *value_offsets; /* of the next row's end */
    int64_t *offsets;       /* of the next row */
    int64_t *timestamps;    /* of the next row */
    uint8_t *key_data;      /* NULL: keys are null */
    int64_t key_used;
    int32_t *key_offsets; /* of the next row's end */
    /* for views: the data buffer, its number, and whether a view of the column refers to one */
    const uint8_t *base;
    int32_t buffer;
    uint32_t value_refers, key_refers;
} kd_run;

/* Reads a number that is not negative, of up to three bytes, at p.  A longer or negative number
 * leaves the loop that this macro stands in. */
#define KD_RUN_LENGTH(n, p)                                                                        \
    {                                                                                              \
        uint32_t word_ = kd_get_le16(p);                                                           \
        if (word_ & 1)                                                                             \
            break;                                                                                 \
        if (word_ & 0x80) {                                                                        \
            n = (word_ & 0x7f) >> 1 | (word_ >> 2 & 0x1fc0);                                       \
            p += 2;                                                                                \
            if (__builtin_expect(word_ & 0x8000, 0)) {                                             \
                uint32_t byte_ = kd_get8(p++);                                                     \
                if (byte_ & 0x80)                                                                  \
                    break;                                                                         \
                n |= byte_ << 13;                                                                  \
            }                                                                                      \
        } else {                                                                                   \
            n = (word_ & 0x7f) >> 1;                                                               \
            p += 1;                                                                                \
        }                                                                                          \
    }

/* Row i of the column `NAME`, from the n bytes at `from`: copied, or as a view. */
#define KD_RUN_COPIED(COPY, NAME, from, n)                                                         \
    COPY(NAME##_data + NAME##_used, from, n);                                                      \
    NAME##_used += n;                                                                              \
    run->NAME##_offsets[i] = (int32_t)NAME##_used;

#define KD_RUN_VIEWED(COPY, NAME, from, n)                                                         \
    COPY(NAME##_data + i * KD_VIEW_BYTES, from, n, buffer, (int32_t)((from)-base));                \
    NAME##_used += n;                                                                              \
    NAME##_refers |= n > KD_VIEW_INLINE;

#define KD_RUN_BODY(KEYED, PUT, COPY, AHEAD)                                                       \
    const uint8_t *p = run->p, *end = run->end - KD_RUN_SLACK;                                     \
    uint8_t *value_data = run->value_data, *key_data = run->key_data;                              \
    int64_t value_used = run->value_used, key_used = run->key_used, i = 0, count = run->count,     \
            due = run->offset_delta;                                                               \
    const int64_t base_offset = run->base_offset + due, base_us = run->base_us;                    \
    while (i < count && p < end) {                                                                 \
        const uint8_t *q = p, *key = NULL;                                                         \
        uint32_t length, delta, key_length = 0, value_length;                                      \
        if (AHEAD) {                                                                               \
            kd_prefetch(p + 16384);                                                                \
            kd_prefetch(p + 16384 + 64);                                                           \
        }                                                                                          \
        KD_RUN_LENGTH(length, q)                                                                   \
        const uint8_t *stop = q + length;                                                          \
        if (stop > end)                                                                            \
            break;                                                                                 \
        q++; /* attributes */                                                                      \
        uint32_t stamp = kd_get8(q++);                                                             \
        if (stamp & 0x80) {                                                                        \
            uint32_t byte = kd_get8(q++);                                                          \
            stamp = (stamp & 0x7f) | byte << 7;                                                    \
            if (byte & 0x80) {                                                                     \
                byte = kd_get8(q++);                                                               \
                if (byte & 0x80)                                                                   \
                    break;                                                                         \
                stamp = (stamp & 0x3fff) | byte << 14;                                             \
            }                                                                                      \
        }                                                                                          \
        KD_RUN_LENGTH(delta, q)                                                                    \
        if (delta != (uint64_t)(due + i))                                                          \
            break;                                                                                 \
        if (KEYED) {                                                                               \
            KD_RUN_LENGTH(key_length, q)                                                           \
            key = q;                                                                               \
            if (key_length > stop - q)                                                             \
                break;                                                                             \
            q += key_length;                                                                       \
        } else if (kd_get8(q++) != 1) /* -1 */                                                     \
            break;                                                                                 \
        KD_RUN_LENGTH(value_length, q)                                                             \
        /* after the value comes one byte: the number of headers, 0 */                             \
        if (value_length != stop - q - 1 || kd_get8(stop - 1) != 0)                                \
            break;                                                                                 \
        if (KEYED) {                                                                               \
            PUT(COPY, key, key, key_length)                                                        \
        }                                                                                          \
        if (!AHEAD && value_length < KD_RUN_SHORT) {                                               \
            kd_prefetch(p + 16384);                                                                \
            kd_prefetch(p + 16384 + 64);                                                           \
        }                                                                                          \
        PUT(COPY, value, q, value_length)                                                          \
        run->offsets[i] = base_offset + i;                                                         \
        run->timestamps[i] = base_us + ((int64_t)(stamp >> 1) ^ -(int64_t)(stamp & 1)) * 1000;     \
        p = stop;                                                                                  \
        i++;                                                                                       \
    }                                                                                              \
    run->p = p;                                                                                    \
    run->value_used = value_used;                                                                  \
    run->key_used = key_used;                                                                      \
    run->offset_delta = due + i;

#define KD_RUN_VIEWS(NAME, KEYED)                                                                  \
    static int64_t NAME(kd_run *run) {                                                             \
        const uint8_t *base = run->base;                                                           \
        const int32_t buffer = run->buffer;                                                        \
        uint32_t value_refers = run->value_refers, key_refers = run->key_refers;                   \
        KD_RUN_BODY(KEYED, KD_RUN_VIEWED, kd_put_view_fast, 0)                                     \
        run->value_refers = value_refers;                                                          \
        run->key_refers = key_refers;                                                              \
        return i;                                                                                  \
    }

KD_RUN_VIEWS(kd_run_keyed_views, 1)
KD_RUN_VIEWS(kd_run_plain_views, 0)

/* Not within its caller, where it would take registers from the general code. */
static __attribute__((noinline)) int64_t kd_run_views(kd_run *run) {
    return run->key_data ? kd_run_keyed_views(run) : kd_run_plain_views(run);
}

#define KD_RUN(NAME, TARGET)                                                                       \
    TARGET static int64_t kd_run_keyed_##NAME(kd_run *run) {                                       \
        KD_RUN_BODY(1, KD_RUN_COPIED, kd_copy_##NAME, 1)                                           \
        return i;                                                                                  \
    }                                                                                              \
    TARGET static int64_t kd_run_plain_##NAME(kd_run *run) {                                       \
        KD_RUN_BODY(0, KD_RUN_COPIED, kd_copy_##NAME, 1)                                           \
        return i;                                                                                  \
    }                                                                                              \
    TARGET static int64_t kd_run_##NAME(kd_run *run) {                                             \
        return run->key_data ? kd_run_keyed_##NAME(run) : kd_run_plain_##NAME(run);                \
    }

KD_RUN(any, )
static int64_t (*kd_run_records)(kd_run *) = kd_run_any;

#if defined(KD_AVX2)
KD_RUN(avx2, KD_AVX2)

/* Runs when the module is loaded. */
__attribute__((constructor)) static void kd_run_choose(void) {
    if (kd_has_avx2())
        kd_run_records = kd_run_avx2;
}
#endif

#endif
