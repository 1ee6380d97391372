/* Reads and writes of numbers at any address: kd_get16 and kd_put16 in Kafka's byte order (big
 * endian), kd_get_le16 and kd_put_le16 in that of our own layouts and of some codecs (little
 * endian).  Each memory cell is read once.
 *
 * The bytes may lie in memory that another process can change while we look at it.  So every load
 * goes through a volatile pointer: the compiler may not read a length a second time after it was
 * checked.
 */
#ifndef KD_WIRE_H
#define KD_WIRE_H

#include <stdint.h>
#include <string.h>

typedef uint16_t __attribute__((aligned(1), may_alias)) kd_u16_unaligned;
typedef uint32_t __attribute__((aligned(1), may_alias)) kd_u32_unaligned;
typedef uint64_t __attribute__((aligned(1), may_alias)) kd_u64_unaligned;

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KD_BE16(v) __builtin_bswap16(v)
#define KD_BE32(v) __builtin_bswap32(v)
#define KD_BE64(v) __builtin_bswap64(v)
#define KD_LE16(v) (v)
#define KD_LE32(v) (v)
#define KD_LE64(v) (v)
#else
#define KD_BE16(v) (v)
#define KD_BE32(v) (v)
#define KD_BE64(v) (v)
#define KD_LE16(v) __builtin_bswap16(v)
#define KD_LE32(v) __builtin_bswap32(v)
#define KD_LE64(v) __builtin_bswap64(v)
#endif

static inline uint8_t kd_get8(const uint8_t *p) { return *(const volatile uint8_t *)p; }
static inline uint16_t kd_get16(const uint8_t *p) {
    return KD_BE16(*(const volatile kd_u16_unaligned *)p);
}
static inline uint32_t kd_get32(const uint8_t *p) {
    return KD_BE32(*(const volatile kd_u32_unaligned *)p);
}
static inline uint64_t kd_get64(const uint8_t *p) {
    return KD_BE64(*(const volatile kd_u64_unaligned *)p);
}

static inline void kd_put16(uint8_t *p, uint16_t v) {
    v = KD_BE16(v);
    memcpy(p, &v, 2);
}
static inline void kd_put32(uint8_t *p, uint32_t v) {
    v = KD_BE32(v);
    memcpy(p, &v, 4);
}
static inline void kd_put64(uint8_t *p, uint64_t v) {
    v = KD_BE64(v);
    memcpy(p, &v, 8);
}

static inline uint16_t kd_get_le16(const uint8_t *p) {
    return KD_LE16(*(const volatile kd_u16_unaligned *)p);
}
static inline uint32_t kd_get_le32(const uint8_t *p) {
    return KD_LE32(*(const volatile kd_u32_unaligned *)p);
}
static inline uint64_t kd_get_le64(const uint8_t *p) {
    return KD_LE64(*(const volatile kd_u64_unaligned *)p);
}
static inline void kd_put_le16(uint8_t *p, uint16_t v) {
    v = KD_LE16(v);
    memcpy(p, &v, 2);
}
static inline void kd_put_le32(uint8_t *p, uint32_t v) {
    v = KD_LE32(v);
    memcpy(p, &v, 4);
}
static inline void kd_put_le64(uint8_t *p, uint64_t v) {
    v = KD_LE64(v);
    memcpy(p, &v, 8);
}

/* Zigzag varints, as in protocol buffers.  At most 5 bytes for 32 bits, 10 for 64. */
static inline uint64_t kd_zigzag(int64_t v) { return ((uint64_t)v << 1) ^ (uint64_t)(v >> 63); }

static inline int kd_varint_size(int64_t v) {
    uint64_t u = kd_zigzag(v) | 1;
    return (70 - __builtin_clzll(u)) / 7; /* ceil(bits / 7) */
}

/* Reads a varint from [p, end).  Returns the position after it, or NULL when it is cut off or has
 * more than 10 bytes. */
static inline const uint8_t *kd_get_varint(const uint8_t *p, const uint8_t *end, int64_t *out) {
    uint64_t u = 0;
    for (int shift = 0; shift < 70; shift += 7) {
        if (p >= end)
            return NULL;
        uint64_t byte = kd_get8(p++);
        u |= (byte & 0x7f) << shift;
        if (byte < 0x80) {
            *out = (int64_t)(u >> 1) ^ -(int64_t)(u & 1);
            return p;
        }
    }
    return NULL;
}

/* A hint to the CPU; any address is allowed. */
static inline void kd_prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

static inline uint8_t *kd_put_varint(uint8_t *p, int64_t v) {
    uint64_t u = kd_zigzag(v);
    if (u < 0x80) {
        *p = (uint8_t)u;
        return p + 1;
    }
    if (u < 0x4000) {
        p[0] = (uint8_t)(u | 0x80);
        p[1] = (uint8_t)(u >> 7);
        return p + 2;
    }
    while (u >= 0x80) {
        *p++ = (uint8_t)(u | 0x80);
        u >>= 7;
    }
    *p++ = (uint8_t)u;
    return p;
}

#endif
