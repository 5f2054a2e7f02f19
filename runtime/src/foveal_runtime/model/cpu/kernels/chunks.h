/* Paged attention for many query tokens of a sequence at once: chunks of prompts, and encoders.
 *
 * Included by paged_prefill.c, which is one layer's attention, and by decoder_layers.c, which is a whole
 * step. A piece is some of a chunk's query tokens and one kv head: it goes over the context in tiles,
 * each copied once and used for all its rows, which are the query tokens of every head that shares the
 * kv head. Tiles start at fixed positions, so the result of a row is the same bits however its prompt
 * was cut and whatever else is in the batch.
 */
#ifndef FOVEAL_CHUNKS_H
#define FOVEAL_CHUNKS_H

#include "paged.h"
#include "tiles.h"

#define KEYS 64       /* context tokens of a tile */
#define GROUP_ROWS 6  /* rows multiplied at once: their sums stay in registers */
#define VECTORS (LANES == 16 ? 4 : 2)
#define MOST_QUERIES 192
#define ROOM 16384    /* numbers of queries, and of results, in one task: 64 KiB each */
#if HAS_TILES
#define MOST_TOGETHER (2 * TILE) /* rows multiplied at once: of pairs */
#define SPARE (MOST_TOGETHER * MAX_DIM)
#else
#define MOST_TOGETHER GROUP_ROWS
#define SPARE 0
#endif

typedef struct {
    int32_t first, count, kv; /* rows of the job, and their kv head */
} Piece;

typedef struct {
    int64_t key_token, key_head, value_token, value_head; /* strides, in elements */
} Layout;

typedef struct {
    float peak; /* of the scores, not yet scaled */
    vec sums;   /* of exp(scaling * (score - peak)), still spread over lanes */
} Share;

/* c (rows, columns vectors) = or += a (rows, depth) times b (depth, ...). `dots`: a's and b's numbers
 * are pairs of bfloat16 numbers, of consecutive places in the depth. */
INLINE void multiply_tile(const int dots, const int rows, const int columns, const int adds,
                          int depth, const float *a, int64_t a_stride, const float *b,
                          int64_t b_stride, float *c, int64_t c_stride) {
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
        multiply_tile(dots, rows, VECTORS, adds, depth, a, a_stride, b + i, b_stride, c + i, c_stride);
    for (; i < wide; i += LANES)
        multiply_tile(dots, rows, 1, adds, depth, a, a_stride, b + i, b_stride, c + i, c_stride);
}

/* Rows 1 ... GROUP_ROWS, inlined once for each. */
static void multiply_some(int dots, int adds, int rows, int depth, int wide, const float *a,
                    int64_t a_stride, const float *b, int64_t b_stride, float *c,
                    int64_t c_stride) {
#if HAS_TILES
    if (dots) {
        const int steps = (depth + TILE - 1) / TILE;
        multiply_in_tiles(adds, rows, wide, steps, (TileJob){a, b, c, 4 * a_stride, 4 * b_stride,
                                                             4 * TILE * b_stride, c_stride});
        return;
    }
#endif
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

/* `count` numbers from the i-th on, and zeros after them. */
INLINE vec some_of(const int dtype, const void *from, int64_t i, int count) {
    return dtype == FLOAT32 ? load_first((const float *)from + i, count)
                            : (vec)(load_first_halves((const uint16_t *)from + i, count) << 16);
}

/* A head's numbers as the tiles have them: whole vectors. */
INLINE int padded(int dim) { return (dim + LANES - 1) / LANES * LANES; }

INLINE int fewer(int a, int b) { return a < b ? a : b; }

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
INLINE void take_numbers(const int dtype, const Job *job, const int64_t *key, const int64_t *value,
                         int first, float *keys, float *values) {
    const int dim = job->head_dim, wide = padded(dim);
    for (int d = 0; d < dim; d += LANES) {
        const int count = fewer(dim - d, LANES);
        vec v[LANES];
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) v[t] = some_of(dtype, job->keys, key[t] + d, count);
        turn(v);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) store(keys + (d + t) * KEYS + first, v[t]);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++)
            store(values + (first + t) * wide + d,
                  some_of(dtype, job->values, value[t] + d, count));
    }
}

/* Likewise, in pairs: keys (dim / 2, KEYS) of numbers that are next to each other, values
 * (KEYS / 2, dim) of tokens that are. */
