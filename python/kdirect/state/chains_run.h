/* Chains of rows a key: append, parse, walk, pair.
 *
 * State of an entry (of a Table), in words:
 *
 *     0        8        16       24       32       40
 *     +--------+--------+--------+--------+--------+
 *     | head 0 | rows 0 | head 1 | rows 1 | dead-  |   head: position of the row that came last,
 *     |        |        |        |        | line   |   0: none.  Side 0 is left, or the only one.
 *     +--------+--------+--------+--------+--------+
 *
 * Bit 63 of `rows 0` says that a column of the key is null.  `deadline` is at or before the time
 * at which the first session of the key can end.
 *
 * Row in the log:   next (position of the row that came before it, 0: none), time, row words.
 * Tuple in a page:  bucket, key words, words of the row | side << 32 | null key << 33, time, row
 *                   words.
 *
 * `time` is there only where the plan needs it (`timed`).
 *
 * The rows of aggregates by session are intervals: the words of a row are the time of its last
 * event, its lane, and a state; `time` is that of its first event.  The intervals of one lane do
 * not touch each other, those of several lanes may.  Windows of other kinds have one such interval
 * for each lane, of no time; where there are no windows, `deadline` says whether a key has changed.
 */
#ifndef KD_CHAINS_RUN_H
#define KD_CHAINS_RUN_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "rows_run.h"
#include "table_run.h"

#define KD_NULL_KEY (1ULL << 63)
#define KD_NO_DEADLINE INT64_MAX
#define KD_BLOCK_LOG 16 /* least deadlines are kept for 64 KiB of entries each */

/* -- least deadlines --------------------------------------------------------------------------- */

typedef struct {
    int64_t *least;  /* of the entries that begin in a block */
    uint64_t *first; /* the first of them; 0: none */
    uint64_t blocks;
} kd_deadlines;

static int kd_deadlines_cover(kd_deadlines *d, uint64_t top) {
    uint64_t need = (top >> KD_BLOCK_LOG) + 1;
    if (need <= d->blocks)
        return 0;
    need += need / 2;
    int64_t *least = realloc(d->least, need * 8);
    if (!least)
        return -1;
    d->least = least;
    uint64_t *first = realloc(d->first, need * 8);
    if (!first)
        return -1;
    d->first = first;
    for (uint64_t b = d->blocks; b < need; b++) {
        least[b] = KD_NO_DEADLINE;
        first[b] = 0;
    }
    d->blocks = need;
    return 0;
}

KD_INLINE void kd_deadline_note(kd_deadlines *d, uint64_t entry, int64_t deadline) {
    uint64_t b = entry >> KD_BLOCK_LOG;
    if (deadline < d->least[b])
        d->least[b] = deadline;
    if (!d->first[b] || entry < d->first[b])
        d->first[b] = entry;
}

/* Entries at [begin, end) of a stretch whose deadline is before `closes`; `*visited` counts the
 * entries that were looked at.  Where it stopped, if `out` is full. */
static uint64_t kd_deadlines_due(const kd_table *t, kd_deadlines *d, uint64_t begin, uint64_t end,
                                 int64_t closes, uint64_t *out, uint64_t *count,
                                 uint64_t *visited) {
    uint64_t n = *count;
    for (uint64_t b = begin >> KD_BLOCK_LOG; b <= (end - 1) >> KD_BLOCK_LOG; b++) {
        uint64_t from = b == begin >> KD_BLOCK_LOG ? begin : d->first[b];
        uint64_t to = (b + 1) << KD_BLOCK_LOG;
        if (d->least[b] >= closes || !from || from >= end)
            continue;
        to = to < end ? to : end;
        int64_t least = KD_NO_DEADLINE;
        while (from < to) {
            const uint64_t *entry = (const uint64_t *)(t->log->base + from);
            int64_t deadline = (int64_t)entry[4];
            if (deadline < closes)
                out[n++] = from;
            else if (deadline < least)
                least = deadline;
            from += kd_entry_words(t, entry) * 8;
            ++*visited;
        }
        /* A block that several stretches share keeps a bound that is low enough for all. */
        if (begin <= b << KD_BLOCK_LOG && end >= (b + 1) << KD_BLOCK_LOG)
            d->least[b] = least;
    }
    *count = n;
    return n;
}

