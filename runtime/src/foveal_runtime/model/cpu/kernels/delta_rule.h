/* What stands between the linear layers of a gated delta net (Qwen3.5, Qwen3-Next), in units that
 * threads take: a short convolution, the gated delta rule, and a norm with a gate.
 *
 * Included by recurrent.c and decoder_layers.c. States are advanced where the pool keeps them, one
 * token after another, columns of a head by themselves: a token's numbers are the same bits wherever
 * a chunk ends, whatever else is in the batch and however many threads run. A chunked form would
 * save memory traffic only, of which little is left: a strip of a state stays in the first cache
 * while a whole chunk goes through it.
 * Loads float32 or bfloat16, computes in float32, and rounds where transformers rounds.
 */
#ifndef FOVEAL_DELTA_RULE_H
#define FOVEAL_DELTA_RULE_H

#include "short_convolution.h"

#define MAX_DIM 256
#define STRIP (LANES == 16 ? 4 : 2) /* vectors of a state's row that are advanced at once */

/* T: rows of all segments; C: channels, those of queries, keys, values. */
typedef struct {
    int32_t dtype, num_threads, num_segments, num_key_heads, num_value_heads, key_dim, value_dim;
    int32_t taps;
    int64_t num_rows;
    const int64_t *segments;  /* (num_segments, 3): first row, rows, slot */
    void *mixed;              /* (T, C), convolved in place */
    const void *gate;         /* (T, value heads, value_dim) */
    const void *rate, *step;  /* (T, value heads): what beta and the decay are made of */
    void *out;                /* (T, value heads, value_dim) */
    void *past;               /* (slots, C, taps): the last inputs of the convolution, in place */
    float *state;             /* (slots, value heads, key_dim, value_dim), in place */
    const void *conv_weight;  /* (C, taps) */
    const float *decay;       /* (value heads): of one unit of a step, negative */
    const float *shift;       /* (value heads): added to a step */
    const void *norm_weight;  /* (value_dim) */
    float eps;
} DeltaJob;

static int64_t num_channels(const DeltaJob *job) {
    return 2 * (int64_t)job->num_key_heads * job->key_dim +
           (int64_t)job->num_value_heads * job->value_dim;
}

/* A head's query or key of one row, of length 1 times `scale`. */
INLINE void take_unit(const int kind, const DeltaJob *job, int64_t at, float scale, float *to) {
    vec squares = splat(0.0f);
    float sum = 1e-6f;
    for (int i = 0; i < job->key_dim; i += LANES) {
        const vec one = some_at(kind, job->mixed, at + i);
        squares += one * one;
        store(to + i, one);
    }
    for (int i = 0; i < LANES; i++) sum += squares[i];
    const vec factor = splat(scale / sqrtf(sum));
    for (int i = 0; i < job->key_dim; i += LANES) store(to + i, load(to + i) * factor);
}

/* One token's update of `columns` vectors of a head's state: the state decays, `added` is written
 * under the key, and the query reads `read`; where there is a next token, what its key reads is
 * `seen`. */
INLINE void update(const int columns, const int has_next, const DeltaJob *job, float *state,
                   float decay, const float *query, const float *key, const float *next,
                   const vec *added, vec *read, vec *seen) {
    const vec kept = splat(decay);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) read[c] = seen[c] = splat(0.0f);
    for (int i = 0; i < job->key_dim; i++, state += job->value_dim) {
        const vec one = splat(key[i]), asked = splat(query[i]);
        const vec ahead = has_next ? splat(next[i]) : one;
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const vec now = load(state + c * LANES) * kept + one * added[c];
            store(state + c * LANES, now);
            read[c] += asked * now;
            if (has_next) seen[c] += ahead * now;
        }
    }
}

