/* Key columns to key words: loops over one Arrow column each.
 *
 * `out[i * stride]` gets the word of row i.  `valid` is an Arrow bitmap, or NULL if no row is null;
 * bit `shift + i` is that of row i.  A null row gets `null_word`.
 */
#ifndef KD_KEYS_RUN_H
#define KD_KEYS_RUN_H

#include <stdint.h>
#include <string.h>

#include "utf8_run.h"

#include "table_run.h"

#define KD_CANONICAL_NAN 0x7FF8000000000000ULL

KD_INLINE int kd_bit(const uint8_t *bits, uint64_t i) { return bits[i >> 3] >> (i & 7) & 1; }

/* Spark's grouping: -0.0 is 0.0, and every NaN is one NaN. */
KD_INLINE uint64_t kd_float_word(double d) {
    uint64_t w;
    if (d != d)
        return KD_CANONICAL_NAN;
    d += 0.0;
    memcpy(&w, &d, 8);
    return w;
}

enum { KD_I8, KD_I16, KD_I32, KD_I64, KD_U8, KD_U16, KD_U32, KD_F32, KD_F64, KD_BOOL };

#define KD_WIDEN(TYPE, EXPRESSION)                                                                 \
    for (uint64_t i = 0; i < n; i++) {                                                             \
        TYPE v = ((const TYPE *)values)[i * step];                                                 \
        uint64_t w = (EXPRESSION);                                                                 \
        out[i * stride] = !valid || kd_bit(valid, shift + i) ? w : null_word;                      \
    }                                                                                              \
    break

/* `step` is the distance of two values, in values: 2 for the low halves of 128-bit decimals. */
static void kd_widen(int type, const void *values, uint64_t step, const uint8_t *valid,
                     uint64_t shift, uint64_t n, uint64_t null_word, uint64_t *out,
                     uint64_t stride) {
    switch (type) {
    case KD_I8: KD_WIDEN(int8_t, (uint64_t)(int64_t)v);
    case KD_I16: KD_WIDEN(int16_t, (uint64_t)(int64_t)v);
    case KD_I32: KD_WIDEN(int32_t, (uint64_t)(int64_t)v);
    case KD_I64: KD_WIDEN(int64_t, (uint64_t)v);
    case KD_U8: KD_WIDEN(uint8_t, v);
    case KD_U16: KD_WIDEN(uint16_t, v);
    case KD_U32: KD_WIDEN(uint32_t, v);
    case KD_F32: KD_WIDEN(float, kd_float_word(v));
    case KD_F64: KD_WIDEN(double, kd_float_word(v));
    case KD_BOOL: /* the values are bits; their first is bit `step` */
        for (uint64_t i = 0; i < n; i++)
            out[i * stride] = !valid || kd_bit(valid, shift + i)
                                  ? (uint64_t)kd_bit((const uint8_t *)values, step + i)
                                  : null_word;
        break;
    }
}

/* Bytes of fixed width to words padded with zeros. */
static void kd_copy_fixed(const uint8_t *values, uint64_t width, const uint8_t *valid,
                          uint64_t shift, uint64_t n, uint64_t *out, uint64_t stride) {
    uint64_t words = (width + 7) / 8;
    for (uint64_t i = 0; i < n; i++) {
        memset(out + i * stride, 0, words * 8);
        if (!valid || kd_bit(valid, shift + i))
            memcpy(out + i * stride, values + i * width, width);
    }
}

/* Sets bit `bit` of the null word of each null row. */
static void kd_mark_nulls(const uint8_t *valid, uint64_t shift, uint64_t n, uint64_t bit,
                          uint64_t *out, uint64_t stride) {
    for (uint64_t i = 0; i < n; i++)
        out[i * stride] |= (uint64_t)!kd_bit(valid, shift + i) << bit;
}

typedef struct {
    const uint8_t *bytes;
    const void *offsets; /* of the first row: int32 or int64 */
    int wide;
    const uint8_t *valid;
    uint64_t shift;
} kd_strings;

KD_INLINE uint64_t kd_string_at(const kd_strings *s, uint64_t i, const uint8_t **bytes) {
    int64_t from, to;
    if (s->valid && !kd_bit(s->valid, s->shift + i)) {
        *bytes = s->bytes;
        return 0;
    }
    if (s->wide) {
        from = ((const int64_t *)s->offsets)[i];
        to = ((const int64_t *)s->offsets)[i + 1];
    } else {
        from = ((const int32_t *)s->offsets)[i];
        to = ((const int32_t *)s->offsets)[i + 1];
    }
    *bytes = s->bytes + from;
    return (uint64_t)(to - from);
}

