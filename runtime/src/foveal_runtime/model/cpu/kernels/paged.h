/* Paged attention for tokens that are decoded: one query token (a "row") against its context.
 *
 * Included by paged_decode.c, which is one layer's attention, by decoder_layers.c, which is a whole
 * step, and by paged_prefill.c for the job's form: the first two cut the work with make_plan and
 * give its units to threads of their own. Plain C with GCC vector extensions: no torch headers, no
 * C++ runtime. Loads float32 or bfloat16, sums in float32, softmax online. Never allocates pool
 * memory and trusts every index: who may see what was decided by the engine.
 *
 * A task is (row, span of the context, range of kv heads). Spans have a fixed length, so the
 * result of a row is the same bits whatever else is in the batch and however many threads run.
 * Head dimensions are constants of the inner functions, which are inlined once for each.
 */
#ifndef FOVEAL_PAGED_H
#define FOVEAL_PAGED_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"

#define TILE 16              /* context tokens scored together */
#define PIECES (TILE / LANES)
#define SPAN 256             /* context tokens of one task; see the note on equal bits above */
#define MAX_DIM 256
#define MAX_STATE 8192       /* floats of accumulators (and of queries) in one task: 32 KiB each */

enum { DONE = 0, UNSUPPORTED = 1, NO_MEMORY = 2 };

typedef struct {
    int32_t dtype, head_dim, num_heads, num_kv_heads, block_size, num_rows, num_threads;
    int32_t window, chunk;         /* 0 = none */
    float scaling, softcap;        /* softcap 0 = none */
    const void *query;             /* (T, H, D), D contiguous */
    int64_t query_token_stride, query_head_stride; /* in elements */
    const void *keys, *values;     /* (rows, Hkv, D), contiguous */
    void *out;                     /* (T, H, D), contiguous */
    const int32_t *block_table;    /* (n, table_stride) */
    int64_t table_stride;
    const int32_t *row_token, *row_sequence, *row_length; /* (num_rows) */
    const float *sinks;            /* (H) or NULL */
} Job;

typedef struct {
    int32_t row, begin, end, slot; /* slot: index of the partial result, -1 = the only span */
} Task;

typedef struct {
    float peak, sum; /* running maximum and sum of exp(score - peak) */
} Norm;

typedef struct {
    float peak, shares[TILE]; /* as Norm, the sum still spread over lanes */
} State;

/* In what follows `dots` says that products are of pairs of bfloat16 numbers, of which a float's
 * memory holds one: `query` and keys are what the job has, values are pairs of two tokens'. */

/* score[t] = query . row[t] for the tile's tokens. */
INLINE void score_tile(const int dim, const int dots, const float *query, const float *const *row,
                       vec *score) {
    const int deep = dots ? dim / 2 : dim, first = dots ? 0 : LANES;
    for (int piece = 0; piece < PIECES; piece++) {
        vec part[LANES];
        for (int t = 0; t < LANES; t++) {
            const float *k = row[piece * LANES + t];
            vec sum = dots ? splat(0.0f) : load(query) * load(k);
            UNROLL
            for (int d = first; d < deep; d += LANES)
                if (!dots) sum += load(query + d) * load(k + d);
                else if (d + LANES <= deep) sum = add_dots(sum, load(query + d), load(k + d));
                else sum = add_dots(sum, load_first(query + d, LANES / 2),
                                        load_first(k + d, LANES / 2));
            part[t] = sum;
        }
        score[piece] = sums_of(part);
    }
}

