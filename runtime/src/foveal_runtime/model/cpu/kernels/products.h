/* Few rows times a packed weight, some outputs at a time, with the sums in registers.
 *
 * Included by chunked_products.h, tiled_products.h and linear.h, which chooses between them. A weight is
 * either of the rows' type, where oneDNN packed it, or quantised, as model/checkpoint/blocked.py lays it
 * out. Every sum is one thread's, in one order.
 */
#ifndef FOVEAL_PRODUCTS_H
#define FOVEAL_PRODUCTS_H

#include "rows.h"
#include "tiles.h"

#define MOST_ROWS 6   /* rows multiplied at once: their sums stay in registers */
#define COLS (LANES == 16 ? 4 : 8) /* vectors of outputs at once, at most */
#define MAX_WIDE 64   /* outputs of a block */
#define PROJECT_ROWS 96 /* at most, of one product */

/* Of weights, beside FLOAT32 and BFLOAT16. Codes become float32 numbers, or PAIRS of bfloat16 ones. */
enum { INT8 = 2, INT4 = 3, PAIRS = 2, INT8_PAIRS = 4, INT4_PAIRS = 5, NUM_KINDS = HAS_DOTS ? 6 : 4 };

/* A packed linear layer: blocks of `wide` outputs times `deep` inputs, outputs next to each other,
 * or pairs of inputs where `paired`. Strides are in elements, from block to block.
 *
 * Quantised (`bits` not 0): a block is a group of inputs that shares a scale for each output, signed
 * codes of 8 bits, or 8 inputs' codes of 4 bits in one element of 32 bits, each at its PLACE.
 * Scales lie as the blocks do, `wide` numbers for each; so do zero points. */
typedef struct {
    const void *weight, *bias; /* bias: NULL = none; a layer that is not packed has `deep` 0 */
    const float *scales, *zeros;  /* zeros: NULL = all are 0 */
    int32_t ins, outs, wide, deep, paired, bits;
    int64_t out_stride, in_stride;
} Product;

/* Rows of inputs, `stride` numbers apart: float32 numbers, and if they are bfloat16 numbers and this
 * CPU multiplies such, also as these. Where all weights are bfloat16, too, the float32 numbers are
 * read no more once there are halves of them: a stride of 0 gives all rows the same room, NULL none. */
typedef struct {
    float *x;
    uint16_t *halves; /* or NULL */
    int64_t stride, halves_stride;
} Inputs;

/* Whether codes are multiplied as pairs of inputs, with bfloat16 rows. */
INLINE int has_code_dots(const Product *p) {
    return HAS_DOTS && p->ins % 2 == 0 && (p->deep % 2 == 0 || p->deep >= p->ins);
}

INLINE Inputs rows_from(const Inputs *in, int64_t row) {
    return (Inputs){in->x ? in->x + row * in->stride : NULL,
                    in->halves ? in->halves + row * in->halves_stride : NULL, in->stride,
                    in->halves_stride};
}

/* Once numbers [low, high) of a row, all bfloat16, are there: makes `halves` of them. */
INLINE void halve(const Inputs *in, int64_t row, int64_t low, int64_t high) {
    if (!in->halves) return;
    const Inputs to = rows_from(in, row);
    for (; low + LANES <= high; low += LANES) {
        const hvec half = __builtin_convertvector((uvec)load(to.x + low) >> 16, hvec);
        memcpy(to.halves + low, &half, sizeof half);
    }
    for (; low < high; low++) to.halves[low] = to_bf16(to.x[low]);
}

/* sum[r, c] += x[r] * one[c], an input of each row. */
INLINE void add_input(const int rows, const int columns, const float *x, int64_t stride,
                      const vec *one, vec *sum) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vec factor = splat(x[r * stride]);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) sum[r * columns + c] += factor * one[c];
    }
}

INLINE vec load_int8(const int8_t *p) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif LANES == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return (vec){p[0], p[1], p[2], p[3]};
#endif
}

/* a * b + c, rounded once wherever it stands: left to the compiler, a row's result would depend on
 * how many rows it was compiled with. */
INLINE vec fused(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Where the code of an input lies in a word of 8 inputs: neighbours are 16 bits apart. */
#define PLACE(i) ((i) / 2 * 4 + (i) % 2 * 16)

/* The lowest four bits of each word, as signed numbers. */
INLINE vec low_int4(uvec word) {
#if LANES == 16
    const vec table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    return (vec)_mm512_permutexvar_ps((__m512i)word, (__m512)table);
#else
    return __builtin_convertvector((ivec)(word << 28) >> 28, vec);
#endif
}

/* sum[r, c] += the products of an input of each row, and of the next one, with a pair of weights. */
INLINE void add_pair(const int rows, const int columns, const Inputs *in, int64_t at,
                     const vec *pair, vec *sum) {
    vec one[COLS], other[COLS];
    if (HAS_DOTS) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec factors = splat_bits(in->halves + r * in->halves_stride + at);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                sum[r * columns + c] = add_dots(sum[r * columns + c], pair[c], factors);
        }
        return;
    }
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) one[c] = low_half(pair[c]), other[c] = high_half(pair[c]);
    add_input(rows, columns, in->x + at, in->stride, one, sum);
    add_input(rows, columns, in->x + at + 1, in->stride, other, sum);
}

