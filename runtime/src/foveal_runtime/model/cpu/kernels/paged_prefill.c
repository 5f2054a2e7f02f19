/* One layer's paged attention for chunks of prompts: many query tokens of a sequence at once.
 *
 * Called by model/attention/cpu.py through ctypes; compiled by runtime/setup.py once per instruction
 * set. A task is (chunk, kv head, some of the chunk's query tokens): it goes over the context in
 * tiles, each copied once out of the pool and used for all its rows, which are the query tokens of every
 * head that shares the kv head. Tiles start at fixed positions, so the result of a row is the same
 * bits however its prompt was cut and whatever else is in the batch.
 */
#include "paged.h"

#define KEYS 64       /* context tokens of a tile */
#define GROUP_ROWS 6  /* rows multiplied at once: their sums stay in registers */
#define VECTORS (LANES == 16 ? 4 : 2)
#define MOST_QUERIES 96
#define ROOM 16384    /* numbers of queries, and of results, in one task: 64 KiB each */

typedef struct {
    int32_t first, count, kv; /* rows of the job, and their kv head */
} Piece;

typedef struct {
    float peak;
    vec sums; /* of exp(score - peak), still spread over lanes */
} Share;

/* c (rows, columns vectors) = or += a (rows, depth) times b (depth, ...). `dots`: a's and b's numbers
 * are pairs of bfloat16 numbers, of consecutive places in the depth. */
INLINE void multiply(const int dots, const int rows, const int columns, const int adds, int depth,
                     const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c,
                     int64_t c_stride) {
    vec sum[GROUP_ROWS * VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < columns; i++)
            sum[r * columns + i] = adds ? load(c + r * c_stride + i * LANES) : splat(0.0f);
    for (int k = 0; k < depth; k++) {
        vec one[VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < columns; i++) one[i] = load(b + k * b_stride + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const float *at = a + r * a_stride + k;
            const vec factor = dots ? splat_bits(at) : splat(*at);
#pragma GCC unroll 8
            for (int i = 0; i < columns; i++) {
                vec *to = sum + r * columns + i;
                *to = dots ? add_dots(*to, one[i], factor) : *to + factor * one[i];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < columns; i++)
            store(c + r * c_stride + i * LANES, sum[r * columns + i]);
}

INLINE void multiply_rows(const int dots, const int rows, const int adds, int depth, int wide,
                          const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                          float *c, int64_t c_stride) {
    int i = 0;
    for (; i + VECTORS * LANES <= wide; i += VECTORS * LANES)
        multiply(dots, rows, VECTORS, adds, depth, a, a_stride, b + i, b_stride, c + i, c_stride);
    for (; i < wide; i += LANES)
        multiply(dots, rows, 1, adds, depth, a, a_stride, b + i, b_stride, c + i, c_stride);
}

/* Rows 1 ... GROUP_ROWS, inlined once for each. */
static void product(int dots, int adds, int rows, int depth, int wide, const float *a,
                    int64_t a_stride, const float *b, int64_t b_stride, float *c,
                    int64_t c_stride) {
#define PRODUCT(DOTS, R, ADDS) \
    multiply_rows(DOTS, R, ADDS, depth, wide, a, a_stride, b, b_stride, c, c_stride)
#define ROWS(R)                                       \
    case R:                                           \
        if (HAS_DOTS && dots && adds) PRODUCT(1, R, 1); \
        else if (HAS_DOTS && dots) PRODUCT(1, R, 0);  \
        else if (adds) PRODUCT(0, R, 1);              \
        else PRODUCT(0, R, 0);                        \
        break;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
}

INLINE vec some_of(const int dtype, const void *from, int64_t i) {
    return dtype == FLOAT32 ? load((const float *)from + i) : load_bf16((const uint16_t *)from + i);
}

/* Lane c of v[r] becomes lane r of v[c]. */
INLINE void turn(vec *v) {
#pragma GCC unroll 4
    for (int done = 1; done < LANES; done *= 2) {
        vec w[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            w[i] = EVEN(v[2 * i], v[2 * i + 1]);
            w[LANES / 2 + i] = ODD(v[2 * i], v[2 * i + 1]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) v[i] = w[i];
    }
}

/* LANES tokens' keys and values as columns `first` ... of (dim, KEYS) and rows of (KEYS, dim). */
INLINE void take_numbers(const int dtype, const Job *job, const int64_t *from, int first,
                         float *keys, float *values) {
    const int dim = job->head_dim;
    for (int d = 0; d < dim; d += LANES) {
        vec v[LANES];
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) v[t] = some_of(dtype, job->keys, from[t] + d);
        turn(v);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) store(keys + (d + t) * KEYS + first, v[t]);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++)
            store(values + (first + t) * dim + d, some_of(dtype, job->values, from[t] + d));
    }
}