/* acc += sum over t of weight[t] * row[t], COLUMNS vectors at a time. */
INLINE void add_tile(const int dim, const int dots, float *acc, const float *weight,
                     const float *const *row) {
    const int width = COLUMNS * LANES, depth = dots ? TILE / 2 : TILE;
#pragma GCC unroll 64
    for (int low = 0; low < dim; low += width) {
        const int high = low + width < dim ? low + width : dim;
        const int count = (high - low) / LANES;
        vec sum[COLUMNS];
#pragma GCC unroll 16
        for (int c = 0; c < count; c++) sum[c] = load(acc + low + c * LANES);
        UNROLL
        for (int t = 0; t < depth; t++) {
            vec w = dots ? splat_bits(weight + t) : splat(weight[t]);
#pragma GCC unroll 16
            for (int c = 0; c < count; c++) {
                const vec one = load(row[t] + low + c * LANES);
                sum[c] = dots ? add_dots(sum[c], w, one) : sum[c] + w * one;
            }
        }
#pragma GCC unroll 16
        for (int c = 0; c < count; c++) store(acc + low + c * LANES, sum[c]);
    }
}

/* One query head against one tile: scores, running softmax, weights for add_tile, rounded as
 * transformers rounds them if they are multiplied as bfloat16 numbers. */
INLINE void attend_tile(const int dim, const int dots, const Job *job, const float *query,
                        const float *const *keys, const float *const *values, int valid,
                        State *state, float *acc) {
    vec score[PIECES];
    float flat[TILE] __attribute__((aligned(64)));
    score_tile(dim, dots, query, keys, score);
    for (int i = 0; dots && i < PIECES; i++) score[i] *= splat(job->scaling);
    if (job->softcap > 0)
        for (int i = 0; i < PIECES; i++) score[i] = vcap(score[i], job->softcap);
    if (valid < TILE) {
        for (int i = 0; i < PIECES; i++) store(flat + i * LANES, score[i]);
        for (int t = valid; t < TILE; t++) flat[t] = -INFINITY;
        for (int i = 0; i < PIECES; i++) score[i] = load(flat + i * LANES);
    }
    vec high = score[0];
    for (int i = 1; i < PIECES; i++) high = pick(high > score[i], high, score[i]);
    if (ANY_ABOVE(high, state->peak)) {
        const float peak = reduce_max(high);
        const vec shrink = splat(expf(state->peak - peak));
        for (int i = 0; i < TILE; i += LANES)
            store(state->shares + i, load(state->shares + i) * shrink);
        for (int d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) * shrink);
        state->peak = peak;
    }
    for (int i = 0; i < PIECES; i++) {
        vec weight = vexp(score[i] - splat(state->peak));
        const hvec half = to_halves(weight);
        float *share = state->shares + i * LANES;
        if (dots) weight = (vec)(widened(half) << 16);
        store(share, load(share) + weight);
        if (dots) memcpy((uint16_t *)flat + i * LANES, &half, sizeof half);
        else store(flat + i * LANES, weight);
    }
    add_tile(dim, dots, acc, flat, values);
}

/* Where a tile's tokens are in the pool, in elements, plus `shift`. Past the end: the last token
 * again, which then gets weight 0. */
INLINE void find_tokens(const Job *job, const int32_t *table, int low, int end, int64_t stride,
                        int64_t shift, int64_t *offset) {
    for (int t = 0; t < TILE; t++) {
        const int at = low + t < end ? low + t : end - 1;
        const int64_t block = table[at / job->block_size];
        offset[t] = (block * job->block_size + at % job->block_size) * stride + shift;
    }
}

/* Rows of the tile for one kv head as float32: pointers into the pool, or widened into `wide`. */
INLINE void tile_rows(const int dim, const int dtype, const void *pool, const int64_t *offset,
                      float *wide, const float **row) {
    for (int t = 0; t < TILE; t++) {
        if (dtype == FLOAT32) {
            row[t] = (const float *)pool + offset[t];
        } else {
            const uint16_t *from = (const uint16_t *)pool + offset[t];
            float *to = wide + t * dim;
            UNROLL
            for (int d = 0; d < dim; d += LANES) store(to + d, load_bf16(from + d));
            row[t] = to;
        }
    }
}

