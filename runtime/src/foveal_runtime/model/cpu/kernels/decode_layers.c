/* Some new tokens of some sequences through all layers of a Llama-like decoder, in one call.
 *
 * Called by model/layers/decode_layers.py through ctypes; compiled by runtime/setup.py once per instruction
 * set. The threads are woken once a step and meet at barriers, where they spin for some tens of
 * microseconds before they sleep; work between two barriers goes to whoever is free. Weights are read
 * where oneDNN packed them. Loads float32 or bfloat16, computes in float32, and rounds where
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

#include "paged.h"
#include "rows.h"

#define MOST_ROWS 6   /* rows multiplied at once: their sums stay in registers */
#define COLS (LANES == 16 ? 4 : 2)
#define MAX_WIDE 128  /* outputs of a block */
#define SPINS 2000    /* turns before a thread that waits sleeps: some tens of microseconds */

enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

/* A packed linear layer: blocks of `wide` outputs times `deep` inputs, outputs next to each other,
 * or pairs of inputs where `paired`. Strides are in elements, from block to block. */
typedef struct {
    const void *weight, *bias; /* bias: NULL = none */
    int32_t ins, outs, wide, deep, paired;
    int64_t out_stride, in_stride;
} Product;

typedef struct {
    RmsNorm before, after;  /* before attention and before the MLP */
    RmsNorm query, key;     /* of single heads; weight NULL = none */
    Product q, k, v, o, gate, up, down;
    void *keys, *values;    /* this layer's part of the pool */
    const float *sinks;     /* (num_heads) or NULL */
    float scaling, softcap;
    int32_t window, chunk;
} Layer;

