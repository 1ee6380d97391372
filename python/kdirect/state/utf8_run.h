/* Whether bytes that came from elsewhere are UTF-8: no string of a result may be anything else. */
#ifndef KD_UTF8_RUN_H
#define KD_UTF8_RUN_H

#include <stdint.h>
#include <string.h>

/* As RFC 3629 has it: no longer form than needed, no surrogates, nothing after U+10FFFF. */
static inline int kd_is_utf8(const uint8_t *p, uint64_t n) {
    const uint8_t *const end = p + n;
    while (p < end) {
        uint64_t eight;
        if (end - p >= 8) {
            memcpy(&eight, p, 8);
            if (!(eight & 0x8080808080808080ULL)) {
                p += 8;
                continue;
            }
        }
        const uint8_t first = *p++;
        if (first < 0x80)
            continue;
        const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || end - p < more)
            return 0;
        /* The second byte says whether the form is too long, a surrogate, or too great. */
        const uint8_t least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        const uint8_t most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*p < least || *p > most)
            return 0;
        for (int i = 1; i < more; i++)
            if (p[i] >> 6 != 2)
                return 0;
        p += more;
    }
    return 1;
}

#endif
