/* The loops that make records: one field of many records at a time.
 *
 * Chance has no state.  The random number of draw `draw` of record `index` is a hash of the seed,
 * the stream of the field, the index and the draw, so record number i of a workload is the same
 * however the work is cut into blocks and dealt to partitions.
 *
 * `kd_rows` says where the field is: `count` values of `stride` bytes each; the first has the index
 * `first`, and each next one `step` more.
 */
#ifndef KD_GENERATE_H
#define KD_GENERATE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint8_t *out; /* the field in the first record */
    int64_t stride, count;
    uint64_t first, step;
} kd_rows;

static inline uint64_t kd_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* A random number of the record; `stream` is a hash already. */
static inline uint64_t kd_draw(uint64_t stream, uint64_t index) {
    return kd_mix(stream + index * 0x9e3779b97f4a7c15u);
}

static inline uint64_t kd_again(uint64_t x, uint64_t draw) {
    return kd_mix(x + draw * 0xd1342543de82ef95u);
}

/* Uniform in [0, range). */
static inline uint64_t kd_below(uint64_t x, uint64_t range) {
    return (uint64_t)((unsigned __int128)x * range >> 64);
}

/* Uniform in [0, 1).  A signed number becomes a double by one instruction. */
static inline double kd_unit(uint64_t x) { return (double)(int64_t)(x >> 11) * 0x1p-53; }

/* BODY computes `uint64_t value` of record `index`. */
#define KD_FILL(TYPE, BODY)                                                                        \
    for (int64_t i = 0; i < rows->count; i++, out += rows->stride, index += rows->step) {          \
        BODY;                                                                                      \
        const TYPE kept = (TYPE)value;                                                             \
        memcpy(out, &kept, sizeof kept);                                                           \
    }

#define KD_FILL_WIDTH(BODY)                                                                        \
    uint8_t *out = rows->out;                                                                      \
    uint64_t index = rows->first;                                                                  \
    switch (width) {                                                                               \
    case 1:                                                                                        \
        KD_FILL(uint8_t, BODY)                                                                     \
        break;                                                                                     \
    case 2:                                                                                        \
        KD_FILL(uint16_t, BODY)                                                                    \
        break;                                                                                     \
    case 4:                                                                                        \
        KD_FILL(uint32_t, BODY)                                                                    \
        break;                                                                                     \
    default:                                                                                       \
        KD_FILL(uint64_t, BODY)                                                                    \
        break;                                                                                     \
    }

static void kd_put_uniform(const kd_rows *rows, int width, uint64_t stream, uint64_t base,
                           uint64_t range) {
    KD_FILL_WIDTH(uint64_t value = base + kd_below(kd_draw(stream, index), range))
}

/* base + index * scale */
static void kd_put_index(const kd_rows *rows, int width, uint64_t base, uint64_t scale) {
    KD_FILL_WIDTH(uint64_t value = base + index * scale)
}

/* Truncated Pareto: P(key >= k) falls like (k + 1)^-alpha over [0, range). */
static void kd_put_pareto(const kd_rows *rows, int width, uint64_t stream, uint64_t base,
                          uint64_t range, double alpha) {
    const double tail = 1 - pow((double)range + 1, -alpha), power = -1 / alpha;
    KD_FILL_WIDTH(uint64_t value = (uint64_t)pow(1 - kd_unit(kd_draw(stream, index)) * tail, power);
                  value = base + (value < 1 ? 0 : value > range ? range - 1 : value - 1))
}

/* Zipf: P(key = k) is proportional to w(k) = (k + 1)^-z over [0, range), for any z > 0.
 *
 * Keys are in bins whose width grows with the key: the first KD_ZIPF_HEAD have one each, and from
 * there on a bin is a KD_ZIPF_HEAD-th of the keys before it.  A bin is chosen by an alias table
 * (Walker, 1977) with a chance in proportion to its width times the weight of its first key; a key
 * of it with equal chances; and that key is taken with a chance of its weight over that of the
 * first one, else all is drawn again.  So the distribution is exact.  Most draws are below the
 * chance of the bin's last key, and need no power. */