/* -- appending --------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *base;
    uint32_t timed;   /* 1: rows have a time */
    uint32_t session; /* 1: entries have a deadline */
    uint32_t interval; /* 1: rows are intervals: time is their start, then last time and lane */
    int64_t gap;
    kd_deadlines deadlines;
} kd_chains;

KD_INLINE uint64_t kd_chain_head_bytes(const kd_chains *c) { return 8 + 8 * c->timed; }

/* How many of the rows from `i` on fit into `room` bytes; where each will lie. */
static uint64_t kd_chain_place(const kd_chains *c, const uint64_t *words, uint64_t n, uint64_t tail,
                               uint64_t room, uint64_t *place, uint64_t *used) {
    uint64_t at = 0, i = 0, head = kd_chain_head_bytes(c);
    for (; i < n; i++) {
        uint64_t bytes = head + words[i] * 8;
        if (at + bytes > room)
            break;
        place[i] = tail + at;
        at += bytes;
    }
    *used = at;
    return i;
}

/* Links rows that lie at `place` to the entries at `state`.  `time` may be NULL; `flags` has bit 0
 * for the side and bit 1 for a null key. */
static void kd_chain_link(kd_chains *c, const uint64_t *state, const uint64_t *place,
                          const int64_t *time, const uint8_t *flags, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        if (i + 8 < n)
            __builtin_prefetch(c->base + state[i + 8], 1);
        uint64_t *entry = (uint64_t *)(c->base + state[i]);
        uint64_t *row = (uint64_t *)(c->base + place[i]);
        uint64_t side = 2 * (flags[i] & 1);
        row[0] = entry[side];
        entry[side] = place[i];
        entry[side + 1]++;
        if (flags[i] & 2)
            entry[1] |= KD_NULL_KEY;
        if (c->timed)
            row[1] = (uint64_t)time[i];
        if (c->session) {
            int64_t ends = time[i] + c->gap;
            if (ends < (int64_t)entry[4])
                entry[4] = (uint64_t)ends;
            kd_deadline_note(&c->deadlines, state[i], (int64_t)entry[4]);
        }
    }
}

/* -- tuples in pages --------------------------------------------------------------------------- */

KD_INLINE uint64_t kd_tuple_key_words(uint32_t key_words, const uint64_t *key) {
    return key_words ? key_words : kd_variable_words(key[0]);
}

/* Writes tuples but for the words of their rows, whose addresses go to `to`.  How many fit. */
static uint64_t kd_tuples_put(uint32_t timed, uint32_t key_words, const kd_keys *keys,
                              const uint32_t *rows, const int64_t *bucket, const int64_t *time,
                              const uint8_t *flags, const uint64_t *words, uint64_t n,
                              uint8_t *page, uint64_t *tail, uint64_t end, uint8_t **to) {
    uint64_t i = 0;
    for (; i < n; i++) {
        uint32_t r = rows[i];
        const uint64_t *key = kd_key_of(keys, r);
        uint64_t k = kd_tuple_key_words(key_words, key);
        uint64_t bytes = 8 * (2 + timed + k + words[i]);
        if (*tail + bytes > end)
            break;
        uint64_t *out = (uint64_t *)(page + *tail);
        *out++ = (uint64_t)bucket[i];
        memcpy(out, key, k * 8);
        out += k;
        *out++ = words[i] | (uint64_t)(flags[i] & 3) << 32;
        if (timed)
            *out++ = (uint64_t)time[i];
        to[i] = (uint8_t *)out;
        *tail += bytes;
    }
    return i;
}

/* Parses the tuples at [at, used) of a page that was copied to memory of the reader; every length
 * is checked.  -1 if something does not fit, else how many there are. */
static int64_t kd_tuples_parse(const uint8_t *page, uint64_t at, uint64_t used, uint64_t most,
                               uint32_t key_words, uint32_t timed, uint32_t sides,
                               const kd_row_shape *const *shape, int64_t *bucket,
                               uint32_t *key_at, uint64_t *hash, uint64_t *words, int64_t *time,
                               uint8_t *flags, const uint8_t **row) {
    uint64_t n = 0;
    while (at < used) {
        const uint64_t *p = (const uint64_t *)(page + at);
        uint64_t left = (used - at) / 8, k = key_words;
        if (n == most || left < 2 || (used - at) % 8)
            return -1;
        if (!key_words) {
            if (p[1] > left * 8)
                return -1;
            k = kd_variable_words(p[1]);
        }
        if (left < 2 + k + timed)
            return -1;
        bucket[n] = (int64_t)p[0];
        key_at[n] = (uint32_t)(at / 8 + 1);
        hash[n] = kd_hash_words(p + 1, k);
        uint64_t head = p[1 + k];
        words[n] = head & 0xFFFFFFFF;
        flags[n] = (uint8_t)(head >> 32 & 3);
        if (head >> 34 || (head >> 32 & 1) >= sides)
            return -1;
        time[n] = timed ? (int64_t)p[2 + k] : 0;
        left -= 2 + k + timed;
        row[n] = (const uint8_t *)(p + 2 + k + timed);
        if (words[n] > left ||
            kd_row_fits(shape[flags[n] & 1], row[n], words[n]) != (int64_t)words[n])
            return -1;
        at += 8 * (2 + k + timed + words[n]);
        n++;
    }
    return (int64_t)n;
}

