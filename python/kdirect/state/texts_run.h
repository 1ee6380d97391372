/* Cells whose values have a variable length: extremes of strings and bytes, and sets of values.
 *
 * The words of a cell lie in the state of its group like those of any other cell; the bytes lie in
 * a log, and the last word of the cell is their position:
 *
 *     min, max      prefix, value          the first eight bytes of the value, big endian
 *     first, last   time, valid, value     as kd_merge_edge has them
 *     set           count, slots
 *
 * A value is its length (u32), its room (u32) and its bytes.  A better one is written over it if
 * it has room, else to new bytes of twice the room, so that the log holds at most twice the longest
 * value that ever won.  Slots are their number (a power of two) and words of 16 bits of hash and 48
 * of the position of a value; 0 is empty; at most half of them are used.
 *
 * Outside of a log, in a tuple, the words are followed by their bytes, the tail: for each cell a
 * number of values (u32) and for each of them its length (u32) and its bytes.
 *
 * No function makes room: it says how many bytes it wants, and having them is called again.  To
 * bring in the same value again changes nothing.
 */
#ifndef KD_TEXTS_RUN_H
#define KD_TEXTS_RUN_H

#include <stdint.h>
#include <string.h>

#include "chains_run.h"

enum { KD_TEXT_MIN, KD_TEXT_MAX, KD_TEXT_FIRST, KD_TEXT_LAST, KD_TEXT_SET };
#define KD_FEWEST_SLOTS 8
#define KD_LONGEST_TEXT 32000 /* with the longest key it still fits into a page of 64 KiB */

typedef struct {
    uint32_t kind;
    uint32_t input;  /* its number among the inputs */
    uint32_t offset; /* words from the state's position */
    uint32_t words;
    uint64_t width; /* of every value; 0: they differ */
    uint32_t utf8;  /* whether values are text */
} kd_text;

/* One column: value r is at `bytes + r * width`, or from offsets[r] to offsets[r + 1]. */
typedef struct {
    const uint8_t *bytes;
    const int32_t *offsets;
    uint64_t width;
    const uint8_t *valid; /* a byte a row; NULL: no row is null */
} kd_text_input;

typedef struct {
    const uint8_t *bytes;
    uint64_t length;
} kd_bytes;