enum { KD_ZIPF_HEAD = 256 };

typedef struct {
    uint64_t first, width; /* keys [first, first + width) */
    uint64_t keep;         /* of 2^64: below it this bin, else `other` */
    uint64_t sure;         /* of 2^64: below it any key of the bin is taken */
    uint64_t other;
} kd_zipf_bin;

/* The bins of a range, which go to `bins` unless that is NULL; how many. */
static uint64_t kd_zipf_bins(uint64_t range, kd_zipf_bin *bins) {
    uint64_t n = 0;
    for (uint64_t first = 0; first < range; n++) {
        uint64_t width = first < KD_ZIPF_HEAD ? 1 : first / KD_ZIPF_HEAD;
        width = width < range - first ? width : range - first;
        if (bins)
            bins[n] = (kd_zipf_bin){.first = first, .width = width};
        first += width;
    }
    return n;
}

/* A share of 2^64, of which 1 is not there. */
static inline uint64_t kd_share(double share) {
    return share >= 1 ? UINT64_MAX : share <= 0 ? 0 : (uint64_t)(share * 0x1p64);
}

/* The alias table; `weight` and `order` have room for `n` numbers. */
static void kd_zipf_prepare(kd_zipf_bin *bins, uint64_t n, double z, double *weight,
                            uint64_t *order) {
    double sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double first = (double)bins[i].first + 1;
        weight[i] = (double)bins[i].width * pow(first, -z);
        bins[i].sure = kd_share(pow((first + (double)bins[i].width - 1) / first, -z) * (1 - 1e-12));
        bins[i].sure = bins[i].width == 1 ? UINT64_MAX : bins[i].sure;
        sum += weight[i];
    }
    /* Bins of less than the mean from the left, the others from the right. */
    uint64_t low = 0, high = n;
    for (uint64_t i = 0; i < n; i++) {
        weight[i] *= (double)n / sum;
        order[weight[i] < 1 ? low++ : --high] = i;
    }
    while (low && high < n) {
        const uint64_t poor = order[--low], rich = order[high];
        bins[poor].keep = kd_share(weight[poor]);
        bins[poor].other = rich;
        weight[rich] -= 1 - weight[poor];
        if (weight[rich] < 1) {
            high++;
            order[low++] = rich;
        }
    }
    for (; low; low--)
        bins[order[low - 1]].keep = UINT64_MAX;
    for (; high < n; high++)
        bins[order[high]].keep = UINT64_MAX;
}

static inline uint64_t kd_zipf_of(const kd_zipf_bin *bins, uint64_t n, double z, uint64_t x) {
    for (uint64_t draw = 1;; draw += 2) {
        /* Which bin it is, and whether it has one key, is chance: neither is a branch. */
        const unsigned __int128 place = (unsigned __int128)x * n;
        const kd_zipf_bin *bin = &bins[(uint64_t)(place >> 64)];
        const uint64_t index = (uint64_t)place < bin->keep ? (uint64_t)(place >> 64) : bin->other;
        bin = &bins[index];
        const unsigned __int128 key = (unsigned __int128)kd_again(x, draw) * bin->width;
        const uint64_t k = bin->first + (uint64_t)(key >> 64);
        if (__builtin_expect((uint64_t)key <= bin->sure, 1) ||
            (double)(uint64_t)key * 0x1p-64 < pow(((double)k + 1) / ((double)bin->first + 1), -z))
            return k;
        x = kd_again(x, draw + 1);
    }
}

static void kd_put_zipf(const kd_rows *rows, int width, uint64_t stream, uint64_t base,
                        const kd_zipf_bin *bins, uint64_t n, double z) {
    KD_FILL_WIDTH(uint64_t value = base + kd_zipf_of(bins, n, z, kd_draw(stream, index)))
}

