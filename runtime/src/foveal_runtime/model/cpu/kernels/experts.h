/* Experts: each row goes through some of them, and their outputs are added up.
 *
 * Included by decoder_layers.c. Rows of one expert are multiplied with its weights together, which are
 * read once; experts that no row goes to are not read. A row's outputs are added in the order of the
 * experts, each product in its own order, so its result is the same bits in any company.
 */
#ifndef FOVEAL_EXPERTS_H
#define FOVEAL_EXPERTS_H

#include <stdlib.h>

#include "linear.h"

typedef struct {
    Product gate, up, down; /* up: what the activated gate is multiplied with */
} Expert;

/* Pairs of a row and an expert, by expert. */
typedef struct {
    int32_t dtype, activation, num_experts, num_used; /* used: by each row */
    int64_t num_rows;
    const Expert *experts;
    int32_t panels;         /* blocks of outputs of an expert's first products, at most */
    int32_t num_met;
    int32_t *met;           /* experts that there are pairs of */
    int32_t *first;         /* (num_experts + 1): pairs [first[e], first[e + 1]) are of expert e */
    int32_t *row;
    float *factor;
    Inputs in, wide;        /* of each pair: its row, and what the last product takes */
    float *sums;            /* of each thread: (num_rows, MAX_WIDE) */
} Pairs;

static int are_experts_known(int dtype, const Expert *experts, int count) {
    for (int e = 0; e < count; e++) {
        const Product *all[] = {&experts[e].gate, &experts[e].up, &experts[e].down};
        for (int i = 0; i < 3; i++)
            if (!is_known(dtype, all[i])) return 0;
        if (all[0]->wide != all[1]->wide || MAX_WIDE % all[2]->wide) return 0;
    }
    return 1;
}

static int are_experts_quantised(const Expert *experts, int count) {
    for (int e = 0; e < count; e++)
        if (experts[e].gate.bits || experts[e].up.bits || experts[e].down.bits) return 1;
    return 0;
}

/* Sets addresses within `room`, if it is not NULL; returns the bytes that they take. `numbers`: rows
 * are multiplied as float32 numbers, too. */
static size_t lay_pairs(Pairs *p, int threads, int numbers, char *room) {
    const int halves = HAS_DOTS && p->dtype == BFLOAT16;
    const size_t count = p->num_rows * p->num_used, read = count + (HAS_TILES ? TILE : 0);
    int64_t ins = p->experts->gate.ins, inner = 0;
    p->panels = 0;
    for (int e = 0; e < p->num_experts; e++) {
        const Expert *one = p->experts + e;
        if (one->down.ins > inner) inner = one->down.ins;
        if (num_panels(&one->gate) > p->panels) p->panels = num_panels(&one->gate);
    }
    const size_t sizes[] = {
        p->num_experts * sizeof *p->met,
        (p->num_experts + 1) * sizeof *p->first,
        count * sizeof *p->row,
        count * sizeof *p->factor,
        numbers ? count * ins * 4 : 0,
        halves ? read * ins * 2 : 0,
        numbers ? count * inner * 4 : 0,
        halves ? read * inner * 2 : 0,
        threads * p->num_rows * MAX_WIDE * 4,
    };
    enum { MET, FIRST, ROW, FACTOR, IN, IN_HALVES, WIDE, WIDE_HALVES, SUMS, NUM };
    size_t bytes = 0;
    void *pieces[NUM];
    for (int i = 0; i < NUM; i++) {
        pieces[i] = room && sizes[i] ? room + bytes : NULL;
        bytes += (sizes[i] + 63) / 64 * 64;
    }
    p->met = pieces[MET], p->first = pieces[FIRST];
    p->row = pieces[ROW], p->factor = pieces[FACTOR], p->sums = pieces[SUMS];
    p->in = (Inputs){pieces[IN], pieces[IN_HALVES], ins, ins};
    p->wide = (Inputs){pieces[WIDE], pieces[WIDE_HALVES], inner, inner};
    return bytes;
}

/* Finds the pairs. which: (num_rows, num_used), experts of each row; factors: likewise, what their
 * outputs are multiplied with. */
static void sort_pairs(Pairs *p, const int64_t *which, const float *factors) {
    const int64_t count = p->num_rows * p->num_used;
    int32_t *first = p->first;
    memset(first, 0, (p->num_experts + 1) * sizeof *first);
    p->num_met = 0;
    for (int64_t i = 0; i < count; i++) first[which[i] + 1]++;
    for (int e = 0; e < p->num_experts; e++) {
        if (first[e + 1]) p->met[p->num_met++] = e;
        first[e + 1] += first[e];
    }
    for (int64_t i = 0; i < count; i++) {
        const int32_t pair = first[which[i]]++;
        p->row[pair] = (int32_t)(i / p->num_used);
        p->factor[pair] = factors[i];
    }
    memmove(first + 1, first, p->num_experts * sizeof *first);
    first[0] = 0;
}

