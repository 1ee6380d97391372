/* Short copies that may write past their end, with the widest registers that the CPU has.
 *
 * kd_copy_any and kd_copy_avx2 copy n bytes and may read and write up to 31 bytes more: callers
 * leave that slack on both sides.  A loop that uses them is compiled once for each (a macro with
 * the loop's body, the copy and the target), and one is chosen when the module is loaded.  So no
 * -march flag is needed.
 */
#ifndef KD_COPIES_H
#define KD_COPIES_H

#include <stdint.h>
#include <string.h>

#define KD_COPY_SHORT 1024 /* above this memcpy is faster */

#define KD_COPY(NAME, VECTOR, TARGET)                                                              \
    TARGET static inline __attribute__((always_inline)) void kd_copy_##NAME(                       \
        uint8_t *to, const uint8_t *from, uint32_t n) {                                            \
        if (__builtin_expect(n > KD_COPY_SHORT, 0)) {                                              \
            memcpy(to, from, n);                                                                   \
            return;                                                                                \
        }                                                                                          \
        for (int64_t left = n; left > 0; left -= (int64_t)sizeof(VECTOR)) {                        \
            *(VECTOR *)to = *(const VECTOR *)from;                                                 \
            to += sizeof(VECTOR);                                                                  \
            from += sizeof(VECTOR);                                                                \
            __asm__ volatile(""); /* or the compiler turns the loop into a memcpy call */          \
        }                                                                                          \
    }

typedef long long kd_vector16 __attribute__((vector_size(16), aligned(1), may_alias));
KD_COPY(any, kd_vector16, )

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KD_AVX2 __attribute__((target("avx2,bmi,bmi2")))
typedef long long kd_vector32 __attribute__((vector_size(32), aligned(1), may_alias));
KD_COPY(avx2, kd_vector32, KD_AVX2)

static inline int kd_has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2");
}
#endif

#endif
