/* The last 8 bytes of a WRITE: how software stores them, and how whoever polls them loads them. */
#ifndef KD_LANDING_H
#define KD_LANDING_H

#include <stdint.h>
#include <string.h>

/* Whether the last 8 bytes of these are aligned, so that they may be one store. */
static inline int kd_lands_last(const uint8_t *to, uint64_t length) {
    return length >= 8 && (((uintptr_t)to + length) & 7) == 0;
}

/* Store the 8 bytes at `from` after all that was stored before, and at once. */
static inline void kd_land_last(uint8_t *to, const uint8_t *from) {
    uint64_t last;
    memcpy(&last, from, 8);
    __atomic_store_n((uint64_t *)(void *)to, last, __ATOMIC_RELEASE);
}

/* Copy; where the last 8 bytes are aligned they land last.  A plain memcpy may copy from both ends
 * at once. */
static inline void kd_land(uint8_t *to, const uint8_t *from, uint64_t length) {
    if (kd_lands_last(to, length)) {
        memcpy(to, from, length - 8);
        kd_land_last(to + length - 8, from + length - 8);
    } else
        memcpy(to, from, length);
}

/* The 8 aligned bytes that a peer writes; what was stored before them is seen by later loads. */
static inline uint64_t kd_landed(const uint8_t *at) {
    return __atomic_load_n((const uint64_t *)(const void *)at, __ATOMIC_ACQUIRE);
}

/* A line that is read as soon as `kd_landed` shows that a WRITE has come. */
static inline void kd_fetch_early(const uint8_t *at) { __builtin_prefetch(at, 0, 3); }

#endif
