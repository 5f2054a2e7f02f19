/* Rows of float32 or bfloat16: loads, stores, rounding where transformers rounds, and the RMS norm.
 *
 * Included by rows.c and decoder_layers.c. `kind` is what the numbers are, which says how they are
 * rounded; `memory` is what they are kept as.
 */
#ifndef FOVEAL_ROWS_H
#define FOVEAL_ROWS_H

#include <math.h>
#include <stdint.h>

#include "lanes.h"

/* Sums in double, and the rest rounded as transformers rounds it: equal
 * inputs nearly always give equal outputs. */
typedef double dvec __attribute__((vector_size(8 * LANES)));

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

INLINE vec rounded(const int dtype, vec x) { return dtype == FLOAT32 ? x : nearest(x); }

INLINE void put_one(const int dtype, void *to, int64_t i, float x) {
    if (dtype == FLOAT32) ((float *)to)[i] = x;
    else ((uint16_t *)to)[i] = to_bf16(x);
}

INLINE void put_some(const int dtype, void *to, int64_t i, vec x) {
    if (dtype == FLOAT32) {
        store((float *)to + i, x);
    } else {
        const hvec half = to_halves(x);
        memcpy((uint16_t *)to + i, &half, sizeof half);
    }
}

/* `count` numbers, rounded. */
INLINE void put_rounded(const int kind, const int memory, const float *from, int count, void *to,
                        int64_t at) {
    int c = 0;
    const int first = memory == FLOAT32 ? kind : FLOAT32; /* else it is rounded where it is put */
    for (; c + LANES <= count; c += LANES)
        put_some(memory, to, at + c, rounded(first, load(from + c)));
    for (; c < count; c++) put_one(memory, to, at + c, rounded_one(first, from[c]));
}

/* weight: (width), of `kind`. offset: added to it. rounds_first: the normed row is rounded before the
 * weight is multiplied. */
typedef struct {
    const void *weight;
    float eps, offset;
    int32_t rounds_first;
} RmsNorm;

INLINE void norm_row(const int kind, const int memory, const RmsNorm *norm, int64_t width,
                     const void *x, void *out, int64_t start) {
    const int64_t whole = width - width % LANES;
    const int first = norm->rounds_first ? kind : FLOAT32;
    dvec squares = {0};
    double sum = 0;
    for (int64_t i = 0; i < whole; i += LANES) {
        const dvec one = __builtin_convertvector(some_at(memory, x, start + i), dvec);
        squares += one * one;
    }
    for (int i = 0; i < LANES; i++) sum += squares[i];
    for (int64_t i = whole; i < width; i++) {
        const double one = one_at(memory, x, start + i);
        sum += one * one;
    }
    const float scale = 1.0f / sqrtf((float)(sum / (double)width) + norm->eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        const vec normed = rounded(first, some_at(memory, x, start + i) * splat(scale));
        const vec weight = some_at(kind, norm->weight, i) + splat(norm->offset);
        put_some(memory, out, start + i, rounded(kind, normed * weight));
    }
    for (int64_t i = whole; i < width; i++) {
        const float normed = rounded_one(first, one_at(memory, x, start + i) * scale);
        const float weight = one_at(kind, norm->weight, i) + norm->offset;
        put_one(memory, out, start + i, rounded_one(kind, normed * weight));
    }
}

#endif
