/* The loops that read fixed values: where the values of a batch lie, which of them are wanted, and
 * the columns of their fields.
 *
 * Records are taken in chunks that a first-level cache holds.  kd_fixed_scan notes where each value
 * of a chunk lies, kd_fixed_keep drops those that a test refuses, and kd_fixed_gather copies one
 * field of all that are left into its column.  So no value is copied whole, and each loop is short
 * enough to keep what it needs in registers.
 *
 * kd_fixed_scan keeps the law of records.pyx: nothing outside [p, end) is read, and every length is
 * read once and compared with what is left before it is used.  It takes the same kind of records as
 * records_run.h (short numbers, no headers, the offset delta that is due, KD_RUN_SLACK bytes that
 * follow) with a value of exactly `size` bytes; a key may be there or not.  Any other record ends
 * it, and the general code in fixed.pyx handles that one.
 */
#ifndef KD_FIXED_RUN_H
#define KD_FIXED_RUN_H

#include "records_run.h"
#include "wide.h"

#define KD_FIXED_CHUNK 128

typedef struct {
    int64_t rows;
    const uint8_t *values[KD_FIXED_CHUNK];
    int64_t offsets[KD_FIXED_CHUNK];
    int64_t stamps[KD_FIXED_CHUNK]; /* ms after the base timestamp of the batch */
    const uint8_t *keys[KD_FIXED_CHUNK];
    int64_t key_lengths[KD_FIXED_CHUNK]; /* -1: null */
} kd_chunk;

typedef struct {
    const uint8_t *p, *end;
    int64_t count;        /* records to take at most */
    int64_t offset_delta; /* due next */
    int64_t base_offset;
    uint32_t size; /* of each value */
} kd_fixed;

/* Notes n records that lie `stride` bytes apart, the first value at `value`; they have no keys. */
KD_WIDE(kd_fixed_note,
        (kd_chunk *chunk, int64_t first, int64_t n, const uint8_t *value, int64_t stride,
         int64_t offset, int64_t stamp),
        (chunk, first, n, value, stride, offset, stamp), {
            for (int64_t i = 0; i < n; i++) {
                chunk->values[first + i] = value + i * stride;
                chunk->offsets[first + i] = offset + i;
                chunk->stamps[first + i] = stamp;
                chunk->keys[first + i] = NULL;
                chunk->key_lengths[first + i] = -1;
            }
        })

#define KD_LIKE_GROUP 8 /* records that are compared before a branch */

/* Up to `most` records that follow `record`, which was taken and has no key, and that are like it:
 * all bytes before and after the value are the same but for the offset delta, which grows by one
 * from `delta`.  `head` bytes lie before the value and `stride` in the whole record; the delta lies
 * at `at`.  Nothing from `end` on is read, but for KD_RUN_SLACK bytes.  Returns how many.
 *
 * No byte of these records says where the next one lies: each of them is only compared with what is
 * due there, and so they are compared side by side. */
static int64_t kd_fixed_like(const uint8_t *record, const uint8_t *end, uint32_t head, uint32_t at,
                             int64_t stride, int64_t delta, int64_t most) {
    const uint32_t delta_bytes = delta < 1 << 6 ? 1 : delta < 1 << 13 ? 2 : 3;
    const int64_t limit = delta < 1 << 6 ? 1 << 6 : delta < 1 << 13 ? 1 << 13 : 1 << 20;
    if (head < 6 || head > 16 || at + delta_bytes > 8 || delta >= limit)
        return 0;
    const uint64_t cut = delta_bytes == 1 ? 0xFF : delta_bytes == 2 ? 0xFFFF : 0xFFFFFF;
    const uint64_t more = cut >> 8 & 0x8080; /* the delta's bytes but the last */
    const uint64_t first_mask = head < 8 ? (1ULL << 8 * head) - 1 : ~0ULL;
    const uint64_t second_mask = head <= 8 ? 0 : ~0ULL >> 8 * (16 - head);
    const uint64_t first = kd_get_le64(record) & first_mask & ~(cut << 8 * at);
    const uint64_t second = kd_get_le64(record + 8) & second_mask;
    const uint8_t *p = record + stride;
    int64_t n = 0;
    if (most > limit - delta)
        most = limit - delta;
    if (most > (end - p) / stride)
        most = (end - p) / stride;
    while (n < most) {
        const int64_t group = most - n < KD_LIKE_GROUP ? 1 : KD_LIKE_GROUP;
        uint64_t other = 0;
        for (int64_t i = 0; i < group; i++, p += stride) {
            const uint64_t z = (uint64_t)(delta + n + i) << 1;
            const uint64_t due = (z & 0x7f) | (z & 0x3f80) << 1 | (z & 0x1fc000) << 2 | more;
            kd_prefetch(p + 4096);
            kd_prefetch(p + 4096 + 64);
            other |= (kd_get_le64(p) & first_mask) ^ (first | due << 8 * at);
            other |= (kd_get_le64(p + 8) & second_mask) ^ second;
            other |= kd_get8(p + stride - 1); /* the number of headers */
        }
        if (other)
            break;
        n += group;
    }
    return n;
}

