/* Pages of a delta: tuples that are written, and pages of others that are checked.
 *
 * The layout is in layout.py.  An entry and a tuple have the same form: bucket, `head` words, key.
 */
#ifndef KD_PAGE_RUN_H
#define KD_PAGE_RUN_H

#include <stdint.h>
#include <string.h>

#include "accumulate_run.h"
#include "keys_run.h"

#define KD_PAGE_HEADER 32
#define KD_MOST_INPUTS 64

enum { KD_PAGE_ENTRIES = 1, KD_PAGE_TUPLES = 2, KD_PAGE_VERSION = 1 };

typedef struct {
    uint32_t inputs;
    uint32_t words;                    /* of validity bytes and inputs */
    uint32_t width[KD_MOST_INPUTS];    /* words of each input */
    uint32_t at[KD_MOST_INPUTS];       /* its word */
    int32_t time;                      /* the number of the input that is the event time, or -1 */
} kd_tuple;

/* Writes rows i to n-1 as tuples.  Returns n, or the first for which the page has no room, with
 * `wanted` bytes. */
static uint32_t kd_write_tuples(kd_log *log, const kd_tuple *f, const kd_keys *k,
                                uint32_t key_words, const uint32_t *rows, uint32_t i, uint32_t n,
                                const int64_t *buckets, const kd_input *in, const int64_t *times,
                                uint32_t *wanted) {
    for (; i < n; i++) {
        const uint32_t r = rows ? rows[i] : i;
        const uint64_t *key = kd_key_of(k, r);
        const uint64_t words = key_words ? key_words : kd_variable_words(key[0]);
        const uint64_t bytes = (1 + f->words + words) * 8;
        if (log->end - log->tail < bytes) {
            *wanted = (uint32_t)bytes;
            return i;
        }
        uint64_t *to = (uint64_t *)(log->base + log->tail);
        log->tail += bytes;
        *to++ = (uint64_t)buckets[r];
        uint8_t *valid = (uint8_t *)to;
        if (f->inputs)
            memset(to, 0, ((f->inputs + 7) / 8) * 8);
        for (uint32_t c = 0; c < f->inputs; c++) {
            if ((int32_t)c == f->time) {
                valid[c] = 1;
                to[f->at[c]] = times ? (uint64_t)times[r] : 0;
                continue;
            }
            valid[c] = !in[c].valid || in[c].valid[r * in[c].step];
            memcpy(to + f->at[c], in[c].values + r * in[c].stride, f->width[c] * 8);
        }
        to += f->words;
        for (uint64_t w = 0; w < words; w++)
            to[w] = key[w];
    }
    return n;
}

static void kd_finish_page(uint8_t *page, uint64_t used, int kind, uint32_t sender, uint32_t count,
                           uint32_t shape, uint32_t entry_words, uint64_t rows) {
    uint32_t length = (uint32_t)used;
    uint16_t s = (uint16_t)sender;
    memset(page, 0, KD_PAGE_HEADER);
    page[0] = (uint8_t)kind;
    page[1] = KD_PAGE_VERSION;
    memcpy(page + 2, &s, 2);
    memcpy(page + 4, &count, 4);
    memcpy(page + 8, &length, 4);
    memcpy(page + 12, &shape, 4);
    memcpy(page + 16, &entry_words, 4);
    memcpy(page + 24, &rows, 8);
}

enum {
    KD_OK, KD_BAD_HEADER, KD_BAD_LENGTH, KD_BAD_SENDER, KD_BAD_SHAPE, KD_BAD_COUNT, KD_BAD_BUCKET,
    KD_BAD_KEY, KD_BAD_PARTITION, KD_BAD_ALIGNMENT, KD_BAD_TEXT
};

typedef struct {
    const uint16_t *owners;
    uint32_t self, sender, shape, key_words;
    uint32_t fixed_words, strings;      /* of keys of variable length */
    uint32_t texts;                     /* bit c: string c of a key must be UTF-8 */
    uint32_t state_words, tuple_words;  /* heads of entries and of tuples */
    int64_t least_bucket, most_bucket;
    uint32_t inputs;                    /* of a tuple: its first bytes say which are valid */
    int has_seen;
    /* what a checked page is */
    uint32_t kind, count, head;
    uint64_t rows;
    int unseen; /* some entry has a seen bit that is not set, or some tuple a null */
} kd_page;