/* Where the key of each row begins, in words; the last is their sum.  A row whose key is longer
 * than `most` words ends it: its number is returned, n else. */
static uint64_t kd_string_offsets(const kd_strings *s, uint32_t columns, uint64_t fixed_words,
                                  uint64_t n, uint64_t most, uint32_t *offsets) {
    uint64_t at = 0;
    const uint8_t *unused;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t length = (fixed_words + columns / 2) * 8;
        for (uint32_t c = 0; c < columns; c++)
            length += kd_string_at(&s[c], i, &unused);
        offsets[i] = (uint32_t)at;
        at += kd_variable_words(length);
        if (kd_variable_words(length) > most || at > 0xFFFFFFFFULL)
            return i;
    }
    offsets[n] = (uint32_t)at;
    return n;
}

/* Length, fixed words (row-major in `fixed`), lengths of all strings but the last (u32 each, padded
 * to a word), their bytes, zeros. */
static void kd_string_keys(const kd_strings *s, uint32_t columns, const uint64_t *fixed,
                           uint64_t fixed_words, uint64_t n, const uint32_t *offsets,
                           uint64_t *out) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t *key = out + offsets[i];
        out[offsets[i + 1] - 1] = 0;
        for (uint64_t w = 0; w < fixed_words; w++)
            key[1 + w] = fixed[i * fixed_words + w];
        uint8_t *lengths = (uint8_t *)(key + 1 + fixed_words);
        uint8_t *to = lengths + (columns / 2) * 8;
        memset(lengths, 0, (columns / 2) * 8);
        for (uint32_t c = 0; c < columns; c++) {
            const uint8_t *bytes;
            uint64_t length = kd_string_at(&s[c], i, &bytes);
            if (c + 1 < columns) {
                uint32_t l = (uint32_t)length;
                memcpy(lengths + c * 4, &l, 4);
            }
            memcpy(to, bytes, length);
            to += length;
        }
        key[0] = (uint64_t)(to - (uint8_t *)(key + 1));
        memset(to, 0, (8 - key[0] % 8) % 8);
    }
}

/* The bytes of string `column` of the key at `key`, whose own words were checked to lie in memory;
 * -1 if its lengths do not add up. */
KD_INLINE int64_t kd_string_of(const uint64_t *key, uint32_t columns, uint64_t fixed_words,
                               uint32_t column, const uint8_t **bytes) {
    uint64_t head = (fixed_words + columns / 2) * 8, length = key[0], from = head;
    if (length < head)
        return -1;
    const uint8_t *lengths = (const uint8_t *)(key + 1 + fixed_words);
    for (uint32_t c = 0;; c++) {
        uint32_t l;
        uint64_t own = length - from;
        if (c + 1 < columns) {
            memcpy(&l, lengths + c * 4, 4);
            if (l > own)
                return -1;
            own = l;
        }
        if (c == column) {
            *bytes = (const uint8_t *)(key + 1) + from;
            return (int64_t)own;
        }
        from += own;
    }
}

KD_WIDE(kd_hash_dense, (const uint64_t *restrict words, uint32_t n, uint64_t *restrict out),
        (words, n, out), {
            for (uint32_t i = 0; i < n; i++)
                out[i] = kd_mix(words[i]);
        })

static void kd_hash_rows(const kd_keys *k, uint32_t key_words, uint32_t n, uint64_t *out) {
    if (key_words == 1 && !k->offsets) {
        const uint64_t stride = k->stride;
        if (stride == 1)
            kd_hash_dense(k->words, n, out);
        else
            for (uint32_t i = 0; i < n; i++)
                out[i] = kd_mix(k->words[i * stride]);
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t *key = kd_key_of(k, i);
        out[i] = kd_hash_words(key, key_words ? key_words : kd_variable_words(key[0]));
    }
}

/* The strings of a key add up. */
KD_INLINE int kd_key_is_whole(const uint64_t *key, uint32_t strings, uint32_t fixed_words) {
    const uint8_t *unused;
    for (uint32_t c = 0; c < strings; c++)
        if (kd_string_of(key, strings, fixed_words, c, &unused) < 0)
            return 0;
    return 1;
}

/* The strings c of a whole key with bit c in `texts` are UTF-8. */
KD_INLINE int kd_key_is_text(const uint64_t *key, uint32_t strings, uint32_t fixed_words,
                             uint32_t texts) {
    const uint8_t *bytes;
    for (uint32_t c = 0; texts >> c; c++)
        if (texts >> c & 1) {
            const int64_t length = kd_string_of(key, strings, fixed_words, c, &bytes);
            if (!kd_is_utf8(bytes, (uint64_t)length))
                return 0;
        }
    return 1;
}

#endif
