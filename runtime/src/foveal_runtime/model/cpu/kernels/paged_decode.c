/* One layer's paged attention for tokens that are decoded; see paged.h.
 *
 * Called by model/attention/cpu.py through ctypes; compiled by runtime/setup.py once per instruction
 * set.
 */
#include "paged.h"

int foveal_paged_decode(const Job *job) {
    Plan plan;
    const int code = make_plan(job, &plan);
    if (code != DONE || plan.num_tasks == 0) return code;
    const int threads = plan.work > 65536 ? job->num_threads : 1; /* waking a thread costs ~10 us */
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int i = 0; i < plan.num_tasks * plan.parts; i++) run_unit(job, &plan, i);
    if (plan.num_slots) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int i = 0; i < plan.num_tasks * job->num_heads; i++) join_unit(job, &plan, i);
    }
    drop_plan(&plan);
    return DONE;
}
