/* Entries of a snapshot: out of the log of a window table, and back into one.
 *
 * An entry is [state words] [key words], as in the log (table_run.h), one after the other.  They
 * are written ordered by the stretch of the index that they fall into: whoever puts them into a
 * table again goes through its index from the beginning to the end, and not to and fro.
 */
#ifndef KD_SNAPSHOT_RUN_H
#define KD_SNAPSHOT_RUN_H

#include <stdint.h>
#include <string.h>

#include "page_run.h"

/* Adds the bytes of the entries at [from, to) of the log to those of their stretches, which are
 * 1 << shift slots of an index of mask + 1. */
static void kd_stretch_bytes(const kd_table *t, uint64_t from, uint64_t to, uint64_t mask,
                             uint32_t shift, uint64_t *bytes) {
    while (from < to) {
        const uint64_t *entry = (const uint64_t *)(t->log->base + from);
        const uint64_t size = kd_entry_words(t, entry) * 8;
        bytes[(kd_entry_hash(t, entry) & mask) >> shift] += size;
        from += size;
    }
}

/* Copies the same entries to `out`; those of stretch s to out + at[s], which moves on. */
static void kd_copy_stretches(const kd_table *t, uint64_t from, uint64_t to, uint64_t mask,
                              uint32_t shift, uint64_t *at, uint8_t *out) {
    while (from < to) {
        const uint64_t *entry = (const uint64_t *)(t->log->base + from);
        const uint64_t words = kd_entry_words(t, entry);
        const uint64_t s = (kd_entry_hash(t, entry) & mask) >> shift;
        uint64_t *copy = (uint64_t *)(out + at[s]);
        for (uint64_t w = 0; w < words; w++)
            copy[w] = entry[w];
        at[s] += words * 8;
        from += words * 8;
    }
}

enum { KD_ENTRY_CUT = -1, KD_ENTRY_KEY = -2, KD_ENTRY_FOREIGN = -3, KD_ENTRY_TWICE = -4 };

/* What entries must be, and who reads them. */
typedef struct {
    uint32_t state_words, key_words, strings, fixed_words;
    uint32_t texts;         /* bit c: string c of a key must be UTF-8 */
    uint32_t first, last;   /* they belong to virtual partitions [first, last) */
    const uint16_t *owners; /* of each virtual partition; only those of `self` are listed */
    uint32_t self;
    int has_seen;
    uint64_t unseen;        /* some listed entry has a seen bit that is not set */
} kd_section;

/* Checks entries from word *at on, until `most` of them are listed or word `end` is reached, where
 * *at is then.  Lists the address of each entry, the hash of its key, and the first word of its key
 * from where *at was.  Returns how many, or what is wrong with the entry at *at. */
static int64_t kd_check_entries(kd_section *s, const uint64_t *data, uint64_t *at, uint64_t end,
                                uint32_t most, uint64_t *entries, uint64_t *hash,
                                uint32_t *key_at) {
    const uint64_t begin = *at, least = s->state_words + (s->key_words ? s->key_words : 1);
    uint32_t n = 0;
    while (*at < end && n < most) {
        const uint64_t left = end - *at;
        const uint64_t *entry = data + *at, *key = entry + s->state_words;
        uint64_t words = s->key_words;
        if (left < least)
            return KD_ENTRY_CUT;
        if (!words) {
            if (key[0] > left * 8 || (words = kd_variable_words(key[0])) > left - s->state_words)
                return KD_ENTRY_CUT;
            if (!kd_key_is_whole(key, s->strings, s->fixed_words) ||
                !kd_key_is_text(key, s->strings, s->fixed_words, s->texts))
                return KD_ENTRY_KEY;
        }
        const uint64_t h = kd_hash_words(key, words), vpart = h >> 56;
        if (vpart < s->first || vpart >= s->last)
            return KD_ENTRY_FOREIGN;
        if (s->owners[vpart] == s->self) {
            if (s->has_seen)
                s->unseen |= ~entry[0];
            entries[n] = (uint64_t)(uintptr_t)entry;
            hash[n] = h;
            key_at[n++] = (uint32_t)(*at + s->state_words - begin);
        }
        *at += s->state_words + words;
    }
    return n;
}

/* Copies entries i to n-1 to the end of the log and into the index.  `stamp`: the word of the state
 * that says in which batch it changed, which is set to "in none"; or -1.  Returns n, the first that
 * waits for the table to grow, or KD_ENTRY_TWICE. */
static int64_t kd_insert_entries(kd_table *t, const uint64_t *entries, const uint64_t *hash,
                                 uint32_t i, uint32_t n, int32_t stamp) {
    uint8_t *const base = t->log->base;
    for (; i < n; i++) {
        if (i + KD_GROUP < n)
            __builtin_prefetch(&t->index[kd_home(hash[i + KD_GROUP], t->mask)], 1);
        const uint64_t *entry = (const uint64_t *)(uintptr_t)entries[i];
        const uint64_t *key = entry + t->state_words;
        const uint64_t keys = t->key_words ? t->key_words : kd_variable_words(key[0]);
        const uint64_t words = t->state_words + keys, tag = hash[i] >> 40 & 0xFFFF;
        uint64_t slot = kd_home(hash[i], t->mask), w;
        for (; (w = t->index[slot]); slot = (slot + 1) & t->mask) {
            const uint64_t *other = (const uint64_t *)(base + (w & KD_POSITION)) + t->state_words;
            if (w >> 48 == tag && other[0] == key[0] &&
                (keys == 1 || !memcmp(other, key, keys * 8)))
                return KD_ENTRY_TWICE;
        }
        if (t->used >= t->most || t->log->end - t->log->tail < words * 8) {
            t->wanted = (uint32_t)(words * 8);
            return i;
        }
        const uint64_t position = t->log->tail;
        uint64_t *copy = (uint64_t *)(base + position);
        for (uint64_t c = 0; c < words; c++)
            copy[c] = entry[c];
        if (stamp >= 0)
            copy[stamp] = ~0ULL;
        t->log->tail = position + words * 8;
        t->index[slot] = tag << 48 | position;
        t->used++;
    }
    return n;
}

#endif
