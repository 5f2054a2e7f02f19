/* What stands between the matrix products of a layer, in one pass over memory each: RMS norm and
 * the activation x * sigmoid(1.702 x).
 *
 * Called by model/fusing.py through ctypes; compiled by runtime/setup.py once per instruction set.
 * Loads float32 or bfloat16 and computes in float32; in bfloat16 intermediate results are rounded
 * where transformers rounds them. A row's result does not depend on the others or on the threads.
 */
#include <math.h>
#include <stdint.h>

#include "lanes.h"

/* Sums in double, and the rest rounded as transformers rounds it: equal
 * inputs nearly always give equal outputs. */
typedef double dvec __attribute__((vector_size(8 * LANES)));

#define ALONE 65536 /* numbers that one thread does before another would be awake */

enum { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE float one_at(const int dtype, const void *from, int64_t i) {
    if (dtype == FLOAT32) return ((const float *)from)[i];
    const uint32_t wide = (uint32_t)((const uint16_t *)from)[i] << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

INLINE vec some_at(const int dtype, const void *from, int64_t i) {
    return dtype == FLOAT32 ? load((const float *)from + i) : load_bf16((const uint16_t *)from + i);
}

INLINE float rounded_one(const int dtype, float x) {
    if (dtype == FLOAT32) return x;
    const uint16_t half = to_bf16(x);
    return one_at(BFLOAT16, &half, 0);
}

/* Upper halves of the nearest bfloat16 numbers; NaN stays NaN. */
INLINE uvec nearest(vec x) {
    const uvec u = (uvec)x;
    const uvec near = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
    return (uvec)pick(x == x, (vec)near, (vec)(u | 0x400000u));
}

INLINE vec rounded(const int dtype, vec x) { return dtype == FLOAT32 ? x : (vec)nearest(x); }

INLINE void put_one(const int dtype, void *to, int64_t i, float x) {
    if (dtype == FLOAT32) ((float *)to)[i] = x;
    else ((uint16_t *)to)[i] = to_bf16(x);
}

INLINE void put_some(const int dtype, void *to, int64_t i, vec x) {
    if (dtype == FLOAT32) {
        store((float *)to + i, x);
    } else {
        const hvec half = __builtin_convertvector(nearest(x) >> 16, hvec);
        memcpy((uint16_t *)to + i, &half, sizeof half);
    }
}

typedef struct {
    int32_t dtype, num_threads;
    int64_t num_rows, width;
    const void *x, *weight; /* (num_rows, width) and (width), contiguous */
    void *out;              /* (num_rows, width), contiguous */
    float eps, offset;      /* offset: added to the weight */
    int32_t rounds_first;   /* rounds the normed row before the weight is multiplied */
} NormJob;

INLINE void norm_row(const int dtype, const NormJob *job, int64_t row) {
    const int64_t width = job->width, start = row * width, whole = width - width % LANES;
    const int first = job->rounds_first ? dtype : FLOAT32;
    dvec squares = {0};
    double sum = 0;
    for (int64_t i = 0; i < whole; i += LANES) {
        const dvec x = __builtin_convertvector(some_at(dtype, job->x, start + i), dvec);
        squares += x * x;
    }
    for (int i = 0; i < LANES; i++) sum += squares[i];
    for (int64_t i = whole; i < width; i++) {
        const double x = one_at(dtype, job->x, start + i);
        sum += x * x;
    }
    const float scale = 1.0f / sqrtf((float)(sum / (double)width) + job->eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        const vec normed = rounded(first, some_at(dtype, job->x, start + i) * splat(scale));
        const vec weight = some_at(dtype, job->weight, i) + splat(job->offset);
        put_some(dtype, job->out, start + i, normed * weight);
    }
    for (int64_t i = whole; i < width; i++) {
        const float normed = rounded_one(first, one_at(dtype, job->x, start + i) * scale);
        put_one(dtype, job->out, start + i,
                normed * (one_at(dtype, job->weight, i) + job->offset));
    }
}

void foveal_rms_norm(const NormJob *job) {
    const int threads = job->num_rows * job->width > ALONE ? job->num_threads : 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < job->num_rows; row++) {
        if (job->dtype == FLOAT32) norm_row(FLOAT32, job, row);
        else norm_row(BFLOAT16, job, row);
    }
}

INLINE void gelu_span(const int dtype, void *x, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        const vec one = some_at(dtype, x, i);
        const vec power = rounded(dtype, splat(1.702f) * one);
        const vec share = rounded(dtype, splat(1.0f) / (splat(1.0f) + vexp(-power)));
        put_some(dtype, x, i, one * share);
    }
    for (; i < end; i++) {
        const float one = one_at(dtype, x, i), power = rounded_one(dtype, 1.702f * one);
        put_one(dtype, x, i, one * rounded_one(dtype, 1.0f / (1.0f + expf(-power))));
    }
}

/* x <- x * sigmoid(1.702 x), in place. */
void foveal_quick_gelu(int32_t dtype, int32_t num_threads, int64_t count, void *x) {
    const int64_t span = 4096;
    const int threads = count > ALONE ? num_threads : 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t begin = 0; begin < count; begin += span) {
        const int64_t end = begin + span < count ? begin + span : count;
        if (dtype == FLOAT32) gelu_span(FLOAT32, x, begin, end);
        else gelu_span(BFLOAT16, x, begin, end);
    }
}