/* Unit i of num_met * panels: a block of outputs of one expert's first products, of all its rows. */
static void put_expert(const Pairs *p, int i) {
    const int number = p->met[i / p->panels], panel = i % p->panels, kind = p->dtype;
    const Expert *one = p->experts + number;
    float gate[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    float up[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    if (panel >= num_panels(&one->gate)) return;
    EACH_GROUP(first, count, p->first[number], p->first[number + 1], PROJECT_ROWS) {
        const int outs = project(kind, &one->gate, panel, &p->in, first, count, gate);
        project(kind, &one->up, panel, &p->in, first, count, up);
        for (int r = 0; r < count; r++)
            put_activated(kind, p->activation, outs, up + r * MAX_WIDE, gate + r * MAX_WIDE,
                          &p->wide, first + r, panel * one->gate.wide);
    }
}

/* Units of the last products: MAX_WIDE outputs each, one block or several of an expert's. */
INLINE int num_sums(const Pairs *p) { return (p->experts->down.outs + MAX_WIDE - 1) / MAX_WIDE; }

/* Outputs of a unit. */
INLINE int outs_of(const Pairs *p, int unit) {
    const int rest = p->experts->down.outs - unit * MAX_WIDE;
    return rest < MAX_WIDE ? rest : MAX_WIDE;
}

/* A unit's outputs of all rows, into sums (num_rows, MAX_WIDE). */
static void add_experts(const Pairs *p, int unit, float *sums) {
    const int outs = outs_of(p, unit);
    float tile[PROJECT_ROWS * MAX_WIDE] __attribute__((aligned(64)));
    memset(sums, 0, p->num_rows * MAX_WIDE * sizeof *sums);
    for (int i = 0; i < p->num_met; i++) {
        const Product *down = &p->experts[p->met[i]].down;
        const int32_t *first_pair = p->first + p->met[i];
        EACH_GROUP(first, count, first_pair[0], first_pair[1], PROJECT_ROWS) {
            for (int c = 0; c < outs; c += down->wide)
                project(p->dtype, down, (unit * MAX_WIDE + c) / down->wide, &p->wide, first, count,
                        tile + c);
            for (int r = 0; r < count; r++) {
                float *to = sums + (int64_t)p->row[first + r] * MAX_WIDE;
                const vec factor = splat(p->factor[first + r]);
                for (int c = 0; c < outs; c += LANES)
                    store(to + c, fused(factor, load(tile + r * MAX_WIDE + c), load(to + c)));
            }
        }
    }
}

typedef struct {
    int32_t dtype, num_threads, activation, num_experts, num_used;
    int64_t num_rows;
    const void *x;          /* (num_rows, ins), of dtype */
    void *out;              /* (num_rows, outs) */
    const int64_t *which;   /* (num_rows, num_used) */
    const float *factors;   /* likewise */
    const Expert *experts;
} ExpertsJob;

static void copy_row(const Pairs *p, const void *x, int64_t pair) {
    const int64_t ins = p->in.stride, from = p->row[pair] * ins;
    const Inputs to = rows_from(&p->in, pair);
    for (int64_t i = 0; to.x && i < ins; i++) to.x[i] = one_at(p->dtype, x, from + i);
    if (to.halves) memcpy(to.halves, (const uint16_t *)x + from, ins * sizeof *to.halves);
}

/* The experts of one layer by themselves. DONE, UNSUPPORTED or NO_MEMORY. */
int foveal_experts(const ExpertsJob *job) {
    const int64_t count = job->num_rows * job->num_used;
    Pairs p = {.dtype = job->dtype, .activation = job->activation, .experts = job->experts,
               .num_experts = job->num_experts, .num_used = job->num_used,
               .num_rows = job->num_rows};
    if (!are_experts_known(p.dtype, p.experts, p.num_experts)) return UNSUPPORTED;
    for (int64_t i = 0; i < count; i++)
        if (job->which[i] < 0 || job->which[i] >= job->num_experts) return UNSUPPORTED;
    if (!count) return DONE;
    const int numbers = !(HAS_DOTS && p.dtype == BFLOAT16) ||
                        are_experts_quantised(p.experts, p.num_experts);
    char *room = aligned_alloc(64, lay_pairs(&p, job->num_threads, numbers, NULL));
    if (!room) return NO_MEMORY;
    lay_pairs(&p, job->num_threads, numbers, room);
    sort_pairs(&p, job->which, job->factors);
#pragma omp parallel num_threads(job->num_threads)
    {
        float *sums = p.sums + omp_get_thread_num() * p.num_rows * MAX_WIDE;
        begin_tiles();
#pragma omp for
        for (int64_t pair = 0; pair < count; pair++) copy_row(&p, job->x, pair);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < p.num_met * p.panels; i++) put_expert(&p, i);
#pragma omp for schedule(dynamic)
        for (int unit = 0; unit < num_sums(&p); unit++) {
            add_experts(&p, unit, sums);
            for (int64_t r = 0; r < p.num_rows; r++)
                put_rounded(p.dtype, p.dtype, sums + r * MAX_WIDE, outs_of(&p, unit), job->out,
                            r * p.experts->down.outs + unit * MAX_WIDE);
        }
        end_tiles();
    }
    free(room);
    return DONE;
}

#define SCORED 16 /* experts of one unit of work */

/* Which experts a row goes to: by the softmax of its products with a vector of each, as the routers of
 * Qwen's and Mixtral's models do; a trial shows whether a model's is such a one. */
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