/* Uniform numbers in [low, high) as float32 or float64. */
static void kd_put_reals(const kd_rows *rows, int width, uint64_t stream, double low, double high) {
    uint8_t *out = rows->out;
    uint64_t index = rows->first;
    const double span = high - low;
    for (int64_t i = 0; i < rows->count; i++, out += rows->stride, index += rows->step) {
        const double value = low + span * kd_unit(kd_draw(stream, index));
        const float narrow = (float)value;
        if (width == 4)
            memcpy(out, &narrow, 4);
        else
            memcpy(out, &value, 8);
    }
}

/* 2^x for x in [0, 63): a table of KD_POWERS steps of each power of two, and the first terms of the
 * series for what is left.  Its relative error is below 1e-14. */
enum { KD_POWERS = 256 };

static double kd_powers[KD_POWERS];

__attribute__((constructor)) static void kd_make_powers(void) {
    for (int i = 0; i < KD_POWERS; i++)
        kd_powers[i] = exp2((double)i / KD_POWERS);
}

static inline double kd_power_of_two(double x) {
    const int64_t step = (int64_t)(x * KD_POWERS);
    const double t = (x - (double)step * (1.0 / KD_POWERS)) * 0.6931471805599453;
    const double left = 1 + t * (1 + t * (0.5 + t * (1.0 / 6 + t * (1.0 / 24 + t * (1.0 / 120)))));
    return (double)(1LL << (step / KD_POWERS)) * kd_powers[step % KD_POWERS] * left;
}

/* NEXMark's prices: a whole number of cents, 100 to 10^8, uniform in its logarithm. */
static inline uint64_t kd_price(uint64_t x) {
    const double doublings = 6 * 3.321928094887362; /* a factor of 10^6 */
    return (uint64_t)(int64_t)(100 * kd_power_of_two(kd_unit(x) * doublings) + 0.5);
}

/* As a whole number of `width` bytes, or as float64 if `real`. */
static void kd_put_prices(const kd_rows *rows, int width, int real, uint64_t stream) {
    if (real) {
        uint8_t *out = rows->out;
        uint64_t index = rows->first;
        for (int64_t i = 0; i < rows->count; i++, out += rows->stride, index += rows->step) {
            const double value = (double)(int64_t)kd_price(kd_draw(stream, index));
            memcpy(out, &value, 8);
        }
        return;
    }
    KD_FILL_WIDTH(uint64_t value = kd_price(kd_draw(stream, index)))
}

/* `letters` random letters of a to p, then zero bytes up to `width`. */
static void kd_put_letters(const kd_rows *rows, int64_t width, int64_t letters, uint64_t stream) {
    uint8_t *out = rows->out;
    uint64_t index = rows->first;
    for (int64_t i = 0; i < rows->count; i++, out += rows->stride, index += rows->step) {
        uint64_t x = kd_draw(stream, index);
        int64_t at = 0;
        for (; at + 16 <= letters; at += 16) {
            const uint64_t low = (x & 0x0f0f0f0f0f0f0f0fu) + 0x6161616161616161u;
            const uint64_t high = (x >> 4 & 0x0f0f0f0f0f0f0f0fu) + 0x6161616161616161u;
            memcpy(out + at, &low, 8);
            memcpy(out + at + 8, &high, 8);
            x = kd_again(x, 1);
        }
        for (; at < letters; at++, x >>= 4)
            out[at] = (uint8_t)('a' + (x & 15));
        memset(out + at, 0, (size_t)(width - at));
    }
}

/* One of `count` texts of `width` bytes each, zero bytes included. */
static void kd_put_choice(const kd_rows *rows, int64_t width, uint64_t stream, const uint8_t *texts,
                          uint64_t count) {
    uint8_t *out = rows->out;
    uint64_t index = rows->first;
    for (int64_t i = 0; i < rows->count; i++, out += rows->stride, index += rows->step)
        memcpy(out, texts + kd_below(kd_draw(stream, index), count) * (uint64_t)width,
               (size_t)width);
}

