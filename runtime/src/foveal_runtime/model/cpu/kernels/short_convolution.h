/* The short convolution in front of a layer's recurrence, in units that threads take: channels by
 * themselves, all rows of a segment, from the last inputs that its state has.
 *
 * Included by delta_rule.h and mamba.h. Loads float32 or bfloat16, computes in float32, and rounds
 * where transformers rounds.
 */
#ifndef FOVEAL_SHORT_CONVOLUTION_H
#define FOVEAL_SHORT_CONVOLUTION_H

#include "rows.h"

#define MAX_TAPS 8
#define CHANNELS 128 /* convolved by one task */

/* T: rows of all segments; C: channels, a multiple of LANES. */
typedef struct {
    int32_t dtype, taps;
    int64_t width;           /* C */
    const int64_t *segments; /* (segments, 3): first row, rows, slot */
    void *mixed;             /* (T, C), convolved in place */
    void *past;              /* (slots, C, taps): the last inputs, in place */
    const void *weight;      /* (C, taps) */
    const void *bias;        /* (C), or NULL */
} Convolution;

/* Numbers of LANES channels, `taps` of each, to one vector for each tap. */
INLINE void by_tap(const int kind, const int taps, const void *from, int64_t at, vec *to) {
    float all[LANES * MAX_TAPS], one[LANES];
    for (int i = 0; i < LANES * taps; i += LANES) store(all + i, some_at(kind, from, at + i));
    for (int k = 0; k < taps; k++) {
        for (int i = 0; i < LANES; i++) one[i] = all[i * taps + k];
        to[k] = load(one);
    }
}

/* The other way round. */
INLINE void by_channel(const int kind, const int taps, const vec *from, void *to, int64_t at) {
    float all[LANES * MAX_TAPS], one[LANES];
    for (int k = 0; k < taps; k++) {
        store(one, from[k]);
        for (int i = 0; i < LANES; i++) all[i * taps + k] = one[i];
    }
    for (int i = 0; i < LANES * taps; i += LANES) put_some(kind, to, at + i, load(all + i));
}

INLINE vec silu(const int kind, vec x) { return times_sigmoid(kind, x, x); }

/* LANES channels from `channel` on, all rows of a segment. */
INLINE void convolve(const int kind, const int taps, const Convolution *job,
                     const int64_t *segment, int64_t channel) {
    const int64_t width = job->width, start = (segment[2] * width + channel) * taps;
    const vec first = job->bias ? some_at(kind, job->bias, channel) : splat(0.0f);
    vec seen[MAX_TAPS], factor[MAX_TAPS];
    by_tap(kind, taps, job->past, start, seen);
    by_tap(kind, taps, job->weight, channel * taps, factor);
    for (int64_t row = segment[0]; row < segment[0] + segment[1]; row++) {
        vec sum = first;
        for (int k = 0; k + 1 < taps; k++) {
            seen[k] = seen[k + 1];
            sum += seen[k] * factor[k];
        }
        seen[taps - 1] = some_at(kind, job->mixed, row * width + channel);
        sum += seen[taps - 1] * factor[taps - 1];
        put_some(kind, job->mixed, row * width + channel, silu(kind, rounded(kind, sum)));
    }
    by_channel(kind, taps, seen, job->past, start);
}

static int64_t num_blocks(const Convolution *job) { return (job->width + CHANNELS - 1) / CHANNELS; }

INLINE void convolve_some(const int kind, const Convolution *job, int64_t task) {
    const int64_t blocks = num_blocks(job), first = task % blocks * CHANNELS;
    const int64_t *segment = job->segments + task / blocks * 3;
    for (int64_t c = first; c < first + CHANNELS && c < job->width; c += LANES) {
        if (job->taps == 4) convolve(kind, 4, job, segment, c);
        else convolve(kind, job->taps, job, segment, c);
    }
}

/* Task of as many as there are segments times num_blocks. */
static void convolve_task(const Convolution *job, int64_t task) {
    if (job->dtype == FLOAT32) convolve_some(FLOAT32, job, task);
    else convolve_some(BFLOAT16, job, task);
}

#endif
