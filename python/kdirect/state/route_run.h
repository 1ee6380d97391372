/* Which rows go where: from times and hashes to targets, and rows sorted by target.
 *
 * A target below `executors` is that executor's fragment; one of `executors + slot` is the window
 * table in `slot` of this executor.  KD_DROP: the row is late, has no usable time, was filtered
 * out, or belongs to a virtual partition that nobody wants (a replay of others).
 */
#ifndef KD_ROUTE_RUN_H
#define KD_ROUTE_RUN_H

#include <stdint.h>
#include <string.h>

#include "keys_run.h"

#define KD_DROP 0xFFFF
#define KD_SLOT_CACHE 4096
#define KD_NEVER INT64_MIN
#define KD_FEW_EXECUTORS 8 /* up to which kd_split_rows is the faster one */

typedef struct {
    uint16_t owners[256]; /* the executor of each virtual partition, or KD_DROP */
    uint16_t self, executors;
    int all_own;            /* every virtual partition is this executor's */
    int leads;              /* one of them is */
    int64_t origin, size;   /* of buckets in microseconds; size 0: one bucket for all */
    int64_t least_bucket;   /* rows of earlier buckets are late */
    int64_t most_time;      /* rows of later times are refused */
    int64_t bucket, low;    /* of the last row that had a bucket: its start */
    uint16_t slot;          /* of that bucket, KD_DROP if it has no table yet */
    int64_t cached[KD_SLOT_CACHE];
    uint16_t cached_slot[KD_SLOT_CACHE];
    uint64_t late, null_time, early, ahead, filtered, other;
    int64_t first_bad, newest; /* a row number, -1; the greatest usable time, KD_NEVER */
} kd_route;

typedef struct {
    const int64_t *times; /* NULL: rows have no time */
    const uint8_t *time_valid, *mask;
    uint64_t time_shift, mask_shift; /* the bits of row 0 */
} kd_rows;

KD_INLINE int64_t kd_floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static void kd_route_begin(kd_route *r) {
    r->late = r->null_time = r->early = r->ahead = r->filtered = r->other = 0;
    r->first_bad = -1;
    r->newest = KD_NEVER;
}

/* Forgets the buckets that it remembers: after windows were dropped. */
static void kd_route_forget(kd_route *r) {
    for (int i = 0; i < KD_SLOT_CACHE; i++)
        r->cached[i] = KD_NEVER;
    r->bucket = r->low = KD_NEVER;
    r->slot = KD_DROP;
}

static void kd_route_learn(kd_route *r, int64_t bucket, uint16_t slot) {
    uint64_t i = (uint64_t)bucket % KD_SLOT_CACHE;
    r->cached[i] = bucket;
    r->cached_slot[i] = slot;
    if (bucket == r->bucket)
        r->slot = slot;
}

KD_INLINE void kd_route_bucket(kd_route *r, int64_t bucket) {
    uint64_t i = (uint64_t)bucket % KD_SLOT_CACHE;
    r->bucket = bucket;
    r->low = r->origin + bucket * r->size;
    r->slot = r->cached[i] == bucket ? r->cached_slot[i] : KD_DROP;
}

KD_WIDE(kd_bounds, (const int64_t *times, uint32_t n, int64_t *least, int64_t *most),
        (times, n, least, most), {
            int64_t low = INT64_MAX;
            int64_t high = INT64_MIN;
            for (uint32_t i = 0; i < n; i++) {
                low = times[i] < low ? times[i] : low;
                high = times[i] > high ? times[i] : high;
            }
            *least = low;
            *most = high;
        })

/* Whether all n rows from `from` on are in the last bucket, with nothing to drop. */
KD_INLINE int kd_route_same(kd_route *r, const kd_rows *rows, uint64_t from, uint32_t n) {
    if (rows->mask || rows->time_valid || r->bucket == KD_NEVER || (r->leads && r->slot == KD_DROP))
        return 0;
    if (!rows->times)
        return 1;
    int64_t least, most;
    kd_bounds(rows->times + from, n, &least, &most);
    if (least < 0 || most > r->most_time || r->bucket < r->least_bucket ||
        (r->size && (least < r->low || most - r->low >= r->size)))
        return 0;
    r->newest = most > r->newest ? most : r->newest;
    return 1;
}

KD_INLINE uint16_t kd_bad(kd_route *r, uint64_t row, uint64_t *count) {
    (*count)++;
    if (r->first_bad < 0)
        r->first_bad = (int64_t)row;
    return KD_DROP;
}

