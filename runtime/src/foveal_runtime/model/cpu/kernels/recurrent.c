/* The recurrence of a layer in one call, for all sequences of a step: a short convolution, and
 * behind it a gated delta rule or Mamba-2's.
 *
 * Called by model/layers/delta_rule.py and mamba.py through ctypes; compiled by runtime/setup.py
 * once per instruction set.
 */
#include "delta_rule.h"
#include "mamba.h"

#define ALONE (1 << 20) /* numbers of state that one thread advances before others wake */

enum { DONE = 0, UNSUPPORTED = 1 };

/* Tasks that need nothing of each other. */
typedef struct {
    int64_t count;
    void (*run)(const void *job, int64_t task);
} Round;

/* The convolution by channels, then the other rounds. */
static int advance_all(const Convolution *convolution, int threads, int64_t segments, Round second,
                       Round third, const void *job) {
    const int64_t convolved = segments * num_blocks(convolution);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < convolved; task++) convolve_task(convolution, task);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < second.count; task++) second.run(job, task);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < third.count; task++) third.run(job, task);
    }
    return DONE;
}

static void delta_head(const void *job, int64_t task) { head_task(job, task); }
static void mamba_head(const void *job, int64_t task) { mamba_task(job, task); }
static void mamba_norm(const void *job, int64_t task) { norm_task(job, task); }

/* DONE or UNSUPPORTED; only DONE has changed anything. */
int foveal_delta_rule(const DeltaJob *job) {
    if (!is_delta_supported(job)) return UNSUPPORTED;
    const int64_t size = (int64_t)job->num_value_heads * job->key_dim * job->value_dim;
    const int threads = job->num_rows * size > ALONE ? job->num_threads : 1;
    const Convolution convolution = convolution_of(job);
    const Round heads = {(int64_t)job->num_segments * job->num_value_heads, delta_head};
    return advance_all(&convolution, threads, job->num_segments, heads, (Round){0, NULL}, job);
}

/* DONE or UNSUPPORTED; only DONE has changed anything. */
int foveal_mamba(const MambaJob *job) {
    if (!is_mamba_supported(job)) return UNSUPPORTED;
    const int64_t size = (int64_t)job->num_heads * job->head_dim * job->state_dim;
    const int threads = job->num_rows * size > ALONE ? job->num_threads : 1;
    const Convolution convolution = convolution_of_mamba(job);
    const Round heads = {(int64_t)job->num_segments * job->num_heads, mamba_head};
    const Round norms = {num_norms(job), mamba_norm};
    return advance_all(&convolution, threads, job->num_segments, heads, norms, job);
}
