/* Products of several rows, chunk by chunk of the inputs.
 *
 * Included by linear.h. Six rows at a time would go through all weights of a block column again and
 * again, with AVX2 in pieces, since its registers do not hold a block's outputs as sums of several rows.
 * Here each chunk is read once, in the order in which it lies, and all rows are multiplied with it while
 * it is in the first cache; the sums wait in the tile. Measured in docs/decisions/decode-in-one-call.md.
 */
#ifndef FOVEAL_CHUNKED_PRODUCTS_H
#define FOVEAL_CHUNKED_PRODUCTS_H

#include "products.h"

#define CHUNK 64                 /* inputs of a chunk for many rows; few take one block at a time */
#define FEW (2 * MOST_ROWS)

/* More rows than these go through the weights six at a time. Its caller may set it, which changes no
 * bit: with AVX-512 few rows are faster chunk by chunk on Intel's CPUs, and slower on AMD's. */
int foveal_most_in_order = LANES == 16 ? 0 : PROJECT_ROWS;

/* tile[r] += the products of `rows` rows with `columns` vectors of outputs, from output `from` of a
 * block column on, and inputs [low, high), whose first block is at element `at` of the weight. `next`:
 * what of the chunk after it is asked for meanwhile, or NULL. */
INLINE void add_piece(const int kind, const int rows, const int columns, const Product *p, int64_t at,
                      int from, const Inputs *in, int low, int high, const char *next, float *tile) {
    vec sum[MOST_ROWS * COLS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * columns; i++)
        sum[i] = low ? load(tile + i / columns * MAX_WIDE + from + i % columns * LANES) : splat(0.0f);
    at += from * (p->paired ? 2 : 1);
    for (; low < high; low += p->deep, at += p->in_stride) {
        const int count = high - low < p->deep ? high - low : p->deep;
        if (next) add_block(kind, rows, columns, p, NULL, at, in, low, count, next, sum);
        else add_block(kind, rows, columns, p, NULL, at, in, low, count, NULL, sum);
        if (next) next += count * columns * LANES * (kind == FLOAT32 ? 4 : 2);
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows * columns; i++)
        store(tile + i / columns * MAX_WIDE + from + i % columns * LANES, sum[i]);
}

/* Likewise with all outputs of the block column. `next`: the whole next chunk, or NULL: a block ends
 * with its page, where the processor would stop to read ahead. */
INLINE void add_chunk(const int kind, const int rows, const Product *p, int64_t at, const Inputs *in,
                      int low, int high, const char *next, float *tile) {
    const int columns = COLUMNS_OF(rows), size = kind == FLOAT32 ? 4 : 2;
    int c = 0;
    for (; c + columns * LANES <= p->wide; c += columns * LANES)
        add_piece(kind, rows, columns, p, at, c, in, low, high,
                  next ? next + c * (high - low) * size : NULL, tile);
    for (; c < p->wide; c += LANES)
        add_piece(kind, rows, 1, p, at, c, in, low, high, NULL, tile);
}

#define CHUNK_FUNCTION(KIND, R)                                                             \
    static void chunk_##KIND##_##R(const Product *p, int64_t at, const Inputs *in, int low, \
                                   int high, const char *next, float *tile) {               \
        add_chunk(KIND, R, p, at, in, low, high, next, tile);                               \
    }
#define CHUNK_FUNCTIONS(KIND)                                               \
    CHUNK_FUNCTION(KIND, 1) CHUNK_FUNCTION(KIND, 2) CHUNK_FUNCTION(KIND, 3) \
    CHUNK_FUNCTION(KIND, 4) CHUNK_FUNCTION(KIND, 5) CHUNK_FUNCTION(KIND, 6)
