/* A copy that sums: what an RNIC's checksum offload does to a WRITE. */
#ifndef KD_SUMMED_H
#define KD_SUMMED_H

#include <stdint.h>
#include <string.h>

#include "crc32c.h"
#include "landing.h"

/* What is summed before it is copied: it stays in a second-level cache in between.  Smaller pieces
 * lose more than they save: a large memcpy writes lines without reading them first, and leaves them
 * where another core finds them soon. */
enum { KD_SUMMED_BYTES = 65536 };
/* Up to here the copy comes first: its stores wait for their lines, which the other core polls,
 * while the sum is made. */
enum { KD_SUMMED_SHORT = 1024 };

/* Copy `length` bytes, of which the last 8 are one aligned store that lands last.  The 4 before the
 * last 4 become the CRC-32C of all others. */
static inline void kd_land_summed(uint8_t *to, const uint8_t *from, uint64_t length) {
    uint64_t left = length - 8, last;
    uint32_t crc = 0;
    while (left > KD_SUMMED_BYTES) {
        crc = kd_crc32c(crc, from, KD_SUMMED_BYTES);
        memcpy(to, from, KD_SUMMED_BYTES);
        to += KD_SUMMED_BYTES;
        from += KD_SUMMED_BYTES;
        left -= KD_SUMMED_BYTES;
    }
    if (left <= KD_SUMMED_SHORT) {
        memcpy(to, from, left);
        crc = kd_crc32c(crc, from, left);
    } else {
        crc = kd_crc32c(crc, from, left);
        memcpy(to, from, left);
    }
    memcpy(&last, from + left, 8);
    last &= ~(uint64_t)UINT32_MAX;
    last |= kd_crc32c(crc, from + left + 4, 4);
    kd_land_last(to + left, (const uint8_t *)&last);
}

#endif
