/* The hash index over a log: find a key or insert it, for many rows at a time.
 *
 * An index word is 16 bits of tag and 48 of position; 0 is empty.  Slots come in pairs, which never
 * straddle a cache line.  A key belongs into the pair of its hash; where both slots are taken, the
 * slots after them are probed one after the other.  The slot comes from the low bits of the hash,
 * the tag from bits 40 to 55, the virtual partition from the top 8: they do not overlap below 2^40
 * slots.  An entry of the log is [bucket] state key, all of them words; a key of variable length
 * begins with its length in bytes.  So the position of a state leads to its key and to its bucket.
 *
 * A table that does not fit into the caches is walked in groups of KD_GROUP rows, so that their
 * cache misses overlap: first all index lines are asked for, then all entries, then keys are
 * compared.
 */
#ifndef KD_TABLE_RUN_H
#define KD_TABLE_RUN_H

#include <stdint.h>
#include <string.h>

#include "wide.h"

#define KD_GROUP 32
#define KD_POSITION 0xFFFFFFFFFFFFULL
#define KD_INLINE static inline __attribute__((always_inline))
#define KD_SMALL_MASK 0x1FFF /* slots up to which no prefetching pays: 64 KiB of index */

typedef struct {
    uint8_t *base;
    uint64_t tail, end; /* of the segment that is written */
} kd_log;

typedef struct {
    kd_log *log;
    uint64_t *index;
    uint64_t mask;        /* slots - 1 */
    uint64_t used, most;  /* entries; how many the index takes before it has to grow */
    uint32_t key_words;   /* 0: variable */
    uint32_t prefix;      /* 1: entries begin with their bucket */
    uint32_t state_words;
    uint32_t wanted;      /* bytes that the entry needs for which kd_find stopped */
    const uint64_t *initial; /* state_words words */
} kd_table;

/* Keys of rows.  Row r: `words + r * stride`, or `words + offsets[r]` if `offsets` is given. */
typedef struct {
    const uint64_t *words;
    uint64_t stride;
    const uint32_t *offsets;
    const uint64_t *hash;
    const int64_t *bucket;
    uint64_t bucket_stride;
} kd_keys;

KD_INLINE uint64_t kd_mix(uint64_t w) {
    w *= 0x9E3779B97F4A7C15ULL;
    w ^= w >> 32;
    w *= 0xD6E8FEB86659FD93ULL;
    return w ^ w >> 32;
}

/* The hash of a key within a bucket. */
KD_INLINE uint64_t kd_bucket_hash(uint64_t hash, int64_t bucket) {
    uint64_t b = (uint64_t)bucket * 0xA0761D6478BD642FULL;
    return hash ^ (b ^ b >> 32);
}

/* Words of a key of variable length, its length word included. */
KD_INLINE uint64_t kd_variable_words(uint64_t length) { return 1 + ((length + 7) >> 3); }

KD_INLINE uint64_t kd_hash_words(const uint64_t *key, uint64_t words) {
    uint64_t h = 0;
    for (uint64_t i = 0; i < words; i++)
        h = kd_mix(h ^ key[i]);
    return h;
}

/* The first slot of the pair of a hash. */
KD_INLINE uint64_t kd_home(uint64_t hash, uint64_t mask) { return hash & (mask - 1); }

/* The position in the pair of slots at `pair` whose tag is that of the hash.  At most 2^48 if there
 * is one, and then it may still be that of another key, or 0, an empty slot.  A word without its
 * tag is a position if the tag was the right one, and a greater number else: so the least of the
 * two is the answer, and no branch depends on where in its pair a key lies. */
KD_INLINE uint64_t kd_in_pair(const uint64_t *pair, uint64_t hash) {
    const uint64_t tag = hash << 8 & ~KD_POSITION;
    const uint64_t first = pair[0] ^ tag, second = pair[1] ^ tag;
    return first < second ? first : second;
}

KD_INLINE const uint64_t *kd_key_of(const kd_keys *k, uint32_t r) {
    return k->offsets ? k->words + k->offsets[r] : k->words + r * k->stride;
}

KD_INLINE int kd_same(const uint64_t *a, const uint64_t *b, const uint32_t words) {
    for (uint32_t i = 0; i < words; i++)
        if (a[i] != b[i])
            return 0;
    return 1;
}