/* Likewise, in pairs: keys (dim / 2, KEYS) of numbers that are next to each other, values
 * (KEYS / 2, dim) of tokens that are. */
INLINE void take_pairs(const Job *job, const int64_t *from, int first, float *keys,
                       float *values) {
    const int dim = job->head_dim;
    const uint16_t *all_keys = job->keys, *all_values = job->values;
    for (int d = 0; d < dim; d += 2 * LANES) {
        const int is_whole = d + 2 * LANES <= dim;
        vec v[LANES];
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) {
            const float *at = (const float *)(all_keys + from[t] + d);
            v[t] = is_whole ? load(at) : load_half(at);
        }
        turn(v);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++)
            if (is_whole || t < LANES / 2) store(keys + (d / 2 + t) * KEYS + first, v[t]);
    }
    for (int t = 0; t < LANES; t += 2)
        for (int d = 0; d < dim; d += LANES)
            store(values + (first + t) / 2 * dim + d,
                  load_pairs(all_values + from[t] + d, all_values + from[t + 1] + d));
}

/* Copies a tile out of the pool. What lies beyond the context is the last token again, which nobody
 * may see. */
INLINE void take_tile(const int dtype, const Job *job, const int32_t *table, int low, int end,
                      int kv, float *keys, float *values) {
    const int64_t stride = (int64_t)job->num_kv_heads * job->head_dim;
    for (int first = 0; first < KEYS; first += LANES) {
        int64_t from[LANES];
        for (int t = 0; t < LANES; t++) {
            const int at = low + first + t < end ? low + first + t : end - 1;
            const int64_t slot = (int64_t)table[at / job->block_size] * job->block_size;
            from[t] = (slot + at % job->block_size) * stride + (int64_t)kv * job->head_dim;
        }
        if (HAS_DOTS && dtype == BFLOAT16) take_pairs(job, from, first, keys, values);
        else take_numbers(dtype, job, from, first, keys, values);
    }
}

/* Turns the scores of one row against a tile into weights, with `dots` rounded to bfloat16 as
 * transformers rounds them; valid: [low, high) of the tile. */
INLINE void weigh(const int dots, const Job *job, int low, int high, float *score, Share *share,
                  float *acc) {
    const int dim = job->head_dim;
    if (high <= low) {
        for (int i = 0; i < KEYS; i += LANES) store(score + i, splat(0.0f));
        return;
    }
    if (dots)
        for (int i = 0; i < KEYS; i += LANES) store(score + i, load(score + i) * splat(job->scaling));
    if (job->softcap > 0)
        for (int i = 0; i < KEYS; i += LANES) store(score + i, vcap(load(score + i), job->softcap));
    for (int t = 0; t < low; t++) score[t] = -INFINITY;
    for (int t = high; t < KEYS; t++) score[t] = -INFINITY;
    vec most = load(score);
    for (int i = LANES; i < KEYS; i += LANES) {
        const vec one = load(score + i);
        most = pick(most > one, most, one);
    }
    if (ANY_ABOVE(most, share->peak)) {
        const float peak = reduce_max(most);
        const vec shrink = splat(expf(share->peak - peak));
        share->sums *= shrink;
        for (int d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) * shrink);
        share->peak = peak;
    }
    for (int i = 0; i < KEYS; i += LANES) {
        const vec weight = vexp(load(score + i) - splat(share->peak));
        const hvec half = to_halves(weight);
        if (dots) memcpy((uint16_t *)score + i, &half, sizeof half);
        else store(score + i, weight);
        share->sums += dots ? (vec)(widened(half) << 16) : weight;
    }
}

