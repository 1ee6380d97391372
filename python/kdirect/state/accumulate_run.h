/* Accumulators: one loop for each kind over the positions of states.
 *
 * `kd_update` brings in rows, `kd_merge` the states of another executor, or of another table.  A
 * state is a number of words at `offset` words from the state's position.  Kinds whose result
 * would depend on the order of floats have a lane for each executor; the caller gives the offset of
 * the lane.  A state may begin with a word of seen bits: bit b says that the accumulator of bit b
 * has had a value.  Where no null was ever met all bits are set from the start, and need not be
 * written.
 */
#ifndef KD_ACCUMULATE_RUN_H
#define KD_ACCUMULATE_RUN_H

#include <stdint.h>
#include <string.h>

#include "table_run.h"

enum {
    KD_COUNT, KD_COUNT_VALID, KD_SUM_I64, KD_SUM_F64, KD_SUM_I128, KD_MIN_I64, KD_MAX_I64,
    KD_MIN_I128, KD_MAX_I128, KD_AVG_I64, KD_AVG_F64, KD_AVG_I128, KD_MOMENTS, KD_FIRST, KD_LAST,
    KD_FIRST_I128, KD_LAST_I128, KD_DISTINCT, KD_STAMP, KD_KINDS
};

enum { KD_NO_BIT = 64, KD_OPTION_WRAP = 1, KD_OPTION_IGNORE_NULLS = 2 };

typedef struct {
    uint32_t kind;
    uint32_t input;   /* its number among the inputs */
    uint32_t offset;  /* words from the state's position, in a table: of lane 0 */
    uint32_t delta;   /* the same in a fragment, which has one lane */
    uint32_t words;   /* of one lane */
    uint32_t lanes;   /* whether there is one an executor */
    uint32_t bit;     /* its seen bit, or KD_NO_BIT */
    uint32_t option;
    uint32_t precision; /* KD_DISTINCT: registers are 1 << precision */
} kd_accumulator;

/* Values of rows: row r at `values + r * stride` bytes; its validity byte at `valid + r * step`. */
typedef struct {
    const uint8_t *values;
    uint64_t stride;
    const uint8_t *valid; /* NULL: no row is null */
    uint64_t step;
} kd_input;

typedef __int128 kd_i128;

KD_INLINE kd_i128 kd_load128(const void *p) {
    kd_i128 v;
    memcpy(&v, p, 16);
    return v;
}
KD_INLINE void kd_store128(void *p, kd_i128 v) { memcpy(p, &v, 16); }

/* What a sum of decimals is from where it has left 128 bits on: no value of 38 digits. */
#define KD_LOST ((kd_i128)((unsigned __int128)1 << 127))

/* Adds to a sum of decimals.  Returns 1 if it is lost and that is an error. */
KD_INLINE int kd_add128(uint64_t *s, kd_i128 v, uint32_t option) {
    const kd_i128 held = kd_load128(s);
    kd_i128 x;
    const int lost = __builtin_add_overflow(held, v, &x) | (held == KD_LOST) | (v == KD_LOST);
    kd_store128(s, lost ? KD_LOST : x);
    return lost && !(option & KD_OPTION_WRAP);
}

KD_INLINE double kd_load_double(const void *p) {
    double v;
    memcpy(&v, p, 8);
    return v;
}
KD_INLINE void kd_store_double(void *p, double v) { memcpy(p, &v, 8); }

/* Chan's merge of (count, mean, sum of squared differences). */
KD_INLINE void kd_merge_moments(uint64_t *state, double nb, double mb, double sb) {
    double na = kd_load_double(state), ma = kd_load_double(state + 1), n = na + nb;
    if (nb == 0)
        return;
    if (na == 0) {
        kd_store_double(state, nb);
        kd_store_double(state + 1, mb);
        kd_store_double(state + 2, sb);
        return;
    }
    double delta = mb - ma;
    kd_store_double(state, n);
    kd_store_double(state + 1, ma + delta * (nb / n));
    kd_store_double(state + 2, kd_load_double(state + 2) + sb + delta * delta * (na * nb / n));
}

/* (time, validity, value): the earliest (or latest); of equal times a null, then the least. */
KD_INLINE void kd_merge_edge(uint64_t *state, int64_t time, uint64_t valid, kd_i128 value, int last,
                             int wide) {
    int64_t own = (int64_t)state[0];
    kd_i128 held = wide ? kd_load128(state + 2) : (kd_i128)(int64_t)state[2];
    if (time == own ? valid < state[1] || (valid == state[1] && value < held)
                    : (last ? time > own : time < own)) {
        state[0] = (uint64_t)time;
        state[1] = valid;
        if (wide)
            kd_store128(state + 2, value);
        else
            state[2] = (uint64_t)(int64_t)value;
    }
}