/* Adds records to `chunk` until it is full; moves run->p, count and offset_delta over them.
 *
 * Records of one size mostly have one length.  Where the next one begins is therefore predicted
 * from the last length, and the length that is read only confirms it: then the processor works on
 * several records at once, and need not wait for one length before it reads the next.  Records
 * without keys that were written together mostly differ in nothing else than their offset delta and
 * value: after one of them kd_fixed_like takes those that follow, as long as it finds any. */
static int64_t kd_fixed_scan(kd_fixed *run, kd_chunk *chunk) {
    const uint8_t *p = run->p, *end = run->end - KD_RUN_SLACK;
    const int64_t first = chunk->rows, due = run->offset_delta - first,
                  base_offset = run->base_offset + due;
    const uint32_t size = run->size;
    uint8_t coded[4] = {0};
    const uint32_t coded_bytes = (uint32_t)(kd_put_varint(coded, size) - coded);
    const uint32_t coded_mask = coded_bytes < 4 ? (1u << 8 * coded_bytes) - 1 : ~0u;
    const uint32_t coded_size = kd_get_le32(coded);
    uint32_t last_word = 1, last_bytes = 0, last_length = 0;
    int like = 1;
    int64_t i = first, last = first + run->count;
    if (last > KD_FIXED_CHUNK)
        last = KD_FIXED_CHUNK;
    while (i < last && p < end) {
        const uint8_t *q = p, *key = NULL;
        uint32_t length, delta, key_length;
        int64_t has_key = -1;
        kd_prefetch(p + 4096);
        kd_prefetch(p + 4096 + 64);
        if (__builtin_expect(kd_get_le16(p) == last_word, 1)) {
            length = last_length;
            q += last_bytes;
            __asm__ volatile(""); /* or the compiler selects a length instead of predicting it */
        } else {
            KD_RUN_LENGTH(length, q)
            last_bytes = (uint32_t)(q - p);
            last_length = length;
            /* Two bytes do not tell a length of three: 1, which is negative, is no length. */
            last_word = last_bytes <= 2 ? kd_get_le16(p) : 1;
        }
        const uint8_t *stop = q + length;
        if (stop > end)
            break;
        q++; /* attributes */
        uint32_t stamp = kd_get8(q++);
        if (stamp & 0x80) {
            uint32_t byte = kd_get8(q++);
            stamp = (stamp & 0x7f) | byte << 7;
            if (byte & 0x80) {
                byte = kd_get8(q++);
                if (byte & 0x80)
                    break;
                stamp = (stamp & 0x3fff) | byte << 14;
            }
        }
        const uint32_t delta_at = (uint32_t)(q - p);
        KD_RUN_LENGTH(delta, q)
        if (delta != (uint64_t)(due + i))
            break;
        if (kd_get8(q) == 1) /* -1 */
            q++;
        else {
            KD_RUN_LENGTH(key_length, q)
            key = q;
            if (key_length > stop - q)
                break;
            q += key_length;
            has_key = key_length;
        }
        if ((kd_get_le32(q) & coded_mask) != coded_size)
            break;
        q += coded_bytes;
        /* after the value comes one byte: the number of headers, 0 */
        if (size != stop - q - 1 || kd_get8(stop - 1) != 0)
            break;
        chunk->values[i] = q;
        chunk->offsets[i] = base_offset + i;
        chunk->stamps[i] = (int64_t)(stamp >> 1) ^ -(int64_t)(stamp & 1);
        chunk->keys[i] = key;
        chunk->key_lengths[i] = has_key;
        i++;
        if (like && has_key < 0) {
            const int64_t stride = stop - p;
            const int64_t taken = kd_fixed_like(p, end, (uint32_t)(q - p), delta_at, stride,
                                                (int64_t)delta + 1, last - i);
            kd_fixed_note(chunk, i, taken, q + stride, stride, base_offset + i,
                          chunk->stamps[i - 1]);
            stop += taken * stride;
            i += taken;
            like = taken > 0;
        }
        p = stop;
    }
    run->p = p;
    run->count -= i - first;
    run->offset_delta += i - first;
    chunk->rows = i;
    return i - first;
}