/* A segment through `columns` vectors of a head's state. */
INLINE void advance(const int kind, const int columns, const DeltaJob *job, const int64_t *segment,
                    int head, int column) {
    const int heads = job->num_value_heads, dim = job->key_dim;
    const int64_t width = num_channels(job), keys = (int64_t)job->num_key_heads * dim;
    const int64_t own = (int64_t)(head / (heads / job->num_key_heads)) * dim;
    const int64_t values = 2 * keys + (int64_t)head * job->value_dim + column;
    const float scale = 1.0f / sqrtf((float)dim);
    float *state = job->state + (segment[2] * heads + head) * dim * job->value_dim + column;
    float query[MAX_DIM], both[2][MAX_DIM];
    vec seen[STRIP], added[STRIP], read[STRIP];
    int64_t row = segment[0], left = segment[1];
    take_unit(kind, job, row * width + keys + own, 1.0f, both[row & 1]);
    for (int c = 0; c < columns; c++) seen[c] = splat(0.0f);
    for (int i = 0; i < dim; i++)
        for (int c = 0; c < columns; c++)
            seen[c] += splat(both[row & 1][i]) * load(state + i * job->value_dim + c * LANES);
    for (; left > 0; row++, left--) {
        const float *key = both[row & 1];
        float *next = both[~row & 1];
        const float step = one_at(kind, job->step, row * heads + head) + job->shift[head];
        const float decay = expf(job->decay[head] * (step > 20.0f ? step : log1pf(expf(step))));
        const float rate = rounded_one(
            kind, 1.0f / (1.0f + expf(-one_at(kind, job->rate, row * heads + head))));
        for (int c = 0; c < columns; c++) {
            const vec value = some_at(kind, job->mixed, row * width + values + c * LANES);
            added[c] = (value - splat(decay) * seen[c]) * splat(rate);
        }
        take_unit(kind, job, row * width + own, scale, query);
        if (left > 1) {
            take_unit(kind, job, (row + 1) * width + keys + own, 1.0f, next);
            update(columns, 1, job, state, decay, query, key, next, added, read, seen);
        } else {
            update(columns, 0, job, state, decay, query, key, next, added, read, seen);
        }
        for (int c = 0; c < columns; c++)
            put_some(kind, job->out, (row * heads + head) * job->value_dim + column + c * LANES,
                     read[c]);
    }
}

/* A head's output of one row: its norm, times the gate's SiLU. */
INLINE void gate_row(const int kind, const DeltaJob *job, int64_t at) {
    vec squares = splat(0.0f);
    float sum = 0.0f;
    for (int i = 0; i < job->value_dim; i += LANES) {
        const vec one = some_at(kind, job->out, at + i);
        squares += one * one;
    }
    for (int i = 0; i < LANES; i++) sum += squares[i];
    const vec scale = splat(1.0f / sqrtf(sum / (float)job->value_dim + job->eps));
    for (int i = 0; i < job->value_dim; i += LANES) {
        const vec normed = rounded(kind, some_at(kind, job->out, at + i) * scale);
        const vec one = rounded(kind, some_at(kind, job->norm_weight, i) * normed);
        put_some(kind, job->out, at + i, one * silu(kind, some_at(kind, job->gate, at + i)));
    }
}

INLINE void run_head(const int kind, const DeltaJob *job, int64_t task) {
    const int64_t *segment = job->segments + task / job->num_value_heads * 3;
    const int head = (int)(task % job->num_value_heads);
    int column = 0;
    for (; column + STRIP * LANES <= job->value_dim; column += STRIP * LANES)
        advance(kind, STRIP, job, segment, head, column);
    for (; column < job->value_dim; column += LANES) advance(kind, 1, job, segment, head, column);
    for (int64_t row = segment[0]; row < segment[0] + segment[1]; row++)
        gate_row(kind, job, (row * job->num_value_heads + head) * job->value_dim);
}

/* The first of the two rounds. */
static Convolution convolution_of(const DeltaJob *job) {
    return (Convolution){job->dtype, job->taps, num_channels(job), job->segments, job->mixed,
                         job->past, job->conv_weight, NULL};
}

/* Second round: task of num_segments * num_value_heads. */
static void head_task(const DeltaJob *job, int64_t task) {
    if (job->dtype == FLOAT32) run_head(FLOAT32, job, task);
    else run_head(BFLOAT16, job, task);
}

static int is_delta_supported(const DeltaJob *job) {
    return !(job->key_dim % LANES || job->value_dim % LANES || job->key_dim > MAX_DIM ||
             job->taps < 1 || job->taps > MAX_TAPS || job->num_value_heads % job->num_key_heads);
}

#endif
