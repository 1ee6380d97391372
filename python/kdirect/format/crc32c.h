/* CRC-32C (Castagnoli), as in Kafka's record batches and iSCSI.
 *
 *   uint32_t kd_crc32c(uint32_t crc, const void *data, size_t n)
 *
 * is chainable the way zlib's crc32 is: start with 0, pass the result of the bytes before.  It
 * reads exactly data[0, n).  The implementation is chosen once, when the module that includes this
 * header is loaded: x86-64 with VPCLMULQDQ on 512-bit registers, x86-64 with SSE4.2 and PCLMUL,
 * arm64 with the CRC extension, or tables (slicing by eight).  Nothing here needs -march flags.
 *
 * Arithmetic of the three lanes.  The crc32 instruction takes 3 cycles but can start every cycle,
 * so three independent lanes of `lane` bytes run side by side.  Bits are reflected: bit i of a
 * 32-bit register is x^(31-i).  A carry-less product of registers a and b, read as 64 bits, is
 * a*b*x, and crc32(0, word) is word*x^32 mod P; so crc32(0, clmul(a, b)) = a*b*x^33 mod P.
 * Appending N bytes multiplies a register by x^(8N), hence by clmul with x^(8N-33).  The last 8
 * bytes of a block are consumed together with the two shifted lanes: those lie 2*lane+8 and lane+8
 * bytes before the end, and kd_crc32c_power[m] = x^(64m-33) holds both for every lane that is a
 * multiple of 8.
 *
 * Arithmetic of folding.  16 bytes in a register are H*x^64 + L, H the first 8 bytes (the low half
 * of the register).  Moving them D bits on, to be added to the bytes that lie there, is H*x^(D+64)
 * + L*x^D mod P: by the same rule two carry-less products, with kd_crc32c_power[D/64+1] and
 * kd_crc32c_power[D/64].
 */
#ifndef KD_CRC32C_H
#define KD_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KD_CRC32C_POLYNOMIAL 0x82F63B78u /* reflected 0x1EDC6F41 */

static uint32_t kd_crc32c_table[8][256];

static void kd_crc32c_fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = (c >> 1) ^ (KD_CRC32C_POLYNOMIAL & (0u - (c & 1)));
        kd_crc32c_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            kd_crc32c_table[t][i] = (kd_crc32c_table[t - 1][i] >> 8) ^
                                    kd_crc32c_table[0][kd_crc32c_table[t - 1][i] & 0xff];
}

