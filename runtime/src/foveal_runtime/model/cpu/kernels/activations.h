/* What MLPs apply to their gates.
 *
 * Included by decoder_layers.c and experts.h.
 */
#ifndef FOVEAL_ACTIVATIONS_H
#define FOVEAL_ACTIVATIONS_H

#include "products.h"

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