#define CHUNK_NAMES(KIND)                                                                      \
    {chunk_##KIND##_1, chunk_##KIND##_2, chunk_##KIND##_3, chunk_##KIND##_4, chunk_##KIND##_5, \
     chunk_##KIND##_6}
CHUNK_FUNCTIONS(FLOAT32) CHUNK_FUNCTIONS(BFLOAT16)

typedef void (*ChunkFunction)(const Product *, int64_t, const Inputs *, int, int, const char *,
                              float *);

static const ChunkFunction chunk_functions[2][MOST_ROWS] = {CHUNK_NAMES(FLOAT32),
                                                            CHUNK_NAMES(BFLOAT16)};

/* Inputs [low, high) of a block column, whose first block is at element `at`, as one block of float32
 * numbers. */
static void copy_chunk(int kind, const Product *p, int64_t at, int low, int high, float *to) {
    for (; low < high; low += p->deep, at += p->in_stride) {
        const int count = high - low < p->deep ? high - low : p->deep;
        if (kind == FLOAT32) {
            memcpy(to, (const float *)p->weight + at, count * p->wide * sizeof *to);
            to += count * p->wide;
            continue;
        }
        const uint16_t *from = (const uint16_t *)p->weight + at;
        for (int k = 0; k < count; k += 2, to += 2 * p->wide, from += 2 * p->wide)
            for (int c = 0; c < p->wide; c += LANES) {
                vec pair;
                memcpy(&pair, from + 2 * c, sizeof pair);
                store(to + c, low_half(pair));
                store(to + p->wide + c, high_half(pair));
            }
    }
}

/* tile[r] = the products of row r with the outputs of a block column, all of them. */
static void multiply_in_order(int kind, int rows, const Product *p, int panel, const Inputs *in,
                              float *tile) {
    const int deep = rows > FEW && p->deep < CHUNK ? CHUNK / p->deep * p->deep : p->deep;
    const int64_t stride = deep / p->deep * p->in_stride;
    /* A copy of many rows' weights stays where it is while rows and sums come and go; a chunk of
     * bfloat16 numbers is widened once instead of for each six rows. */
    const int few = kind == FLOAT32 ? FEW : HAS_DOTS ? PROJECT_ROWS : MOST_ROWS;
    const int copies = deep <= CHUNK && rows > few;
    float wide[CHUNK * MAX_WIDE] __attribute__((aligned(64)));
    const Product copy = {.weight = wide, .wide = p->wide, .deep = deep};
    int64_t at = panel * p->out_stride;
    for (int low = 0; low < p->ins; low += deep, at += stride) {
        const int high = p->ins - low < deep ? p->ins : low + deep;
        const char *next = (const char *)p->weight + (at + stride) * (kind == FLOAT32 ? 4 : 2);
        if (copies) copy_chunk(kind, p, at, low, high, wide);
        EACH_GROUP(first, count, 0, rows, MOST_ROWS) {
            const Inputs some = rows_from(in, first);
            const char *asked = high < p->ins && first == 0 ? next : NULL;
            float *to = tile + first * MAX_WIDE;
            if (copies) chunk_functions[FLOAT32][count - 1](&copy, 0, &some, low, high, asked, to);
            else chunk_functions[kind][count - 1](p, at, &some, low, high, asked, to);
        }
    }
}

/* Inputs [low, high) of a group of quantised weights, as one block of float32 numbers: the codes less
 * their zero points. `at`: the group's first element, `zeros`: of its block of outputs, or NULL. */
static void copy_codes(int kind, const Product *p, int64_t at, const float *zeros, int low, int high,
                       float *to) {
    for (int c = 0; c < p->wide; c += LANES) {
        const vec zero = zeros ? load(zeros + c) : splat(0.0f);
        for (int k = low; kind == INT8 && k < high; k++) {
            const vec code = load_int8((const int8_t *)p->weight + at + (int64_t)k * p->wide + c);
            store(to + (k - low) * p->wide + c, code - zero);
        }
        for (int k = low; kind == INT4 && k < high; k += 8) {
            uvec word;
            memcpy(&word, (const uint32_t *)p->weight + at + k / 8 * p->wide + c, sizeof word);
            for (int i = 0; i < 8; i++)
                store(to + (k + i - low) * p->wide + c, low_int4(word >> PLACE(i)) - zero);
        }
    }
}

/* tile[r] = the products of row r with the outputs of a block column of quantised weights. A group's
 * sums are scaled once, as those of few rows are. */
static void multiply_groups(int kind, int rows, const Product *p, int panel, const Inputs *in,
                            float *tile) {
    const int groups = (p->ins + p->deep - 1) / p->deep;
    int64_t at = panel * p->out_stride, scale_at = (int64_t)panel * groups * p->wide;
    float wide[CHUNK * MAX_WIDE] __attribute__((aligned(64)));
    float part[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    const Product copy = {.weight = wide, .wide = p->wide, .deep = CHUNK};
    for (int low = 0; low < p->ins; low += p->deep, at += p->in_stride, scale_at += p->wide) {
        const int count = p->ins - low < p->deep ? p->ins - low : p->deep;
        const float *zeros = p->zeros ? p->zeros + scale_at : NULL;
        const Inputs group = {in->x + low, NULL, in->stride, 0};
        for (int from = 0; from < count; from += CHUNK) {
            const int to = count - from < CHUNK ? count : from + CHUNK;
            copy_codes(kind, p, at, zeros, from, to, wide);
            EACH_GROUP(first, some, 0, rows, MOST_ROWS) {
                const Inputs x = rows_from(&group, first);
                chunk_functions[FLOAT32][some - 1](&copy, 0, &x, from, to, NULL,
                                                   part + first * MAX_WIDE);
            }
        }
        add_scaled(rows, p->wide, p->scales + scale_at, low, part, tile);
    }
}

#endif