INLINE void run_piece(const int dtype, const Job *job, const Piece *piece) {
    const int dots = HAS_DOTS && dtype == BFLOAT16;
    const int dim = job->head_dim, group = job->num_heads / job->num_kv_heads;
    const int words = dots ? 2 : 1, deep = dim / words; /* numbers of one float's size */
    const int count = piece->count, rows = count * group, sequence = job->row_sequence[piece->first];
    const int32_t *table = job->block_table + sequence * job->table_stride;
    const int32_t *length = job->row_length + piece->first;
    float keys[KEYS * MAX_DIM] __attribute__((aligned(64)));
    float values[KEYS * MAX_DIM] __attribute__((aligned(64)));
    float query[ROOM] __attribute__((aligned(64)));
    float acc[ROOM] __attribute__((aligned(64)));
    float score[GROUP_ROWS * KEYS] __attribute__((aligned(64)));
    Share share[ROOM / 16];
    for (int r = 0; r < rows; r++) {
        const int64_t at = job->row_token[piece->first + r % count] * job->query_token_stride +
                           (piece->kv * group + r / count) * job->query_head_stride;
        for (int d = 0; d < dim; d += LANES) {
            const vec one = some_of(dtype, job->query, at + d);
            if (!dots) store(query + r * dim + d, one * splat(job->scaling));
            store(acc + r * dim + d, splat(0.0f));
        }
        if (dots) memcpy(query + r * deep, (const uint16_t *)job->query + at, 2 * dim);
        share[r] = (Share){-INFINITY, splat(0.0f)};
    }
    const int end = length[count - 1];
    for (int low = first_visible(job, length[0]) / KEYS * KEYS; low < end; low += KEYS) {
        take_tile(dtype, job, table, low, end, piece->kv, keys, values);
        for (int first = 0; first < rows; first += GROUP_ROWS) {
            const int some = rows - first < GROUP_ROWS ? rows - first : GROUP_ROWS;
            int seen = 0;
            for (int r = 0; r < some; r++) seen |= length[(first + r) % count] > low;
            if (!seen) continue;
            product(dots, 0, some, deep, KEYS, query + first * deep, deep, keys, KEYS, score, KEYS);
            for (int r = 0; r < some; r++) {
                const int visible = length[(first + r) % count];
                const int from = first_visible(job, visible) - low, to = visible - low;
                weigh(dots, job, from > 0 ? from : 0, to < KEYS ? to : KEYS, score + r * KEYS,
                      share + first + r, acc + (first + r) * dim);
            }
            product(dots, 1, some, KEYS / words, dim, score, KEYS, values, dim, acc + first * dim,
                    dim);
        }
    }
    for (int r = 0; r < rows; r++) {
        float sum = 0;
        for (int i = 0; i < LANES; i++) sum += share[r].sums[i];
        finish_head(job, piece->first + r % count, piece->kv * group + r / count,
                    (Norm){share[r].peak, sum}, acc + r * dim);
    }
}

static void run_float32(const Job *job, const Piece *piece) { run_piece(FLOAT32, job, piece); }
static void run_bfloat16(const Job *job, const Piece *piece) { run_piece(BFLOAT16, job, piece); }

/* The job's rows are the chunks' tokens, one chunk after the other, each of one sequence and in its
 * order; chunk_rows: how many of each. */
int foveal_paged_prefill(const Job *job, const int32_t *chunk_rows, int32_t num_chunks) {
    const int group_dim = job->num_heads / job->num_kv_heads * job->head_dim;
    if (job->head_dim > MAX_DIM || job->head_dim % 16 || group_dim > ROOM) return UNSUPPORTED;
    const int fit = ROOM / group_dim, most = fit < MOST_QUERIES ? fit : MOST_QUERIES;
    int64_t num = 0, work = 0;
    for (int c = 0; c < num_chunks; c++)
        num += (int64_t)(chunk_rows[c] + most - 1) / most * job->num_kv_heads;
    if (num == 0) return DONE;
    Piece *pieces = malloc(num * sizeof *pieces);
    if (!pieces) return NO_MEMORY;
    num = 0;
    for (int c = 0, row = 0; c < num_chunks; row += chunk_rows[c++]) {
        work += (int64_t)chunk_rows[c] * job->row_length[row] * job->num_heads * job->head_dim;
        /* The last first: they see the most, and threads end together. */
        const int parts = (chunk_rows[c] + most - 1) / most;
        for (int p = parts - 1; p >= 0; p--)
            for (int kv = 0; kv < job->num_kv_heads; kv++) {
                const int from = (int64_t)chunk_rows[c] * p / parts;
                const int to = (int64_t)chunk_rows[c] * (p + 1) / parts;
                pieces[num++] = (Piece){row + from, to - from, kv};
            }
    }
    const int threads = work > 65536 ? job->num_threads : 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < num; i++)
        (job->dtype == FLOAT32 ? run_float32 : run_bfloat16)(job, pieces + i);
    free(pieces);
    return DONE;
}