KD_INLINE uint32_t kd_text_u32(const void *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

KD_INLINE kd_bytes kd_text_at(const uint8_t *base, uint64_t position) {
    return (kd_bytes){base + position + 8, kd_text_u32(base + position)};
}

KD_INLINE uint64_t kd_text_prefix(kd_bytes v) {
    uint64_t p = 0;
    if (v.length >= 8)
        memcpy(&p, v.bytes, 8);
    else
        memcpy(&p, v.bytes, v.length);
    return __builtin_bswap64(p);
}

KD_INLINE int kd_text_compare(kd_bytes a, kd_bytes b) {
    int c = memcmp(a.bytes, b.bytes, a.length < b.length ? a.length : b.length);
    return c ? c : (a.length > b.length) - (a.length < b.length);
}

KD_INLINE uint64_t kd_text_hash(kd_bytes v) {
    uint64_t h = v.length, w;
    for (; v.length >= 8; v.bytes += 8, v.length -= 8) {
        memcpy(&w, v.bytes, 8);
        h = kd_mix(h ^ w);
    }
    w = 0;
    memcpy(&w, v.bytes, v.length);
    return kd_mix(kd_mix(h ^ w));
}

/* Writes a value to `*place`, or to new bytes of the log.  0, or the bytes that it wants. */
static uint64_t kd_text_put(kd_log *log, uint64_t *place, kd_bytes v, int spare) {
    uint8_t *at = log->base + *place;
    if (!*place || kd_text_u32(at + 4) < v.length) {
        uint64_t room = (v.length + 7) & ~7ULL;
        if (spare && *place && 2 * kd_text_u32(at + 4) > room)
            room = 2 * kd_text_u32(at + 4);
        if (log->end - log->tail < room + 8)
            return room + 8;
        *place = log->tail;
        log->tail += room + 8;
        at = log->base + *place;
        uint32_t bytes = (uint32_t)room;
        memcpy(at + 4, &bytes, 4);
    }
    uint32_t length = (uint32_t)v.length;
    memcpy(at, &length, 4);
    memcpy(at + 8, v.bytes, v.length);
    return 0;
}

/* The slot of a value, or the empty one where it belongs. */
KD_INLINE uint64_t *kd_set_slot(const uint8_t *base, uint64_t slots, kd_bytes v, uint64_t hash) {
    uint64_t *s = (uint64_t *)(base + slots), mask = s[0] - 1, tag = hash >> 48;
    for (uint64_t i = hash & mask;; i = (i + 1) & mask) {
        uint64_t w = s[1 + i];
        if (!w || (w >> 48 == tag && !kd_text_compare(kd_text_at(base, w & KD_POSITION), v)))
            return &s[1 + i];
    }
}

static uint64_t kd_set_grow(uint64_t *state, kd_log *log) {
    const uint64_t *old = state[1] ? (const uint64_t *)(log->base + state[1]) : NULL;
    uint64_t count = old ? old[0] * 2 : KD_FEWEST_SLOTS, bytes = 8 + 8 * count, place = log->tail;
    if (log->end - log->tail < bytes)
        return bytes;
    uint64_t *fresh = (uint64_t *)(log->base + place);
    log->tail += bytes;
    memset(fresh, 0, bytes);
    fresh[0] = count;
    for (uint64_t i = 0; old && i < old[0]; i++) {
        if (!old[1 + i])
            continue;
        kd_bytes v = kd_text_at(log->base, old[1 + i] & KD_POSITION);
        uint64_t at = kd_text_hash(v) & (count - 1);
        while (fresh[1 + at])
            at = (at + 1) & (count - 1);
        fresh[1 + at] = old[1 + i];
    }
    state[1] = place;
    return 0;
}

static uint64_t kd_set_add(uint64_t *state, kd_log *log, kd_bytes v) {
    uint64_t hash = kd_text_hash(v), *slot = NULL, place = 0, wants;
    if (state[1]) {
        slot = kd_set_slot(log->base, state[1], v, hash);
        if (*slot)
            return 0;
    }
    if (!slot || 2 * (state[0] + 1) > *(const uint64_t *)(log->base + state[1])) {
        if ((wants = kd_set_grow(state, log)))
            return wants;
        slot = kd_set_slot(log->base, state[1], v, hash);
    }
    if ((wants = kd_text_put(log, &place, v, 0)))
        return wants;
    *slot = place | (hash >> 48) << 48;
    state[0]++;
    return 0;
}

/* Brings one value, or a null, into a cell.  0, or the bytes that it wants. */
KD_INLINE uint64_t kd_text_take(const kd_text *a, uint64_t *s, kd_log *log, int64_t time,
                                uint64_t valid, kd_bytes v) {
    uint64_t prefix, wants;
    switch (a->kind) {
    case KD_TEXT_MIN:
    case KD_TEXT_MAX:
        if (!valid)
            return 0;
        prefix = kd_text_prefix(v);
        if (s[1]) {
            if (a->kind == KD_TEXT_MIN ? prefix > s[0] : prefix < s[0])
                return 0;
            if (prefix == s[0]) {
                int c = kd_text_compare(v, kd_text_at(log->base, s[1]));
                if (a->kind == KD_TEXT_MIN ? c >= 0 : c <= 0)
                    return 0;
            }
        }
        if ((wants = kd_text_put(log, &s[1], v, 1)))
            return wants;
        s[0] = prefix;
        return 0;
    case KD_TEXT_SET: return valid ? kd_set_add(s, log, v) : 0;
    default: {
        int64_t own = (int64_t)s[0];
        if (time == own) {
            if (valid > s[1] || (!valid && !s[1]) ||
                (valid && kd_text_compare(v, kd_text_at(log->base, s[2])) >= 0))
                return 0;
        } else if (a->kind == KD_TEXT_LAST ? time < own : time > own) {
            return 0;
        }
        if (valid && (wants = kd_text_put(log, &s[2], v, 1)))
            return wants;
        s[0] = (uint64_t)time;
        s[1] = valid;
        return 0;
    }
    }
}

/* Brings the rows from `i` on into the states at `at`.  Where it stopped for want of `*wants`
 * bytes; `n`: at the end. */
static uint32_t kd_text_update(const kd_text *a, uint8_t *base, kd_log *log, const uint64_t *at,
                               const uint32_t *rows, uint32_t i, uint32_t n,
                               const kd_text_input *in, const int64_t *times, uint64_t *wants) {
    for (; i < n; i++) {
        const uint64_t r = rows ? rows[i] : i;
        kd_bytes v = {in->bytes + r * in->width, in->width};
        if (!in->width) {
            v.bytes = in->bytes + in->offsets[r];
            v.length = (uint64_t)(in->offsets[r + 1] - in->offsets[r]);
        }
        if ((*wants = kd_text_take(a, (uint64_t *)(base + at[i]) + a->offset, log,
                                   times ? times[r] : 0, !in->valid || in->valid[r], v)))
            return i;
    }
    return n;
}

/* Brings the cell of another state, whose bytes lie from `from_base` on, into one. */
static uint64_t kd_text_merge(const kd_text *a, uint64_t *s, kd_log *log, const uint64_t *f,
                              const uint8_t *from_base) {
    uint64_t wants, held = f[a->words - 1];
    kd_bytes none = {(const uint8_t *)"", 0};
    switch (a->kind) {
    case KD_TEXT_MIN:
    case KD_TEXT_MAX:
        return held ? kd_text_take(a, s, log, 0, 1, kd_text_at(from_base, held)) : 0;
    case KD_TEXT_SET: {
        const uint64_t *slots = (const uint64_t *)(from_base + held);
        for (uint64_t i = 0; held && i < slots[0]; i++)
            if (slots[1 + i] &&
                (wants = kd_set_add(s, log, kd_text_at(from_base, slots[1 + i] & KD_POSITION))))
                return wants;
        return 0;
    }
    default:
        return kd_text_take(a, s, log, (int64_t)f[0], f[1],
                            f[1] ? kd_text_at(from_base, held) : none);
    }
}

/* -- tuples ------------------------------------------------------------------------------------ */

/* A state goes into as many tuples as its values need; each is a state of its own.  A cursor says
 * how far they have come: the number of a cell, and of a slot if it is a set. */
typedef struct {
    uint32_t cell;
    uint64_t slot;
} kd_text_cursor;

KD_INLINE void kd_tail_value(uint8_t *out, uint64_t *used, kd_bytes v) {
    uint32_t length = (uint32_t)v.length;
    if (out) {
        memcpy(out + *used, &length, 4);
        memcpy(out + *used + 4, v.bytes, v.length);
    }
    *used += 4 + v.length;
}

/* The next tuple of a state: the bytes of its tail, which go to `out` unless that is NULL.  `words`
 * are the words of the tuple's state, those of every cell empty: what of a cell is in this tuple is
 * written to them.  A second value is in it only if the tail has no more than `most` bytes then. */
static uint64_t kd_text_tail(const kd_text *cells, uint32_t count, const uint64_t *state,
                             const uint8_t *base, uint64_t most, kd_text_cursor *from,
                             uint64_t *words, uint8_t *out) {
    uint64_t used = 0, taken = 0;
    int full = 0;
    for (uint32_t c = 0; c < count; c++) {
        const kd_text *a = &cells[c];
        const uint64_t *s = state + a->offset;
        uint64_t held = s[a->words - 1], number_at = used;
        const int edge = a->kind == KD_TEXT_FIRST || a->kind == KD_TEXT_LAST;
        uint32_t number = 0;
        used += 4;
        if (c == from->cell && !full) {
            if (a->kind == KD_TEXT_SET) {
                const uint64_t *slots = (const uint64_t *)(base + held);
                uint64_t i = from->slot;
                for (; held && i < slots[0]; i++) {
                    if (!slots[1 + i])
                        continue;
                    kd_bytes v = kd_text_at(base, slots[1 + i] & KD_POSITION);
                    if ((full = taken && used + 4 + v.length > most))
                        break;
                    kd_tail_value(out, &used, v);
                    taken++;
                    number++;
                }
                from->slot = i;
                if (!full)
                    from->cell++, from->slot = 0;
            } else {
                kd_bytes v = {NULL, 0};
                if ((number = edge ? s[1] != 0 : held != 0))
                    v = kd_text_at(base, held);
                if ((full = number && taken && used + 4 + v.length > most)) {
                    number = 0;
                } else {
                    if (number)
                        kd_tail_value(out, &used, v);
                    taken += number;
                    if (edge && out)
                        memcpy(words + a->offset, s, 16);
                    from->cell++;
                }
            }
        }
        if (out)
            memcpy(out + number_at, &number, 4);
    }
    return used;
}

/* Brings the tail of a tuple, which was checked, into a state. */
static uint64_t kd_text_take_tail(const kd_text *cells, uint32_t count, uint64_t *state,
                                  kd_log *log, const uint64_t *words, const uint8_t *tail) {
    for (uint32_t c = 0; c < count; c++) {
        const kd_text *a = &cells[c];
        const uint64_t *f = words + a->offset;
        uint32_t number = kd_text_u32(tail);
        uint64_t wants = 0;
        kd_bytes v = {tail, 0};
        tail += 4;
        if (!number && (a->kind == KD_TEXT_FIRST || a->kind == KD_TEXT_LAST))
            wants = kd_text_take(a, state + a->offset, log, (int64_t)f[0], 0, v);
        for (; number && !wants; number--) {
            v = (kd_bytes){tail + 4, kd_text_u32(tail)};
            wants = kd_text_take(a, state + a->offset, log, (int64_t)f[0], 1, v);
            tail += 4 + v.length;
        }
        if (wants)
            return wants;
    }
    return 0;
}

/* Whether `bytes` bytes at `tail` are the tail of a tuple with these words. */
static int kd_text_fits(const kd_text *cells, uint32_t count, const uint64_t *words,
                        const uint8_t *tail, uint64_t bytes) {
    uint64_t at = 0;
    for (uint32_t c = 0; c < count; c++) {
        const kd_text *a = &cells[c];
        int edge = a->kind == KD_TEXT_FIRST || a->kind == KD_TEXT_LAST;
        if (bytes - at < 4)
            return 0;
        uint32_t number = kd_text_u32(tail + at);
        at += 4;
        if (a->kind != KD_TEXT_SET && number > 1)
            return 0;
        if (edge && words[a->offset + 1] != number)
            return 0;
        for (; number; number--) {
            if (bytes - at < 4)
                return 0;
            uint64_t length = kd_text_u32(tail + at);
            at += 4;
            if (bytes - at < length || (a->width ? length != a->width : length > KD_LONGEST_TEXT))
                return 0;
            if (a->utf8 && !kd_is_utf8(tail + at, length))
                return 0;
            at += length;
        }
    }
    return at == bytes;
}

/* -- results ----------------------------------------------------------------------------------- */

/* Where the value of a cell lies in each state: `bytes` 0 for a null. */
static void kd_text_values(const kd_text *a, const uint8_t *base, const uint64_t *at, uint64_t n,
                           const uint8_t *text_base, const uint8_t **bytes, int64_t *lengths) {
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t *s = (const uint64_t *)(base + at[i]) + a->offset;
        uint64_t held = s[a->words - 1];
        if (a->words == 3 && !s[1])
            held = 0;
        kd_bytes v = {NULL, 0};
        if (held)
            v = kd_text_at(text_base, held);
        bytes[i] = v.bytes;
        lengths[i] = (int64_t)v.length;
    }
}

