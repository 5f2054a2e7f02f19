/* One layer's attention for many query tokens of a sequence at once: chunks of prompts, whose
 * context is paged, and encoders, whose tokens all see each other.
 *
 * Called by model/attention/cpu.py and dense.py through ctypes; compiled by runtime/setup.py once
 * per instruction set. How it is computed: chunks.h.
 */
#include "chunks.h"

static int run_chunks(const Job *job, const Layout *layout, const int32_t *chunk_rows,
                      int32_t num_chunks) {
    Pieces cut;
    const int code = cut_chunks(job, chunk_rows, num_chunks, &cut);
    const int threads = cut.work > 65536 ? job->num_threads : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < cut.count; i++) run_one_piece(job, layout, cut.pieces + i);
        end_tiles();
    }
    free(cut.pieces);
    return code;
}

/* See cut_chunks. */
int foveal_paged_prefill(const Job *job, const int32_t *chunk_rows, int32_t num_chunks) {
    const Layout layout = pool_layout(job);
    return run_chunks(job, &layout, chunk_rows, num_chunks);
}

typedef struct {
    int32_t dtype, head_dim, num_heads, num_kv_heads, num_sequences, num_queries, num_keys,
        num_threads; /* queries and keys: of each sequence */
    float scaling;
    const void *query, *keys, *values; /* (tokens, heads, D), D contiguous */
    int64_t query_token, query_head;   /* strides, in elements */
    Layout layout;
    void *out;                         /* (tokens, H, D), contiguous */
} DenseJob;

/* Every query sees every key of its sequence: each sequence is a block of a pool. */
int foveal_dense_attention(const DenseJob *dense) {
    const int queries = dense->num_queries, num = dense->num_sequences * queries;
    int32_t *token = malloc((3 * (size_t)num + 2 * dense->num_sequences) * sizeof *token);
    if (!token) return NO_MEMORY;
    int32_t *sequence = token + num, *length = sequence + num, *table = length + num;
    int32_t *chunk_rows = table + dense->num_sequences;
    for (int r = 0; r < num; r++)
        token[r] = r, sequence[r] = r / queries, length[r] = dense->num_keys;
    for (int s = 0; s < dense->num_sequences; s++) table[s] = s, chunk_rows[s] = queries;
    const Job job = {
        .dtype = dense->dtype, .head_dim = dense->head_dim, .num_heads = dense->num_heads,
        .num_kv_heads = dense->num_kv_heads, .block_size = dense->num_keys, .num_rows = num,
        .num_threads = dense->num_threads, .scaling = dense->scaling, .query = dense->query,
        .query_token_stride = dense->query_token, .query_head_stride = dense->query_head,
        .keys = dense->keys, .values = dense->values, .out = dense->out, .block_table = table,
        .table_stride = 1, .row_token = token, .row_sequence = sequence, .row_length = length};
    const int result = run_chunks(&job, &dense->layout, chunk_rows, dense->num_sequences);
    free(token);
    return result;
}
