/* Arrow's views of bytes: 16 bytes for each value, in the byte order of the machine.
 *
 *   up to 12 bytes:  length (int32), the bytes themselves, zeros up to 16
 *   more:            length (int32), the first 4 bytes, buffer (int32), offset (int32)
 *
 * `buffer` counts the data buffers of the array, and `offset` the bytes from the beginning of that
 * buffer.  Callers have checked that the value lies in the buffer, and that its offset fits.
 */
#ifndef KD_VIEWS_H
#define KD_VIEWS_H

#include <stdint.h>
#include <string.h>

#define KD_VIEW_BYTES 16
#define KD_VIEW_INLINE 12
#define KD_VIEW_SLACK 12 /* kd_put_view_fast reads so many bytes, whatever the length is */

typedef struct {
    int32_t length;
    uint8_t prefix[4];
    int32_t buffer, offset;
} kd_view;

_Static_assert(sizeof(kd_view) == KD_VIEW_BYTES, "a view has 16 bytes");

static inline void kd_put_long_view(uint8_t *to, const uint8_t *from, uint32_t n, int32_t buffer,
                                    int32_t offset) {
    kd_view view = {(int32_t)n, {0}, buffer, offset};
    memcpy(view.prefix, from, sizeof(view.prefix));
    memcpy(to, &view, sizeof(view));
}

/* Reads nothing but the n bytes. */
static inline void kd_put_view(uint8_t *to, const uint8_t *from, uint32_t n, int32_t buffer,
                               int32_t offset) {
    if (n > KD_VIEW_INLINE) {
        kd_put_long_view(to, from, n, buffer, offset);
        return;
    }
    memset(to, 0, KD_VIEW_BYTES);
    memcpy(to, &n, sizeof(n));
    memcpy(to + sizeof(n), from, n);
}

/* The same without a call and without a jump for each length: KD_VIEW_SLACK bytes at `from` are
 * readable. */
static inline __attribute__((always_inline)) void
kd_put_view_fast(uint8_t *to, const uint8_t *from, uint32_t n, int32_t buffer, int32_t offset) {
    static const uint8_t keep[2 * KD_VIEW_INLINE] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                                     0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    uint64_t low, low_kept;
    uint32_t high, high_kept;
    if (n > KD_VIEW_INLINE) {
        kd_put_long_view(to, from, n, buffer, offset);
        return;
    }
    memcpy(&low, from, 8);
    memcpy(&high, from + 8, 4);
    memcpy(&low_kept, keep + KD_VIEW_INLINE - n, 8);
    memcpy(&high_kept, keep + KD_VIEW_INLINE - n + 8, 4);
    low &= low_kept;
    high &= high_kept;
    memcpy(to, &n, 4);
    memcpy(to + 4, &low, 8);
    memcpy(to + 12, &high, 4);
}

#endif