/* The same of all values of the sets; their number has been counted. */
static void kd_set_values(const kd_text *a, const uint8_t *base, const uint64_t *at, uint64_t n,
                          const uint8_t *text_base, const uint8_t **bytes, int64_t *lengths) {
    uint64_t used = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t *s = (const uint64_t *)(base + at[i]) + a->offset;
        const uint64_t *slots = (const uint64_t *)(text_base + s[1]);
        for (uint64_t k = 0; s[1] && k < slots[0]; k++)
            if (slots[1 + k]) {
                kd_bytes v = kd_text_at(text_base, slots[1 + k] & KD_POSITION);
                bytes[used] = v.bytes;
                lengths[used++] = (int64_t)v.length;
            }
    }
}

static void kd_text_copy(const uint8_t *const *bytes, const int64_t *lengths, uint64_t n,
                         uint8_t *out) {
    for (uint64_t i = 0; i < n; i++) {
        if (lengths[i])
            memcpy(out, bytes[i], (size_t)lengths[i]);
        out += lengths[i];
    }
}

/* -- bytes of a file --------------------------------------------------------------------------- */

/* Whether a value at `position` lies within `left` bytes. */
KD_INLINE int kd_text_whole(const kd_text *a, const uint8_t *base, uint64_t position,
                            uint64_t left) {
    if (position % 8 || left < 8)
        return 0;
    uint64_t length = kd_text_u32(base + position), room = kd_text_u32(base + position + 4);
    return length <= room && room <= left - 8 && (!a->width || a->width == length);
}

