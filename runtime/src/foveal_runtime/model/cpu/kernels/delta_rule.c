/* The gated delta rule of a layer in one call, for all sequences of a step.
 *
 * Called by model/layers/delta_rule.py through ctypes; compiled by runtime/setup.py once per instruction
 * set.
 */
#include "delta_rule.h"

#define ALONE (1 << 20) /* numbers of state that one thread advances before others wake */

enum { DONE = 0, UNSUPPORTED = 1 };

/* DONE or UNSUPPORTED; only DONE has changed anything. */
int foveal_delta_rule(const DeltaJob *job) {
    if (!is_delta_supported(job)) return UNSUPPORTED;
    const int64_t size = (int64_t)job->num_value_heads * job->key_dim * job->value_dim;
    const int threads = job->num_rows * size > ALONE ? job->num_threads : 1;
    const int64_t convolved = job->num_segments * num_blocks(job);
    const int64_t heads = (int64_t)job->num_segments * job->num_value_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < convolved; task++) convolve_task(job, task);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < heads; task++) head_task(job, task);
    }
    return DONE;
}
