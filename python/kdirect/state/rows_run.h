/* Rows of several columns as bytes, and back: loops over one column each.
 *
 * A row is a whole number of words:
 *
 *     null bits (bit c of the first bytes: column c is null)
 *     each column of fixed width, and for each string its length (u32), one after the other
 *     the bytes of the strings, in the order of their columns
 *     zeros up to a whole word
 *
 * A null has zeros, and no bytes.  How long a row is follows from its lengths, so a row that came
 * from elsewhere is checked (kd_row_fits) before anything else reads it.
 */
#ifndef KD_ROWS_RUN_H
#define KD_ROWS_RUN_H

#include <stdint.h>
#include <string.h>

#include "utf8_run.h"

enum { KD_ROW_BOOL, KD_ROW_FIXED, KD_ROW_STRING };

typedef struct {
    int kind;
    uint32_t width; /* bytes within the fixed part */
    uint32_t at;    /* where they lie in it */
    uint32_t utf8;  /* whether a string must be UTF-8 */
} kd_row_column;

typedef struct {
    uint32_t columns, strings;
    uint32_t null_bytes;
    uint32_t fixed_bytes; /* null bits, fixed columns and lengths */
    kd_row_column *column;
} kd_row_shape;

/* One Arrow array.  `shift` is its offset, in rows. */
typedef struct {
    const uint8_t *valid;
    const uint8_t *values;
    const int32_t *offsets; /* of strings */
    uint64_t shift;
} kd_row_source;

static inline int kd_row_bit(const uint8_t *bits, uint64_t i) {
    return bits[i >> 3] >> (i & 7) & 1;
}

static inline uint32_t kd_row_u32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline int kd_row_null(const uint8_t *row, uint32_t c) { return kd_row_bit(row, c); }

/* Words of each chosen row; the longest one is returned. */
static uint64_t kd_row_words(const kd_row_shape *s, const kd_row_source *from, const uint32_t *rows,
                             uint64_t n, uint64_t *words) {
    uint64_t longest = 0;
    for (uint64_t i = 0; i < n; i++)
        words[i] = s->fixed_bytes;
    for (uint32_t c = 0; c < s->columns; c++) {
        const kd_row_source *f = &from[c];
        if (s->column[c].kind != KD_ROW_STRING)
            continue;
        for (uint64_t i = 0; i < n; i++) {
            uint64_t r = f->shift + rows[i];
            if (!f->valid || kd_row_bit(f->valid, r))
                words[i] += (uint64_t)(f->offsets[r + 1] - f->offsets[r]);
        }
    }
    for (uint64_t i = 0; i < n; i++) {
        words[i] = (words[i] + 7) >> 3;
        if (words[i] > longest)
            longest = words[i];
    }
    return longest;
}

#define KD_ROW_COPY(W)                                                                             \
    for (uint64_t i = 0; i < n; i++) {                                                             \
        uint64_t r = f->shift + rows[i];                                                           \
        if (!f->valid || kd_row_bit(f->valid, r))                                                  \
            memcpy(to[i] + k.at, f->values + r * (W), (W));                                        \
        else                                                                                       \
            to[i][c >> 3] |= (uint8_t)(1 << (c & 7));                                              \
    }                                                                                              \
    break

static void kd_row_put_fixed(const kd_row_column k, uint32_t c, const kd_row_source *f,
                             const uint32_t *rows, uint64_t n, uint8_t **to) {
    switch (k.width) {
    case 1: KD_ROW_COPY(1);
    case 2: KD_ROW_COPY(2);
    case 4: KD_ROW_COPY(4);
    case 8: KD_ROW_COPY(8);
    case 16: KD_ROW_COPY(16);
    default: KD_ROW_COPY((uint64_t)k.width);
    }
}