typedef struct {
    int32_t dtype, num_threads, num_layers, num_rows;
    int32_t width, mlp_width, num_heads, num_kv_heads, head_dim, rope_dim, activation, block_size;
    const Layer *layers;
    void *rows;             /* (num_rows, width), hidden states, in place */
    const float *cos, *sin; /* (num_rows, rope_dim) */
    const int64_t *slots;   /* (num_rows), where keys and values are written */
    const int32_t *block_table;
    int64_t table_stride;
    const int32_t *row_number, *row_sequence, *row_length; /* row_number: 0, 1, 2 ... */
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
    float *qkv;             /* (num_rows, heads and kv heads twice, head_dim) */
    float *wide;            /* (num_rows, mlp_width) */
    float *own;             /* per thread: (num_rows, own_width) */
    void *query, *attended; /* (num_rows, num_heads, head_dim), of dtype */
    int64_t own_width;
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

/* tile[r] = the products of row r with `columns` vectors of outputs of a block column. */
INLINE void multiply(const int kind, const int rows, const int columns, const Product *p,
                     int64_t at, const float *x, int64_t stride, float *tile) {
    vec sum[MOST_ROWS * COLS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * columns; i++) sum[i] = splat(0.0f);
    for (int low = 0; low < p->ins; low += p->deep, at += p->in_stride) {
        const int count = p->ins - low < p->deep ? p->ins - low : p->deep;
        const float *from = x + low;
        if (kind == FLOAT32) {
            const float *w = (const float *)p->weight + at;
            for (int k = 0; k < count; k++, w += p->wide) {
                vec one[COLS];
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++) one[c] = load(w + c * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const vec factor = splat(from[r * stride + k]);
#pragma GCC unroll 8
                    for (int c = 0; c < columns; c++) sum[r * columns + c] += factor * one[c];
                }
            }
        } else {
            const uint16_t *w = (const uint16_t *)p->weight + at;
            for (int k = 0; k < count; k += 2, w += 2 * p->wide) {
                vec even[COLS], odd[COLS];
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++) {
                    uvec pair;
                    memcpy(&pair, w + 2 * c * LANES, sizeof pair);
                    even[c] = (vec)(pair << 16), odd[c] = (vec)(pair & 0xffff0000u);
                }
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const vec first = splat(from[r * stride + k]);
                    const vec second = splat(from[r * stride + k + 1]);
#pragma GCC unroll 8
                    for (int c = 0; c < columns; c++) {
                        sum[r * columns + c] += first * even[c];
                        sum[r * columns + c] += second * odd[c];
                    }
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            store(tile + r * MAX_WIDE + c * LANES, sum[r * columns + c]);
}

INLINE void multiply_panel(const int kind, const int rows, const Product *p, int panel,
                           const float *x, int64_t stride, float *tile) {
    const int64_t at = panel * p->out_stride, pair = p->paired ? 2 : 1;
    int c = 0;
    for (; c + COLS * LANES <= p->wide; c += COLS * LANES)
        multiply(kind, rows, COLS, p, at + c * pair, x, stride, tile + c);
    for (; c < p->wide; c += LANES)
        multiply(kind, rows, 1, p, at + c * pair, x, stride, tile + c);
}

#define PANEL(KIND, R)                                                                          \
    static void panel_##KIND##_##R(const Product *p, int panel, const float *x, int64_t stride, \
                                   float *tile) {                                               \
        multiply_panel(KIND, R, p, panel, x, stride, tile);                                     \
    }
#define PANELS(R) PANEL(FLOAT32, R) PANEL(BFLOAT16, R)
PANELS(1) PANELS(2) PANELS(3) PANELS(4) PANELS(5) PANELS(6)

typedef void (*PanelFunction)(const Product *, int, const float *, int64_t, float *);

static const PanelFunction panel_functions[2][MOST_ROWS] = {
    {panel_FLOAT32_1, panel_FLOAT32_2, panel_FLOAT32_3, panel_FLOAT32_4, panel_FLOAT32_5,
     panel_FLOAT32_6},
    {panel_BFLOAT16_1, panel_BFLOAT16_2, panel_BFLOAT16_3, panel_BFLOAT16_4, panel_BFLOAT16_5,
     panel_BFLOAT16_6},
};

static int num_panels(const Product *p) { return (p->outs + p->wide - 1) / p->wide; }

/* Rows [first, first + count) times one block of outputs, with the bias: (count, MAX_WIDE). Returns
 * how many of the block's outputs there are. */
static int project(int kind, const Product *p, int panel, const float *x, int64_t stride,
                   int first, int count, float *tile) {
    const int low = panel * p->wide;
    const int outs = p->outs - low < p->wide ? p->outs - low : p->wide;
    panel_functions[kind][count - 1](p, panel, x + first * stride, stride, tile);
    if (p->bias)
        for (int r = 0; r < count; r++)
            for (int c = 0; c < outs; c++)
                tile[r * MAX_WIDE + c] += one_at(kind, p->bias, low + c);
    return outs;
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
#define EACH_GROUP(first, count, rows) \
    for (int first = 0, count; first < (rows); first += count) \
        if (count = (rows) - first < MOST_ROWS ? (rows) - first : MOST_ROWS, 1)

/* out[row, low ...] = the product, rounded. */
static void put_product(const Run *run, const Product *p, int panel, const float *x,
                        int64_t stride, float *out, int64_t out_stride) {
    const int kind = run->step->dtype;
    float tile[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_GROUP(first, count, run->step->num_rows) {
        const int outs = project(kind, p, panel, x, stride, first, count, tile);
        for (int r = 0; r < count; r++)
            for (int c = 0; c < outs; c++)
                out[(first + r) * out_stride + panel * p->wide + c] =
                    rounded_one(kind, tile[r * MAX_WIDE + c]);
    }
}

/* hidden += the product, both rounded. */
static void add_product(const Run *run, const Product *p, int panel, const float *x,
                        int64_t stride) {
    const int kind = run->step->dtype;
    float tile[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_GROUP(first, count, run->step->num_rows) {
        const int outs = project(kind, p, panel, x, stride, first, count, tile);
        for (int r = 0; r < count; r++) {
            float *to = run->hidden + (int64_t)(first + r) * run->step->width + panel * p->wide;
            for (int c = 0; c < outs; c++)
                to[c] = rounded_one(kind, to[c] + rounded_one(kind, tile[r * MAX_WIDE + c]));
        }
    }
}

/* wide = activation(gate) times up. */
static void put_gated(const Run *run, const Layer *layer, int panel, const float *x,
                      int64_t stride) {
    const int kind = run->step->dtype, mlp = run->step->mlp_width;
    float gate[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    float up[MOST_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    EACH_GROUP(first, count, run->step->num_rows) {
        const int outs = project(kind, &layer->gate, panel, x, stride, first, count, gate);
        project(kind, &layer->up, panel, x, stride, first, count, up);
        for (int r = 0; r < count; r++) {
            float *to = run->wide + (int64_t)(first + r) * mlp + panel * layer->gate.wide;
            for (int c = 0; c < outs; c += LANES) {
                const vec factor = activated(run->step->activation, load(gate + r * MAX_WIDE + c));
                const vec one = rounded(kind, load(up + r * MAX_WIDE + c) * rounded(kind, factor));
                if (c + LANES <= outs) store(to + c, one);
                else memcpy(to + c, &one, (size_t)(outs - c) * sizeof *to);
            }
        }
    }
}

/* One head of one row: norm and rotary embedding, then into the queries or into the pool. */
static void place_head(const Run *run, const Layer *layer, int row, int head) {
    const Step *step = run->step;
    const int kind = step->dtype, dim = step->head_dim, half = step->rope_dim / 2;
    const int num_heads = step->num_heads, num_kv = step->num_kv_heads;
    const float *from = run->qkv + ((int64_t)row * (num_heads + 2 * num_kv) + head) * dim;
    const int64_t slot = step->slots[row] * num_kv * dim;
    float one[MAX_DIM] __attribute__((aligned(64)));
    if (head >= num_heads + num_kv) {
        const int64_t at = slot + (int64_t)(head - num_heads - num_kv) * dim;
        for (int d = 0; d < dim; d++) put_one(kind, layer->values, at + d, from[d]);
        return;
    }
    const RmsNorm *norm = head < num_heads ? &layer->query : &layer->key;
    if (norm->weight) norm_row(kind, FLOAT32, norm, dim, from, one, 0);
    else memcpy(one, from, dim * sizeof *one);
    const float *cos = step->cos + (int64_t)row * step->rope_dim;
    const float *sin = step->sin + (int64_t)row * step->rope_dim;
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
                 .block_table = step->block_table,
                 .table_stride = step->table_stride,
                 .row_token = step->row_number,
                 .row_sequence = step->row_sequence,
                 .row_length = step->row_length,
                 .sinks = layer->sinks};
}

enum { QKV, ATTEND, OUT, GATED, DOWN, NUM_PHASES }; /* those whose units are taken one by one */

static void norm_all(const Step *step, const RmsNorm *norm, const float *hidden, float *own,
                     int64_t own_width) {
    for (int r = 0; r < step->num_rows; r++) {
        memcpy(own + r * own_width, hidden + (int64_t)r * step->width, step->width * sizeof *own);
        if (step->dtype == FLOAT32)
            norm_row(FLOAT32, FLOAT32, norm, step->width, own + r * own_width, own + r * own_width, 0);
        else
            norm_row(BFLOAT16, FLOAT32, norm, step->width, own + r * own_width, own + r * own_width, 0);
    }
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

static void run_layers(Run *run, int thread, int threads) {
    const Step *step = run->step;
    const int kind = step->dtype, rows = step->num_rows;
    const int64_t queries = (int64_t)step->num_heads * step->head_dim;
    const int64_t kvs = (int64_t)step->num_kv_heads * step->head_dim;
    const int64_t own_width = run->own_width;
    float *own = run->own + thread * rows * own_width;
    for (int n = 0; n < step->num_layers; n++) {
        const Layer *layer = step->layers + n;
        const int phase = n * NUM_PHASES;
        const int num_q = num_panels(&layer->q), num_k = num_panels(&layer->k);
        norm_all(step, &layer->before, run->hidden, own, own_width);
        EACH_UNIT(i, phase + QKV, num_q + num_k + num_panels(&layer->v)) {
            const int which = i < num_q ? 0 : i < num_q + num_k ? 1 : 2;
            const Product *p = which == 0 ? &layer->q : which == 1 ? &layer->k : &layer->v;
            float *to = run->qkv + (which == 0 ? 0 : which == 1 ? queries : queries + kvs);
            const int panel = which == 0 ? i : which == 1 ? i - num_q : i - num_q - num_k;
            put_product(run, p, panel, own, own_width, to, queries + 2 * kvs);
        }
        meet(&run->barrier, threads);
        attend_layer(run, layer, n, thread, threads);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < queries; d++)
                own[r * own_width + d] = one_at(kind, run->attended, r * queries + d);
        EACH_UNIT(i, phase + OUT, num_panels(&layer->o))
            add_product(run, &layer->o, i, own, own_width);
        meet(&run->barrier, threads);
        norm_all(step, &layer->after, run->hidden, own, own_width);
        EACH_UNIT(i, phase + GATED, num_panels(&layer->gate))
            put_gated(run, layer, i, own, own_width);
        meet(&run->barrier, threads);
        EACH_UNIT(i, phase + DOWN, num_panels(&layer->down))
            add_product(run, &layer->down, i, run->wide, step->mlp_width);
        meet(&run->barrier, threads);
    }
}

static int is_supported(const Step *step) {
    for (int n = 0; n < step->num_layers; n++) {
        const Layer *layer = step->layers + n;
        const Product *all[] = {&layer->q,    &layer->k,  &layer->v,   &layer->o,
                                &layer->gate, &layer->up, &layer->down};
        for (int i = 0; i < 7; i++)
            if (all[i]->wide % LANES || all[i]->wide > MAX_WIDE ||
                all[i]->paired != (step->dtype == BFLOAT16) ||
                (all[i]->paired && (all[i]->ins % 2 || all[i]->deep % 2)))
                return 0;
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

/* Everything a step needs beside the plans, or NULL. */
static void *make_room(const Step *step, Run *run) {
    const size_t rows = step->num_rows, threads = step->num_threads;
    const size_t queries = (size_t)step->num_heads * step->head_dim;
    const size_t all = queries + 2 * (size_t)step->num_kv_heads * step->head_dim;
    const size_t own = queries > (size_t)step->width ? queries : (size_t)step->width;
    const size_t counters = (size_t)step->num_layers * NUM_PHASES;
    const size_t floats = rows * (step->width + all + step->mlp_width + 2 * queries + threads * own);
    char *room = aligned_alloc(64, (floats * 4 + counters * sizeof *run->next + 8 * 64 + 63) / 64 * 64);
    char *at = room;
    if (!room) return NULL;
    run->own_width = (int64_t)own;
    run->hidden = piece(&at, rows * step->width * 4);
    run->qkv = piece(&at, rows * all * 4);
    run->wide = piece(&at, rows * step->mlp_width * 4);
    run->query = piece(&at, rows * queries * 4);
    run->attended = piece(&at, rows * queries * 4);
    run->own = piece(&at, threads * rows * own * 4);
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