/* The targets of rows [from + i, from + n), and their buckets.  Returns n, or the first whose
 * bucket has no table here: `r->bucket` names it, and the call is repeated from that row on. */
static uint32_t kd_route_rows(kd_route *r, const kd_rows *rows, uint64_t from, uint32_t i,
                              uint32_t n, const uint64_t *hash, uint16_t *targets,
                              int64_t *buckets) {
    if (!r->size && r->bucket == KD_NEVER)
        kd_route_bucket(r, 0);
    for (; i < n; i++) {
        const uint64_t row = from + i;
        if (rows->times) {
            if (rows->time_valid && !kd_bit(rows->time_valid, rows->time_shift + row)) {
                targets[i] = rows->mask && !kd_bit(rows->mask, rows->mask_shift + row)
                                 ? (r->filtered++, KD_DROP)
                                 : kd_bad(r, row, &r->null_time);
                continue;
            }
            const int64_t t = rows->times[row];
            const int usable = t >= 0 && t <= r->most_time;
            if (usable && t > r->newest)
                r->newest = t;
            if (rows->mask && !kd_bit(rows->mask, rows->mask_shift + row)) {
                r->filtered++;
                targets[i] = KD_DROP;
                continue;
            }
            if (!usable) {
                targets[i] = kd_bad(r, row, t < 0 ? &r->early : &r->ahead);
                continue;
            }
            if (r->size && (uint64_t)t - (uint64_t)r->low >= (uint64_t)r->size)
                kd_route_bucket(r, kd_floor_divide(t - r->origin, r->size));
        } else if (rows->mask && !kd_bit(rows->mask, rows->mask_shift + row)) {
            r->filtered++;
            targets[i] = KD_DROP;
            continue;
        }
        if (r->bucket < r->least_bucket) {
            r->late++;
            targets[i] = KD_DROP;
            continue;
        }
        uint16_t owner = r->owners[hash[i] >> 56];
        if (owner == r->self) {
            if (r->slot == KD_DROP)
                return i;
            owner = r->executors + r->slot;
        } else if (owner == KD_DROP) {
            r->other++;
        }
        targets[i] = owner;
        buckets[i] = r->bucket;
    }
    return n;
}

/* Sorts n rows that kd_route_same has found to be in one bucket, as kd_sort_rows does: by their
 * owners alone, one walk for each executor, so that no branch depends on a key.  `order` has room
 * for n + 1. */
static uint32_t kd_split_rows(kd_route *r, uint32_t n, const uint64_t *hash, uint16_t *targets,
                              int64_t *buckets, uint16_t *present, uint32_t *numbers,
                              uint32_t *order) {
    const int64_t bucket = r->bucket;
    uint32_t found = 0, at = 0;
    for (uint32_t i = 0; i < n; i++) {
        targets[i] = r->owners[hash[i] >> 56];
        buckets[i] = bucket;
    }
    for (uint16_t t = 0; t < r->executors; t++) {
        const uint32_t first = at;
        for (uint32_t i = 0; i < n; i++) {
            order[at] = i; /* at < n, or the walk has ended */
            at += targets[i] == t;
        }
        if (at == first)
            continue;
        present[found] = t == r->self ? r->executors + r->slot : t;
        numbers[found++] = at - first;
        if (at == n)
            break;
    }
    r->other += n - at;
    return found;
}

/* Sorts rows 0..n-1 by target, keeping their order: `order` gets the rows of the targets in
 * `present`, one after the other; `counts` (zero before and after) has their numbers in
 * `numbers`.  Returns the number of targets. */
static uint32_t kd_sort_rows(const uint16_t *targets, uint32_t n, uint32_t *counts,
                             uint16_t *present, uint32_t *numbers, uint32_t *order) {
    uint32_t found = 0, at = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint16_t t = targets[i];
        if (t == KD_DROP)
            continue;
        if (!counts[t]++)
            present[found++] = t;
    }
    for (uint32_t k = 0; k < found; k++) {
        numbers[k] = counts[present[k]];
        counts[present[k]] = at;
        at += numbers[k];
    }
    for (uint32_t i = 0; i < n; i++)
        if (targets[i] != KD_DROP)
            order[counts[targets[i]]++] = i;
    for (uint32_t k = 0; k < found; k++)
        counts[present[k]] = 0;
    return found;
}

#endif
