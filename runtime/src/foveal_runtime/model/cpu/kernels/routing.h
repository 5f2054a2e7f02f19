/* Which experts a row goes to: by the softmax of its products with a vector of each.
 *
 * Included by decoder_layers.c. As the routers of Qwen's and Mixtral's models; a trial shows whether a
 * model's is such a one.
 */
#ifndef FOVEAL_ROUTING_H
#define FOVEAL_ROUTING_H

#include "experts.h"

#define SCORED 16 /* experts of one unit of work */

typedef struct {
    const void *scores;     /* (num_experts, width), of dtype */
    const void *shared;     /* (width), of dtype: what says how much of the last expert is added */
    const Expert *experts;  /* where there is `shared`, one more, which all rows go to */
    int32_t num_experts, num_used, activation;
    int32_t normalises;     /* the factors of the experts used add up to 1 */
    int32_t rounds;         /* and are of dtype; else float32 numbers */
} Routing;

/* Experts, and pairs of a row, with the one that all rows go to. */
INLINE int all_experts(const Routing *routing) {
    return routing->num_experts + (routing->shared != NULL);
}

INLINE int all_used(const Routing *routing) { return routing->num_used + (routing->shared != NULL); }

/* The product of a row with `count` numbers of a weight. */
INLINE float dot(const int kind, const void *weight, int64_t at, const Inputs *row, int count) {
    vec sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    float all = 0;
    int k = 0;
    for (; k + 4 * LANES <= count; k += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            const int here = k + i * LANES;
            const vec x = row->halves ? load_bf16(row->halves + here) : load(row->x + here);
            sum[i] = fused(x, some_at(kind, weight, at + here), sum[i]);
        }
    const vec both = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int i = 0; i < LANES; i++) all += both[i];
    for (; k < count; k++) {
        const float x = row->halves ? one_at(BFLOAT16, row->halves, k) : row->x[k];
        all += x * one_at(kind, weight, at + k);
    }
    return all;
}

/* Scores of experts [low, low + SCORED) and one row. */
static void score_row(int dtype, const Routing *routing, const Inputs *row, int width, int low,
                      float *scores) {
    for (int e = low; e < low + SCORED && e < routing->num_experts; e++) {
        const int64_t at = (int64_t)e * width;
        scores[e] = rounded_one(dtype, dtype == FLOAT32 ? dot(FLOAT32, routing->scores, at, row, width)
                                                        : dot(BFLOAT16, routing->scores, at, row, width));
    }
}

/* The experts of one row, by its scores, which are changed: (all_used) of them, and their factors. */
static void choose(int dtype, const Routing *routing, const Inputs *row, int width, float *scores,
                   int64_t *which, float *factors) {
    const int num = routing->num_experts, used = routing->num_used;
    float most = scores[0], all = 0, chosen = 0;
    for (int e = 1; e < num; e++) most = scores[e] > most ? scores[e] : most;
    for (int e = 0; e < num; e++) all += expf(scores[e] - most);
    for (int j = 0; j < used; j++) {
        int best = 0;
        for (int e = 1; e < num; e++) best = scores[e] > scores[best] ? e : best;
        which[j] = best;
        factors[j] = expf(scores[best] - most) / all;
        chosen += factors[j];
        scores[best] = -INFINITY;
    }
    for (int j = 0; j < used; j++) {
        if (routing->normalises) factors[j] /= chosen;
        if (routing->rounds) factors[j] = rounded_one(dtype, factors[j]);
    }
    if (!routing->shared) return;
    const float gate = rounded_one(dtype, dtype == FLOAT32 ? dot(FLOAT32, routing->shared, 0, row, width)
                                                           : dot(BFLOAT16, routing->shared, 0, row, width));
    which[used] = num;
    factors[used] = rounded_one(dtype, 1.0f / (1.0f + expf(-gate)));
}

#endif