/* Writes the chosen rows to where `to` says; `words` are theirs.  `cursor` is scratch memory. */
static void kd_row_encode(const kd_row_shape *s, const kd_row_source *from, const uint32_t *rows,
                          uint64_t n, const uint64_t *words, uint8_t **to, uint32_t *cursor) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t bytes = words[i] * 8;
        memset(to[i], 0, s->fixed_bytes < bytes ? s->fixed_bytes : bytes);
        if (bytes)
            memset(to[i] + bytes - 8, 0, 8);
        cursor[i] = s->fixed_bytes;
    }
    for (uint32_t c = 0; c < s->columns; c++) {
        const kd_row_column k = s->column[c];
        const kd_row_source *f = &from[c];
        if (k.kind == KD_ROW_FIXED) {
            kd_row_put_fixed(k, c, f, rows, n, to);
            continue;
        }
        for (uint64_t i = 0; i < n; i++) {
            uint64_t r = f->shift + rows[i];
            if (f->valid && !kd_row_bit(f->valid, r)) {
                to[i][c >> 3] |= (uint8_t)(1 << (c & 7));
            } else if (k.kind == KD_ROW_BOOL) {
                to[i][k.at] = (uint8_t)kd_row_bit(f->values, r);
            } else {
                uint32_t length = (uint32_t)(f->offsets[r + 1] - f->offsets[r]);
                memcpy(to[i] + k.at, &length, 4);
                memcpy(to[i] + cursor[i], f->values + f->offsets[r], length);
                cursor[i] += length;
            }
        }
    }
}

/* Words of the row at `row`, if it lies within `most` words, its lengths say so, and its text is
 * UTF-8; else -1. */
static int64_t kd_row_fits(const kd_row_shape *s, const uint8_t *row, uint64_t most) {
    uint64_t bytes = s->fixed_bytes;
    if (bytes > most * 8)
        return -1;
    for (uint32_t c = 0; c < s->columns && s->strings; c++)
        if (s->column[c].kind == KD_ROW_STRING)
            bytes += kd_row_u32(row + s->column[c].at);
    if (bytes > most * 8)
        return -1;
    const uint8_t *string = row + s->fixed_bytes;
    for (uint32_t c = 0; c < s->columns && s->strings; c++) {
        const kd_row_column *k = &s->column[c];
        if (k->kind != KD_ROW_STRING)
            continue;
        const uint32_t length = kd_row_u32(row + k->at);
        if (k->utf8 && !kd_is_utf8(string, length))
            return -1;
        string += length;
    }
    return (int64_t)((bytes + 7) >> 3);
}

/* Column c of the rows at `row` (NULL: a row of nulls).  `valid` gets a byte a row.  Fixed columns
 * and booleans (a byte each) go to `values`. */
static void kd_row_take_fixed(const kd_row_shape *s, uint32_t c, const uint8_t *const *row,
                              uint64_t n, uint8_t *valid, uint8_t *values) {
    const kd_row_column k = s->column[c];
    for (uint64_t i = 0; i < n; i++) {
        if (i + 8 < n && row[i + 8])
            __builtin_prefetch(row[i + 8] + k.at);
        valid[i] = row[i] && !kd_row_null(row[i], c);
        if (!valid[i])
            memset(values + i * k.width, 0, k.width);
        else if (k.width == 8)
            memcpy(values + i * 8, row[i] + k.at, 8);
        else
            memcpy(values + i * k.width, row[i] + k.at, k.width);
    }
}

/* Where string column c begins in each row: its bytes, and in `offsets` the sums of lengths.  The
 * last sum is returned. */
static uint64_t kd_row_find_strings(const kd_row_shape *s, uint32_t c, const uint8_t *const *row,
                                    uint64_t n, uint8_t *valid, const uint8_t **bytes,
                                    int32_t *offsets) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        offsets[i] = (int32_t)sum;
        valid[i] = row[i] && !kd_row_null(row[i], c);
        if (!valid[i]) {
            bytes[i] = NULL;
            continue;
        }
        uint64_t begin = s->fixed_bytes;
        for (uint32_t b = 0; b < c; b++)
            if (s->column[b].kind == KD_ROW_STRING)
                begin += kd_row_u32(row[i] + s->column[b].at);
        bytes[i] = row[i] + begin;
        sum += kd_row_u32(row[i] + s->column[c].at);
        if (sum > INT32_MAX)
            return sum;
    }
    offsets[n] = (int32_t)sum;
    return sum;
}

static void kd_row_copy_strings(const uint8_t *const *bytes, const int32_t *offsets, uint64_t n,
                                uint8_t *out) {
    for (uint64_t i = 0; i < n; i++)
        if (bytes[i])
            memcpy(out + offsets[i], bytes[i], (size_t)(offsets[i + 1] - offsets[i]));
}

#endif
