/* The loop that writes most records: 32-bit Arrow offsets, no nulls, no headers, and one timestamp
 * for all.
 *
 *   int64_t kd_encode_records(kd_encode *run)
 *
 * Returns the number of records written, and moves run->p and run->count on.
 *
 * A record is written when it ends at or before `limit` and its numbers have at most three bytes
 * (lengths and offset delta below 2^20).  Any other record ends the run, and the general code in
 * encode.pyx handles it.  `limit` leaves KD_ENCODE_SLACK bytes of memory after it.  Rows that are
 * followed by fewer than 32 bytes of the Arrow buffer are not for this loop either (value_safe,
 * key_safe).
 */
#ifndef KD_ENCODE_RUN_H
#define KD_ENCODE_RUN_H

#include "copies.h"
#include "wire.h"

#define KD_ENCODE_SLACK 64
#define KD_ENCODE_MAX ((1 << 20) - 64)

typedef struct {
    uint8_t *p;
    const uint8_t *limit; /* no record may end after it */
    int64_t rows;         /* to write at most */
    int64_t count;        /* offset delta of the next record */
    int64_t max_body;     /* no record may be longer; at most KD_ENCODE_MAX */
    int64_t delta;        /* timestamp delta of all of them, as a zigzag number below 128 */
    const uint8_t *value_data;
    const int32_t *value_offsets; /* of the next row */
    int64_t value_safe;      /* a value that ends at or before it may be read 31 bytes too far */
    const uint8_t *key_data; /* NULL: null keys */
    const int32_t *key_offsets;
    int64_t key_safe;
} kd_encode;

static inline uint32_t kd_length_bytes(uint32_t n) { return n < 64 ? 1 : n < 8192 ? 2 : 3; }

static inline uint8_t *kd_put_length(uint8_t *p, uint32_t n) {
    if (n < 64) {
        p[0] = (uint8_t)(n << 1);
        return p + 1;
    }
    if (__builtin_expect(n < 8192, 1)) {
        uint16_t v = (uint16_t)((n << 1 & 0x7f) | 0x80 | (n >> 6) << 8);
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
        v = __builtin_bswap16(v);
#endif
        memcpy(p, &v, 2);
        return p + 2;
    }
    p[0] = (uint8_t)(n << 1 | 0x80);
    p[1] = (uint8_t)(n >> 6 | 0x80);
    p[2] = (uint8_t)(n >> 13);
    return p + 3;
}

#define KD_ENCODE_BODY(KEYED, COPY)                                                                \
    uint8_t *p = run->p;                                                                           \
    const uint8_t *limit = run->limit;                                                             \
    const int64_t rows = run->rows, first = run->count;                                            \
    int64_t i = 0;                                                                                 \
    int32_t begin = run->value_offsets[0], key_begin = KEYED ? run->key_offsets[0] : 0;            \
    while (i < rows && first + i < KD_ENCODE_MAX) {                                                \
        int32_t end = run->value_offsets[i + 1], key_end = 0;                                      \
        uint32_t length = (uint32_t)(end - begin), key_length = 0, count = (uint32_t)(first + i);  \
        if (length > KD_ENCODE_MAX / 2 || end > run->value_safe)                                   \
            break;                                                                                 \
        uint32_t body = 4 + kd_length_bytes(count) + kd_length_bytes(length) + length;             \
        if (KEYED) {                                                                               \
            key_end = run->key_offsets[i + 1];                                                     \
            key_length = (uint32_t)(key_end - key_begin);                                          \
            if (key_length > KD_ENCODE_MAX / 2 || key_end > run->key_safe)                         \
                break;                                                                             \
            body += kd_length_bytes(key_length) - 1 + key_length;                                  \
        }                                                                                          \
        if (body > run->max_body || p + kd_length_bytes(body) + body > limit)                      \
            break;                                                                                 \
        p = kd_put_length(p, body);                                                                \
        p[0] = 0; /* attributes */                                                                 \
        p[1] = (uint8_t)run->delta;                                                                \
        p = kd_put_length(p + 2, count);                                                           \
        if (KEYED) {                                                                               \
            p = kd_put_length(p, key_length);                                                      \
            COPY(p, run->key_data + key_begin, key_length);                                        \
            p += key_length;                                                                       \
            key_begin = key_end;                                                                   \
        } else                                                                                     \
            *p++ = 1; /* -1 */                                                                     \
        p = kd_put_length(p, length);                                                              \
        COPY(p, run->value_data + begin, length);                                                  \
        p += length;                                                                               \
        *p++ = 0; /* no headers */                                                                 \
        begin = end;                                                                               \
        i++;                                                                                       \
    }                                                                                              \
    run->p = p;                                                                                    \
    run->count = first + i;                                                                        \
    return i;

#define KD_ENCODE(NAME, TARGET)                                                                    \
    TARGET static int64_t kd_encode_keyed_##NAME(kd_encode *run) {                                 \
        KD_ENCODE_BODY(1, kd_copy_##NAME)                                                          \
    }                                                                                              \
    TARGET static int64_t kd_encode_plain_##NAME(kd_encode *run) {                                 \
        KD_ENCODE_BODY(0, kd_copy_##NAME)                                                          \
    }                                                                                              \
    TARGET static int64_t kd_encode_##NAME(kd_encode *run) {                                       \
        return run->key_data ? kd_encode_keyed_##NAME(run) : kd_encode_plain_##NAME(run);          \
    }

KD_ENCODE(any, )
static int64_t (*kd_encode_records)(kd_encode *) = kd_encode_any;

#if defined(KD_AVX2)
KD_ENCODE(avx2, KD_AVX2)

/* Runs when the module is loaded. */
__attribute__((constructor)) static void kd_encode_choose(void) {
    if (kd_has_avx2())
        kd_encode_records = kd_encode_avx2;
}
#endif

#endif
