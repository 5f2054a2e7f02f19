/* Products of bfloat16 numbers by AMX: 16 rows times 16 outputs and 32 inputs at once, with the sums
 * in float32.
 *
 * Included by products.h and chunks.h. A row's sums are the same bits whatever the others are. TILE rows
 * are computed together: behind the last one there must be room for as many, with any numbers in it.
 */
#ifndef FOVEAL_TILES_H
#define FOVEAL_TILES_H

#include "lanes.h"

#define TILE 16       /* rows, and outputs, of a tile */
#define TILE_DEPTH 32 /* inputs of a tile */

#if defined(__AMX_BF16__)
#define HAS_TILES 1

/* A thread's tiles are configured from here to `end_tiles`. */
INLINE void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.row_bytes[i] = 64, all.rows[i] = TILE;
    __asm__ volatile("" ::"r"(&all) : "memory");
    _tile_loadconfig(&all);
}

INLINE void end_tiles(void) { _tile_release(); }

/* Numbers that are multiplied: rows at a, `a_stride` bytes from row to row; pairs of inputs at b, the
 * outputs next to each other, `b_stride` bytes from pair to pair and `b_step` from TILE_DEPTH inputs
 * to the next. c: (rows, outputs), `c_stride` numbers from row to row. */
typedef struct {
    const void *a, *b;
    float *c;
    int64_t a_stride, b_stride, b_step, c_stride;
} TileJob;

/* c = or += a times b, of one or two tiles of rows and of outputs. */
INLINE void multiply_tiles(const int rows, const int columns, int adds, int steps,
                           const TileJob *job) {
    const char *a = job->a, *b = job->b;
    const int64_t a_stride = job->a_stride, b_stride = job->b_stride, c_stride = job->c_stride * 4;
    float *below = job->c + TILE * job->c_stride;
    __asm__ volatile("" ::: "memory"); /* GCC does not know that tiles are loaded from memory */
    if (adds) {
        _tile_loadd(0, job->c, c_stride);
        if (columns > 1) _tile_loadd(1, job->c + TILE, c_stride);
        if (rows > 1) _tile_loadd(2, below, c_stride);
        if (rows > 1 && columns > 1) _tile_loadd(3, below + TILE, c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < steps; k++, a += 2 * TILE_DEPTH, b += job->b_step) {
        _tile_loadd(6, b, b_stride);
        if (columns > 1) _tile_loadd(7, b + 4 * TILE, b_stride);
        _tile_loadd(4, a, a_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (columns > 1) _tile_dpbf16ps(1, 4, 7);
        if (rows == 1) continue;
        _tile_loadd(5, a + TILE * a_stride, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        if (columns > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, job->c, c_stride);
    if (columns > 1) _tile_stored(1, job->c + TILE, c_stride);
    if (rows > 1) _tile_stored(2, below, c_stride);
    if (rows > 1 && columns > 1) _tile_stored(3, below + TILE, c_stride);
}

/* Likewise of `outs` outputs, a multiple of TILE, and at most two tiles of rows. */
static void multiply_in_tiles(int adds, int rows, int outs, int steps, TileJob job) {
    for (; outs > 0; outs -= 2 * TILE) {
        if (rows > TILE && outs > TILE) multiply_tiles(2, 2, adds, steps, &job);
        else if (rows > TILE) multiply_tiles(2, 1, adds, steps, &job);
        else if (outs > TILE) multiply_tiles(1, 2, adds, steps, &job);
        else multiply_tiles(1, 1, adds, steps, &job);
        job.b = (const char *)job.b + 8 * TILE;
        job.c += 2 * TILE;
    }
}
#else
#define HAS_TILES 0
INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}
#endif

#endif