INLINE void take_pairs(const Job *job, const int64_t *key, const int64_t *value, int first,
                       float *keys, float *values) {
    const int dim = job->head_dim, wide = padded(dim);
    const uint16_t *all_keys = job->keys, *all_values = job->values;
    for (int d = 0; d < dim; d += 2 * LANES) {
        vec v[LANES];
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++)
            v[t] = load_first((const float *)(all_keys + key[t] + d), fewer((dim - d) / 2, LANES));
        turn(v);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) store(keys + (d / 2 + t) * KEYS + first, v[t]);
    }
    for (int t = 0; t < LANES; t += 2)
        for (int d = 0; d < dim; d += LANES)
            store(values + (first + t) / 2 * wide + d,
                  load_pairs(all_values + value[t] + d, all_values + value[t + 1] + d,
                             fewer(dim - d, LANES)));
}

/* Copies a tile of the context. What lies beyond it is the last token again, which nobody may
 * see. */
INLINE void take_tile(const int dtype, const Job *job, const Layout *layout, const int32_t *table,
                      int low, int end, int kv, float *keys, float *values) {
    for (int first = 0; first < KEYS; first += LANES) {
        int64_t key[LANES], value[LANES];
        for (int t = 0; t < LANES; t++) {
            const int at = fewer(low + first + t, end - 1);
            const int64_t slot =
                (int64_t)table[at / job->block_size] * job->block_size + at % job->block_size;
            key[t] = slot * layout->key_token + kv * layout->key_head;
            value[t] = slot * layout->value_token + kv * layout->value_head;
        }
        if (HAS_DOTS && dtype == BFLOAT16) take_pairs(job, key, value, first, keys, values);
        else take_numbers(dtype, job, key, value, first, keys, values);
    }
}

/* What scores are still to be multiplied with when their peak is taken. */
INLINE float late_scaling(const Job *job) { return job->softcap > 0 ? 1.0f : job->scaling; }

/* Turns the scores of one row against a tile into weights, with `dots` rounded to bfloat16 as
 * transformers rounds them; valid: [low, high) of the tile. */
INLINE void weigh(const int dots, const Job *job, int low, int high, float *score, Share *share,
                  float *acc) {
    if (high <= low) {
        for (int i = 0; i < KEYS; i += LANES) store(score + i, splat(0.0f));
        return;
    }
    if (job->softcap > 0)
        for (int i = 0; i < KEYS; i += LANES)
            store(score + i, vcap(load(score + i) * splat(job->scaling), job->softcap));
    for (int t = 0; t < low; t++) score[t] = -INFINITY;
    for (int t = high; t < KEYS; t++) score[t] = -INFINITY;
    vec most = load(score);
    for (int i = LANES; i < KEYS; i += LANES) most = larger(most, load(score + i));
    if (ANY_ABOVE(most, share->peak)) {
        const float peak = reduce_max(most);
        const vec shrink = splat(expf((share->peak - peak) * late_scaling(job)));
        share->sums *= shrink;
        for (int d = 0; d < job->head_dim; d += LANES) store(acc + d, load(acc + d) * shrink);
        share->peak = peak;
    }
    const vec scaling = splat(late_scaling(job) * (dots ? 1.44269504f : 1.0f));
    const vec shift = scaling * splat(share->peak);
    for (int i = 0; i < KEYS; i += LANES) {
        const vec exponent = load(score + i) * scaling - shift;
        const vec weight = dots ? vexp2_coarse(exponent) : vexp(exponent);
        const hvec half = to_halves(weight);
        if (dots) memcpy((uint16_t *)score + i, &half, sizeof half);
        else store(score + i, weight);
        share->sums += dots ? (vec)(widened(half) << 16) : weight;
    }
}

