/* What stands between the matrix products of a layer, in one pass over memory each: RMS norm and
 * the activation x * sigmoid(1.702 x).
 *
 * Called by model/cpu/fusing.py through ctypes; compiled by runtime/setup.py once per instruction set.
 * Loads float32 or bfloat16 and computes in float32; in bfloat16 intermediate results are rounded
 * where transformers rounds them. A row's result does not depend on the others or on the threads.
 */
#include "rows.h"

#define ALONE 65536 /* numbers that one thread does before another would be awake */

typedef struct {
    int32_t dtype, num_threads;
    int64_t num_rows, width;
    const void *x; /* (num_rows, width), contiguous */
    void *out;     /* likewise */
    RmsNorm norm;
} NormJob;

void foveal_rms_norm(const NormJob *job) {
    const int64_t width = job->width;
    const int threads = job->num_rows * width > ALONE ? job->num_threads : 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < job->num_rows; row++) {
        if (job->dtype == FLOAT32)
            norm_row(FLOAT32, FLOAT32, &job->norm, width, job->x, job->out, row * width);
        else
            norm_row(BFLOAT16, BFLOAT16, &job->norm, width, job->x, job->out, row * width);
    }
}

INLINE void gelu_span(const int dtype, void *x, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        const vec one = some_at(dtype, x, i);
        const vec power = rounded(dtype, splat(1.702f) * one);
        const vec share = rounded(dtype, times_sigmoid(dtype, splat(1.0f), power));
        put_some(dtype, x, i, one * share);
    }
    for (; i < end; i++) {
        const float one = one_at(dtype, x, i), power = rounded_one(dtype, 1.702f * one);
        put_one(dtype, x, i, one * rounded_one(dtype, 1.0f / (1.0f + expf(-power))));
    }
}

/* x <- x * sigmoid(1.702 x), in place. */
void foveal_quick_gelu(int32_t dtype, int32_t num_threads, int64_t count, void *x) {
    const int64_t span = 4096;
    const int threads = count > ALONE ? num_threads : 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t begin = 0; begin < count; begin += span) {
        const int64_t end = begin + span < count ? begin + span : count;
        if (dtype == FLOAT32) gelu_span(FLOAT32, x, begin, end);
        else gelu_span(BFLOAT16, x, begin, end);
    }
}
