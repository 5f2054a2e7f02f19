/* Some new tokens of some sequences through all layers of a decoder, in one call.
 *
 * Called by model/layers/decode_layers.py through ctypes; compiled by runtime/setup.py once per instruction
 * set. The threads are woken once a step and meet at barriers, where they spin for some tens of
 * microseconds before they sleep; work between two barriers goes to whoever is free. Weights are read
 * where oneDNN packed them. Loads float32 or bfloat16, sums in float32, and rounds where
 * transformers rounds. A row's result is the same bits whatever else is in the batch and however
 * many threads run: every sum is one thread's, in one order.
 */
#include <limits.h>
#include <omp.h>
#include <stdatomic.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "delta_rule.h"
#include "paged.h"
#include "products.h"
#include "rows.h"

#define SPINS 2000    /* turns before a thread that waits sleeps: some tens of microseconds */

enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

typedef struct {
    RmsNorm before, after;  /* before attention and before the MLP */
    RmsNorm of_attention, of_mlp; /* of what these add to a row; weight NULL = none */
    RmsNorm query, key;     /* of single heads; weight NULL = none */
    /* q of a short convolution: its three inputs. Of a delta rule: q what is convolved, k what beta
     * and v what the decay is made of, z the gates. */
    Product q, k, v, z, o, gate, up, down;
    void *keys, *values;    /* this layer's part of the pool */
    const float *sinks;     /* (num_heads) or NULL */
    float scaling, softcap;
    int32_t window, chunk;
    int32_t place;          /* which of the step's */
    int32_t gated;          /* q has a gate of what attention gives behind each head's query */
    int32_t taps;           /* of a short convolution, which stands where attention does; 0 = none */
    const void *conv_weight, *conv_bias; /* (width, taps) and (width) or NULL */
    void *past;             /* (slots, width, taps): its last inputs, in place */
    const DeltaJob *delta;  /* a gated delta rule in attention's place, but for its step; or NULL */
} Layer;

/* What layers of one pool with one rotary embedding share. */
typedef struct {
    const float *cos, *sin; /* (num_rows, rope_dim) */
    const int64_t *slots;   /* (num_rows), where keys and values are written */
    const int32_t *block_table;
    int64_t table_stride;
} Place;

typedef struct {
    int32_t dtype, num_threads, num_layers, num_rows;
    int32_t width, mlp_width, num_heads, num_kv_heads, head_dim, rope_dim, activation, block_size;
    const Layer *layers;
    void *rows;             /* (num_rows, width), hidden states, in place */
    const Place *places;
    const int32_t *row_number, *row_sequence, *row_length; /* row_number: 0, 1, 2 ... */
    int64_t num_segments;
    const int64_t *segments; /* (num_segments, 3): first row, rows, slot of the states; or NULL */
} Step;

typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int round;
    atomic_int sleepers;
} Barrier;

typedef struct {
    const Step *step;
    const Plan **plans;     /* of each layer */
    atomic_int *next;       /* units taken, of each phase */
    float *hidden;          /* (num_rows, width) */
    float *qkv;             /* (num_rows, inputs of a layer's first half) */
    Inputs wide;            /* (num_rows, mlp_width) */
    float *added;           /* (num_rows, width), where it has a norm of its own */
    Inputs own;             /* per thread: (num_rows, widest input of a product) */
    int64_t own_floats;     /* per thread */
    void *query, *attended; /* (num_rows, num_heads, head_dim) and (num_rows, ins of o), of dtype */
    Barrier barrier;
} Run;

static void meet(Barrier *b, int count) {
    const int round = atomic_load(&b->round);
    if (atomic_fetch_add(&b->arrived, 1) + 1 == count) {
        atomic_store(&b->arrived, 0);
        atomic_fetch_add(&b->round, 1);
#if defined(__linux__)
        if (atomic_load(&b->sleepers))
            syscall(SYS_futex, &b->round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&b->round, memory_order_acquire) != round) return;
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
    atomic_fetch_add(&b->sleepers, 1);
    while (atomic_load(&b->round) == round)
#if defined(__linux__)
        syscall(SYS_futex, &b->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
#else
        sched_yield();
#endif
    atomic_fetch_sub(&b->sleepers, 1);
}

INLINE vec activated(int which, vec x) {
    const vec one = splat(1.0f);
    if (which == SILU) return x / (one + vexp(-x));
    if (which == RELU) return pick(x > splat(0.0f), x, splat(0.0f));
    if (which == GELU_TANH) {
        const vec power =
            vexp(splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x)); /* 2 sqrt(2/pi) */
        return x * (power / (power + one));
    }
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return y;
}