/* Whether all that the cells of a state lead to lies within the stretches of a log. */
static int kd_text_check(const kd_text *cells, uint32_t count, const uint64_t *state,
                         const uint8_t *base, const kd_stretch *stretches, uint64_t n) {
    for (uint32_t c = 0; c < count; c++) {
        const kd_text *a = &cells[c];
        const uint64_t *s = state + a->offset;
        uint64_t held = s[a->words - 1], used = 0;
        if (!held) {
            if (s[a->words - 2] && a->kind != KD_TEXT_MIN && a->kind != KD_TEXT_MAX)
                return 0;
            continue;
        }
        const kd_stretch *found = kd_stretch_of(stretches, n, held);
        if (!found || held % 8)
            return 0;
        if (a->kind != KD_TEXT_SET) {
            if (!kd_text_whole(a, base, held, found->end - held))
                return 0;
            continue;
        }
        const uint64_t *slots = (const uint64_t *)(base + held);
        uint64_t room = (found->end - held) / 8;
        if (room < 1 || slots[0] < KD_FEWEST_SLOTS || slots[0] & (slots[0] - 1) ||
            slots[0] > room - 1)
            return 0;
        for (uint64_t i = 0; i < slots[0]; i++) {
            uint64_t at = slots[1 + i] & KD_POSITION;
            if (!slots[1 + i])
                continue;
            used++;
            const kd_stretch *place = kd_stretch_of(stretches, n, at);
            if (!place || !kd_text_whole(a, base, at, place->end - at))
                return 0;
        }
        if (used != s[0] || 2 * used > slots[0])
            return 0;
    }
    return 1;
}

#endif
