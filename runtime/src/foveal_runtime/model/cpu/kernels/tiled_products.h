/* Products of packed, quantised and unpacked weights by AMX, in bfloat16.
 *
 * Included by linear.h; without AMX there are none. Packed weights are tiles as oneDNN left them; codes
 * are made numbers a few inputs at a time; of a weight as it lies the outputs are the rows of a tile,
 * so that the rows' inputs are put in pairs. A row's sums are the same bits in any company.
 */
#ifndef FOVEAL_TILED_PRODUCTS_H
#define FOVEAL_TILED_PRODUCTS_H

#include "products.h"

#if HAS_TILES
#define PLAIN_ROWS 64 /* at most, of one product with a weight as it lies */

/* Bytes from TILE_DEPTH inputs of a block column to the next, or 0 where they are not that far apart
 * everywhere. */
INLINE int64_t tile_step(const Product *p) {
    if (!p->paired || p->wide % TILE) return 0;
    if (p->deep == TILE_DEPTH) return 2 * p->in_stride;
    return p->in_stride == (int64_t)p->deep * p->wide ? 2 * TILE_DEPTH * p->wide : 0;
}

/* tile[r] = the products of row r of `count` with the outputs of a block column. Inputs beyond the last
 * TILE_DEPTH ones, and their weights, are multiplied from copies, filled up with zeros. */
static void project_tiles(const Product *p, int64_t step, int panel, const Inputs *in, int count,
                          float *tile) {
    const int steps = p->ins / TILE_DEPTH, rest = p->ins % TILE_DEPTH;
    const uint16_t *weight = (const uint16_t *)p->weight + panel * p->out_stride;
    const uint16_t *last = weight + steps * (step / 2);
    uint16_t inputs[2 * TILE * TILE_DEPTH] __attribute__((aligned(64)));
    uint16_t weights[TILE_DEPTH * MAX_WIDE] __attribute__((aligned(64)));
    if (rest) {
        memset(weights, 0, sizeof weights);
        memcpy(weights, last, rest * p->wide * sizeof *weights);
    }
    for (int r = 0; r < count; r += 2 * TILE) {
        const int rows = count - r < 2 * TILE ? count - r : 2 * TILE;
        const uint16_t *x = in->halves + r * in->halves_stride;
        TileJob job = {x, weight, tile + r * MAX_WIDE, 2 * in->halves_stride, 4 * p->wide, step,
                       MAX_WIDE};
        multiply_in_tiles(0, rows, p->wide, steps, job);
        if (!rest) continue;
        memset(inputs, 0, sizeof inputs);
        for (int i = 0; i < rows; i++)
            memcpy(inputs + i * TILE_DEPTH, x + i * in->halves_stride + steps * TILE_DEPTH,
                   rest * sizeof *inputs);
        job.a = inputs, job.a_stride = 2 * TILE_DEPTH, job.b = weights;
        multiply_in_tiles(1, rows, p->wide, 1, job);
    }
}

#define CODE_INPUTS 128 /* whose codes are made numbers at a time */
#define FEW_CODES 2     /* rows that are multiplied with codes as they are read */

/* Codes of `count` inputs, from element `at` on, less their zero points, as pairs of inputs:
 * (count / 2, wide). */
INLINE void pair_codes(const int kind, const int has_zeros, const Product *p, int64_t at,
                       const float *zeros, int count, uint32_t *to) {
    const __m512i numbers = code_numbers(has_zeros);
    for (int c = 0; c < p->wide; c += LANES) {
        const vec zero = has_zeros ? load(zeros + c) : splat(0.0f);
        const uvec shifts = code_shifts(zero);
        const int8_t *codes = (const int8_t *)p->weight + at + c;
        const uint32_t *words = (const uint32_t *)p->weight + at + c;
        float *out = (float *)to + c;
        for (int k = 0; kind == INT8 && k < count; k += 2, out += p->wide)
            store(out, pair_int8(codes + k * p->wide, codes + (k + 1) * p->wide, zero));
        for (int k = 0; kind == INT4 && k < count; k += 8) {
            uvec word;
            memcpy(&word, words + k / 8 * p->wide, sizeof word);
#pragma GCC unroll 4
            for (int i = 0; i < 8; i += 2, out += p->wide)
                store(out, pair_int4(has_zeros, word >> PLACE(i), shifts, numbers));
        }
    }
}