/* -- groups: the rows of one key in one window ------------------------------------------------- */

typedef struct {
    int64_t time, last;
    uint64_t place, lane;
    uint64_t side;
} kd_item;

typedef struct {
    kd_chains *chains;
    const uint64_t *entries;
    uint64_t count, next;
    int64_t closes;
    kd_item *items; /* sessions: rows of the entry that is at hand, by time */
    uint64_t items_count, items_room, items_at;
    uint64_t *list[2], length[2], room[2];
    int64_t start, end;
    uint64_t entry;
    int null_key;
} kd_groups;

static void kd_groups_free(kd_groups *g) {
    free(g->items);
    free(g->list[0]);
    free(g->list[1]);
    g->items = NULL;
    g->list[0] = g->list[1] = NULL;
}

static int kd_groups_room(kd_groups *g, int side, uint64_t need) {
    if (need <= g->room[side])
        return 0;
    need += need / 2 + 64;
    uint64_t *list = realloc(g->list[side], need * 8);
    if (!list)
        return -1;
    g->list[side] = list;
    g->room[side] = need;
    return 0;
}

static int kd_item_order(const void *a, const void *b) {
    const kd_item *x = a, *y = b;
    if (x->time != y->time)
        return x->time > y->time ? 1 : -1;
    if (x->lane != y->lane)
        return x->lane > y->lane ? 1 : -1;
    return (x->last > y->last) - (x->last < y->last);
}

/* Where the session that begins with item `i` of `n` ends: the first item that it does not have,
 * and in `last` its last event. */
static uint64_t kd_session_end(const kd_item *items, uint64_t i, uint64_t n, int64_t gap,
                               int64_t *last) {
    int64_t latest = items[i].last;
    for (i++; i < n && items[i].time <= latest + gap; i++)
        if (items[i].last > latest)
            latest = items[i].last;
    *last = latest;
    return i;
}

/* Takes the rows of ended sessions out of an entry.  They are items [0, items_count) then. */
static int kd_groups_load(kd_groups *g, uint64_t *entry) {
    kd_chains *c = g->chains;
    uint64_t need = (entry[1] & ~KD_NULL_KEY) + entry[3], n = 0, split = 0, i, next;
    int64_t last;
    if (need > g->items_room) {
        kd_item *items = realloc(g->items, (need + need / 2) * sizeof(kd_item));
        if (!items)
            return -1;
        g->items = items;
        g->items_room = need + need / 2;
    }
    for (uint64_t side = 0; side < 2; side++)
        for (uint64_t at = entry[2 * side]; at && n < need; n++) {
            const uint64_t *row = (const uint64_t *)(c->base + at);
            g->items[n] = (kd_item){(int64_t)row[1], (int64_t)row[c->interval ? 2 : 1], at,
                                    c->interval ? row[3] : 0, side};
            at = row[0];
        }
    qsort(g->items, n, sizeof(kd_item), kd_item_order);
    entry[4] = (uint64_t)KD_NO_DEADLINE;
    while (split < n) {
        next = kd_session_end(g->items, split, n, c->gap, &last);
        if (last + c->gap >= g->closes) {
            entry[4] = (uint64_t)(last + c->gap);
            kd_deadline_note(&c->deadlines, (uint64_t)((uint8_t *)entry - c->base),
                             (int64_t)entry[4]);
            break;
        }
        split = next;
    }
    entry[0] = entry[2] = entry[3] = 0;
    entry[1] &= KD_NULL_KEY;
    for (i = split; i < n; i++) {
        uint64_t *row = (uint64_t *)(c->base + g->items[i].place);
        uint64_t side = 2 * g->items[i].side;
        row[0] = entry[side];
        entry[side] = g->items[i].place;
        entry[side + 1]++;
    }
    g->items_count = split;
    g->items_at = 0;
    return 0;
}