/* One row: the position of its state, or 0 if the table has no room for a new entry. */
KD_INLINE uint64_t kd_find_one(kd_table *t, const kd_keys *k, uint32_t r, uint64_t h,
                               const uint32_t K, const uint32_t P) {
    const uint64_t *key = K ? k->words + r * k->stride : kd_key_of(k, r);
    const uint64_t words = K ? K : t->key_words ? t->key_words : kd_variable_words(key[0]);
    const uint64_t tag = h >> 40 & 0xFFFF;
    uint64_t s = kd_home(h, t->mask), w, position;
    uint8_t *const base = t->log->base;
    for (;; s = (s + 1) & t->mask) {
        w = t->index[s];
        if (!w)
            break;
        if (w >> 48 != tag)
            continue;
        position = w & KD_POSITION;
        const uint64_t *entry = (const uint64_t *)(base + position);
        if (P && (int64_t)entry[0] != k->bucket[r * k->bucket_stride])
            continue;
        if (K ? kd_same(entry + P + t->state_words, key, K)
              : entry[P + t->state_words] == key[0] && /* else the entry may be shorter */
                    !memcmp(entry + P + t->state_words, key, words * 8))
            return position + P * 8;
    }
    const uint64_t bytes = (P + words + t->state_words) * 8;
    if (__builtin_expect(t->used >= t->most || t->log->end - t->log->tail < bytes, 0)) {
        t->wanted = (uint32_t)bytes;
        return 0;
    }
    position = t->log->tail;
    uint64_t *entry = (uint64_t *)(base + position);
    t->log->tail = position + bytes;
    t->index[s] = tag << 48 | position;
    t->used++;
    if (P)
        *entry++ = (uint64_t)k->bucket[r * k->bucket_stride];
    for (uint32_t i = 0; i < t->state_words; i++)
        *entry++ = t->initial[i];
    for (uint64_t i = 0; i < words; i++)
        *entry++ = key[i];
    return position + P * 8;
}

/* The row's state, if its entry is at `position` (of kd_in_pair); 0 else. */
KD_INLINE uint64_t kd_state_at(const uint8_t *base, uint64_t position, const uint64_t *key,
                               const int64_t *bucket, uint32_t state_words, const uint32_t K,
                               const uint32_t P) {
    if (K == 0 || position - 1 >= KD_POSITION)
        return 0;
    const uint64_t *entry = (const uint64_t *)(base + position);
    if (P && (int64_t)entry[0] != *bucket)
        return 0;
    return kd_same(entry + P + state_words, key, K) ? position + P * 8 : 0;
}

/* kd_find_one for what lies elsewhere or nowhere; kept out of the loop. */
static __attribute__((noinline)) uint64_t kd_find_slow(kd_table *t, const kd_keys *k, uint32_t r,
                                                       uint64_t h) {
    return t->key_words == 1 ? kd_find_one(t, k, r, h, 1, t->prefix)
                             : kd_find_one(t, k, r, h, 0, t->prefix);
}

KD_INLINE uint32_t kd_find_rows(kd_table *t, const kd_keys *k, const uint32_t *rows, uint32_t i,
                                uint32_t n, uint64_t *out, const uint32_t K, const uint32_t P,
                                const int dense) {
    uint64_t hs[KD_GROUP], at[KD_GROUP];
    /* Copies: the compiler cannot know that the stores of the loops leave them alone. */
    const uint64_t *const index = t->index, mask = t->mask, *const hash = k->hash;
    const uint64_t *const words = k->words, stride = dense ? K : k->stride, step = k->bucket_stride;
    const int64_t *const bucket = k->bucket;
    const uint8_t *const base = t->log->base;
    const uint32_t state_words = t->state_words;
    if (mask <= KD_SMALL_MASK) {
        for (; i < n; i++) {
            const uint32_t r = !dense && rows ? rows[i] : i;
            uint64_t h = hash[r];
            if (P)
                h = kd_bucket_hash(h, bucket[r * step]);
            uint64_t p = kd_state_at(base, kd_in_pair(&index[kd_home(h, mask)], h),
                                     words + r * stride, bucket + r * step, state_words, K, P);
            if (__builtin_expect(!p, 0) && !(p = kd_find_slow(t, k, r, h)))
                return i;
            out[i] = p;
        }
        return n;
    }
    while (i < n) {
        uint32_t m = n - i < KD_GROUP ? n - i : KD_GROUP;
        for (uint32_t j = 0; j < m; j++) {
            const uint32_t r = !dense && rows ? rows[i + j] : i + j;
            uint64_t h = hash[r];
            if (P)
                h = kd_bucket_hash(h, bucket[r * step]);
            hs[j] = h;
            __builtin_prefetch(&index[kd_home(h, mask)], 1);
        }
        for (uint32_t j = 0; j < m; j++) {
            at[j] = kd_in_pair(&index[kd_home(hs[j], mask)], hs[j]);
            __builtin_prefetch(base + (at[j] & KD_POSITION), 1);
        }
        for (uint32_t j = 0; j < m; j++, i++) {
            const uint32_t r = !dense && rows ? rows[i] : i;
            uint64_t p = kd_state_at(base, at[j], words + r * stride, bucket + r * step,
                                     state_words, K, P);
            if (!p && !(p = kd_find_one(t, k, r, hs[j], K, P)))
                return i;
            out[i] = p;
        }
    }
    return n;
}