/* Event times: `start` + number * `step` microseconds, where number is that of the record's event,
 * less up to `disorder`, and for a share of the records less `late` besides; in units of `unit`
 * microseconds. `late_share` is the share of 2^32. */
typedef struct {
    uint64_t start, step, disorder, late, late_share, unit;
} kd_times;

static inline uint64_t kd_time_of(const kd_times *times, uint64_t stream, uint64_t index,
                                  uint64_t number) {
    uint64_t at = times->start + number * times->step;
    if (times->disorder | times->late_share) {
        const uint64_t x = kd_draw(stream, index);
        at -= kd_below(x, times->disorder + 1);
        if ((kd_again(x, 1) >> 32) < times->late_share)
            at -= times->late;
    }
    return times->unit == 1000 ? at / 1000 : at / times->unit;
}

/* Events of a mixed stream: each epoch of `total` events has `own` of this stream, from the
 * `before`-th on. */
typedef struct {
    uint64_t own, before, total;
} kd_mixture;

/* Where a stream is: record `within` of its own in an epoch.  It goes on without a division. */
typedef struct {
    uint64_t epoch, within, epochs, more;
} kd_walk;

static inline kd_walk kd_walk_from(const kd_mixture *mixture, const kd_rows *rows) {
    return (kd_walk){rows->first / mixture->own, rows->first % mixture->own,
                     rows->step / mixture->own, rows->step % mixture->own};
}

static inline void kd_walk_on(kd_walk *walk, const kd_mixture *mixture) {
    walk->epoch += walk->epochs;
    walk->within += walk->more;
    if (walk->within >= mixture->own) {
        walk->within -= mixture->own;
        walk->epoch++;
    }
}

static void kd_put_times(const kd_rows *rows, int width, uint64_t stream, const kd_times *times,
                         const kd_mixture *mixture) {
    if (mixture->total == mixture->own) {
        KD_FILL_WIDTH(uint64_t value = kd_time_of(times, stream, index, index))
        return;
    }
    kd_walk walk = kd_walk_from(mixture, rows);
    KD_FILL_WIDTH(
        uint64_t event = walk.epoch * mixture->total + mixture->before + walk.within;
        uint64_t value = kd_time_of(times, stream, index, event);
        kd_walk_on(&walk, mixture))
}

/* Ids of another stream that a record of this one refers to.  When event number e happens, the
 * other stream has made `made` = (e / total) * other + (how many of this epoch) ids, from `base`
 * on.  With a probability of 1 - 1/hot a hot one is chosen: the one at `hot_at` of the batch of
 * 100 that was begun last.  Else one of the last `active` ids or of `lead` that are yet to come. */
typedef struct {
    kd_mixture mixture; /* of the records that refer */
    uint64_t other, other_before;
    uint64_t base, hot, hot_at, active, lead;
} kd_reference;

static inline uint64_t kd_made(const kd_reference *r, const kd_walk *walk) {
    const uint64_t within = r->mixture.before + walk->within;
    uint64_t here = 0;
    if (within >= r->other_before)
        here = within - r->other_before + 1 > r->other ? r->other : within - r->other_before + 1;
    return walk->epoch * r->other + here;
}

static void kd_put_references(const kd_rows *rows, int width, uint64_t stream,
                              const kd_reference *r) {
    kd_walk walk = kd_walk_from(&r->mixture, rows);
    KD_FILL_WIDTH(
        uint64_t x = kd_draw(stream, index);
        const uint64_t made = kd_made(r, &walk);
        const uint64_t active = made < r->active ? made : r->active;
        const uint64_t hot = r->base + (made - 1) / 100 * 100 + r->hot_at;
        const uint64_t other = r->base + made - active + kd_below(kd_again(x, 1), active + r->lead);
        /* Both are made: a branch that no processor can foresee would cost more. */
        const uint64_t is_hot = 0 - (uint64_t)(kd_below(x, r->hot) > 0);
        const uint64_t value = other ^ ((other ^ hot) & is_hot);
        kd_walk_on(&walk, &r->mixture))
}

#endif