static int kd_groups_next_session(kd_groups *g) {
    while (g->items_at == g->items_count) {
        if (g->next == g->count)
            return 0;
        g->entry = g->entries[g->next++];
        uint64_t *entry = (uint64_t *)(g->chains->base + g->entry);
        g->null_key = (entry[1] & KD_NULL_KEY) != 0;
        if (kd_groups_load(g, entry))
            return -1;
    }
    uint64_t i = g->items_at;
    int64_t last;
    g->items_at = kd_session_end(g->items, i, g->items_count, g->chains->gap, &last);
    g->length[0] = g->length[1] = 0;
    g->start = g->items[i].time;
    g->end = last + g->chains->gap;
    for (; i < g->items_at; i++) {
        int side = (int)g->items[i].side;
        if (kd_groups_room(g, side, g->length[side] + 1))
            return -1;
        g->list[side][g->length[side]++] = g->items[i].place;
    }
    return 1;
}

/* The next group: 1, 0 if there is none, -1 without memory. */
static int kd_groups_next(kd_groups *g) {
    if (g->chains->session)
        return kd_groups_next_session(g);
    if (g->next == g->count)
        return 0;
    g->entry = g->entries[g->next++];
    const uint64_t *entry = (const uint64_t *)(g->chains->base + g->entry);
    if (g->next + 4 < g->count)
        __builtin_prefetch(g->chains->base + g->entries[g->next + 4]);
    g->null_key = (entry[1] & KD_NULL_KEY) != 0;
    for (int side = 0; side < 2; side++) {
        uint64_t rows = entry[2 * side + 1] & ~KD_NULL_KEY, n = 0;
        if (kd_groups_room(g, side, rows))
            return -1;
        for (uint64_t at = entry[2 * side]; at && n < rows; n++) {
            g->list[side][n] = at;
            at = *(const uint64_t *)(g->chains->base + at);
        }
        g->length[side] = n;
    }
    return 1;
}

/* Whole groups, one after the other, until there are `most` of them or as many rows; the rows of
 * side 0 only.  `*rows` grows as needed.  How many groups, -1 without memory. */
static int64_t kd_groups_fill(kd_groups *g, uint64_t most, uint64_t *entries, int64_t *lengths,
                              int64_t *start, int64_t *end, uint64_t **rows, uint64_t *room,
                              uint64_t *count) {
    const uint64_t base = (uint64_t)(uintptr_t)g->chains->base + kd_chain_head_bytes(g->chains);
    uint64_t n = 0, used = 0;
    while (n < most && used < most) {
        int found = kd_groups_next(g);
        if (found <= 0) {
            if (found < 0)
                return -1;
            break;
        }
        if (used + g->length[0] > *room) {
            uint64_t need = (used + g->length[0]) * 2;
            uint64_t *more = realloc(*rows, need * 8);
            if (!more)
                return -1;
            *rows = more;
            *room = need;
        }
        for (uint64_t i = 0; i < g->length[0]; i++)
            (*rows)[used++] = base + g->list[0][i];
        entries[n] = g->entry;
        lengths[n] = (int64_t)g->length[0];
        start[n] = g->start;
        end[n++] = g->end;
    }
    *count = used;
    return (int64_t)n;
}

/* -- pairs ------------------------------------------------------------------------------------- */

enum { KD_INNER, KD_LEFT, KD_RIGHT, KD_FULL = KD_LEFT | KD_RIGHT };

typedef struct {
    kd_groups groups;
    int how;
    int busy;      /* the group is not at its end */
    uint64_t i, j; /* the next pair of it */
    uint64_t rows[2]; /* what the group gives: 0 rows of a side stand for one row of nulls */
} kd_pairs;

static void kd_pairs_begin(kd_pairs *p) {
    const kd_groups *g = &p->groups;
    int both = g->length[0] && g->length[1] && !g->null_key;
    p->rows[0] = both || p->how & KD_LEFT ? g->length[0] : 0;
    p->rows[1] = both || p->how & KD_RIGHT ? g->length[1] : 0;
    p->busy = p->rows[0] || p->rows[1];
    p->i = p->j = 0;
}