/* Takes the next unit of a phase; those there are: [0, count). */
#define EACH_UNIT(i, phase, count) \
    for (int i; (i = atomic_fetch_add(&run->next[phase], 1)) < (count);)

/* Where a product of a layer's first half goes: (num_rows, stride), kept as `memory`. */
typedef struct {
    const Product *product;
    void *to;
    int64_t stride;
    int memory;
} Target;

/* Of each row the block's outputs, rounded. */
static void put_product(const Run *run, const Target *target, int panel, const Inputs *in) {
    const Product *p = target->product;
    const int kind = run->step->dtype;
    float tile[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_GROUP(first, count, run->step->num_rows) {
        const int outs = project(kind, p, panel, in, first, count, tile);
        for (int r = 0; r < count; r++)
            for (int c = 0; c < outs; c++)
                put_one(target->memory, target->to,
                        (first + r) * target->stride + panel * p->wide + c,
                        rounded_one(kind, tile[r * MAX_WIDE + c]));
    }
}

/* hidden += the product, both rounded; with a norm the product waits for `add_normed`. */
static void add_product(const Run *run, const Product *p, const RmsNorm *norm, int panel,
                        const Inputs *in) {
    const int kind = run->step->dtype;
    float tile[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_GROUP(first, count, run->step->num_rows) {
        const int outs = project(kind, p, panel, in, first, count, tile);
        for (int r = 0; r < count; r++) {
            const int64_t at = (int64_t)(first + r) * run->step->width + panel * p->wide;
            float *to = run->hidden + at, *waiting = run->added + at;
            for (int c = 0; c < outs; c++) {
                const float one = rounded_one(kind, tile[r * MAX_WIDE + c]);
                if (norm->weight) waiting[c] = one;
                else to[c] = rounded_one(kind, to[c] + one);
            }
        }
    }
}

/* wide = activation(gate) times up. */
static void put_gated(const Run *run, const Layer *layer, int panel, const Inputs *in) {
    const int kind = run->step->dtype;
    float gate[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    float up[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_GROUP(first, count, run->step->num_rows) {
        const int outs = project(kind, &layer->gate, panel, in, first, count, gate);
        project(kind, &layer->up, panel, in, first, count, up);
        for (int r = 0; r < count; r++) {
            const int low = panel * layer->gate.wide;
            float *to = run->wide.x + (first + r) * run->wide.stride + low;
            for (int c = 0; c < outs; c += LANES) {
                const vec factor = activated(run->step->activation, load(gate + r * MAX_WIDE + c));
                const vec one = rounded(kind, load(up + r * MAX_WIDE + c) * rounded(kind, factor));
                if (c + LANES <= outs) store(to + c, one);
                else memcpy(to + c, &one, (size_t)(outs - c) * sizeof *to);
            }
            halve(&run->wide, first + r, low, low + outs);
        }
    }
}

/* One head of one row: norm and rotary embedding, then into the queries or into the pool. */
static void place_head(const Run *run, const Layer *layer, int row, int head) {
    const Step *step = run->step;
    const int kind = step->dtype, dim = step->head_dim, half = step->rope_dim / 2;
    const int num_heads = step->num_heads, num_kv = step->num_kv_heads;
    const int per_query = layer->gated ? 2 : 1;
    const int before = head < num_heads ? head * per_query : head + num_heads * (per_query - 1);
    float *from = run->qkv + ((int64_t)row * (num_heads * per_query + 2 * num_kv) + before) * dim;
    const Place *place = step->places + layer->place;
    const int64_t slot = place->slots[row] * num_kv * dim;
    float one[MAX_DIM] __attribute__((aligned(64)));
    if (head >= num_heads + num_kv) {
        const int64_t at = slot + (int64_t)(head - num_heads - num_kv) * dim;
        for (int d = 0; d < dim; d++) put_one(kind, layer->values, at + d, from[d]);
        return;
    }
    if (head < num_heads && layer->gated)
        for (int d = dim; d < 2 * dim; d++)
            from[d] = rounded_one(kind, 1.0f / (1.0f + expf(-from[d])));
    const RmsNorm *norm = head < num_heads ? &layer->query : &layer->key;
    if (norm->weight) norm_row(kind, FLOAT32, norm, dim, from, one, 0);
    else memcpy(one, from, dim * sizeof *one);
    const float *cos = place->cos + (int64_t)row * step->rope_dim;
    const float *sin = place->sin + (int64_t)row * step->rope_dim;
    for (int d = 0; d < half; d++) {
        const float low = one[d], high = one[d + half];
        one[d] = rounded_one(
            kind, rounded_one(kind, low * cos[d]) + rounded_one(kind, -high * sin[d]));
        one[d + half] = rounded_one(kind, rounded_one(kind, high * cos[d + half]) +
                                              rounded_one(kind, low * sin[d + half]));
    }
    void *to = head < num_heads ? run->query : layer->keys;
    const int64_t at = head < num_heads ? ((int64_t)row * num_heads + head) * dim
                                        : slot + (int64_t)(head - num_heads) * dim;
    for (int d = 0; d < dim; d++) put_one(kind, to, at + d, one[d]);
}

static Job attention_of(const Step *step, const Layer *layer, const void *query, void *out) {
    return (Job){.dtype = step->dtype,
                 .head_dim = step->head_dim,
                 .num_heads = step->num_heads,
                 .num_kv_heads = step->num_kv_heads,
                 .block_size = step->block_size,
                 .num_rows = step->num_rows,
                 .num_threads = step->num_threads,
                 .window = layer->window,
                 .chunk = layer->chunk,
                 .scaling = layer->scaling,
                 .softcap = layer->softcap,
                 .query = query,
                 .query_token_stride = (int64_t)step->num_heads * step->head_dim,
                 .query_head_stride = step->head_dim,
                 .keys = layer->keys,
                 .values = layer->values,
                 .out = out,
                 .block_table = step->places[layer->place].block_table,
                 .table_stride = step->places[layer->place].table_stride,
                 .row_token = step->row_number,
                 .row_sequence = step->row_sequence,
                 .row_length = step->row_length,
                 .sinks = layer->sinks};
}

enum { QKV, ATTEND, HEADS, OUT, GATED, DOWN, NUM_PHASES }; /* those whose units are taken one by one */

static void norm_in_place(const Step *step, const RmsNorm *norm, float *row) {
    if (step->dtype == FLOAT32) norm_row(FLOAT32, FLOAT32, norm, step->width, row, row, 0);
    else norm_row(BFLOAT16, FLOAT32, norm, step->width, row, row, 0);
}

static void norm_all(const Step *step, const RmsNorm *norm, const float *hidden,
                     const Inputs *own) {
    for (int r = 0; r < step->num_rows; r++) {
        float *to = own->x + r * own->stride;
        memcpy(to, hidden + (int64_t)r * step->width, step->width * sizeof *to);
        norm_in_place(step, norm, to);
        halve(own, r, 0, step->width);
    }
}

/* What attention or the MLP adds, once all of it is there. */
static void add_normed(Run *run, const RmsNorm *norm, int thread, int threads) {
    const Step *step = run->step;
    meet(&run->barrier, threads);
    if (!norm->weight) return;
    for (int64_t r = thread; r < step->num_rows; r += threads) {
        float *one = run->added + r * step->width, *to = run->hidden + r * step->width;
        norm_in_place(step, norm, one);
        for (int c = 0; c < step->width; c++) to[c] = rounded_one(step->dtype, to[c] + one[c]);
    }
    meet(&run->barrier, threads);
}

static void attend_layer(Run *run, const Layer *layer, int number, int thread, int threads) {
    const Step *step = run->step;
    const Plan *plan = run->plans[number];
    const Job job = attention_of(step, layer, run->query, run->attended);
    const int heads = step->num_heads + 2 * step->num_kv_heads;
    for (int i = thread; i < step->num_rows * heads; i += threads)
        place_head(run, layer, i / heads, i % heads);
    meet(&run->barrier, threads);
    EACH_UNIT(i, number * NUM_PHASES + ATTEND, plan->num_tasks * plan->parts)
        run_unit(&job, plan, i);
    meet(&run->barrier, threads);
    if (plan->num_slots) {
        for (int i = thread; i < plan->num_tasks * job.num_heads; i += threads)
            join_unit(&job, plan, i);
        meet(&run->barrier, threads);
    }
}

/* CHANNELS of a segment's rows: the product of two inputs, convolved with what came before it, times
 * the input between them. */
static void convolve_inputs(const Run *run, const Layer *layer, const int64_t *segment, int low) {
    const int kind = run->step->dtype, width = run->step->width, taps = layer->taps;
    const int high = low + CHANNELS < width ? low + CHANNELS : width;
    for (int64_t row = segment[0]; row < segment[0] + segment[1]; row++) {
        const float *from = run->qkv + row * 3 * width;
        for (int c = low; c < high; c++) {
            const int64_t past = (segment[2] * width + c) * taps, weight = (int64_t)c * taps;
            const float newest = rounded_one(kind, from[c] * from[2 * width + c]);
            float sum = newest * one_at(kind, layer->conv_weight, weight + taps - 1);
            for (int k = 0; k + 1 < taps; k++) {
                const float one = one_at(kind, layer->past, past + k + 1);
                put_one(kind, layer->past, past + k, one);
                sum += one * one_at(kind, layer->conv_weight, weight + k);
            }
            put_one(kind, layer->past, past + taps - 1, newest);
            if (layer->conv_bias) sum += one_at(kind, layer->conv_bias, c);
            put_one(kind, run->attended, row * width + c,
                    from[width + c] * rounded_one(kind, sum));
        }
    }
}

static void convolve_layer(Run *run, const Layer *layer, int number, int thread, int threads) {
    const Step *step = run->step;
    const int blocks = (step->width + CHANNELS - 1) / CHANNELS;
    EACH_UNIT(i, number * NUM_PHASES + ATTEND, (int)step->num_segments * blocks)
        convolve_inputs(run, layer, step->segments + i / blocks * 3, i % blocks * CHANNELS);
    meet(&run->barrier, threads);
}

/* The layer's delta rule, whose gates, and what beta and the decay are made of, are behind the
 * numbers that it convolves. */
static DeltaJob delta_of(const Run *run, const Layer *layer) {
    const Step *step = run->step;
    const int64_t rows = step->num_rows;
    DeltaJob job = *layer->delta;
    job.num_segments = (int32_t)step->num_segments;
    job.num_rows = rows;
    job.segments = step->segments;
    job.mixed = run->qkv;
    job.gate = run->qkv + rows * layer->q.outs;
    job.rate = run->qkv + rows * (layer->q.outs + layer->z.outs);
    job.step = run->qkv + rows * (layer->q.outs + layer->z.outs + layer->k.outs);
    job.out = run->attended;
    return job;
}

static void delta_layer(Run *run, const Layer *layer, int number, int thread, int threads) {
    const DeltaJob job = delta_of(run, layer);
    EACH_UNIT(i, number * NUM_PHASES + ATTEND, (int)(job.num_segments * num_blocks(&job)))
        convolve_task(&job, i);
    meet(&run->barrier, threads);
    EACH_UNIT(i, number * NUM_PHASES + HEADS, job.num_segments * job.num_value_heads)
        head_task(&job, i);
    meet(&run->barrier, threads);
}

/* Numbers of a row that come out of the products before attention or what stands in its place. */
static int64_t num_inputs(const Layer *layer) {
    return (int64_t)layer->q.outs + layer->k.outs + layer->v.outs + layer->z.outs;
}

/* The products before attention, or before what stands in its place. */
static void project_layer(Run *run, const Layer *layer, int number, const Inputs *own) {
    const int64_t stride = num_inputs(layer);
    Target targets[] = {{&layer->q, run->qkv, stride, FLOAT32},
                        {&layer->k, run->qkv + layer->q.outs, stride, FLOAT32},
                        {&layer->v, run->qkv + layer->q.outs + layer->k.outs, stride, FLOAT32},
                        {&layer->z, NULL, 0, FLOAT32}};
    if (layer->delta) {
        const DeltaJob job = delta_of(run, layer);
        void *to[] = {job.mixed, (void *)job.rate, (void *)job.step, (void *)job.gate};
        for (int t = 0; t < 4; t++)
            targets[t] = (Target){targets[t].product, to[t], targets[t].product->outs, job.dtype};
    }
    int count = 0, first[5];
    for (int t = 0; t < 4; t++) {
        first[t] = count;
        if (targets[t].product->weight) count += num_panels(targets[t].product);
    }
    EACH_UNIT(i, number * NUM_PHASES + QKV, count) {
        int t = 3;
        while (first[t] > i || !targets[t].product->weight) t--;
        put_product(run, targets + t, i - first[t], own);
    }
}

/* What the layer's first half gave, as the inputs of its last product. */
static void take_attended(const Run *run, const Layer *layer, const Inputs *own) {
    const int64_t ins = layer->o.ins, dim = run->step->head_dim;
    const int kind = run->step->dtype;
    for (int64_t r = 0; r < run->step->num_rows; r++) {
        float *to = own->x + r * own->stride;
        for (int64_t d = 0; d < ins; d++) to[d] = one_at(kind, run->attended, r * ins + d);
        const float *gates = run->qkv + r * num_inputs(layer) + dim;
        for (int64_t low = 0; layer->gated && low < ins; low += dim)
            for (int64_t d = low; d < low + dim; d++)
                to[d] = rounded_one(kind, to[d] * gates[low + d]);
        halve(own, r, 0, ins);
    }
}

static void run_layers(Run *run, int thread, int threads) {
    const Step *step = run->step;
    Inputs own = run->own;
    own.x += thread * run->own_floats;
    if (own.halves) own.halves += thread * step->num_rows * own.halves_stride;
    for (int n = 0; n < step->num_layers; n++) {
        const Layer *layer = step->layers + n;
        const int phase = n * NUM_PHASES;
        norm_all(step, &layer->before, run->hidden, &own);
        project_layer(run, layer, n, &own);
        meet(&run->barrier, threads);
        if (layer->delta) delta_layer(run, layer, n, thread, threads);
        else if (layer->taps) convolve_layer(run, layer, n, thread, threads);
        else attend_layer(run, layer, n, thread, threads);
        take_attended(run, layer, &own);
        EACH_UNIT(i, phase + OUT, num_panels(&layer->o))
            add_product(run, &layer->o, &layer->of_attention, i, &own);
        add_normed(run, &layer->of_attention, thread, threads);
        norm_all(step, &layer->after, run->hidden, &own);
        EACH_UNIT(i, phase + GATED, num_panels(&layer->gate)) put_gated(run, layer, i, &own);
        meet(&run->barrier, threads);
        EACH_UNIT(i, phase + DOWN, num_panels(&layer->down))
            add_product(run, &layer->down, &layer->of_mlp, i, &run->wide);
        add_normed(run, &layer->of_mlp, thread, threads);
    }
}

static int is_supported(const Step *step) {
    for (int n = 0; n < step->num_layers; n++) {
        const Layer *layer = step->layers + n;
        const Product *all[] = {&layer->q, &layer->k,    &layer->v,  &layer->z,
                                &layer->o, &layer->gate, &layer->up, &layer->down};
        if (layer->delta && !is_delta_supported(layer->delta)) return 0;
        for (int i = 0; i < 8; i++)
            if (all[i]->weight && !is_known(step->dtype, all[i])) return 0;
        if (layer->gate.wide != layer->up.wide) return 0;
    }
    return step->head_dim <= MAX_DIM && step->rope_dim % 2 == 0 && step->rope_dim <= step->head_dim;
}

/* Plans of all layers; those that see the same share one. Returns DONE or why not. */
static int make_plans(const Step *step, Plan *owned, const Plan **plans) {
    for (int n = 0; n < step->num_layers; n++) {
        const Layer *layer = step->layers + n;
        int same = 0;
        while (step->layers[same].window != layer->window ||
               step->layers[same].chunk != layer->chunk)
            same++;
        if (same == n) {
            const Job job = attention_of(step, layer, NULL, NULL);
            const int code = make_plan(&job, owned + n);
            if (code != DONE) return code;
        }
        plans[n] = owned + same;
    }
    return DONE;
}

static void *piece(char **at, size_t bytes) {
    void *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

static int is_quantised(const Layer *layer) {
    const Product *all[] = {&layer->q, &layer->k,    &layer->v,  &layer->z,
                            &layer->o, &layer->gate, &layer->up, &layer->down};
    for (int i = 0; i < 8; i++)
        if (all[i]->bits) return 1;
    return 0;
}

/* Everything a step needs beside the plans, or NULL. Of 64 rows, or 128 as halves alone (LIMITS,
 * FAST_LIMITS), a thread has 256 bytes times the widest input: 1 MiB at a width of 4096, 2 MiB at
 * 8192 (half as much again for halves beside quantised weights). Memory plans have no line for it:
 * it is freed before the logits are made, whose bytes are in `activations` (profiler.py), and those
 * are more than the parts of 100 threads with every profile in examples/. */
static void *make_room(const Step *step, Run *run) {
    const size_t rows = step->num_rows, threads = step->num_threads;
    const size_t queries = (size_t)step->num_heads * step->head_dim;
    size_t all = 0, own = step->width;
    int quantised = 0;
    for (int n = 0; n < step->num_layers; n++) {
        const size_t inputs = num_inputs(step->layers + n), ins = step->layers[n].o.ins;
        all = inputs > all ? inputs : all;
        own = ins > own ? ins : own;
        quantised |= is_quantised(step->layers + n);
    }
    const size_t counters = (size_t)step->num_layers * NUM_PHASES;
    const int halves = HAS_DOTS && step->dtype == BFLOAT16;
    const size_t own_floats = (halves && !quantised ? 1 : rows) * own;
    const size_t floats = rows * (2 * step->width + all + step->mlp_width + queries + own) +
                          threads * own_floats;
    const size_t numbers = halves ? rows * (step->mlp_width + threads * own) : 0;
    const size_t bytes = floats * 4 + numbers * 2 + counters * sizeof *run->next;
    char *room = aligned_alloc(64, (bytes + 11 * 64 + 63) / 64 * 64);
    char *at = room;
    if (!room) return NULL;
    run->hidden = piece(&at, rows * step->width * 4);
    run->qkv = piece(&at, rows * all * 4);
    run->wide = (Inputs){.x = piece(&at, rows * step->mlp_width * 4), .stride = step->mlp_width,
                         .halves_stride = step->mlp_width};
    run->added = piece(&at, rows * step->width * 4);
    run->query = piece(&at, rows * queries * 4);
    run->attended = piece(&at, rows * own * 4);
    run->own = (Inputs){.x = piece(&at, threads * own_floats * 4),
                        .stride = halves && !quantised ? 0 : (int64_t)own,
                        .halves_stride = (int64_t)own};
    run->own_floats = (int64_t)own_floats;
    if (halves) {
        run->wide.halves = piece(&at, rows * step->mlp_width * 2);
        run->own.halves = piece(&at, threads * rows * own * 2);
    }
    run->next = piece(&at, counters * sizeof *run->next);
    memset(run->next, 0, counters * sizeof *run->next);
    return room;
}

/* DONE, UNSUPPORTED or NO_MEMORY; only DONE has changed anything. */
int foveal_decode_layers(const Step *step) {
    const int64_t count = (int64_t)step->num_rows * step->width;
    if (!is_supported(step)) return UNSUPPORTED;
    Run run = {.step = step};
    Plan *owned = calloc(step->num_layers, sizeof *owned);
    run.plans = calloc(step->num_layers, sizeof *run.plans);
    void *room = make_room(step, &run);
    int code = NO_MEMORY;
    if (owned && run.plans && room) code = make_plans(step, owned, run.plans);
    if (code == DONE && count) {
        for (int64_t i = 0; i < count; i++) run.hidden[i] = one_at(step->dtype, step->rows, i);
#pragma omp parallel num_threads(step->num_threads)
        run_layers(&run, omp_get_thread_num(), omp_get_num_threads());
        for (int64_t i = 0; i < count; i++) put_one(step->dtype, step->rows, i, run.hidden[i]);
    }
    for (int n = 0; owned && n < step->num_layers; n++) drop_plan(owned + n);
    free(owned), free(run.plans), free(room);
    return code;
}

typedef struct {
    int32_t dtype, num_threads;
    int64_t num_rows;
    const void *x; /* (num_rows, ins), of dtype */
    void *out;     /* (num_rows, outs) */
    Product product;
} ProductJob;

/* One linear layer by itself. DONE, UNSUPPORTED or NO_MEMORY. */
int foveal_multiply(const ProductJob *job) {
    const Product *p = &job->product;
    const int64_t rows = job->num_rows, ins = p->ins;
    if (!is_known(job->dtype, p)) return UNSUPPORTED;
    float *x = aligned_alloc(64, (rows * ins * sizeof *x + 63) / 64 * 64);
    if (!x) return NO_MEMORY;
    const int halves = HAS_DOTS && job->dtype == BFLOAT16;
    const Inputs in = {x, halves ? (uint16_t *)job->x : NULL, ins, ins};
#pragma omp parallel num_threads(job->num_threads)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = r * ins; i < (r + 1) * ins; i++) x[i] = one_at(job->dtype, job->x, i);
#pragma omp for schedule(dynamic)
        for (int panel = 0; panel < num_panels(p); panel++) {
            float tile[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
            EACH_GROUP(first, count, rows) {
                const int outs = project(job->dtype, p, panel, &in, first, count, tile);
                for (int r = 0; r < count; r++)
                    for (int c = 0; c < outs; c++)
                        put_one(job->dtype, job->out, (first + r) * (int64_t)p->outs +
                                panel * p->wide + c, tile[r * MAX_WIDE + c]);
            }
        }
    }
    free(x);
    return DONE;
}