KD_INLINE void kd_merge_registers(uint8_t *to, const uint8_t *from, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        to[i] = to[i] > from[i] ? to[i] : from[i];
}

KD_INLINE void kd_add_distinct(uint8_t *registers, uint64_t hash, uint32_t precision) {
    uint64_t h = kd_mix(hash ^ 0x5851F42D4C957F2DULL);
    uint8_t rank = (uint8_t)(__builtin_clzll(h << precision | 1ULL << (precision - 1)) + 1);
    uint8_t *r = registers + (h >> (64 - precision));
    if (rank > *r)
        *r = rank;
}

#define KD_EACH(BODY)                                                                              \
    for (uint32_t i = 0; i < n; i++) {                                                             \
        const uint64_t r = rows ? rows[i] : i;                                                     \
        if (is_valid && !is_valid[r * step])                                                       \
            continue;                                                                              \
        uint64_t *s = (uint64_t *)(base + at[i]) + offset;                                         \
        const uint8_t *v = values + r * stride;                                                    \
        (void)v;                                                                                   \
        BODY                                                                                       \
    }                                                                                              \
    break
#define KD_I64_OF(p) (*(const int64_t *)(p))

/* Brings rows into states.  `track` says that seen bits have to be set.  Returns 1 if a sum
 * overflowed. */
static int kd_update(const kd_accumulator *a, uint32_t offset, uint8_t *base, const uint64_t *at,
                     const uint32_t *rows, uint32_t n, const kd_input *in, const int64_t *times,
                     uint64_t time_step, int track, uint64_t stamp) {
    int overflow = 0;
    /* Copies: the compiler cannot know that the stores below leave `in` alone. */
    const uint8_t *const values = in->values, *const is_valid = in->valid;
    const uint64_t stride = in->stride, step = in->step;
    switch (a->kind) {
    case KD_COUNT:
        for (uint32_t i = 0; i < n; i++)
            ((uint64_t *)(base + at[i]))[offset]++;
        break;
    case KD_STAMP:
        for (uint32_t i = 0; i < n; i++)
            ((uint64_t *)(base + at[i]))[offset] = stamp;
        break;
    case KD_COUNT_VALID: KD_EACH((*s)++;);
    case KD_SUM_I64:
        if (a->option & KD_OPTION_WRAP) {
            KD_EACH(*s += (uint64_t)KD_I64_OF(v););
        }
        KD_EACH(overflow |= __builtin_add_overflow((int64_t)*s, KD_I64_OF(v), (int64_t *)s););
    case KD_SUM_F64: KD_EACH(kd_store_double(s, kd_load_double(s) + kd_load_double(v)););
    case KD_SUM_I128: KD_EACH(overflow |= kd_add128(s, kd_load128(v), a->option););
    case KD_MIN_I64: KD_EACH(if (KD_I64_OF(v) < (int64_t)*s) *s = (uint64_t)KD_I64_OF(v););
    case KD_MAX_I64: KD_EACH(if (KD_I64_OF(v) > (int64_t)*s) *s = (uint64_t)KD_I64_OF(v););
    case KD_MIN_I128: KD_EACH(if (kd_load128(v) < kd_load128(s)) kd_store128(s, kd_load128(v)););
    case KD_MAX_I128: KD_EACH(if (kd_load128(v) > kd_load128(s)) kd_store128(s, kd_load128(v)););
    case KD_AVG_I64: KD_EACH(kd_store128(s, kd_load128(s) + KD_I64_OF(v)); s[2]++;);
    case KD_AVG_F64: KD_EACH(kd_store_double(s, kd_load_double(s) + kd_load_double(v)); s[1]++;);
    case KD_AVG_I128: KD_EACH(overflow |= kd_add128(s, kd_load128(v), a->option); s[2]++;);
    case KD_MOMENTS: /* x - x is 0, and NaN of what has no variance: NaN and infinity */
        KD_EACH(const double x = kd_load_double(v); kd_merge_moments(s, 1.0, x, x - x););
    case KD_DISTINCT: KD_EACH(kd_add_distinct((uint8_t *)s, *(const uint64_t *)v, a->precision););
    case KD_FIRST:
    case KD_LAST:
    case KD_FIRST_I128:
    case KD_LAST_I128: {
        const int last = a->kind == KD_LAST || a->kind == KD_LAST_I128;
        const int wide = a->kind == KD_FIRST_I128 || a->kind == KD_LAST_I128;
        for (uint32_t i = 0; i < n; i++) {
            const uint64_t r = rows ? rows[i] : i;
            const uint8_t *v = in->values + r * in->stride;
            const uint64_t valid = !in->valid || in->valid[r * in->step];
            if (!valid && a->option & KD_OPTION_IGNORE_NULLS)
                continue;
            const kd_i128 value = !valid ? 0 : wide ? kd_load128(v) : (kd_i128)KD_I64_OF(v);
            kd_merge_edge((uint64_t *)(base + at[i]) + offset, times[r * time_step], valid, value,
                          last, wide);
        }
        break;
    }
    }
    if (track && a->bit != KD_NO_BIT)
        for (uint32_t i = 0; i < n; i++) {
            const uint64_t r = rows ? rows[i] : i;
            const uint64_t valid = !in->valid || in->valid[r * in->step];
            *(uint64_t *)(base + at[i]) |= valid << a->bit;
        }
    return overflow;
}