/* Asks for `columns` vectors of weights, which lie one after the other. */
INLINE void ask_for(const int columns, const char **next) {
    for (int c = 0; c < columns * LANES * 4; c += 64) __builtin_prefetch(*next + c);
    *next += columns * LANES * 4;
}

#if HAS_DOTS
/* The bfloat16 numbers of 4-bit codes, twice; or of -16 ... 15, their differences from zero points. */
INLINE __m512i code_numbers(const int has_zeros) {
    const ivec some = {-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1};
    const ivec codes = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    const vec low = __builtin_convertvector(has_zeros ? some : codes, vec);
    const vec high = has_zeros ? low + splat(16.0f) : low;
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

/* What pairs of 4-bit codes, made 0 ... 15, need to stand for their differences from zero points. */
INLINE uvec code_shifts(vec zero) {
    const ivec shift = 8 - __builtin_convertvector(zero, ivec);
    return (uvec)shift | (uvec)shift << 16;
}

/* The pair of bfloat16 numbers of the codes in the lowest bits of each word's halves. */
INLINE vec pair_int4(const int has_zeros, uvec word, uvec shifts, __m512i numbers) {
    const uvec which = has_zeros ? ((word & 0xf000f) ^ 0x80008) + shifts : word;
    return (vec)_mm512_permutexvar_epi16((__m512i)which, numbers);
}

/* Likewise of codes of 8 bits less their zero point: whole numbers that bfloat16 holds. */
INLINE vec pair_int8(const int8_t *low, const int8_t *high, vec zero) {
    return (vec)((uvec)(load_int8(low) - zero) >> 16 | (uvec)(load_int8(high) - zero));
}

/* As add_block, of quantised weights and bfloat16 rows. */
INLINE void add_code_pairs(const int kind, const int rows, const int columns, const Product *p,
                           const float *zeros, int64_t at, const Inputs *in, int low, int count,
                           vec *sum) {
    const __m512i numbers = code_numbers(zeros != NULL);
    vec zero[COLS], pair[COLS];
    uvec shifts[COLS];
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) {
        zero[c] = zeros ? load(zeros + c * LANES) : splat(0.0f);
        shifts[c] = code_shifts(zero[c]);
    }
    for (int k = 0; kind == INT8_PAIRS && k < count; k += 2, at += 2 * p->wide) {
        const int8_t *codes = (const int8_t *)p->weight + at;
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            pair[c] = pair_int8(codes + c * LANES, codes + p->wide + c * LANES, zero[c]);
        add_pair(rows, columns, in, low + k, pair, sum);
    }
    for (int k = 0; kind == INT4_PAIRS && k < count; k += 8, at += p->wide) {
        uvec word[COLS];
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            memcpy(word + c, (const uint32_t *)p->weight + at + c * LANES, sizeof *word);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i += 2) {
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                pair[c] = pair_int4(zeros != NULL, word[c] >> PLACE(i), shifts[c], numbers);
            add_pair(rows, columns, in, low + k + i, pair, sum);
        }
    }
}
#endif

/* sum += `count` inputs, from `low` on, with a block at element `at` of the weight. `zeros`: of this
 * block. `next`: what is to be read later, of as many bytes, is asked for meanwhile; or NULL. */
INLINE void add_block(const int kind, const int rows, const int columns, const Product *p,
                      const float *zeros, int64_t at, const Inputs *in, int low, int count,
                      const char *next, vec *sum) {
#if HAS_DOTS
    if (kind == INT8_PAIRS || kind == INT4_PAIRS) {
        add_code_pairs(kind, rows, columns, p, zeros, at, in, low, count, sum);
        return;
    }
#endif
    const float *x = in->x + low;
    vec one[COLS], zero[COLS];
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) zero[c] = zeros ? load(zeros + c * LANES) : splat(0.0f);
    if (kind == FLOAT32 || kind == INT8) {
        for (int k = 0; k < count; k++, at += p->wide) {
            if (next) ask_for(columns, &next);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) {
                one[c] = kind == INT8 ? load_int8((const int8_t *)p->weight + at + c * LANES)
                                      : load((const float *)p->weight + at + c * LANES);
                if (zeros) one[c] -= zero[c];
            }
            add_input(rows, columns, x + k, in->stride, one, sum);
        }
    } else if (kind == BFLOAT16) {
        for (int k = 0; k < count; k += 2, at += 2 * p->wide) {
            vec pair[COLS];
            if (next) ask_for(columns, &next);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                memcpy(pair + c, (const uint16_t *)p->weight + at + 2 * c * LANES, sizeof *pair);
            add_pair(rows, columns, in, low + k, pair, sum);
        }
    } else {
        for (int k = 0; k < count; k += 8, at += p->wide) {
            uvec word[COLS];
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                memcpy(word + c, (const uint32_t *)p->weight + at + c * LANES, sizeof *word);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++) {
                    one[c] = low_int4(word[c] >> PLACE(i));
                    if (zeros) one[c] -= zero[c];
                }
                add_input(rows, columns, x + k + i, in->stride, one, sum);
            }
        }
    }
}