/* Likewise, for products of pairs: keys as they are, values of each two tokens into `wide`. */
INLINE void tile_pairs(const int dim, const Job *job, const int64_t *offset, float *wide,
                       const float **keys, const float **values) {
    const uint16_t *from = job->values;
    for (int t = 0; t < TILE; t++)
        keys[t] = (const float *)((const uint16_t *)job->keys + offset[t]);
    for (int t = 0; t < TILE / 2; t++) {
        float *to = wide + t * dim;
#pragma GCC unroll 64
        for (int d = 0; d < dim; d += LANES)
            store(to + d, load_pairs(from + offset[2 * t] + d, from + offset[2 * t + 1] + d, LANES));
        values[t] = to;
    }
}

/* Asks for the rows of a later tile: they are a token's whole width apart, too far for the CPU to
 * guess. Into its second cache, as the first is full of the tile at hand. */
INLINE void prefetch_rows(const int dim, const int dtype, const Job *job, const int64_t *offset,
                          int part, int parts) {
    const int size = dtype == FLOAT32 ? 4 : 2;
    for (int t = TILE * part / parts; t < TILE * (part + 1) / parts; t++) {
        const int64_t from = offset[t] * size;
        for (int64_t b = from; b < from + parts * dim * size; b += 64) {
            __builtin_prefetch((const char *)job->keys + b, 0, 2);
            __builtin_prefetch((const char *)job->values + b, 0, 2);
        }
    }
}

/* Loads and scales the queries of one row, and clears its accumulators. */
INLINE void start_heads(const int dim, const int dtype, const Job *job, int row, int first, int num,
                        float *query, State *state, float *acc) {
    for (int h = 0; h < num; h++) {
        const int64_t at = job->row_token[row] * job->query_token_stride +
                           (first + h) * job->query_head_stride;
        for (int d = 0; d < dim; d += LANES) {
            const vec q = dtype == FLOAT32 ? load((const float *)job->query + at + d)
                                           : load_bf16((const uint16_t *)job->query + at + d);
            store(query + h * dim + d, q * splat(job->scaling));
            store(acc + h * dim + d, splat(0.0f));
        }
        if (HAS_DOTS && dtype == BFLOAT16)
            memcpy(query + h * dim, (const uint16_t *)job->query + at, 2 * dim);
        state[h].peak = -INFINITY;
        for (int i = 0; i < TILE; i++) state[h].shares[i] = 0;
    }
}

INLINE void run_span(const int dim, const int dtype, const Job *job, const Task *task,
                     int first_kv, int last_kv, float *query, State *state, float *acc) {
    const int group = job->num_heads / job->num_kv_heads, dots = HAS_DOTS && dtype == BFLOAT16;
    const int64_t stride = (int64_t)job->num_kv_heads * dim;
    const int32_t *table = job->block_table + job->row_sequence[task->row] * job->table_stride;
    float wide_keys[dtype == FLOAT32 ? 1 : TILE * dim] __attribute__((aligned(64)));
    float wide_values[dtype == FLOAT32 ? 1 : TILE * dim] __attribute__((aligned(64)));
    int64_t offset[TILE], next[TILE];
    start_heads(dim, dtype, job, task->row, first_kv * group, (last_kv - first_kv) * group, query,
                state, acc);
    for (int low = task->begin; low < task->end; low += TILE) {
        const int has_next = low + TILE < task->end;
        find_tokens(job, table, low, task->end, stride, first_kv * dim, offset);
        if (has_next) find_tokens(job, table, low + TILE, task->end, stride, first_kv * dim, next);
        for (int kv = first_kv; kv < last_kv; kv++) {
            if (has_next) prefetch_rows(dim, dtype, job, next, kv - first_kv, last_kv - first_kv);
            const float *keys[TILE], *values[TILE];
            if (dots) {
                tile_pairs(dim, job, offset, wide_values, keys, values);
            } else {
                tile_rows(dim, dtype, job->keys, offset, wide_keys, keys);
                tile_rows(dim, dtype, job->values, offset, wide_values, values);
            }
            for (int g = 0; g < group; g++) {
                const int h = (kv - first_kv) * group + g;
                attend_tile(dim, dots, job, query + h * dim, keys, values, task->end - low,
                            state + h, acc + h * dim);
            }
            for (int t = 0; t < TILE; t++) offset[t] += dim;
        }
    }
}

