/* Rows times linear layers, packed, quantised or as they lie, each by the products that suit it, and MLPs' gates.
 *
 * Included by decoder_layers.c.
 */
#ifndef FOVEAL_LINEAR_H
#define FOVEAL_LINEAR_H

#include "chunked_products.h"
#include "products.h"
#include "tiled_products.h"

#if !HAS_TILES
#define PLAIN_ROWS MOST_ROWS
#endif

static int num_panels(const Product *p) { return (p->outs + p->wide - 1) / p->wide; }

/* Whether it can be multiplied with rows of a type. */
static int is_known(int dtype, const Product *p) {
    if (p->wide % LANES || p->wide > MAX_WIDE || !p->deep) return 0;
    if (p->bits) return !p->paired && (p->bits == 8 || (p->bits == 4 && p->ins % 8 == 0 &&
                                                        (p->deep % 8 == 0 || p->deep >= p->ins)));
    if (p->paired != (dtype == BFLOAT16)) return 0;
    return !p->paired || (p->ins % 2 == 0 && p->deep % 2 == 0);
}

INLINE void add_bias(int dtype, const Product *p, int low, int outs, int rows, float *tile) {
    for (int r = 0; p->bias && r < rows; r++) {
        float *to = tile + r * MAX_WIDE;
        int c = 0;
        for (; c + LANES <= outs; c += LANES)
            store(to + c, load(to + c) + some_at(dtype, p->bias, low + c));
        for (; c < outs; c++) to[c] += one_at(dtype, p->bias, low + c);
    }
}

/* Rows [first, first + count) times one block of outputs, with the bias: (count, MAX_WIDE), at most
 * PROJECT_ROWS. Returns how many of the block's outputs there are. */
static int project(int dtype, const Product *p, int panel, const Inputs *in, int first, int count,
                   float *tile) {
    const int low = panel * p->wide, kind = p->bits == 8 ? INT8 : p->bits == 4 ? INT4 : dtype;
    const int outs = p->outs - low < p->wide ? p->outs - low : p->wide;
    const int dots = kind > BFLOAT16 && dtype == BFLOAT16 && has_code_dots(p);
    const Inputs some = rows_from(in, first);
#if HAS_TILES
    const int64_t step = kind == BFLOAT16 ? tile_step(p) : 0;
    if (step) project_tiles(p, step, panel, &some, count, tile);
    else if (kind > BFLOAT16 && dtype == BFLOAT16 && has_code_tiles(p))
        (count <= FEW_CODES ? project_few_codes : project_code_tiles)(kind, p, panel, &some, count,
                                                                      tile);
    else
#endif
    if (kind <= BFLOAT16 && count > 1 && count <= foveal_most_in_order)
        multiply_in_order(kind, count, p, panel, &some, tile);
    else if (kind > BFLOAT16 && count > FEW && LANES != 16)
        multiply_groups(kind, count, p, panel, &some, tile);
    else
    EACH_GROUP(group, size, 0, count, MOST_ROWS) {
        const Inputs rows = rows_from(&some, group);
        panel_functions[dots ? kind + PAIRS : kind][size - 1](p, panel, &rows,
                                                              tile + group * MAX_WIDE);
    }
    add_bias(dtype, p, low, outs, count, tile);
    return outs;
}

/* Vectors of inputs of a weight that is not packed: (outs, ins). */
INLINE vec plain_at(const int dtype, const Product *p, int64_t at, int count) {
    if (dtype == FLOAT32) return load_first((const float *)p->weight + at, count);
    return (vec)(load_first_halves((const uint16_t *)p->weight + at, count) << 16);
}

