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

/* Uniform in [0, 1). */
static inline double kd_unit(uint64_t x) { return (double)(x >> 11) * 0x1p-53; }

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

/* Zipf by rejection-inversion (Hoermann and Derflinger, 1996): P(key = k) is proportional to
 * (k + 1)^-z over [0, range), for any z > 0. */
typedef struct {
    double z, low, high, cut;
    uint64_t range;
} kd_zipf;

static inline double kd_zipf_integral(double z, double x) {
    const double power = (1 - z) * log(x);
    return fabs(power) < 1e-9 ? log(x) : expm1(power) / (1 - z);
}

static inline double kd_zipf_inverse(double z, double y) {
    const double t = y * (1 - z);
    return exp(fabs(t) < 1e-9 ? y : log1p(t < -1 ? -1 : t) / (1 - z));
}

static void kd_zipf_prepare(kd_zipf *zipf, double z, uint64_t range) {
    zipf->z = z;
    zipf->range = range;
    zipf->low = kd_zipf_integral(z, 1.5) - 1;
    zipf->high = kd_zipf_integral(z, (double)range + 0.5);
    zipf->cut = 2 - kd_zipf_inverse(z, kd_zipf_integral(z, 2.5) - pow(2, -z));
}

static inline uint64_t kd_zipf_of(const kd_zipf *zipf, uint64_t x) {
    for (uint64_t draw = 0;; draw++) {
        const double u = zipf->high + kd_unit(kd_again(x, draw)) * (zipf->low - zipf->high);
        const double at = kd_zipf_inverse(zipf->z, u);
        double k = floor(at + 0.5);
        k = k < 1 ? 1 : k > (double)zipf->range ? (double)zipf->range : k;
        if (k - at <= zipf->cut || u >= kd_zipf_integral(zipf->z, k + 0.5) - pow(k, -zipf->z))
            return (uint64_t)k - 1;
    }
}

static void kd_put_zipf(const kd_rows *rows, int width, uint64_t stream, uint64_t base,
                        uint64_t range, double z) {
    kd_zipf zipf;
    kd_zipf_prepare(&zipf, z, range);
    KD_FILL_WIDTH(uint64_t value = base + kd_zipf_of(&zipf, kd_draw(stream, index)))
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

/* NEXMark's prices: a whole number of cents, 100 to 10^8, uniform in its logarithm.  As a whole
 * number of `width` bytes, or as float64 if `real`. */
static void kd_put_prices(const kd_rows *rows, int width, int real, uint64_t stream) {
    const double decades = 6 * 2.302585092994046;
    if (real) {
        uint8_t *out = rows->out;
        uint64_t index = rows->first;
        for (int64_t i = 0; i < rows->count; i++, out += rows->stride, index += rows->step) {
            const double value = floor(100 * exp(kd_unit(kd_draw(stream, index)) * decades) + 0.5);
            memcpy(out, &value, 8);
        }
        return;
    }
    KD_FILL_WIDTH(
        uint64_t value =
            (uint64_t)floor(100 * exp(kd_unit(kd_draw(stream, index)) * decades) + 0.5))
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
    return at / times->unit;
}

/* Events of a mixed stream: each epoch of `total` events has `own` of this stream, from the
 * `before`-th on. */
typedef struct {
    uint64_t own, before, total;
} kd_mixture;

static inline uint64_t kd_event(const kd_mixture *mixture, uint64_t index) {
    return index / mixture->own * mixture->total + mixture->before + index % mixture->own;
}

static void kd_put_times(const kd_rows *rows, int width, uint64_t stream, const kd_times *times,
                         const kd_mixture *mixture) {
    if (mixture->total == mixture->own) {
        KD_FILL_WIDTH(uint64_t value = kd_time_of(times, stream, index, index))
        return;
    }
    KD_FILL_WIDTH(uint64_t value = kd_time_of(times, stream, index, kd_event(mixture, index)))
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

static inline uint64_t kd_made(const kd_reference *r, uint64_t event) {
    const uint64_t within = event % r->mixture.total;
    uint64_t here = 0;
    if (within >= r->other_before)
        here = within - r->other_before + 1 > r->other ? r->other : within - r->other_before + 1;
    return event / r->mixture.total * r->other + here;
}

static void kd_put_references(const kd_rows *rows, int width, uint64_t stream,
                              const kd_reference *r) {
    KD_FILL_WIDTH(
        uint64_t x = kd_draw(stream, index);
        uint64_t made = kd_made(r, kd_event(&r->mixture, index));
        uint64_t value;
        if (r->hot > 1 && kd_below(x, r->hot) > 0) value =
            r->base + (made - 1) / 100 * 100 + r->hot_at;
        else {
            const uint64_t active = made < r->active ? made : r->active;
            value = r->base + made - active + kd_below(kd_again(x, 1), active + r->lead);
        })
}

#endif
