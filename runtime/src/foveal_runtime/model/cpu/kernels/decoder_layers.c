/* Some new tokens of some sequences through all layers of a decoder, in one call.
 *
 * Called by model/layers/decoder_layers.py through ctypes; compiled by runtime/setup.py once per instruction
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

#include "chunks.h"
#include "delta_rule.h"
#include "experts.h"
#include "linear.h"
#include "rows.h"

#define SPINS 2000     /* turns before a thread that waits sleeps: some tens of microseconds */
#define OWN_ROWS 64    /* as many each thread prepares for itself, which saves a barrier */
#define SLICE_ROWS 96  /* multiplied with a block of outputs by one thread */
#if HAS_TILES
#define TILED_ROWS 320 /* likewise, where all weights are bfloat16 numbers */
#define TILED_BYTES (3 << 19) /* of a slice that stays in the second cache, which has 2 MiB */
#define ROW_STEP (2 * TILE) /* a slice is a multiple of it */
#else
#define TILED_ROWS SLICE_ROWS
#define TILED_BYTES 0
#define ROW_STEP MOST_ROWS
#endif
#define FEW_ROWS 16    /* prepared by one thread, where threads share the work */
#define FEW_HEADS 256  /* likewise */

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
    const Routing *routing; /* to experts, which stand where the MLP does; or NULL */
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
    /* (num_rows), as a Job has them: first rows that attend by themselves, then those of chunks. */
    const int32_t *row_token, *row_sequence, *row_length;
    int64_t num_single;
    int64_t num_chunks;
    const int32_t *chunk_rows; /* (num_chunks) */
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
    const Plan **plans;     /* of each layer, for rows that attend by themselves */
    Pieces pieces;          /* of the chunks */
    atomic_int *next;       /* units taken, of each phase */
    int num_slices, slice_rows;
    float *hidden;          /* (num_rows, width) */
    float *qkv;             /* (num_rows, inputs of a layer's first half) */
    Inputs wide;            /* (num_rows, mlp_width) */
    float *added;           /* (num_rows, width), where it has a norm of its own */
    Inputs own;             /* (num_rows, widest input of a product), of each thread if not shared */
    int is_shared;
    int64_t own_floats;     /* per thread */
    Pairs pairs;            /* of rows and experts */
    float *scores, *factors; /* (num_rows, num_experts) and (num_rows, experts of a row) */
    int64_t *which;         /* (num_rows, experts of a row) */
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

/* Takes the next unit of a phase; those there are: [0, count). */
#define EACH_UNIT(i, phase, count) \
    for (int i; (i = atomic_fetch_add(&run->next[phase], 1)) < (count);)

/* Of a product: a block of outputs, and rows [first, end). */
typedef struct {
    int panel, first, end;
} Unit;

#define EACH_PART(i, phase, p) EACH_UNIT(i, phase, num_panels(p) * run->num_slices)

/* Rows of a unit, by groups. */
#define EACH_ROW_GROUP(from, count, unit) \
    EACH_GROUP(from, count, (unit).first, (unit).end, PROJECT_ROWS)

/* One block after the other, with all rows, or all blocks with rows that stay in a cache. */
static Unit unit_of(const Run *run, const Product *p, int i) {
    const int panels = num_panels(p), slices = run->num_slices, rows = run->slice_rows;
    const int stay = p->paired && (int64_t)rows * p->ins * 2 <= TILED_BYTES;
    const int first = (stay ? i / panels : i % slices) * rows;
    return (Unit){stay ? i % panels : i / slices, first, fewer(run->step->num_rows, first + rows)};
}

/* Where a product of a layer's first half goes: (num_rows, stride), kept as `memory`. */
typedef struct {
    const Product *product;
    void *to;
    int64_t stride;
    int memory;
} Target;