#define KD_COUNTED(BODY)                                                                           \
    for (uint32_t i = 0; i < n; i++) {                                                             \
        uint64_t *const state = (uint64_t *)(base + at[i]), *const s = state + offset;             \
        const uint8_t *const v = values + (rows ? rows[i] : i) * stride;                           \
        state[count]++;                                                                            \
        BODY                                                                                       \
    }                                                                                              \
    break

/* Whether kd_update_counted knows the kind. */
KD_INLINE int kd_goes_with_count(uint32_t kind) {
    return kind == KD_SUM_I64 || kind == KD_SUM_F64 || kind == KD_AVG_I64 || kind == KD_AVG_F64 ||
           kind == KD_MIN_I64 || kind == KD_MAX_I64;
}

/* Brings rows, none of which is null, into a count at word `count` of the states, and into `a`: one
 * walk over the states where kd_update would take two.  Sets no seen bits. */
static int kd_update_counted(const kd_accumulator *a, uint32_t offset, uint32_t count,
                             uint8_t *base, const uint64_t *at, const uint32_t *rows, uint32_t n,
                             const kd_input *in) {
    int overflow = 0;
    const uint8_t *const values = in->values;
    const uint64_t stride = in->stride;
    switch (a->kind) {
    case KD_SUM_I64:
        if (a->option & KD_OPTION_WRAP) {
            KD_COUNTED(*s += (uint64_t)KD_I64_OF(v););
        }
        KD_COUNTED(overflow |= __builtin_add_overflow((int64_t)*s, KD_I64_OF(v), (int64_t *)s););
    case KD_SUM_F64: KD_COUNTED(kd_store_double(s, kd_load_double(s) + kd_load_double(v)););
    case KD_MIN_I64: KD_COUNTED(if (KD_I64_OF(v) < (int64_t)*s) *s = (uint64_t)KD_I64_OF(v););
    case KD_MAX_I64: KD_COUNTED(if (KD_I64_OF(v) > (int64_t)*s) *s = (uint64_t)KD_I64_OF(v););
    case KD_AVG_I64: KD_COUNTED(kd_store128(s, kd_load128(s) + KD_I64_OF(v)); s[2]++;);
    case KD_AVG_F64: KD_COUNTED(kd_store_double(s, kd_load_double(s) + kd_load_double(v)); s[1]++;);
    }
    return overflow;
}

/* Merges one state into another. */
KD_INLINE int kd_merge_one(const kd_accumulator *a, uint64_t *s, const uint64_t *f) {
    int overflow = 0;
    switch (a->kind) {
    case KD_COUNT:
    case KD_COUNT_VALID: *s += *f; break;
    case KD_SUM_I64:
        if (a->option & KD_OPTION_WRAP)
            *s += *f;
        else
            overflow = __builtin_add_overflow((int64_t)*s, (int64_t)*f, (int64_t *)s);
        break;
    case KD_SUM_F64: kd_store_double(s, kd_load_double(s) + kd_load_double(f)); break;
    case KD_SUM_I128:
    case KD_AVG_I64:
    case KD_AVG_I128:
        overflow = kd_add128(s, kd_load128(f), a->option);
        if (a->kind != KD_SUM_I128)
            s[2] += f[2];
        break;
    case KD_MIN_I64: *s = (int64_t)*f < (int64_t)*s ? *f : *s; break;
    case KD_MAX_I64: *s = (int64_t)*f > (int64_t)*s ? *f : *s; break;
    case KD_MIN_I128: if (kd_load128(f) < kd_load128(s)) kd_store128(s, kd_load128(f)); break;
    case KD_MAX_I128: if (kd_load128(f) > kd_load128(s)) kd_store128(s, kd_load128(f)); break;
    case KD_AVG_F64:
        kd_store_double(s, kd_load_double(s) + kd_load_double(f));
        s[1] += f[1];
        break;
    case KD_MOMENTS:
        kd_merge_moments(s, kd_load_double(f), kd_load_double(f + 1), kd_load_double(f + 2));
        break;
    case KD_FIRST:
    case KD_LAST:
        kd_merge_edge(s, (int64_t)f[0], f[1], (int64_t)f[2], a->kind == KD_LAST, 0);
        break;
    case KD_FIRST_I128:
    case KD_LAST_I128:
        kd_merge_edge(s, (int64_t)f[0], f[1], kd_load128(f + 2), a->kind == KD_LAST_I128, 1);
        break;
    case KD_DISTINCT:
        kd_merge_registers((uint8_t *)s, (const uint8_t *)f, 1ULL << a->precision);
        break;
    }
    return overflow;
}

