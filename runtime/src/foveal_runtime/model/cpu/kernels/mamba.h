/* What stands between the linear layers of a Mamba-2 mixer (Nemotron-H, Granite 4, Falcon-H1,
 * Bamba), in units that threads take: a short convolution, the recurrence, a gate and a norm.
 *
 * Included by recurrent.c. States are advanced where the pool keeps them, one token after another,
 * rows of a head's state by themselves: a token's numbers are the same bits wherever a chunk ends,
 * whatever else is in the batch and however many threads run.
 * Loads float32 or bfloat16, computes in float32, and rounds where transformers rounds.
 */
#ifndef FOVEAL_MAMBA_H
#define FOVEAL_MAMBA_H

#include "short_convolution.h"

#define MAX_STATE 256

/* T: rows of all segments; C: channels, those of values, keys (B), queries (C in the paper). */
typedef struct {
    int32_t dtype, num_threads, num_segments, num_groups, num_heads, head_dim, state_dim, taps;
    int64_t num_rows;
    const int64_t *segments; /* (num_segments, 3): first row, rows, slot */
    void *mixed;             /* (T, C), convolved in place */
    const void *gate;        /* (T, heads, head_dim) */
    const void *step;        /* (T, heads) */
    void *out;               /* (T, heads, head_dim) */
    void *past;              /* (slots, C, taps): the last inputs of the convolution, in place */
    float *state;            /* (slots, heads, head_dim, state_dim), in place */
    const void *conv_weight; /* (C, taps) */
    const void *conv_bias;   /* (C), or NULL */
    const float *decay;      /* (heads): of one unit of a step, negative */
    const float *shift;      /* (heads): added to a step */
    const float *skip;       /* (heads): of a value, added to what is read (D in the paper) */
    RmsNorm norm;            /* of `norm_size` numbers each, or without a weight: none */
    int32_t norm_size;
    int32_t gates_last; /* the norm comes first, then the gate */
} MambaJob;

static Convolution convolution_of_mamba(const MambaJob *job) {
    const int64_t width = (int64_t)job->num_heads * job->head_dim +
                          2 * (int64_t)job->num_groups * job->state_dim;
    return (Convolution){job->dtype, job->taps, width, job->segments, job->mixed,
                         job->past, job->conv_weight, job->conv_bias};
}

/* A segment through LANES rows of a head's state. */
INLINE void advance_rows(const int kind, const MambaJob *job, const int64_t *segment, int head,
                         int first) {
    const int heads = job->num_heads, dim = job->state_dim;
    const int64_t values = (int64_t)heads * job->head_dim;
    const int64_t keys = (int64_t)job->num_groups * dim, width = values + 2 * keys;
    const int64_t own = values + (int64_t)(head / (heads / job->num_groups)) * dim;
    float *state = job->state + ((segment[2] * heads + head) * job->head_dim + first) * dim;
    float key[MAX_STATE], query[MAX_STATE], written[LANES];
    vec read[LANES];
    for (int64_t row = segment[0]; row < segment[0] + segment[1]; row++) {
        const float raw = rounded_one(
            kind, one_at(kind, job->step, row * heads + head) + job->shift[head]);
        const float step = rounded_one(kind, raw > 20.0f ? raw : log1pf(expf(raw)));
        const vec kept = splat(expf(job->decay[head] * step));
        const int64_t at = (int64_t)head * job->head_dim + first;
        const vec value = some_at(kind, job->mixed, row * width + at);
        store(written, value * splat(step));
        for (int i = 0; i < dim; i += LANES) {
            store(key + i, some_at(kind, job->mixed, row * width + own + i));
            store(query + i, some_at(kind, job->mixed, row * width + own + keys + i));
        }
        UNROLL for (int p = 0; p < LANES; p++) read[p] = splat(0.0f);
        for (int i = 0; i < dim; i += LANES) {
            const vec one = load(key + i), asked = load(query + i);
            UNROLL for (int p = 0; p < LANES; p++) {
                float *place = state + p * dim + i;
                const vec now = load(place) * kept + one * splat(written[p]);
                store(place, now);
                read[p] += asked * now;
            }
        }
        put_some(kind, job->out, row * values + at,
                 sums_of(read) + value * splat(job->skip[head]));
    }
}

INLINE void run_mamba_head(const int kind, const MambaJob *job, int64_t task) {
    const int64_t *segment = job->segments + task / job->num_heads * 3;
    for (int first = 0; first < job->head_dim; first += LANES)
        advance_rows(kind, job, segment, (int)(task % job->num_heads), first);
}

/* Second round, behind the convolution: task of num_segments * num_heads. */
static void mamba_task(const MambaJob *job, int64_t task) {
    if (job->dtype == FLOAT32) run_mamba_head(FLOAT32, job, task);
    else run_mamba_head(BFLOAT16, job, task);
}

/* Numbers from `at` on, times the gate's SiLU if the norm is behind it. */
INLINE vec gated(const int kind, const MambaJob *job, int64_t at) {
    const vec one = some_at(kind, job->out, at);
    return job->gates_last ? one : one * silu(FLOAT32, some_at(kind, job->gate, at));
}

/* Gate and norm of `norm_size` numbers of a row, or of the whole row where there is no norm. */
INLINE void gate_and_norm(const int kind, const MambaJob *job, int64_t task) {
    const int64_t size = job->norm_size, start = task * size;
    vec squares = splat(0.0f);
    float sum = 0.0f;
    if (!job->norm.weight) {
        for (int64_t i = start; i < start + size; i += LANES) {
            const vec open = rounded(kind, silu(kind, some_at(kind, job->gate, i)));
            put_some(kind, job->out, i, some_at(kind, job->out, i) * open);
        }
        return;
    }
    for (int64_t i = start; i < start + size; i += LANES) {
        const vec one = gated(kind, job, i);
        squares += one * one;
    }
    for (int i = 0; i < LANES; i++) sum += squares[i];
    const vec scale = splat(1.0f / sqrtf(sum / (float)size + job->norm.eps));
    const int64_t row = (int64_t)job->num_heads * job->head_dim;
    for (int64_t i = start; i < start + size; i += LANES) {
        const int first = job->norm.rounds_first ? kind : FLOAT32;
        const vec weight = some_at(kind, job->norm.weight, i % row);
        const vec normed = rounded(first, gated(kind, job, i) * scale) * weight;
        put_some(kind, job->out, i,
                 job->gates_last ? normed * silu(FLOAT32, some_at(kind, job->gate, i)) : normed);
    }
}

static int64_t num_norms(const MambaJob *job) {
    return job->num_rows * job->num_heads * job->head_dim / job->norm_size;
}

/* Third round: task of num_norms. */
static void norm_task(const MambaJob *job, int64_t task) {
    if (job->dtype == FLOAT32) gate_and_norm(FLOAT32, job, task);
    else gate_and_norm(BFLOAT16, job, task);
}

static int is_mamba_supported(const MambaJob *job) {
    return !(job->state_dim % LANES || job->head_dim % LANES || job->state_dim > MAX_STATE ||
             job->taps < 1 || job->taps > MAX_TAPS || job->num_heads % job->num_groups ||
             job->norm_size % LANES || job->norm_size < 1 ||
             (int64_t)job->num_heads * job->head_dim % job->norm_size);
}

#endif