/* Slicing by eight; any CPU, any byte order. */
static uint32_t kd_crc32c_by_table(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    crc = ~crc;
    while (n >= 8) {
        uint64_t v; /* one load: an emulated CPU pays for each, not for shifts */
        memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        v = __builtin_bswap64(v);
#endif
        v ^= crc;
        crc = kd_crc32c_table[7][v & 0xff] ^ kd_crc32c_table[6][(v >> 8) & 0xff] ^
              kd_crc32c_table[5][(v >> 16) & 0xff] ^ kd_crc32c_table[4][(v >> 24) & 0xff] ^
              kd_crc32c_table[3][(v >> 32) & 0xff] ^ kd_crc32c_table[2][(v >> 40) & 0xff] ^
              kd_crc32c_table[1][(v >> 48) & 0xff] ^ kd_crc32c_table[0][v >> 56];
        p += 8;
        n -= 8;
    }
    while (n--)
        crc = (crc >> 8) ^ kd_crc32c_table[0][(crc ^ *p++) & 0xff];
    return ~crc;
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define KD_CRC32C_TARGET __attribute__((target("sse4.2,pclmul")))
#define KD_CRC32C_LANE_MAX 4096

static uint32_t kd_crc32c_power[2 * KD_CRC32C_LANE_MAX / 8 + 2];

KD_CRC32C_TARGET static void kd_crc32c_fill_power(void) {
    uint64_t c = 1; /* x^31 = x^(64*1-33) */
    for (size_t m = 1; m < sizeof(kd_crc32c_power) / sizeof(kd_crc32c_power[0]); m++) {
        kd_crc32c_power[m] = (uint32_t)c;
        c = _mm_crc32_u64(c, 0); /* times x^64 */
    }
}

static inline uint64_t kd_crc32c_word(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

KD_CRC32C_TARGET static inline uint64_t kd_crc32c_shifted(uint64_t crc, size_t m) {
    return (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(
        _mm_cvtsi64_si128((int64_t)crc), _mm_cvtsi64_si128((int64_t)kd_crc32c_power[m]), 0));
}

KD_CRC32C_TARGET static uint32_t kd_crc32c_by_sse42(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    uint64_t c0 = (uint32_t)~crc;
    while (n >= 128) {
        size_t lane = ((n - 8) / 24) * 8;
        if (lane > KD_CRC32C_LANE_MAX)
            lane = KD_CRC32C_LANE_MAX;
        const uint8_t *p1 = p + lane, *p2 = p1 + lane, *end = p1;
        uint64_t c1 = 0, c2 = 0;
        n -= 3 * lane + 8;
        while (end - p >= 32) {
            c0 = _mm_crc32_u64(c0, kd_crc32c_word(p));
            c1 = _mm_crc32_u64(c1, kd_crc32c_word(p1));
            c2 = _mm_crc32_u64(c2, kd_crc32c_word(p2));
            c0 = _mm_crc32_u64(c0, kd_crc32c_word(p + 8));
            c1 = _mm_crc32_u64(c1, kd_crc32c_word(p1 + 8));
            c2 = _mm_crc32_u64(c2, kd_crc32c_word(p2 + 8));
            c0 = _mm_crc32_u64(c0, kd_crc32c_word(p + 16));
            c1 = _mm_crc32_u64(c1, kd_crc32c_word(p1 + 16));
            c2 = _mm_crc32_u64(c2, kd_crc32c_word(p2 + 16));
            c0 = _mm_crc32_u64(c0, kd_crc32c_word(p + 24));
            c1 = _mm_crc32_u64(c1, kd_crc32c_word(p1 + 24));
            c2 = _mm_crc32_u64(c2, kd_crc32c_word(p2 + 24));
            p += 32;
            p1 += 32;
            p2 += 32;
        }
        while (p < end) {
            c0 = _mm_crc32_u64(c0, kd_crc32c_word(p));
            c1 = _mm_crc32_u64(c1, kd_crc32c_word(p1));
            c2 = _mm_crc32_u64(c2, kd_crc32c_word(p2));
            p += 8;
            p1 += 8;
            p2 += 8;
        }
        uint64_t shifted =
            kd_crc32c_shifted(c0, lane / 4 + 1) ^ kd_crc32c_shifted(c1, lane / 8 + 1);
        c0 = _mm_crc32_u64(c2, kd_crc32c_word(p2) ^ shifted);
        p = p2 + 8;
    }
    while (n >= 8) {
        c0 = _mm_crc32_u64(c0, kd_crc32c_word(p));
        p += 8;
        n -= 8;
    }
    if (n >= 4) {
        uint32_t v;
        memcpy(&v, p, 4);
        c0 = _mm_crc32_u32((uint32_t)c0, v);
        p += 4;
        n -= 4;
    }
    while (n--)
        c0 = _mm_crc32_u8((uint32_t)c0, *p++);
    return ~(uint32_t)c0;
}

#define KD_CRC32C_WIDE_TARGET                                                                      \
    __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.2")))

KD_CRC32C_WIDE_TARGET static inline __m512i kd_crc32c_fold(__m512i x, __m512i k, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00),
                                     _mm512_clmulepi64_epi128(x, k, 0x11), next, 0x96);
}

KD_CRC32C_WIDE_TARGET static inline __m512i kd_crc32c_fold_constant(size_t bits) {
    return _mm512_broadcast_i32x4(
        _mm_set_epi64x(kd_crc32c_power[bits / 64], kd_crc32c_power[bits / 64 + 1]));
}