/* A test of one number: low <= number <= low + span, or the opposite with `negate`. */
typedef struct {
    uint32_t position;
    int32_t width; /* in bytes; negative: the number has a sign */
    int32_t negate;
    uint64_t low, span; /* the number with its sign extended to 64 bits */
} kd_test;

typedef int8_t kd_i8_any;
typedef int16_t __attribute__((aligned(1), may_alias)) kd_i16_any;
typedef int32_t __attribute__((aligned(1), may_alias)) kd_i32_any;
typedef int64_t __attribute__((aligned(1), may_alias)) kd_i64_any;
typedef struct {
    uint64_t low, high;
} __attribute__((packed, may_alias)) kd_i128_any;

/* One loop for each type that a number may have; LOOP(TYPE) is its body. */
#define KD_OF_WIDTH(width, LOOP)                                                                   \
    switch (width) {                                                                               \
    case -1:                                                                                       \
        LOOP(kd_i8_any)                                                                            \
        break;                                                                                     \
    case -2:                                                                                       \
        LOOP(kd_i16_any)                                                                           \
        break;                                                                                     \
    case -4:                                                                                       \
        LOOP(kd_i32_any)                                                                           \
        break;                                                                                     \
    case 1:                                                                                        \
        LOOP(uint8_t)                                                                              \
        break;                                                                                     \
    case 2:                                                                                        \
        LOOP(kd_u16_unaligned)                                                                     \
        break;                                                                                     \
    case 4:                                                                                        \
        LOOP(kd_u32_unaligned)                                                                     \
        break;                                                                                     \
    default:                                                                                       \
        LOOP(kd_i64_any)                                                                           \
        break;                                                                                     \
    }

/* Drops the rows of the chunk that the test refuses, and their `times`, which may be NULL. */
static void kd_fixed_keep(kd_chunk *chunk, const kd_test *test, int64_t *times) {
    const int64_t rows = chunk->rows;
    const uint64_t low = test->low, span = test->span, negate = test->negate;
    const uint32_t position = test->position;
    int64_t kept = 0;
    uint8_t order[KD_FIXED_CHUNK + 1];
#define KD_KEEP(TYPE)                                                                              \
    for (int64_t i = 0; i < rows; i++) {                                                           \
        uint64_t number = (uint64_t)(int64_t)(*(const TYPE *)(chunk->values[i] + position));       \
        order[kept] = (uint8_t)i;                                                                  \
        kept += (int64_t)(((number - low) <= span) ^ negate);                                      \
    }
    KD_OF_WIDTH(test->width, KD_KEEP)
#undef KD_KEEP
    if (kept == rows)
        return;
    for (int64_t i = 0; i < kept; i++) {
        const int64_t from = order[i];
        chunk->values[i] = chunk->values[from];
        chunk->offsets[i] = chunk->offsets[from];
        chunk->stamps[i] = chunk->stamps[from];
        chunk->keys[i] = chunk->keys[from];
        chunk->key_lengths[i] = chunk->key_lengths[from];
    }
    if (times)
        for (int64_t i = 0; i < kept; i++)
            times[i] = times[order[i]];
    chunk->rows = kept;
}

/* Drops the rows of the chunk whose numbers are not in [least, most]: their offsets or times. */
static void kd_fixed_between(kd_chunk *chunk, const int64_t *numbers, int64_t least, int64_t most) {
    int64_t kept = 0;
    for (int64_t i = 0; i < chunk->rows; i++) {
        const int64_t number = numbers[i];
        chunk->values[kept] = chunk->values[i];
        chunk->offsets[kept] = chunk->offsets[i];
        chunk->stamps[kept] = chunk->stamps[i];
        chunk->keys[kept] = chunk->keys[i];
        chunk->key_lengths[kept] = chunk->key_lengths[i];
        kept += number >= least && number <= most;
    }
    chunk->rows = kept;
}