/* Addresses of the rows of at most `most` pairs, 0 for a row of nulls.  -1 without memory. */
static int64_t kd_pairs_next(kd_pairs *p, uint64_t most, uint64_t *left, uint64_t *right,
                             int64_t *start, int64_t *end) {
    kd_groups *g = &p->groups;
    const uint64_t base = (uint64_t)(uintptr_t)g->chains->base + kd_chain_head_bytes(g->chains);
    uint64_t n = 0;
    while (n < most) {
        if (!p->busy) {
            int found = kd_groups_next(g);
            if (found <= 0)
                return found < 0 ? -1 : (int64_t)n;
            kd_pairs_begin(p);
            continue;
        }
        uint64_t columns = p->rows[1] ? p->rows[1] : 1, lines = p->rows[0] ? p->rows[0] : 1;
        uint64_t l = p->rows[0] ? base + g->list[0][p->i] : 0;
        for (; p->j < columns && n < most; p->j++, n++) {
            left[n] = l;
            right[n] = p->rows[1] ? base + g->list[1][p->j] : 0;
            start[n] = g->start;
            end[n] = g->end;
        }
        if (p->j == columns) {
            p->j = 0;
            p->busy = ++p->i < lines;
        }
    }
    return (int64_t)n;
}

/* -- intervals --------------------------------------------------------------------------------- */

/* The first interval after `*link` that belongs to `lane` and touches [start, last]; 0: none.
 * `*link` is then the word that leads to it. */
static uint64_t kd_interval_touching(const kd_chains *c, uint64_t **link, uint64_t lane,
                                     int64_t start, int64_t last) {
    for (uint64_t at = **link; at; at = **link) {
        uint64_t *row = (uint64_t *)(c->base + at);
        if (row[3] == lane && (!c->session || (start <= (int64_t)row[2] + c->gap &&
                                               (int64_t)row[1] <= last + c->gap)))
            return at;
        *link = row;
    }
    return 0;
}

/* Makes an interval at `at` of the log the first of an entry. */
static void kd_interval_add(kd_chains *c, uint64_t entry_at, uint64_t at, uint64_t lane,
                            int64_t start, int64_t last, const uint64_t *state, uint64_t words) {
    uint64_t *entry = (uint64_t *)(c->base + entry_at), *row = (uint64_t *)(c->base + at);
    row[0] = entry[0];
    row[1] = (uint64_t)start;
    row[2] = (uint64_t)last;
    row[3] = lane;
    memcpy(row + 4, state, words * 8);
    entry[0] = at;
    entry[1]++;
    if (!c->session)
        return;
    if (last + c->gap < (int64_t)entry[4])
        entry[4] = (uint64_t)(last + c->gap);
    kd_deadline_note(&c->deadlines, entry_at, (int64_t)entry[4]);
}

/* -- bytes of a file --------------------------------------------------------------------------- */

typedef struct {
    uint64_t begin, end;
} kd_stretch;

static const kd_stretch *kd_stretch_of(const kd_stretch *s, uint64_t n, uint64_t position) {
    for (uint64_t i = n; i-- > 0;)
        if (position >= s[i].begin && position < s[i].end)
            return &s[i];
    return NULL;
}

/* Whether every chain of the entries stays within the rows of the log and has the length that its
 * entry says.  At most `most` rows are looked at in all, so a ring ends. */
static int kd_chain_check(const kd_chains *c, const kd_row_shape *const *shape, uint32_t sides,
                          const uint64_t *entries, uint64_t count, const kd_stretch *stretches,
                          uint64_t n, uint64_t most) {
    uint64_t seen = 0, head = kd_chain_head_bytes(c);
    for (uint64_t e = 0; e < count; e++) {
        const uint64_t *entry = (const uint64_t *)(c->base + entries[e]);
        for (uint32_t side = 0; side < 2; side++) {
            uint64_t rows = entry[2 * side + 1], at = entry[2 * side];
            rows = side ? rows : rows & ~KD_NULL_KEY;
            if (side >= sides && (rows || at))
                return -1;
            for (; rows; rows--) {
                const kd_stretch *s = kd_stretch_of(stretches, n, at);
                if (!s || at % 8 || s->end - at < head || seen++ == most ||
                    kd_row_fits(shape[side], c->base + at + head, (s->end - at - head) / 8) < 0)
                    return -1;
                at = *(const uint64_t *)(c->base + at);
            }
            if (at)
                return -1;
        }
    }
    return 0;
}

#endif