static void pair_some(int kind, const Product *p, int64_t at, const float *zeros, int count,
                      uint32_t *to) {
    if (kind == INT8 && zeros) pair_codes(INT8, 1, p, at, zeros, count, to);
    else if (kind == INT8) pair_codes(INT8, 0, p, at, zeros, count, to);
    else if (zeros) pair_codes(INT4, 1, p, at, zeros, count, to);
    else pair_codes(INT4, 0, p, at, zeros, count, to);
}

/* Whether tiles multiply a quantised weight. */
static int has_code_tiles(const Product *p) {
    return p->ins % TILE_DEPTH == 0 && p->deep % TILE_DEPTH == 0 && p->wide % TILE == 0;
}

/* The same bits for so few rows that tiles cost more than they save: AMX adds up the even inputs of
 * TILE_DEPTH, and the odd ones, and then both. */
INLINE void multiply_few_codes(const int kind, const int rows, const int columns, const Product *p,
                               int panel, int from, const Inputs *in, float *tile) {
    const int groups = (p->ins + p->deep - 1) / p->deep, each = kind == INT4 ? 8 : 1;
    int64_t scale_at = from + (int64_t)panel * groups * p->wide;
    int64_t at = from + panel * p->out_stride;
    vec sum[FEW_CODES * COLS], zero[COLS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * columns; i++) sum[i] = splat(0.0f);
    for (int low = 0; low < p->ins; low += p->deep, scale_at += p->wide) {
        const int end = p->ins - low < p->deep ? p->ins : low + p->deep;
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            zero[c] = p->zeros ? load(p->zeros + scale_at + c * LANES) : splat(0.0f);
        for (int k = low; k < end; k += TILE_DEPTH) {
            vec part[2][FEW_CODES * COLS];
#pragma GCC unroll 32
            for (int i = 0; i < rows * columns; i++) part[0][i] = part[1][i] = splat(0.0f);
            for (int j = 0; j < TILE_DEPTH; j += 8, at += 8 / each * p->wide) {
                uvec word[COLS];
#pragma GCC unroll 8
                for (int c = 0; kind == INT4 && c < columns; c++)
                    memcpy(word + c, (const uint32_t *)p->weight + at + c * LANES, sizeof *word);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    vec one[COLS];
#pragma GCC unroll 8
                    for (int c = 0; c < columns; c++) {
                        if (kind == INT8)
                            one[c] = load_int8((const int8_t *)p->weight + at + i * p->wide + c * LANES);
                        else
                            one[c] = low_int4(word[c] >> PLACE(i));
                        if (p->zeros) one[c] -= zero[c];
                    }
                    add_input(rows, columns, in->x + k + j + i, in->stride, one, part[i % 2]);
                }
            }
#pragma GCC unroll 32
            for (int i = 0; i < rows * columns; i++) sum[i] += part[0][i] + part[1][i];
        }
        store_scaled(rows, columns, p->scales + scale_at, low, sum, tile + from);
    }
}

static void project_few_codes(int kind, const Product *p, int panel, const Inputs *in, int count,
                              float *tile) {
#define FEW_CODES_OF(KIND, ROWS)                                                 \
    for (; c + 4 * LANES <= p->wide; c += 4 * LANES)                             \
        multiply_few_codes(KIND, ROWS, 4, p, panel, c, in, tile);                \
    for (; c < p->wide; c += LANES) multiply_few_codes(KIND, ROWS, 1, p, panel, c, in, tile)
    int c = 0;
    if (kind == INT8 && count == 1) { FEW_CODES_OF(INT8, 1); }
    else if (kind == INT8) { FEW_CODES_OF(INT8, 2); }
    else if (count == 1) { FEW_CODES_OF(INT4, 1); }
    else { FEW_CODES_OF(INT4, 2); }
}