#define KD_MERGE(KIND)                                                                             \
    case KIND:                                                                                     \
        one.kind = KIND;                                                                           \
        for (uint32_t i = 0; i < n; i++)                                                           \
            overflow |= kd_merge_one(&one, (uint64_t *)(base + at[i]) + offset,                    \
                                     (const uint64_t *)from[rows ? rows[i] : i] + from_offset);    \
        break

/* Merges the states at the addresses `from` into those at `at`.  Returns 1 if a sum overflowed. */
static int kd_merge(const kd_accumulator *a, uint32_t offset, uint8_t *base, const uint64_t *at,
                    const uint32_t *rows, uint32_t n, const uint64_t *from, uint32_t from_offset,
                    uint64_t stamp) {
    kd_accumulator one = *a;
    int overflow = 0;
    if (a->kind == KD_STAMP) {
        for (uint32_t i = 0; i < n; i++)
            ((uint64_t *)(base + at[i]))[offset] = stamp;
        return 0;
    }
    switch (a->kind) {
        KD_MERGE(KD_COUNT);
        KD_MERGE(KD_COUNT_VALID);
        KD_MERGE(KD_SUM_I64);
        KD_MERGE(KD_SUM_F64);
        KD_MERGE(KD_MIN_I64);
        KD_MERGE(KD_MAX_I64);
        KD_MERGE(KD_AVG_F64);
        KD_MERGE(KD_MOMENTS);
    default:
        for (uint32_t i = 0; i < n; i++)
            overflow |= kd_merge_one(&one, (uint64_t *)(base + at[i]) + offset,
                                     (const uint64_t *)from[rows ? rows[i] : i] + from_offset);
    }
    return overflow;
}

/* Joins the words of seen bits. */
static void kd_merge_seen(uint8_t *base, const uint64_t *at, const uint32_t *rows, uint32_t n,
                          const uint64_t *from) {
    for (uint32_t i = 0; i < n; i++)
        *(uint64_t *)(base + at[i]) |= *(const uint64_t *)from[rows ? rows[i] : i];
}

/* Doubles as signed integers of the same order, -0.0 before 0.0 and one NaN after everything. */
static void kd_order_doubles(const double *values, uint64_t n, int64_t *out) {
    for (uint64_t i = 0; i < n; i++) {
        int64_t w;
        memcpy(&w, &values[i], 8);
        w = values[i] != values[i] ? 0x7FF8000000000000LL : w;
        out[i] = w ^ (int64_t)((uint64_t)(w >> 63) >> 1);
    }
}

/* Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017), algorithm 6:
 * neither a table of corrections nor a range in which another estimator takes over. */
static double kd_estimate_distinct(const uint8_t *registers, uint32_t precision) {
    const uint32_t q = 64 - precision;
    const double m = (double)(1ULL << precision);
    uint64_t counts[66] = {0};
    for (uint64_t i = 0; i < 1ULL << precision; i++)
        counts[registers[i] > q + 1 ? q + 1 : registers[i]]++;
    double x = 1.0 - (double)counts[q + 1] / m, z = 0, y = 1.0, before;
    if (x != 0.0 && x != 1.0) { /* tau(x) */
        z = 1.0 - x;
        do {
            x = __builtin_sqrt(x);
            before = z;
            y *= 0.5;
            z -= (1.0 - x) * (1.0 - x) * y;
        } while (z != before);
        z /= 3.0;
    }
    z *= m;
    for (uint32_t k = q; k >= 1; k--)
        z = 0.5 * (z + (double)counts[k]);
    x = (double)counts[0] / m; /* sigma(x) */
    if (x == 1.0)
        return 0.0;
    double sigma = x;
    y = 1.0;
    do {
        x *= x;
        before = sigma;
        sigma += x * y;
        y += y;
    } while (sigma != before);
    return m / (2.0 * 0.69314718055994530942) * m / (z + m * sigma);
}

#endif