/* Divides by the norm (with the sink's share in it) and stores one head of one row. */
static void finish_head(const Job *job, int row, int head, Norm norm, const float *acc) {
    const int dim = job->head_dim;
    float factor = 1.0f / norm.sum;
    if (job->sinks) {
        const float sink = job->sinks[head];
        const float peak = sink > norm.peak ? sink : norm.peak;
        const float shrink = expf(norm.peak - peak);
        factor = shrink / (norm.sum * shrink + expf(sink - peak));
    }
    const int64_t at = ((int64_t)job->row_token[row] * job->num_heads + head) * dim;
    if (job->dtype == FLOAT32)
        for (int d = 0; d < dim; d++) ((float *)job->out)[at + d] = acc[d] * factor;
    else
        for (int d = 0; d < dim; d++) ((uint16_t *)job->out)[at + d] = to_bf16(acc[d] * factor);
}

#define DIMS(CASE) \
    CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(112) CASE(128) CASE(160) \
    CASE(192) CASE(256)

#define DEFINE(D)                                                                              \
    static void span_f32_##D(const Job *j, const Task *t, int a, int b, float *q, State *s,     \
                             float *acc) {                                                     \
        run_span(D, FLOAT32, j, t, a, b, q, s, acc);                                           \
    }                                                                                          \
    static void span_bf16_##D(const Job *j, const Task *t, int a, int b, float *q, State *s,    \
                              float *acc) {                                                    \
        run_span(D, BFLOAT16, j, t, a, b, q, s, acc);                                          \
    }
DIMS(DEFINE)

typedef void (*SpanFunction)(const Job *, const Task *, int, int, float *, State *, float *);

static SpanFunction span_function(int dtype, int dim) {
    switch (dim) {
#define PICK(D) \
    case D:     \
        return dtype == FLOAT32 ? span_f32_##D : dtype == BFLOAT16 ? span_bf16_##D : NULL;
        DIMS(PICK)
    }
    return NULL;
}

static int first_visible(const Job *job, int length) {
    const int position = length - 1;
    int low = 0;
    if (job->window > 0 && length > job->window) low = length - job->window;
    if (job->chunk > 0 && position / job->chunk * job->chunk > low)
        low = position / job->chunk * job->chunk;
    return low;
}

static int num_spans(const Job *job, int row) {
    const int length = job->row_length[row];
    return (length - first_visible(job, length) + SPAN - 1) / SPAN;
}

static inline void run_task(const Job *job, const Task *task, SpanFunction span, int first_kv,
                            int last_kv, Norm *norms, float *partials) {
    float query[MAX_STATE] __attribute__((aligned(64)));
    float acc[MAX_STATE] __attribute__((aligned(64)));
    State state[MAX_STATE / 16];
    Norm norm[MAX_STATE / 16];
    const int dim = job->head_dim, group = job->num_heads / job->num_kv_heads;
    const int first = first_kv * group, num = (last_kv - first_kv) * group;
    span(job, task, first_kv, last_kv, query, state, acc);
    for (int h = 0; h < num; h++) {
        norm[h] = (Norm){state[h].peak, 0};
        for (int i = 0; i < TILE; i++) norm[h].sum += state[h].shares[i];
    }
    if (task->slot < 0) {
        for (int h = 0; h < num; h++)
            finish_head(job, task->row, first + h, norm[h], acc + h * dim);
    } else {
        const int64_t at = (int64_t)task->slot * job->num_heads + first;
        memcpy(norms + at, norm, num * sizeof *norms);
        memcpy(partials + at * dim, acc, (size_t)num * dim * sizeof *acc);
    }
}