/* tile[r] = or += a group's sums times its scales. Sets the sums to 0 for the next group. */
INLINE void store_scaled(const int rows, const int columns, const float *scales, int adds, vec *sum,
                         float *tile) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            float *to = tile + r * MAX_WIDE + c * LANES;
            const vec scale = load(scales + c * LANES);
            store(to, fused(sum[r * columns + c], scale, adds ? load(to) : splat(0.0f)));
            sum[r * columns + c] = splat(0.0f);
        }
}

/* tile[r] = or += sums[r] times their scales, of `outs` outputs: a group's sums in memory. */
INLINE void add_scaled(int rows, int outs, const float *scales, int adds, const float *sums,
                       float *tile) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < outs; c += LANES) {
            float *to = tile + r * MAX_WIDE + c;
            store(to, fused(load(sums + r * MAX_WIDE + c), load(scales + c),
                            adds ? load(to) : splat(0.0f)));
        }
}

/* tile[r] = the products of row r with `columns` vectors of outputs of a block column, from output
 * `from` of it on. */
INLINE void multiply(const int kind, const int rows, const int columns, const Product *p,
                     int panel, int from, const Inputs *in, float *tile) {
    vec sum[MOST_ROWS * COLS];
    const int is_small = kind > BFLOAT16;
    int64_t at = panel * p->out_stride + from * (p->paired ? 2 : 1);
    int64_t scale_at = from + (int64_t)panel * ((p->ins + p->deep - 1) / p->deep) * p->wide;
#pragma GCC unroll 32
    for (int i = 0; i < rows * columns; i++) sum[i] = splat(0.0f);
    for (int low = 0; low < p->ins; low += p->deep, at += p->in_stride, scale_at += p->wide) {
        const int count = p->ins - low < p->deep ? p->ins - low : p->deep;
        if (is_small && p->zeros)
            add_block(kind, rows, columns, p, p->zeros + scale_at, at, in, low, count, NULL, sum);
        else
            add_block(kind, rows, columns, p, NULL, at, in, low, count, NULL, sum);
        if (!is_small) continue;
        store_scaled(rows, columns, p->scales + scale_at, low, sum, tile);
    }
    if (is_small) return;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            store(tile + r * MAX_WIDE + c * LANES, sum[r * columns + c]);
}

/* Vectors of outputs at once. One row takes all of a block of 64 outputs. With AVX2, 16 registers hold
 * 12 sums beside what is multiplied, so more rows go through a block in pieces. */
#define COLUMNS_OF(rows) (LANES == 16 ? 4 : (rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)

/* tile[r] = the products of row r with the outputs of a block column. */
INLINE void multiply_panel(const int kind, const int rows, const Product *p, int panel,
                           const Inputs *in, float *tile) {
    const int columns = COLUMNS_OF(rows);
    int c = 0;
    for (; c + columns * LANES <= p->wide; c += columns * LANES)
        multiply(kind, rows, columns, p, panel, c, in, tile + c);
    for (; c < p->wide; c += LANES)
        multiply(kind, rows, 1, p, panel, c, in, tile + c);
}

#define PANEL(KIND, R)                                                                         \
    static void panel_##KIND##_##R(const Product *p, int panel, const Inputs *in, float *tile) { \
        multiply_panel(KIND, R, p, panel, in, tile);                                           \
    }
#define PANELS(KIND) \
    PANEL(KIND, 1) PANEL(KIND, 2) PANEL(KIND, 3) PANEL(KIND, 4) PANEL(KIND, 5) PANEL(KIND, 6)
#define NAMES(KIND)                                                                     \
    {panel_##KIND##_1, panel_##KIND##_2, panel_##KIND##_3, panel_##KIND##_4, panel_##KIND##_5, \
     panel_##KIND##_6}
PANELS(FLOAT32) PANELS(BFLOAT16) PANELS(INT8) PANELS(INT4)
#if HAS_DOTS
PANELS(INT8_PAIRS) PANELS(INT4_PAIRS)
#endif

typedef void (*PanelFunction)(const Product *, int, const Inputs *, float *);

static const PanelFunction panel_functions[NUM_KINDS][MOST_ROWS] = {
    NAMES(FLOAT32), NAMES(BFLOAT16), NAMES(INT8), NAMES(INT4),
#if HAS_DOTS
    NAMES(INT8_PAIRS), NAMES(INT4_PAIRS),
#endif
};

/* Rows [low, high) in groups of at most `most`. */
#define EACH_GROUP(first, count, low, high, most) \
    for (int first = (low), count; first < (high); first += count) \
        if (count = (high) - first < (most) ? (high) - first : (most), 1)

#endif