/* tile[r, c] = the product of row r with output `out` + c of a weight that is not packed. */
INLINE void multiply_plain(const int dtype, const int rows, const int columns, const Product *p,
                           int out, const Inputs *in, float *tile) {
    vec sum[MOST_ROWS * 4];
    const int64_t at = (int64_t)out * p->ins;
    const int size = dtype == FLOAT32 ? 4 : 2;
    const char *next = (const char *)p->weight + (at + (int64_t)columns * p->ins) * size;
#pragma GCC unroll 32
    for (int i = 0; i < rows * columns; i++) sum[i] = splat(0.0f);
    for (int k = 0; k < p->ins; k += LANES) {
        const int count = p->ins - k < LANES ? p->ins - k : LANES;
        vec one[4];
        if (k * size % 64 == 0)
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                __builtin_prefetch(next + ((int64_t)c * p->ins + k) * size);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            one[c] = plain_at(dtype, p, at + (int64_t)c * p->ins + k, count);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec x = load_first(in->x + r * in->stride + k, count);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                sum[r * columns + c] = fused(x, one[c], sum[r * columns + c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            float all = 0;
            for (int i = 0; i < LANES; i++) all += sum[r * columns + c][i];
            tile[r * MAX_WIDE + c] = all;
        }
}

#define PLAIN(DTYPE, R)                                                                        \
    static void plain_##DTYPE##_##R(const Product *p, int low, int outs, const Inputs *in,     \
                                    float *tile) {                                             \
        const int columns = R <= 3 ? 4 : 2;                                                    \
        int c = 0;                                                                             \
        for (; c + columns <= outs; c += columns)                                              \
            multiply_plain(DTYPE, R, columns, p, low + c, in, tile + c);                       \
        for (; c < outs; c++) multiply_plain(DTYPE, R, 1, p, low + c, in, tile + c);           \
    }
#define PLAINS(DTYPE) \
    PLAIN(DTYPE, 1) PLAIN(DTYPE, 2) PLAIN(DTYPE, 3) PLAIN(DTYPE, 4) PLAIN(DTYPE, 5) PLAIN(DTYPE, 6)
PLAINS(FLOAT32) PLAINS(BFLOAT16)

typedef void (*PlainFunction)(const Product *, int, int, const Inputs *, float *);

static const PlainFunction plain_functions[2][MOST_ROWS] = {
    {plain_FLOAT32_1, plain_FLOAT32_2, plain_FLOAT32_3, plain_FLOAT32_4, plain_FLOAT32_5,
     plain_FLOAT32_6},
    {plain_BFLOAT16_1, plain_BFLOAT16_2, plain_BFLOAT16_3, plain_BFLOAT16_4, plain_BFLOAT16_5,
     plain_BFLOAT16_6}};

/* As `project`, with a weight that is not packed, of at most PLAIN_ROWS rows. `pairs`: all rows, see
 * pair_rows, or NULL. */
static int project_plain(int dtype, const Product *p, int panel, const Inputs *in,
                         const uint32_t *pairs, int first, int count, float *tile) {
    const int low = panel * p->wide, outs = p->outs - low < p->wide ? p->outs - low : p->wide;
    int done = 0;
#if HAS_TILES
    const uint32_t *from = pairs + (int64_t)first * (p->ins / 2);
    for (; pairs && done + 2 * TILE <= outs; done += 2 * TILE)
        multiply_plain_tiles(2, p, low + done, from, count, tile + done);
    for (; pairs && done + TILE <= outs; done += TILE)
        multiply_plain_tiles(1, p, low + done, from, count, tile + done);
#endif
    if (done < outs)
        EACH_GROUP(group, some, 0, count, MOST_ROWS) {
            const Inputs rows = rows_from(in, first + group);
            plain_functions[dtype][some - 1](p, low + done, outs - done, &rows,
                                             tile + group * MAX_WIDE + done);
        }
    add_bias(dtype, p, low, outs, count, tile);
    return outs;
}

/* What MLPs apply to their gates. */
enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

INLINE vec activated(const int kind, int which, vec x) {
    if (which == SILU) return times_sigmoid(kind, x, x);
    if (which == RELU) return pick(x > splat(0.0f), x, splat(0.0f));
    if (which == GELU_TANH) {
        const vec power =
            vexp(splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x)); /* 2 sqrt(2/pi) */
        return x * (power / (power + splat(1.0f)));
    }
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return y;
}

/* One row's `outs` outputs of an MLP's first products, from output `at` of them on: the gate's
 * activation times `up`, as inputs of the last one. */
INLINE void put_activated(const int kind, int which, int outs, const float *up, float *gate,
                          const Inputs *wide, int64_t row, int64_t at) {
    const Inputs to = rows_from(wide, row);
    for (int c = 0; c < outs; c += LANES)
        store(gate + c, load(up + c) * rounded(kind, activated(kind, which, load(gate + c))));
    if (to.x) put_rounded(kind, FLOAT32, gate, outs, to.x, at);
    if (to.halves) put_rounded(kind, BFLOAT16, gate, outs, to.halves, at);
}

#endif