KD_CRC32C_WIDE_TARGET static inline __m128i kd_crc32c_fold128(__m128i x, __m128i k, __m128i next) {
    return _mm_xor_si128(
        _mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

/* What the processor's own prefetching, which ends with each page, comes too late for. */
enum { KD_CRC32C_AHEAD = 8192 };

/* Folds 256 bytes a step; the few bytes left over go the SSE4.2 way. */
KD_CRC32C_WIDE_TARGET static uint32_t kd_crc32c_by_avx512(uint32_t crc, const void *data,
                                                          size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    if (n < 512)
        return kd_crc32c_by_sse42(crc, data, n);
    __m512i x0 = _mm512_xor_si512(_mm512_loadu_si512(p),
                                  _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    __m512i x1 = _mm512_loadu_si512(p + 64), x2 = _mm512_loadu_si512(p + 128),
            x3 = _mm512_loadu_si512(p + 192);
    __m512i k = kd_crc32c_fold_constant(2048);
    p += 256;
    n -= 256;
    while (n >= 256) {
        if (n >= KD_CRC32C_AHEAD + 256)
            for (int i = 0; i < 256; i += 64)
                __builtin_prefetch(p + KD_CRC32C_AHEAD + i, 0, 3);
        x0 = kd_crc32c_fold(x0, k, _mm512_loadu_si512(p));
        x1 = kd_crc32c_fold(x1, k, _mm512_loadu_si512(p + 64));
        x2 = kd_crc32c_fold(x2, k, _mm512_loadu_si512(p + 128));
        x3 = kd_crc32c_fold(x3, k, _mm512_loadu_si512(p + 192));
        p += 256;
        n -= 256;
    }
    k = kd_crc32c_fold_constant(512);
    x0 = kd_crc32c_fold(x0, k, x1);
    x0 = kd_crc32c_fold(x0, k, x2);
    x0 = kd_crc32c_fold(x0, k, x3);
    while (n >= 64) {
        x0 = kd_crc32c_fold(x0, k, _mm512_loadu_si512(p));
        p += 64;
        n -= 64;
    }
    __m128i k1 = _mm_set_epi64x(kd_crc32c_power[2], kd_crc32c_power[3]);
    __m128i y =
        kd_crc32c_fold128(_mm512_extracti32x4_epi32(x0, 0), k1, _mm512_extracti32x4_epi32(x0, 1));
    y = kd_crc32c_fold128(y, k1, _mm512_extracti32x4_epi32(x0, 2));
    y = kd_crc32c_fold128(y, k1, _mm512_extracti32x4_epi32(x0, 3));
    uint64_t c = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(y));
    c = _mm_crc32_u64(c, (uint64_t)_mm_extract_epi64(y, 1));
    return kd_crc32c_by_sse42(~(uint32_t)c, p, n);
}
#endif

#if defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#include <arm_acle.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

__attribute__((target("+crc"))) static uint32_t kd_crc32c_by_arm(uint32_t crc, const void *data,
                                                                 size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    crc = ~crc;
    while (n >= 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        crc = __crc32cd(crc, v);
        p += 8;
        n -= 8;
    }
    while (n--)
        crc = __crc32cb(crc, *p++);
    return ~crc;
}
#endif

typedef uint32_t (*kd_crc32c_function)(uint32_t, const void *, size_t);
typedef struct {
    const char *name;
    kd_crc32c_function function; /* NULL: not for this CPU */
} kd_crc32c_implementation;

/* From the slowest to the fastest; the last one that this CPU has is chosen. */
static kd_crc32c_implementation kd_crc32c_implementations[] = {
    {"table", kd_crc32c_by_table}, {"sse42", NULL}, {"avx512", NULL}, {"arm", NULL}};
enum { KD_CRC32C_IMPLEMENTATIONS = 4 };
static kd_crc32c_function kd_crc32c_chosen = kd_crc32c_by_table;

/* Runs when the module is loaded, before any call. */
__attribute__((constructor)) static void kd_crc32c_choose(void) {
    kd_crc32c_fill_table();
#if defined(KD_CRC32C_TARGET)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
        kd_crc32c_fill_power();
        kd_crc32c_implementations[1].function = kd_crc32c_by_sse42;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq"))
            kd_crc32c_implementations[2].function = kd_crc32c_by_avx512;
    }
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & (1 << 7)) /* HWCAP_CRC32 */
        kd_crc32c_implementations[3].function = kd_crc32c_by_arm;
#elif defined(__aarch64__) && defined(__APPLE__)
    kd_crc32c_implementations[3].function = kd_crc32c_by_arm;
#endif
    for (int i = 0; i < KD_CRC32C_IMPLEMENTATIONS; i++)
        if (kd_crc32c_implementations[i].function)
            kd_crc32c_chosen = kd_crc32c_implementations[i].function;
}

static inline uint32_t kd_crc32c(uint32_t crc, const void *data, size_t n) {
    return kd_crc32c_chosen(crc, data, n);
}

#endif