/* Appends `width` bytes at `position` of each value of the chunk to a column whose next row is at
 * `out`. */
static void kd_fixed_gather(const kd_chunk *chunk, uint32_t position, uint32_t width,
                            uint8_t *out) {
    const int64_t rows = chunk->rows;
    const uint8_t *const *values = chunk->values;
#define KD_GATHER(TYPE)                                                                            \
    for (int64_t i = 0; i < rows; i++)                                                             \
        ((TYPE *)out)[i] = *(const TYPE *)(values[i] + position);
    switch (width) {
    case 1:
        KD_GATHER(uint8_t)
        return;
    case 2:
        KD_GATHER(kd_u16_unaligned)
        return;
    case 4:
        KD_GATHER(kd_u32_unaligned)
        return;
    case 8:
        KD_GATHER(kd_i64_any)
        return;
    case 16:
        KD_GATHER(kd_i128_any)
        return;
    }
#undef KD_GATHER
    for (int64_t i = 0; i < rows; i++, out += width)
        memcpy(out, values[i] + position, width);
}

/* Event times: a number of each value, or the timestamps of the records, as microseconds. */
typedef struct {
    uint32_t position;
    int32_t width; /* as that of a test; 0: the timestamps of the records, in ms */
    int64_t scale; /* microseconds of one unit; 0: the unit is a nanosecond */
    int64_t base;  /* added to each number: the base timestamp of the batch */
    int64_t least, greatest; /* of the rows that kd_fixed_bounds was shown */
} kd_time;

/* Numbers times `scale`, clamped to what 64 bits hold. */
KD_WIDE(kd_fixed_scale, (int64_t *numbers, int64_t rows, int64_t scale), (numbers, rows, scale), {
    const int64_t most = INT64_MAX / scale;
    for (int64_t i = 0; i < rows; i++) {
        int64_t units = numbers[i];
        units = units > most ? most : units < -most ? -most : units;
        numbers[i] = units * scale;
    }
})

/* Writes the times of the chunk's rows to `out`.  Those that 64 bits cannot hold are clamped. */
static void kd_fixed_times(const kd_chunk *chunk, const kd_time *time, int64_t *out) {
    const int64_t rows = chunk->rows, scale = time->scale;
    const uint32_t position = time->position;
#define KD_TIMES(TYPE)                                                                             \
    for (int64_t i = 0; i < rows; i++)                                                             \
        out[i] = (int64_t)*(const TYPE *)(chunk->values[i] + position);
    if (time->width == 0)
        for (int64_t i = 0; i < rows; i++) {
            const int64_t delta = chunk->stamps[i];
            if (__builtin_add_overflow(time->base, delta, &out[i]))
                out[i] = delta < 0 ? INT64_MIN : INT64_MAX;
        }
    else
        KD_OF_WIDTH(time->width, KD_TIMES)
#undef KD_TIMES
    if (time->width == 8) /* without a sign: what reads as negative is too great */
        for (int64_t i = 0; i < rows; i++)
            out[i] = out[i] < 0 ? INT64_MAX : out[i];
    if (scale == 0)
        for (int64_t i = 0; i < rows; i++)
            out[i] = out[i] / 1000 - (out[i] % 1000 < 0);
    else if (scale > 1)
        kd_fixed_scale(out, rows, scale);
}

/* Widens least and greatest by these times. */
KD_WIDE(kd_fixed_bounds, (kd_time *time, const int64_t *times, int64_t rows), (time, times, rows), {
    int64_t least = time->least;
    int64_t greatest = time->greatest;
    for (int64_t i = 0; i < rows; i++) {
        least = times[i] < least ? times[i] : least;
        greatest = times[i] > greatest ? times[i] : greatest;
    }
    time->least = least;
    time->greatest = greatest;
})

/* Cuts each of `rows` texts of `width` bytes at its first zero byte and moves them together; their
 * ends go to `ends` (rows + 1 of them). */
static void kd_fixed_texts(uint8_t *data, uint32_t width, int64_t rows, int32_t *ends) {
    int64_t used = 0;
    ends[0] = 0;
    for (int64_t i = 0; i < rows; i++) {
        const uint8_t *text = data + i * width;
        const uint8_t *zero = memchr(text, 0, width);
        const int64_t n = zero ? zero - text : width;
        memmove(data + used, text, n);
        used += n;
        ends[i + 1] = (int32_t)used;
    }
}

#endif