/* As project_tiles, with a quantised weight: a group's sums are scaled once. */
static void project_code_tiles(int kind, const Product *p, int panel, const Inputs *in, int count,
                               float *tile) {
    const int groups = (p->ins + p->deep - 1) / p->deep, each = kind == INT4 ? 8 : 1;
    int64_t scale_at = (int64_t)panel * groups * p->wide;
    uint32_t pairs[CODE_INPUTS / 2 * MAX_WIDE] __attribute__((aligned(64)));
    float part[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    for (int low = 0; low < p->ins; low += p->deep, scale_at += p->wide) {
        const int end = p->ins - low < p->deep ? p->ins : low + p->deep;
        const float *zeros = p->zeros ? p->zeros + scale_at : NULL;
        for (int from = low; from < end; from += CODE_INPUTS) {
            const int some = end - from < CODE_INPUTS ? end - from : CODE_INPUTS;
            const int64_t at = panel * p->out_stride + (int64_t)(from / each) * p->wide;
            pair_some(kind, p, at, zeros, some, pairs);
            for (int r = 0; r < count; r += 2 * TILE)
                multiply_in_tiles(from > low, count - r < 2 * TILE ? count - r : 2 * TILE, p->wide,
                                  some / TILE_DEPTH,
                                  (TileJob){in->halves + r * in->halves_stride + from, pairs,
                                            part + r * MAX_WIDE, 2 * in->halves_stride,
                                            4 * p->wide, 4 * TILE * p->wide, MAX_WIDE});
        }
        add_scaled(count, p->wide, p->scales + scale_at, low, part, tile);
    }
}

#define PAIRED_ROWS (2 * TILE)

/* Rows as tiles take them where weights are not packed: of each PAIRED_ROWS rows, filled up with
 * zeros, (ins / 2, PAIRED_ROWS) pairs. NULL without memory. */
static uint32_t *pair_rows(const uint16_t *x, int64_t rows, int64_t ins) {
    const int64_t all = (rows + PAIRED_ROWS - 1) / PAIRED_ROWS * PAIRED_ROWS;
    uint32_t *pairs = aligned_alloc(64, all * ins * sizeof *x);
    for (int64_t r = 0; pairs && r < all; r++) {
        uint32_t *to = pairs + r / PAIRED_ROWS * PAIRED_ROWS * (ins / 2) + r % PAIRED_ROWS;
        for (int64_t k = 0; k < ins / 2; k++, to += PAIRED_ROWS) {
            *to = 0;
            if (r < rows) memcpy(to, x + r * ins + 2 * k, sizeof *to);
        }
    }
    return pairs;
}

/* tile[r, c] = the products of `count` rows, at most PLAIN_ROWS, with one or two tiles of outputs
 * from `out` on. */
INLINE void multiply_plain_tiles(const int tiles, const Product *p, int out, const uint32_t *pairs,
                                 int count, float *tile) {
    float sums[2 * TILE * PLAIN_ROWS] __attribute__((aligned(64)));
    const char *weight = (const char *)((const uint16_t *)p->weight + (int64_t)out * p->ins);
    for (int r = 0; r < count; r += PAIRED_ROWS)
        multiply_tiles(tiles, 2, 0, p->ins / TILE_DEPTH,
                       &(TileJob){weight, pairs + (int64_t)r * (p->ins / 2), sums + r,
                                  2 * (int64_t)p->ins, 4 * PAIRED_ROWS, 4 * PAIRED_ROWS * TILE,
                                  PLAIN_ROWS});
    for (int c = 0; c < tiles * TILE; c++)
        for (int r = 0; r < count; r++) tile[r * MAX_WIDE + c] = sums[c * PLAIN_ROWS + r];
}

#endif

#endif