/* Unit i: of each of its rows the block's outputs, rounded. */
static void put_product(const Run *run, const Target *target, int i, const Inputs *in) {
    const Product *p = target->product;
    const Unit unit = unit_of(run, p, i);
    const int kind = run->step->dtype;
    float tile[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_ROW_GROUP(first, count, unit) {
        const int outs = project(kind, p, unit.panel, in, first, count, tile);
        for (int r = 0; r < count; r++)
            put_rounded(kind, target->memory, tile + r * MAX_WIDE, outs, target->to,
                        (first + r) * target->stride + unit.panel * p->wide);
    }
}

/* Unit i: hidden += the product, both rounded; with a norm the product waits for `add_normed`. */
static void add_product(const Run *run, const Product *p, const RmsNorm *norm, int i,
                        const Inputs *in) {
    const Unit unit = unit_of(run, p, i);
    const int kind = run->step->dtype;
    float tile[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_ROW_GROUP(first, count, unit) {
        const int outs = project(kind, p, unit.panel, in, first, count, tile);
        for (int r = 0; r < count; r++) {
            const int64_t at = (int64_t)(first + r) * run->step->width + unit.panel * p->wide;
            const float *from = tile + r * MAX_WIDE;
            float *to = run->hidden + at;
            int c = 0;
            if (norm->weight) {
                put_rounded(kind, FLOAT32, from, outs, run->added, at);
                continue;
            }
            for (; c + LANES <= outs; c += LANES)
                store(to + c, rounded(kind, load(to + c) + rounded(kind, load(from + c))));
            for (; c < outs; c++) to[c] = rounded_one(kind, to[c] + rounded_one(kind, from[c]));
        }
    }
}

/* Unit i: wide = activation(gate) times up. */
static void put_gated(const Run *run, const Layer *layer, int i, const Inputs *in) {
    const Unit unit = unit_of(run, &layer->gate, i);
    const int kind = run->step->dtype;
    float gate[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    float up[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_ROW_GROUP(first, count, unit) {
        const int outs = project(kind, &layer->gate, unit.panel, in, first, count, gate);
        project(kind, &layer->up, unit.panel, in, first, count, up);
        for (int r = 0; r < count; r++)
            put_activated(kind, run->step->activation, outs, up + r * MAX_WIDE, gate + r * MAX_WIDE,
                          &run->wide, first + r, unit.panel * layer->gate.wide);
    }
}

/* one[:rope_dim] turned by the row's cosines and sines. */
INLINE void turn_head(const int kind, int half, const float *cos, const float *sin, float *one) {
    int d = 0;
    for (; half % LANES == 0 && d < half; d += LANES) {
        const vec low = load(one + d), high = load(one + d + half);
        const vec down = rounded(kind, -high * load(sin + d));
        const vec over = rounded(kind, low * load(sin + d + half));
        store(one + d, rounded(kind, rounded(kind, low * load(cos + d)) + down));
        store(one + d + half, rounded(kind, rounded(kind, high * load(cos + d + half)) + over));
    }
    for (; d < half; d++) {
        const float low = one[d], high = one[d + half];
        one[d] = rounded_one(
            kind, rounded_one(kind, low * cos[d]) + rounded_one(kind, -high * sin[d]));
        one[d + half] = rounded_one(kind, rounded_one(kind, high * cos[d + half]) +
                                              rounded_one(kind, low * sin[d + half]));
    }
}

/* One head of one row: norm and rotary embedding, then into the queries or into the pool. */
INLINE void place_head(const int kind, const Run *run, const Layer *layer, int row, int head) {
    const Step *step = run->step;
    const int dim = step->head_dim;
    const int num_heads = step->num_heads, num_kv = step->num_kv_heads;
    const int per_query = layer->gated ? 2 : 1;
    const int before = head < num_heads ? head * per_query : head + num_heads * (per_query - 1);
    float *from = run->qkv + ((int64_t)row * (num_heads * per_query + 2 * num_kv) + before) * dim;
    const Place *place = step->places + layer->place;
    const int64_t slot = place->slots[row] * num_kv * dim;
    float one[MAX_DIM] __attribute__((aligned(64)));
    if (head >= num_heads + num_kv) {
        const int64_t at = slot + (int64_t)(head - num_heads - num_kv) * dim;
        put_rounded(kind, kind, from, dim, layer->values, at);
        return;
    }
    if (head < num_heads && layer->gated)
        for (int d = dim; d < 2 * dim; d++)
            from[d] = rounded_one(kind, 1.0f / (1.0f + expf(-from[d])));
    const RmsNorm *norm = head < num_heads ? &layer->query : &layer->key;
    if (norm->weight) norm_row(kind, FLOAT32, norm, dim, from, one, 0);
    else memcpy(one, from, dim * sizeof *one);
    turn_head(kind, step->rope_dim / 2, place->cos + (int64_t)row * step->rope_dim,
              place->sin + (int64_t)row * step->rope_dim, one);
    void *to = head < num_heads ? run->query : layer->keys;
    const int64_t at = head < num_heads ? ((int64_t)row * num_heads + head) * dim
                                        : slot + (int64_t)(head - num_heads) * dim;
    put_rounded(kind, kind, one, dim, to, at);
}

static void place_heads(const Run *run, const Layer *layer, int low, int high, int heads) {
    for (int i = low; i < high; i++) {
        if (run->step->dtype == FLOAT32) place_head(FLOAT32, run, layer, i / heads, i % heads);
        else place_head(BFLOAT16, run, layer, i / heads, i % heads);
    }
}

/* Of the rows that attend by themselves. */
static Job attention_of(const Step *step, const Layer *layer, const void *query, void *out) {
    return (Job){.dtype = step->dtype,
                 .head_dim = step->head_dim,
                 .num_heads = step->num_heads,
                 .num_kv_heads = step->num_kv_heads,
                 .block_size = step->block_size,
                 .num_rows = step->num_single,
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
                 .row_token = step->row_token,
                 .row_sequence = step->row_sequence,
                 .row_length = step->row_length,
                 .sinks = layer->sinks};
}

/* Of the chunks' rows. */
static Job chunks_of(const Step *step, Job job) {
    job.num_rows = (int32_t)(step->num_rows - step->num_single);
    job.row_token += step->num_single;
    job.row_sequence += step->num_single;
    job.row_length += step->num_single;
    return job;
}

/* Those whose units are taken one by one. */
enum { BEFORE, QKV, PLACE, ATTEND, HEADS, TAKE, OUT, AFTER, SCORE, CHOOSE, COPY, GATED, DOWN,
       NUM_PHASES };

static void norm_in_place(const Step *step, const RmsNorm *norm, float *row) {
    if (step->dtype == FLOAT32) norm_row(FLOAT32, FLOAT32, norm, step->width, row, row, 0);
    else norm_row(BFLOAT16, FLOAT32, norm, step->width, row, row, 0);
}

static void norm_rows(const Run *run, const RmsNorm *norm, const Inputs *own, int low, int high) {
    const Step *step = run->step;
    for (int r = low; r < high; r++) {
        float *to = own->x + r * own->stride;
        memcpy(to, run->hidden + (int64_t)r * step->width, step->width * sizeof *to);
        norm_in_place(step, norm, to);
        halve(own, r, 0, step->width);
    }
}

/* The inputs of products that follow a norm: all of them by each thread, or some by each. */
static void norm_all(Run *run, const RmsNorm *norm, const Inputs *own, int phase, int threads) {
    const int rows = run->step->num_rows;
    if (!run->is_shared) {
        norm_rows(run, norm, own, 0, rows);
        return;
    }
    EACH_UNIT(i, phase, (rows + FEW_ROWS - 1) / FEW_ROWS)
        norm_rows(run, norm, own, i * FEW_ROWS, fewer(rows, (i + 1) * FEW_ROWS));
    meet(&run->barrier, threads);
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

static void attend_layer(Run *run, const Layer *layer, int number, int threads) {
    const Step *step = run->step;
    const Plan *plan = run->plans[number];
    const Job job = attention_of(step, layer, run->query, run->attended);
    const Job chunks = chunks_of(step, job);
    const Layout layout = pool_layout(&job);
    const int heads = step->num_heads + 2 * step->num_kv_heads, all = step->num_rows * heads;
    const int share = (all + threads - 1) / threads, grain = fewer(share, FEW_HEADS);
    const int num_pieces = (int)run->pieces.count, phase = number * NUM_PHASES;
    EACH_UNIT(i, phase + PLACE, (all + grain - 1) / grain)
        place_heads(run, layer, i * grain, fewer(all, (i + 1) * grain), heads);
    meet(&run->barrier, threads);
    EACH_UNIT(i, phase + ATTEND, num_pieces + plan->num_tasks * plan->parts) {
        if (i < num_pieces) run_one_piece(&chunks, &layout, run->pieces.pieces + i);
        else run_unit(&job, plan, i - num_pieces);
    }
    meet(&run->barrier, threads);
    if (plan->num_slots) {
        EACH_UNIT(i, phase + HEADS, plan->num_tasks) {
            for (int head = 0; head < job.num_heads; head++)
                join_unit(&job, plan, i * job.num_heads + head);
        }
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

static void convolve_layer(Run *run, const Layer *layer, int number, int threads) {
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

static void delta_layer(Run *run, const Layer *layer, int number, int threads) {
    const DeltaJob job = delta_of(run, layer);
    const Convolution conv = convolution_of(&job);
    EACH_UNIT(i, number * NUM_PHASES + ATTEND, (int)(job.num_segments * num_blocks(&conv)))
        convolve_task(&conv, i);
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
        if (targets[t].product->weight)
            count += num_panels(targets[t].product) * run->num_slices;
    }
    EACH_UNIT(i, number * NUM_PHASES + QKV, count) {
        int t = 3;
        while (first[t] > i || !targets[t].product->weight) t--;
        put_product(run, targets + t, i - first[t], own);
    }
}

/* Rows [low, high) of what the layer's first half gave, as inputs of its last product. */
static void take_rows(const Run *run, const Layer *layer, const Inputs *own, int low, int high) {
    const int64_t ins = layer->o.ins, dim = run->step->head_dim;
    const int kind = run->step->dtype;
    for (int64_t r = low; r < high; r++) {
        float *to = own->x + r * own->stride;
        for (int64_t d = 0; d < ins; d++) to[d] = one_at(kind, run->attended, r * ins + d);
        const float *gates = run->qkv + r * num_inputs(layer) + dim;
        for (int64_t head = 0; layer->gated && head < ins; head += dim)
            for (int64_t d = head; d < head + dim; d++)
                to[d] = rounded_one(kind, to[d] * gates[head + d]);
        halve(own, r, 0, ins);
    }
}

/* The inputs of the last product of a layer's first half. */
static Inputs take_attended(Run *run, const Layer *layer, const Inputs *own, int phase,
                            int threads) {
    const int rows = run->step->num_rows, kind = run->step->dtype;
    const int64_t ins = layer->o.ins;
    if (!layer->gated && kind == FLOAT32) return (Inputs){run->attended, NULL, ins, 0};
    if (!layer->gated && own->halves && !own->stride)
        return (Inputs){own->x, run->attended, 0, ins};
    if (run->is_shared) {
        EACH_UNIT(i, phase, (rows + FEW_ROWS - 1) / FEW_ROWS)
            take_rows(run, layer, own, i * FEW_ROWS, fewer(rows, (i + 1) * FEW_ROWS));
        meet(&run->barrier, threads);
    } else {
        take_rows(run, layer, own, 0, rows);
    }
    return *own;
}

/* That products of bfloat16 numbers read. */
static int64_t padded_rows(const Step *step) {
    return HAS_TILES ? (step->num_rows + TILE - 1) / TILE * TILE : step->num_rows;
}

/* What has rows that go to different experts in an MLP's place. */
static void route_layer(Run *run, const Layer *layer, int number, const Inputs *own, int thread,
                        int threads) {
    const Step *step = run->step;
    const Routing *routing = layer->routing;
    const int rows = step->num_rows, width = step->width, phase = number * NUM_PHASES;
    const int num = routing->num_experts, used = all_used(routing);
    const int blocks = (num + SCORED - 1) / SCORED, groups = (rows + FEW_ROWS - 1) / FEW_ROWS;
    Pairs *pairs = &run->pairs;
    EACH_UNIT(i, phase + SCORE, groups * blocks) {
        const int end = fewer(rows, (i / blocks + 1) * FEW_ROWS);
        for (int64_t r = i / blocks * FEW_ROWS; r < end; r++) {
            const Inputs row = rows_from(own, r);
            score_row(step->dtype, routing, &row, width, i % blocks * SCORED, run->scores + r * num);
        }
    }
    meet(&run->barrier, threads);
    EACH_UNIT(r, phase + CHOOSE, rows) {
        const Inputs row = rows_from(own, r);
        choose(step->dtype, routing, &row, width, run->scores + (int64_t)r * num,
               run->which + (int64_t)r * used, run->factors + (int64_t)r * used);
    }
    meet(&run->barrier, threads);
    if (thread == 0) {
        pairs->experts = routing->experts;
        sort_pairs(pairs, run->which, run->factors);
    }
    meet(&run->barrier, threads);
    EACH_UNIT(i, phase + COPY, (rows * used + FEW_ROWS - 1) / FEW_ROWS)
        for (int64_t pair = i * FEW_ROWS; pair < fewer(rows * used, (i + 1) * FEW_ROWS); pair++) {
            const Inputs from = rows_from(own, pairs->row[pair]), to = rows_from(&pairs->in, pair);
            if (to.x) memcpy(to.x, from.x, width * sizeof *to.x);
            if (to.halves) memcpy(to.halves, from.halves, width * sizeof *to.halves);
        }
    meet(&run->barrier, threads);
    EACH_UNIT(i, phase + GATED, pairs->num_met * pairs->panels) put_expert(pairs, i);
    meet(&run->barrier, threads);
    float *sums = pairs->sums + (int64_t)thread * rows * MAX_WIDE;
    EACH_UNIT(unit, phase + DOWN, num_sums(pairs)) {
        const int outs = outs_of(pairs, unit);
        add_experts(pairs, unit, sums);
        for (int64_t r = 0; r < rows; r++) {
            float *to = run->hidden + r * width + unit * MAX_WIDE;
            const float *from = sums + r * MAX_WIDE;
            for (int c = 0; c < outs; c++)
                to[c] = rounded_one(step->dtype, to[c] + rounded_one(step->dtype, from[c]));
        }
    }
    meet(&run->barrier, threads);
}

static void run_layers(Run *run, int thread, int threads) {
    const Step *step = run->step;
    Inputs own = run->own;
    own.x += thread * run->own_floats;
    if (own.halves && !run->is_shared) own.halves += thread * padded_rows(step) * own.halves_stride;
    begin_tiles();
    for (int n = 0; n < step->num_layers; n++) {
        const Layer *layer = step->layers + n;
        const int phase = n * NUM_PHASES;
        norm_all(run, &layer->before, &own, phase + BEFORE, threads);
        project_layer(run, layer, n, &own);
        meet(&run->barrier, threads);
        if (layer->delta) delta_layer(run, layer, n, threads);
        else if (layer->taps) convolve_layer(run, layer, n, threads);
        else attend_layer(run, layer, n, threads);
        const Inputs attended = take_attended(run, layer, &own, phase + TAKE, threads);
        EACH_PART(i, phase + OUT, &layer->o)
            add_product(run, &layer->o, &layer->of_attention, i, &attended);
        add_normed(run, &layer->of_attention, thread, threads);
        norm_all(run, &layer->after, &own, phase + AFTER, threads);
        if (layer->routing) {
            route_layer(run, layer, n, &own, thread, threads);
            continue;
        }
        EACH_PART(i, phase + GATED, &layer->gate) put_gated(run, layer, i, &own);
        meet(&run->barrier, threads);
        EACH_PART(i, phase + DOWN, &layer->down)
            add_product(run, &layer->down, &layer->of_mlp, i, &run->wide);
        add_normed(run, &layer->of_mlp, thread, threads);
    }
    end_tiles();
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
        const Routing *routing = layer->routing;
        if (routing && !are_experts_known(step->dtype, routing->experts, all_experts(routing)))
            return 0;
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

static int is_quantised(const Layer *layer) {
    const Product *all[] = {&layer->q, &layer->k,    &layer->v,  &layer->z,
                            &layer->o, &layer->gate, &layer->up, &layer->down};
    const Routing *routing = layer->routing;
    for (int i = 0; i < 8; i++)
        if (all[i]->bits) return 1;
    return routing && are_experts_quantised(routing->experts, all_experts(routing));
}

/* The first layer's that has one: all are of one size; or NULL. */
static const Routing *routing_of(const Step *step) {
    for (int n = 0; n < step->num_layers; n++)
        if (step->layers[n].routing) return step->layers[n].routing;
    return NULL;
}

static Pairs pairs_of(const Step *step, const Routing *routing) {
    return (Pairs){.dtype = step->dtype,
                   .activation = routing->activation,
                   .num_experts = all_experts(routing),
                   .num_used = all_used(routing),
                   .num_rows = step->num_rows,
                   .experts = routing->experts};
}

/* Everything a step needs beside the plans, or NULL. Of OWN_ROWS rows each thread has 256 bytes times
 * the widest input (half as much as halves alone): 1 MiB at a width of 4096; more rows are shared. All
 * together it is less than what profiler.py plans for each token of a step, and for few tokens less
 * than the logits, which are made when it is freed. */
static void *make_room(const Step *step, Run *run) {
    const size_t rows = step->num_rows, threads = step->num_threads, read = padded_rows(step);
    const size_t queries = (size_t)step->num_heads * step->head_dim;
    const int halves = HAS_DOTS && step->dtype == BFLOAT16, is_wide = step->dtype == FLOAT32;
    size_t all = 0, own = step->width;
    int quantised = 0;
    for (int n = 0; n < step->num_layers; n++) {
        const size_t inputs = num_inputs(step->layers + n), ins = step->layers[n].o.ins;
        all = inputs > all ? inputs : all;
        own = ins > own ? ins : own;
        quantised |= is_quantised(step->layers + n);
    }
    run->is_shared = rows > OWN_ROWS;
    const int only_halves = halves && !quantised;
    const size_t number = is_wide ? 4 : 2, sets = run->is_shared ? 1 : threads;
    const size_t counters = (size_t)step->num_layers * NUM_PHASES;
    const size_t own_floats = only_halves ? own : rows * own;
    const Routing *routing = routing_of(step);
    const size_t chosen = routing ? rows * all_used(routing) : 0;
    if (routing) run->pairs = pairs_of(step, routing);
    const size_t sizes[] = {
        is_wide ? 0 : rows * step->width * 4,
        rows * all * 4,
        only_halves ? 0 : rows * step->mlp_width * 4,
        halves ? read * step->mlp_width * 2 : 0,
        rows * step->width * 4,
        rows * queries * number,
        read * own * number,
        (only_halves ? threads : sets) * own_floats * 4,
        halves ? sets * read * own * 2 : 0,
        counters * sizeof *run->next,
        routing ? rows * routing->num_experts * sizeof *run->scores : 0,
        chosen * sizeof *run->factors,
        chosen * sizeof *run->which,
        routing ? lay_pairs(&run->pairs, threads, !only_halves, NULL) : 0,
    };
    enum { HIDDEN, INPUTS, WIDE, WIDE_HALVES, ADDED, QUERY, ATTENDED, OWN, OWN_HALVES, NEXT, SCORES,
           FACTORS, WHICH, PAIRS, NUM };
    size_t bytes = 64;
    for (int i = 0; i < NUM; i++) bytes += (sizes[i] + 63) / 64 * 64;
    char *room = aligned_alloc(64, bytes), *at = room;
    void *pieces[NUM];
    if (!room) return NULL;
    for (int i = 0; i < NUM; i++) {
        pieces[i] = sizes[i] ? at : NULL;
        at += (sizes[i] + 63) / 64 * 64;
    }
    run->hidden = is_wide ? step->rows : pieces[HIDDEN];
    run->qkv = pieces[INPUTS];
    run->wide = (Inputs){pieces[WIDE], pieces[WIDE_HALVES], step->mlp_width, step->mlp_width};
    run->added = pieces[ADDED];
    run->query = pieces[QUERY];
    run->attended = pieces[ATTENDED];
    run->own = (Inputs){pieces[OWN], pieces[OWN_HALVES], only_halves ? 0 : (int64_t)own,
                        (int64_t)own};
    run->own_floats = run->is_shared && !only_halves ? 0 : (int64_t)own_floats;
    run->scores = pieces[SCORES], run->factors = pieces[FACTORS], run->which = pieces[WHICH];
    if (routing) lay_pairs(&run->pairs, threads, !only_halves, pieces[PAIRS]);
    run->next = pieces[NEXT];
    memset(run->next, 0, sizes[NEXT]);
    const int most = only_halves ? TILED_ROWS : SLICE_ROWS;
    const int num_slices = (step->num_rows + most - 1) / most;
    const int even = (step->num_rows + num_slices - 1) / num_slices;
    run->slice_rows = (even + ROW_STEP - 1) / ROW_STEP * ROW_STEP;
    run->num_slices = (step->num_rows + run->slice_rows - 1) / run->slice_rows;
    return room;
}

/* DONE, UNSUPPORTED or NO_MEMORY; only DONE has changed anything. */
int foveal_decoder_layers(const Step *step) {
    const int64_t count = (int64_t)step->num_rows * step->width;
    if (!is_supported(step)) return UNSUPPORTED;
    if (!count) return DONE;
    Run run = {.step = step};
    Plan *owned = calloc(step->num_layers, sizeof *owned);
    run.plans = calloc(step->num_layers, sizeof *run.plans);
    void *room = make_room(step, &run);
    int code = NO_MEMORY;
    if (owned && run.plans && room) code = make_plans(step, owned, run.plans);
    if (code == DONE) {
        const Job job = attention_of(step, step->layers, NULL, NULL), chunks = chunks_of(step, job);
        code = cut_chunks(&chunks, step->chunk_rows, (int32_t)step->num_chunks, &run.pieces);
    }
    if (code == DONE) {
        for (int64_t i = 0; step->dtype != FLOAT32 && i < count; i++)
            run.hidden[i] = one_at(BFLOAT16, step->rows, i);
#pragma omp parallel num_threads(step->num_threads)
        run_layers(&run, omp_get_thread_num(), omp_get_num_threads());
        if (step->dtype != FLOAT32) put_rounded(BFLOAT16, BFLOAT16, run.hidden, count, step->rows, 0);
    }
    for (int n = 0; owned && n < step->num_layers; n++) drop_plan(owned + n);
    free(owned), free(run.plans), free(room), free(run.pieces.pieces);
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
    const int is_plain = !p->deep && !p->bits && p->wide <= MAX_WIDE;
    const int halves = HAS_DOTS && job->dtype == BFLOAT16;
    if (!is_plain && !is_known(job->dtype, p)) return UNSUPPORTED;
    float *x = aligned_alloc(64, (rows * ins * sizeof *x + 63) / 64 * 64);
    void *copy = NULL; /* as tiles take the rows */
#if HAS_TILES
    const int is_tiled = halves && (!is_plain || ins % TILE_DEPTH == 0);
    if (is_tiled && is_plain) copy = pair_rows(job->x, rows, ins);
    else if (is_tiled && (copy = aligned_alloc(64, (2 * (rows + TILE) * ins + 63) / 64 * 64)))
        memcpy(copy, job->x, 2 * rows * ins);
#else
    const int is_tiled = 0;
#endif
    if (!x || (is_tiled && !copy)) {
        free(x), free(copy);
        return NO_MEMORY;
    }
    const void *half = copy && !is_plain ? copy : halves ? job->x : NULL;
    const Inputs in = {x, (uint16_t *)half, ins, ins};
#pragma omp parallel num_threads(job->num_threads)
    {
        begin_tiles();
#pragma omp for
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = r * ins; i < (r + 1) * ins; i++) x[i] = one_at(job->dtype, job->x, i);
#pragma omp for schedule(dynamic)
        for (int panel = 0; panel < num_panels(p); panel++) {
            float tile[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
            EACH_GROUP(first, count, 0, rows, is_plain ? PLAIN_ROWS : PROJECT_ROWS) {
                const int outs =
                    is_plain ? project_plain(job->dtype, p, panel, &in, copy, first, count, tile)
                             : project(job->dtype, p, panel, &in, first, count, tile);
                for (int r = 0; r < count; r++)
                    put_rounded(job->dtype, job->dtype, tile + r * MAX_WIDE, outs, job->out,
                                (first + r) * (int64_t)p->outs + panel * p->wide);
            }
        }
        end_tiles();
    }
    free(x), free(copy);
    return DONE;
}