/* Checks the page of `length` bytes, all of it, before anything is used.  `from` gets the address
 * of each head, `buckets` and `hash` those of each entry, `offsets` where its key begins, in words
 * from the page.  All have room for length / 16. */
static int kd_check_page(kd_page *p, const uint8_t *page, uint64_t length, uint64_t *from,
                         int64_t *buckets, uint64_t *hash, uint32_t *offsets) {
    uint32_t count, used, shape, entry_words;
    uint16_t sender;
    if (length < KD_PAGE_HEADER || length > 1u << 24)
        return KD_BAD_LENGTH;
    if ((uintptr_t)page % 8)
        return KD_BAD_ALIGNMENT;
    memcpy(&sender, page + 2, 2);
    memcpy(&count, page + 4, 4);
    memcpy(&used, page + 8, 4);
    memcpy(&shape, page + 12, 4);
    memcpy(&entry_words, page + 16, 4);
    memcpy(&p->rows, page + 24, 8);
    p->kind = page[0];
    if (page[1] != KD_PAGE_VERSION || (p->kind != KD_PAGE_ENTRIES && p->kind != KD_PAGE_TUPLES))
        return KD_BAD_HEADER;
    if (used != length || length % 8)
        return KD_BAD_LENGTH;
    if (sender != p->sender)
        return KD_BAD_SENDER;
    p->head = p->kind == KD_PAGE_ENTRIES ? p->state_words : p->tuple_words;
    const uint32_t least = 1 + p->head + (p->key_words ? p->key_words : 1);
    if (shape != p->shape || entry_words != (p->key_words ? least : 0))
        return KD_BAD_SHAPE;
    const uint64_t *begin = (const uint64_t *)page, *end = begin + length / 8;
    const uint64_t *at = begin + KD_PAGE_HEADER / 8;
    uint32_t n = 0;
    uint64_t unseen = 0;
    p->unseen = 0;
    for (; at < end; n++) {
        if ((uint64_t)(end - at) < least || n >= count)
            return n >= count ? KD_BAD_COUNT : KD_BAD_LENGTH;
        const uint64_t *key = at + 1 + p->head;
        uint64_t words = p->key_words;
        if (!words) {
            if (key[0] > length)
                return KD_BAD_KEY;
            words = kd_variable_words(key[0]);
            if (words > (uint64_t)(end - key) || !kd_key_is_whole(key, p->strings, p->fixed_words))
                return KD_BAD_KEY;
            if (!kd_key_is_text(key, p->strings, p->fixed_words, p->texts))
                return KD_BAD_TEXT;
        }
        buckets[n] = (int64_t)at[0];
        if (buckets[n] < p->least_bucket || buckets[n] > p->most_bucket)
            return KD_BAD_BUCKET;
        hash[n] = kd_hash_words(key, words);
        if (p->owners[hash[n] >> 56] != p->self)
            return KD_BAD_PARTITION;
        if (p->kind == KD_PAGE_TUPLES)
            for (uint32_t c = 0; c < p->inputs; c++)
                unseen |= !((const uint8_t *)(at + 1))[c];
        else if (p->has_seen)
            unseen |= ~at[1];
        from[n] = (uint64_t)(uintptr_t)(at + 1);
        offsets[n] = (uint32_t)(key - begin);
        at = key + words;
    }
    p->unseen = p->has_seen && unseen;
    p->count = n;
    return n == count ? KD_OK : KD_BAD_COUNT;
}

/* Marks the states whose key changed in this batch for the first time; how many there are in
 * `changed` then. */
static uint64_t kd_stamp_rows(uint8_t *base, const uint64_t *at, uint32_t n, uint32_t offset,
                              uint64_t batch, uint64_t *changed, uint64_t known) {
    for (uint32_t i = 0; i < n; i++) {
        uint64_t *s = (uint64_t *)(base + at[i]) + offset;
        if (*s != batch) {
            *s = batch;
            changed[known++] = at[i];
        }
    }
    return known;
}

#endif