/* Finds or inserts the keys of rows i to n-1 (rows[i] to rows[n-1], if given); out[i] becomes the
 * position of the state.  Returns n, or the first that waits for the table to grow. */
static uint32_t kd_find(kd_table *t, const kd_keys *k, const uint32_t *rows, uint32_t i, uint32_t n,
                        uint64_t *out) {
    if (t->prefix)
        switch (t->key_words) {
        case 1: return kd_find_rows(t, k, rows, i, n, out, 1, 1, 0);
        case 2: return kd_find_rows(t, k, rows, i, n, out, 2, 1, 0);
        default: return kd_find_rows(t, k, rows, i, n, out, 0, 1, 0);
        }
    switch (t->key_words) {
    case 1:
        if (!rows && k->stride == 1)
            return kd_find_rows(t, k, NULL, i, n, out, 1, 0, 1);
        return kd_find_rows(t, k, rows, i, n, out, 1, 0, 0);
    case 2: return kd_find_rows(t, k, rows, i, n, out, 2, 0, 0);
    default: return kd_find_rows(t, k, rows, i, n, out, 0, 0, 0);
    }
}

/* Parts the rows `rows` by whether their keys are in the table, which does not grow.  `known` gets
 * those whose keys are, and `at` the positions of their states; `unknown` gets the others.  All
 * have room for n.  Returns the number of known ones.
 *
 * Only the pair of a key's hash is looked at: a key that found its pair full counts as unknown. */
KD_INLINE uint32_t kd_part_rows(const kd_table *t, const kd_keys *k, const uint32_t *rows,
                                uint32_t n, uint64_t *at, uint32_t *known, uint32_t *unknown,
                                const uint32_t K, const uint32_t P) {
    uint64_t hs[KD_GROUP], found[KD_GROUP];
    const uint64_t *const index = t->index, mask = t->mask, *const hash = k->hash;
    const uint8_t *const base = t->log->base;
    const uint32_t state_words = t->state_words;
    uint32_t in = 0, out = 0;
    for (uint32_t i = 0; i < n;) {
        const uint32_t m = n - i < KD_GROUP ? n - i : KD_GROUP;
        for (uint32_t j = 0; j < m; j++) {
            const uint32_t r = rows[i + j];
            hs[j] = P ? kd_bucket_hash(hash[r], k->bucket[r * k->bucket_stride]) : hash[r];
            __builtin_prefetch(&index[kd_home(hs[j], mask)]);
        }
        for (uint32_t j = 0; j < m; j++) {
            const uint64_t position = kd_in_pair(&index[kd_home(hs[j], mask)], hs[j]);
            found[j] = position - 1 < KD_POSITION ? position : 0;
            __builtin_prefetch(base + found[j], 1);
        }
        for (uint32_t j = 0; j < m; j++, i++) {
            const uint32_t r = rows[i];
            uint64_t p = 0;
            if (found[j]) {
                const uint64_t *entry = (const uint64_t *)(base + found[j]);
                const uint64_t *key = K ? k->words + r * k->stride : kd_key_of(k, r);
                const uint64_t *its = entry + P + state_words;
                if ((!P || (int64_t)entry[0] == k->bucket[r * k->bucket_stride]) &&
                    (K ? kd_same(its, key, K)
                       : its[0] == key[0] && /* else the entry may be shorter */
                             kd_same(its, key,
                                     (uint32_t)(t->key_words ? t->key_words
                                                             : kd_variable_words(key[0])))))
                    p = found[j] + P * 8;
            }
            at[in] = p;
            known[in] = r;
            unknown[out] = r;
            in += p != 0;
            out += p == 0;
        }
    }
    return in;
}