INLINE void run_piece(const int dtype, const Job *job, const Layout *layout, const Piece *piece) {
    const int dots = HAS_DOTS && dtype == BFLOAT16;
    const int dim = job->head_dim, wide = padded(dim), group = job->num_heads / job->num_kv_heads;
    const int words = dots ? 2 : 1, deep = dim / words; /* numbers of one float's size */
    const int count = piece->count, rows = count * group;
    const int sequence = job->row_sequence[piece->first];
    const int32_t *table = job->block_table + sequence * job->table_stride;
    const int32_t *length = job->row_length + piece->first;
    float keys[KEYS * MAX_DIM] __attribute__((aligned(64)));
    float values[KEYS * MAX_DIM] __attribute__((aligned(64)));
    const int most = dots ? MOST_TOGETHER : GROUP_ROWS;
    float query[ROOM + SPARE] __attribute__((aligned(64)));
    float acc[ROOM + SPARE] __attribute__((aligned(64)));
    float score[MOST_TOGETHER * KEYS] __attribute__((aligned(64)));
    Share share[ROOM / LANES];
    for (int r = 0; r < rows; r++) {
        const int64_t at = job->row_token[piece->first + r % count] * job->query_token_stride +
                           (piece->kv * group + r / count) * job->query_head_stride;
        for (int d = 0; d < dim; d += LANES) {
            const vec one = some_of(dtype, job->query, at + d, fewer(dim - d, LANES));
            store(query + r * wide + d, dots ? splat(0.0f) : one);
            store(acc + r * wide + d, splat(0.0f));
        }
        if (dots) memcpy(query + r * wide, (const uint16_t *)job->query + at, 2 * dim);
        share[r] = (Share){-INFINITY, splat(0.0f)};
    }
    const int end = length[count - 1];
    for (int low = first_visible(job, length[0]) / KEYS * KEYS; low < end; low += KEYS) {
        take_tile(dtype, job, layout, table, low, end, piece->kv, keys, values);
        for (int first = 0; first < rows; first += most) {
            const int some = fewer(rows - first, most);
            int seen = 0;
            for (int r = 0; r < some; r++) seen |= length[(first + r) % count] > low;
            if (!seen) continue;
            multiply_some(dots, 0, some, deep, KEYS, query + first * wide, wide, keys, KEYS, score, KEYS);
            for (int r = 0; r < some; r++) {
                const int visible = length[(first + r) % count];
                const int from = first_visible(job, visible) - low, to = visible - low;
                weigh(dots, job, from > 0 ? from : 0, fewer(to, KEYS), score + r * KEYS,
                      share + first + r, acc + (first + r) * wide);
            }
            multiply_some(dots, 1, some, KEYS / words, wide, score, KEYS, values, wide,
                    acc + first * wide, wide);
        }
    }
    for (int r = 0; r < rows; r++) {
        float sum = 0;
        for (int i = 0; i < LANES; i++) sum += share[r].sums[i];
        finish_head(job, piece->first + r % count, piece->kv * group + r / count,
                    (Norm){share[r].peak * late_scaling(job), sum}, acc + r * wide);
    }
}

static void run_float32(const Job *job, const Layout *layout, const Piece *piece) {
    run_piece(FLOAT32, job, layout, piece);
}

static void run_bfloat16(const Job *job, const Layout *layout, const Piece *piece) {
    run_piece(BFLOAT16, job, layout, piece);
}

typedef struct {
    Piece *pieces;
    int64_t count, work; /* work: query numbers times context tokens */
} Pieces;

/* Cuts chunks into pieces. The job's rows are the chunks' tokens, one chunk after the other, each of
 * one sequence and in its order; chunk_rows: how many of each. The pieces are good for every layer with
 * the same heads and lengths. Returns DONE, UNSUPPORTED or NO_MEMORY; `pieces` is to be freed. */
static int cut_chunks(const Job *job, const int32_t *chunk_rows, int32_t num_chunks, Pieces *cut) {
    const int group_dim = job->num_heads / job->num_kv_heads * padded(job->head_dim);
    *cut = (Pieces){0};
    if (job->head_dim > MAX_DIM || job->head_dim % 2 || group_dim > ROOM) return UNSUPPORTED;
    const int most = fewer(ROOM / group_dim, MOST_QUERIES);
    int64_t num = 0;
    for (int c = 0; c < num_chunks; c++)
        num += (int64_t)(chunk_rows[c] + most - 1) / most * job->num_kv_heads;
    if (num == 0) return DONE;
    cut->pieces = malloc(num * sizeof *cut->pieces);
    if (!cut->pieces) return NO_MEMORY;
    for (int c = 0, row = 0; c < num_chunks; row += chunk_rows[c++]) {
        cut->work += (int64_t)chunk_rows[c] * job->row_length[row] * job->num_heads * job->head_dim;
        /* The last first: they see the most, and threads end together. */
        const int parts = (chunk_rows[c] + most - 1) / most;
        for (int p = parts - 1; p >= 0; p--)
            for (int kv = 0; kv < job->num_kv_heads; kv++) {
                const int from = (int64_t)chunk_rows[c] * p / parts;
                const int to = (int64_t)chunk_rows[c] * (p + 1) / parts;
                cut->pieces[cut->count++] = (Piece){row + from, to - from, kv};
            }
    }
    return DONE;
}

static void run_one_piece(const Job *job, const Layout *layout, const Piece *piece) {
    (job->dtype == FLOAT32 ? run_float32 : run_bfloat16)(job, layout, piece);
}

/* Of a pool's keys and values. */
static Layout pool_layout(const Job *job) {
    const int64_t head = job->head_dim, token = job->num_kv_heads * head;
    return (Layout){token, head, token, head};
}

#endif