/* Joins the spans of one head of a row, in order. */
static inline void join_spans(const Job *job, int row, int slot, int spans, int head,
                              const Norm *norms, const float *partials) {
    const int dim = job->head_dim;
    float acc[MAX_DIM] = {0};
    Norm norm = {-INFINITY, 0.0f};
    for (int s = 0; s < spans; s++) {
        const Norm *one = norms + (int64_t)(slot + s) * job->num_heads + head;
        norm.peak = one->peak > norm.peak ? one->peak : norm.peak;
    }
    for (int s = 0; s < spans; s++) {
        const int64_t at = (int64_t)(slot + s) * job->num_heads + head;
        const float shrink = expf(norms[at].peak - norm.peak);
        norm.sum += norms[at].sum * shrink;
        for (int d = 0; d < dim; d++) acc[d] += partials[at * dim + d] * shrink;
    }
    finish_head(job, row, head, norm, acc);
}

/* How many ranges the kv heads are cut into: enough for the stack, and for idle threads. */
static inline int head_parts(const Job *job, int num_tasks) {
    const int group = job->num_heads / job->num_kv_heads;
    const int fit = MAX_STATE / (group * job->head_dim);
    int parts = (job->num_kv_heads + fit - 1) / fit;
    while (parts < job->num_kv_heads && parts * num_tasks < 2 * job->num_threads) parts++;
    return parts;
}

typedef struct {
    Task *tasks;
    Norm *norms;
    float *partials;   /* of rows with several spans */
    int num_tasks, num_slots, parts;
    int64_t work;      /* query numbers times context tokens */
} Plan;

static inline void drop_plan(Plan *plan) {
    free(plan->tasks), free(plan->norms), free(plan->partials);
    *plan = (Plan){0};
}

/* Cuts a batch into units of work. The plan is good for every layer with the same heads, lengths,
 * window and chunk. Returns DONE, UNSUPPORTED or NO_MEMORY; ends with drop_plan. */
static inline int make_plan(const Job *job, Plan *plan) {
    *plan = (Plan){0};
    if (!span_function(job->dtype, job->head_dim) ||
        job->num_heads / job->num_kv_heads * job->head_dim > MAX_STATE)
        return UNSUPPORTED;
    for (int r = 0; r < job->num_rows; r++) {
        const int spans = num_spans(job, r);
        plan->num_tasks += spans;
        plan->num_slots += spans > 1 ? spans : 0;
    }
    if (plan->num_tasks == 0) return DONE;
    plan->tasks = malloc(plan->num_tasks * sizeof *plan->tasks);
    if (plan->num_slots) {
        const size_t heads = (size_t)plan->num_slots * job->num_heads;
        plan->norms = malloc(heads * sizeof *plan->norms);
        plan->partials = malloc(heads * job->head_dim * sizeof *plan->partials);
    }
    if (!plan->tasks || (plan->num_slots && (!plan->norms || !plan->partials))) {
        drop_plan(plan);
        return NO_MEMORY;
    }
    for (int r = 0, n = 0, slot = 0; r < job->num_rows; r++) {
        const int spans = num_spans(job, r), end = job->row_length[r];
        int low = first_visible(job, end);
        plan->work += end - low;
        for (int s = 0; s < spans; s++, low += SPAN)
            plan->tasks[n++] = (Task){r, low, low + SPAN < end ? low + SPAN : end,
                                      spans > 1 ? slot++ : -1};
    }
    plan->work *= (int64_t)job->num_heads * job->head_dim;
    plan->parts = head_parts(job, plan->num_tasks);
    return DONE;
}

/* First of the two rounds: unit i of num_tasks * parts. */
static inline void run_unit(const Job *job, const Plan *plan, int i) {
    const int part = i % plan->parts, kv = job->num_kv_heads;
    run_task(job, plan->tasks + i / plan->parts, span_function(job->dtype, job->head_dim),
             kv * part / plan->parts, kv * (part + 1) / plan->parts, plan->norms, plan->partials);
}

/* Second round, where num_slots is not 0: unit i of num_tasks * num_heads. */
static inline void join_unit(const Job *job, const Plan *plan, int i) {
    const int n = i / job->num_heads;
    const Task *task = plan->tasks + n;
    if (task->slot >= 0 && (n == 0 || task[-1].row != task->row))
        join_spans(job, task->row, task->slot, num_spans(job, task->row), i % job->num_heads,
                   plan->norms, plan->partials);
}

#endif