static uint32_t kd_part_known(const kd_table *t, const kd_keys *k, const uint32_t *rows,
                              uint32_t n, uint64_t *at, uint32_t *known, uint32_t *unknown) {
    if (t->key_words == 1)
        return t->prefix ? kd_part_rows(t, k, rows, n, at, known, unknown, 1, 1)
                         : kd_part_rows(t, k, rows, n, at, known, unknown, 1, 0);
    return kd_part_rows(t, k, rows, n, at, known, unknown, 0, t->prefix);
}

/* Words of the entry at `entry`, its bucket and its state included. */
KD_INLINE uint64_t kd_entry_words(const kd_table *t, const uint64_t *entry) {
    return t->prefix + t->state_words +
           (t->key_words ? t->key_words : kd_variable_words(entry[t->prefix + t->state_words]));
}

KD_INLINE uint64_t kd_entry_hash(const kd_table *t, const uint64_t *entry) {
    const uint64_t *key = entry + t->prefix + t->state_words;
    uint64_t h = kd_hash_words(key, t->key_words ? t->key_words : kd_variable_words(key[0]));
    return t->prefix ? kd_bucket_hash(h, (int64_t)entry[0]) : h;
}

/* Puts the entries at [from, to) of the log into the index, which has room for them and knows none
 * of them. */
static void kd_index_entries(kd_table *t, uint64_t from, uint64_t to) {
    uint64_t hs[KD_GROUP], at[KD_GROUP];
    while (from < to) {
        uint32_t m = 0;
        for (; m < KD_GROUP && from < to; m++) {
            const uint64_t *entry = (const uint64_t *)(t->log->base + from);
            hs[m] = kd_entry_hash(t, entry);
            at[m] = from;
            __builtin_prefetch(&t->index[kd_home(hs[m], t->mask)], 1);
            from += kd_entry_words(t, entry) * 8;
        }
        for (uint32_t j = 0; j < m; j++) {
            uint64_t s = kd_home(hs[j], t->mask);
            while (t->index[s])
                s = (s + 1) & t->mask;
            t->index[s] = (hs[j] >> 40 & 0xFFFF) << 48 | at[j];
        }
    }
}

/* Empties the index of the entries at [from, to), touching their slots only.  Every cluster of
 * slots in use is cleared to its end, so the order of calls does not matter if all are cleared. */
static void kd_unindex_entries(kd_table *t, uint64_t from, uint64_t to) {
    while (from < to) {
        const uint64_t *entry = (const uint64_t *)(t->log->base + from);
        uint64_t s = kd_home(kd_entry_hash(t, entry), t->mask);
        while (t->index[s]) {
            t->index[s] = 0;
            s = (s + 1) & t->mask;
        }
        from += kd_entry_words(t, entry) * 8;
    }
}

/* Positions of the states of the entries at [from, to), at most `most`; how many. */
static uint64_t kd_scan(const kd_table *t, uint64_t from, uint64_t to, uint64_t *out,
                        uint64_t most) {
    uint64_t n = 0;
    while (from < to && n < most) {
        out[n++] = from + t->prefix * 8;
        from += kd_entry_words(t, (const uint64_t *)(t->log->base + from)) * 8;
    }
    return n;
}

/* Number of entries in [from, to), or -1 if they do not fill it exactly: for bytes of a file. */
static int64_t kd_count_entries(const kd_table *t, uint64_t from, uint64_t to) {
    int64_t n = 0;
    while (from < to) {
        const uint64_t *entry = (const uint64_t *)(t->log->base + from);
        uint64_t left = (to - from) / 8, head = t->prefix + t->state_words;
        if (left < head + (t->key_words ? t->key_words : 1))
            return -1;
        if (!t->key_words && entry[head] > left * 8)
            return -1;
        uint64_t words = kd_entry_words(t, entry);
        if (words > left)
            return -1;
        from += words * 8;
        n++;
    }
    return n;
}

#endif
