"""The Triton kernels of paged attention: writing keys and values, decode with split KV, prefill.

Launched by the backend of this package only, which knows the shapes. All arithmetic on scores is
float32 in base 2 (scores carry a factor log2 e); products take the queries' dtype. A program reads
pages through the block table and never a position that its mask hides from every row. Strides that
change from step to step are not specialised on: a new batch shape compiles nothing.

Rows that read nothing do not exist: every query sees at least itself.

On GPUs whose kernels may start early (EARLY, see `gpu.kernels`) decoding and joining do: a decode
program looks up which token it has before it waits, and lets the next kernel begin when it has
read its span.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foveal_runtime.model.gpu.kernels import wait_for_last
from foveal_runtime.model.gpu.launch import kernel

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _soft_limit(scores, cap: tl.constexpr):
    """cap * tanh(scores / cap), without overflow."""
    decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / cap))
    size = (1.0 - decay) / (1.0 + decay) * cap
    return tl.where(scores < 0, -size, size)


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    """a @ b in float32. The interpreter cannot multiply bfloat16: there WIDEN is set."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr):
    """Scores of a tile in base 2: (rows, DK) by (DK, positions)."""
    if SOFTCAP > 0:
        return _soft_limit(_product(q, k, WIDEN) * scale, SOFTCAP) * LOG2E
    return _product(q, k, WIDEN) * (scale * LOG2E)


@triton.jit
def _accumulate(acc, top, total, scores, v, IS_WHOLE: tl.constexpr, WIDEN: tl.constexpr):
    """One tile into the running softmax: `top` maximum, `total` sum, `acc` weighted values.
    IS_WHOLE: every row sees something of it."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if not IS_WHOLE:
        # Rows that have seen nothing yet keep -inf; a difference of two -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + _product(weights.to(v.dtype), v, WIDEN)
    return acc, new_top, total


@triton.jit
def _add_tile(
    acc, top, total, q, keys, values, block_table, sequence, table_stride, kv_head, scale,
    position, is_read, seen, NUM_KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr, IS_WHOLE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The positions of a tile into the running softmax, as `seen` (rows, positions) says; IS_WHOLE:
    all of them, by every row, with no masks."""
    k, v = _load_tile(
        keys, values, block_table, sequence, table_stride, position, is_read, kv_head,
        q.dtype, NUM_KV_HEADS, PAGE, DK, DV, BLOCK_DK, BLOCK_DV, IS_WHOLE,
    )  # fmt: skip
    scores = _scores(q, k, scale, SOFTCAP, WIDEN)
    if not IS_WHOLE:
        scores = tl.where(seen, scores, float("-inf"))
    return _accumulate(acc, top, total, scores, v, IS_WHOLE, WIDEN)


@triton.jit
def _with_sink(top, total, sink):
    """The softmax's sum with one more logit, relative to the new maximum; and what that does to
    the weighted values."""
    new_top = tl.maximum(top, sink)
    shrink = tl.exp2(top - new_top)
    return total * shrink + tl.exp2(sink - new_top), shrink


@triton.jit
def _with_sinks(acc, top, total, sinks, is_row, HAS_SINKS: tl.constexpr):
    """Weighted values and their weights' sum, with the logits at `sinks` where there are such."""
    if HAS_SINKS:
        sink = tl.load(sinks, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        total, shrink = _with_sink(top, total, sink)
        acc = acc * shrink[:, None]
    return acc, total


@triton.jit
def _rows_of(
    block_table, sequence, table_stride, position, is_read,
    PAGE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Pool rows of positions of one sequence, i64."""
    place = block_table + sequence.to(tl.int64) * table_stride + position // PAGE
    page = tl.load(place) if IS_WHOLE else tl.load(place, mask=is_read, other=0)
    return page.to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _narrowed(value, LARGEST: tl.constexpr):
    """Cut to what the pool's dtype can hold, where that is little: LARGEST, 0 = no matter."""
    if LARGEST > 0:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -LARGEST), LARGEST)
    return value


@triton.jit
def _load_tile(
    keys, values, block_table, sequence, table_stride, position, is_read, kv_head,
    dtype: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys (DK, positions) and values (positions, DV) of one head, as `dtype`; zeros where not
    read. IS_WHOLE: all are read, with no mask that costs anything."""
    pool_row = _rows_of(block_table, sequence, table_stride, position, is_read, PAGE, IS_WHOLE)
    pool_row = pool_row * NUM_KV_HEADS + kv_head
    at_k = tl.arange(0, BLOCK_DK)
    at_v = tl.arange(0, BLOCK_DV)
    k_place = keys + pool_row[None, :] * DK + at_k[:, None]
    v_place = values + pool_row[:, None] * DV + at_v[None, :]
    if IS_WHOLE and DK == BLOCK_DK and DV == BLOCK_DV:
        k = tl.load(k_place)
        v = tl.load(v_place)
    else:
        k = tl.load(k_place, mask=is_read[None, :] & (at_k < DK)[:, None], other=0.0)
        v = tl.load(v_place, mask=is_read[:, None] & (at_v < DV)[None, :], other=0.0)
    return k.to(dtype), v.to(dtype)


@triton.jit
def _visible(
    position, is_read, q_pos, own, groups, base, before,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_GROUPS: tl.constexpr,
    GROUPS_IGNORE_WINDOW: tl.constexpr,
):  # fmt: skip
    """What each query sees of some positions: the oracle's mask. `own` are the queries' groups,
    `before` the positions of earlier steps, which are in no group."""
    seen = position[None, :] <= q_pos[:, None]
    if HAS_GROUPS:
        is_new = is_read & (position >= before)
        theirs = tl.load(groups + base + position - before, mask=is_new, other=-1)
        same = is_new[None, :] & (theirs[None, :] == own[:, None]) & (own >= 0)[:, None]
        seen = seen | same
    if WINDOW > 0:
        seen = seen & (position[None, :] > q_pos[:, None] - WINDOW)
        if HAS_GROUPS and GROUPS_IGNORE_WINDOW:
            seen = seen | same
    if CHUNK > 0:
        seen = seen & (position[None, :] // CHUNK == q_pos[:, None] // CHUNK)
    return seen & is_read[None, :]


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a query at `position` sees, groups aside."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@kernel
@triton.jit(do_not_specialize=["key_token_stride", "key_head_stride", "value_token_stride",
                               "value_head_stride"])  # fmt: skip
def write_kernel(
    key, value, keys, values, slots,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One token's piece of BLOCK values: grid (tokens, pieces of the wider of the two)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < KEY_WIDTH
    source = key + token * key_token_stride + (at // DK) * key_head_stride + at % DK
    found = _narrowed(tl.load(source, mask=inside), LARGEST)
    tl.store(keys + slot * KEY_WIDTH + at, found.to(keys.dtype.element_ty), mask=inside)
    inside = at < VALUE_WIDTH
    source = value + token * value_token_stride + (at // DV) * value_head_stride + at % DV
    found = _narrowed(tl.load(source, mask=inside), LARGEST)
    tl.store(values + slot * VALUE_WIDTH + at, found.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _span(
    last, split, num_splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(begin, whole, end) of a span of what a token at position `last` sees: [begin, whole) are
    whole tiles."""
    first = _first_seen(last, WINDOW, CHUNK)
    span = tl.cdiv(tl.cdiv(last + 1 - first, BLOCK_N), num_splits) * BLOCK_N
    begin = first + split * span
    end = tl.maximum(tl.minimum(begin + span, last + 1), begin)
    return begin, begin + (end - begin) // BLOCK_N * BLOCK_N, end


@kernel
@triton.jit(do_not_specialize=["query_token_stride", "query_head_stride", "table_stride",
                               "num_splits"])  # fmt: skip
def decode_kernel(
    query, keys, values, out, partial_top, partial_total, sinks,
    rows, seq_of_token, pos_of_token, block_table,
    query_token_stride, query_head_stride, table_stride, scale, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr, WIDEN: tl.constexpr, VECTOR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query token, HEADS query heads of one kv head, one of `num_splits` spans of what the
    token sees: grid (rows, kv heads * pieces of a group, splits). With IS_SPLIT `out` is float32
    (rows, query heads, splits, DV), else the result (tokens, query heads, DV). The query's strides
    are in VECTOR values, which makes loads as wide."""
    row = tl.program_id(0)
    token = tl.load(rows + row).to(tl.int64)
    sequence = tl.load(seq_of_token + token)
    last = tl.load(pos_of_token + token)
    if EARLY:  # these tables are copied from the host: no kernel writes them
        gdc_wait()
    pieces: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // pieces
    in_group = (tl.program_id(1) % pieces) * HEADS + tl.arange(0, BLOCK_H)
    is_head = (tl.arange(0, BLOCK_H) < HEADS) & (in_group < GROUP)
    head = kv_head * GROUP + in_group

    split = tl.program_id(2)
    begin, whole, end = _span(last, split, num_splits, BLOCK_N, WINDOW, CHUNK)

    at_k = tl.arange(0, BLOCK_DK)
    at_v = tl.arange(0, BLOCK_DV)
    place = token * query_token_stride + head[:, None] * query_head_stride
    place = place * VECTOR + at_k[None, :]
    q = tl.load(query + place, mask=is_head[:, None] & (at_k < DK)[None, :], other=0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for start in range(begin, whole, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        acc, top, total = _add_tile(
            acc, top, total, q, keys, values, block_table, sequence, table_stride, kv_head, scale,
            position, position >= 0, None, NUM_KV_HEADS, PAGE, DK, DV, BLOCK_DK, BLOCK_DV, SOFTCAP,
            True, WIDEN,
        )  # fmt: skip
    if whole < end:
        position = whole + tl.arange(0, BLOCK_N)
        is_read = position < end
        acc, top, total = _add_tile(
            acc, top, total, q, keys, values, block_table, sequence, table_stride, kv_head, scale,
            position, is_read, is_read[None, :], NUM_KV_HEADS, PAGE, DK, DV, BLOCK_DK, BLOCK_DV,
            SOFTCAP, False, WIDEN,
        )  # fmt: skip
    if EARLY:  # not sooner: what begins would take room and bandwidth from programs that read
        gdc_launch_dependents()

    is_value = is_head[:, None] & (at_v < DV)[None, :]
    if IS_SPLIT:
        part = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
        tl.store(partial_top + part, top, mask=is_head)
        tl.store(partial_total + part, total, mask=is_head)
        # An empty span stores no values; the reduction ignores what is there.
        place = part[:, None] * DV + at_v[None, :]
        tl.store(out + place, acc, mask=is_value & (top > float("-inf"))[:, None])
    else:
        acc, total = _with_sinks(acc, top, total, sinks + head, is_head, HAS_SINKS)
        acc = acc / total[:, None]
        place = (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * DV + at_v[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def _joined(
    partial, partial_top, partial_total, first, num_splits, DV: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_S spans, from the `first` on, as one: weighted values, their maximum, their sum.
    Nothing that is loaded waits for anything else that is."""
    at = tl.arange(0, BLOCK_S)
    at_v = tl.arange(0, BLOCK_DV)
    part = first + at
    is_span = at < num_splits
    place = part[:, None] * DV + at_v[None, :]
    found = tl.load(partial + place, mask=is_span[:, None] & (at_v < DV)[None, :], other=0.0)
    tops = tl.load(partial_top + part, mask=is_span, other=float("-inf"))
    totals = tl.load(partial_total + part, mask=is_span, other=0.0)
    found = tl.where((tops > float("-inf"))[:, None], found, 0.0)  # empty ones wrote no values
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - top)
    return tl.sum(found * weights[:, None], 0), top, tl.sum(totals * weights, 0)


@kernel
@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    partial, partial_top, partial_total, sinks, rows, out, num_splits,
    NUM_HEADS: tl.constexpr, DV: tl.constexpr, FEW: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The spans of one query token and head into its result: grid (rows, query heads). FEW spans
    take less time than BLOCK_S."""
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(rows + row).to(tl.int64)
    head = tl.program_id(1)
    at_v = tl.arange(0, BLOCK_DV)
    first = (row * NUM_HEADS + head) * num_splits
    if num_splits <= FEW:
        acc, top, total = _joined(
            partial, partial_top, partial_total, first, num_splits, DV, FEW, BLOCK_DV
        )
    else:
        acc, top, total = _joined(
            partial, partial_top, partial_total, first, num_splits, DV, BLOCK_S, BLOCK_DV
        )
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        total, shrink = _with_sink(top, total, sink)
        acc = acc * shrink
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + (token * NUM_HEADS + head) * DV + at_v, result, mask=at_v < DV)


@triton.jit
def _reach(
    lowest, before, kv_len, tokens: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, HAS_GROUPS: tl.constexpr, GROUPS_IGNORE_WINDOW: tl.constexpr,
):  # fmt: skip
    """(begin, whole, end) of what queries from position `lowest` on see: all rows see the tiles of
    [begin, whole) as a whole, which therefore need no masks."""
    begin = _first_seen(lowest, WINDOW, CHUNK)
    if HAS_GROUPS and GROUPS_IGNORE_WINDOW:  # a group may reach further back than the window
        begin = tl.minimum(begin, tl.maximum(before, _first_seen(lowest, 0, CHUNK)))
    begin = begin // BLOCK_N * BLOCK_N
    whole = begin
    if WINDOW == 0 and CHUNK == 0 and not HAS_GROUPS:
        whole = (lowest + 1) // BLOCK_N * BLOCK_N
    end = kv_len
    if not HAS_GROUPS:
        end = tl.minimum(lowest + tokens, kv_len)
    return begin, whole, end


@kernel
@triton.jit(do_not_specialize=["query_token_stride", "query_head_stride", "table_stride"])
def prefill_kernel(
    query, keys, values, out, sinks, tile_sequence, tile_first, q_start, seq_lens, block_table,
    groups, query_token_stride, query_head_stride, table_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_GROUPS: tl.constexpr, GROUPS_IGNORE_WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M // HEADS query tokens by HEADS query heads of one kv head: grid (tiles,
    kv heads * pieces of a group). Tile i begins at query token tile_first[i] of its sequence."""
    sequence = tl.load(tile_sequence + tl.program_id(0))
    first = tl.load(tile_first + tl.program_id(0))
    base = tl.load(q_start + sequence)
    q_len = tl.load(q_start + sequence + 1) - base
    kv_len = tl.load(seq_lens + sequence)
    before = kv_len - q_len  # positions of earlier steps
    tokens: tl.constexpr = BLOCK_M // HEADS
    pieces: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // pieces
    at = tl.arange(0, BLOCK_M)
    in_group = (tl.program_id(1) % pieces) * HEADS + at % HEADS
    index = first + at // HEADS
    is_row = (at < tokens * HEADS) & (index < q_len) & (in_group < GROUP)
    index = tl.minimum(index, q_len - 1)
    head = kv_head * GROUP + in_group
    q_pos = before + index
    token = (base + index).to(tl.int64)

    begin, whole, end = _reach(before + first, before, kv_len, tokens, BLOCK_N, WINDOW, CHUNK,
                               HAS_GROUPS, GROUPS_IGNORE_WINDOW)  # fmt: skip
    own = q_pos
    if HAS_GROUPS:
        own = tl.load(groups + token, mask=is_row, other=-1)

    at_k = tl.arange(0, BLOCK_DK)
    at_v = tl.arange(0, BLOCK_DV)
    place = token[:, None] * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(query + place + at_k[None, :],
                mask=is_row[:, None] & (at_k < DK)[None, :], other=0.0)  # fmt: skip
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(begin, whole, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        acc, top, total = _add_tile(
            acc, top, total, q, keys, values, block_table, sequence, table_stride, kv_head, scale,
            position, position >= 0, None, NUM_KV_HEADS, PAGE, DK, DV, BLOCK_DK, BLOCK_DV, SOFTCAP,
            True, WIDEN,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        is_read = position < end
        seen = _visible(position, is_read, q_pos, own, groups, base, before,
                        WINDOW, CHUNK, HAS_GROUPS, GROUPS_IGNORE_WINDOW)  # fmt: skip
        acc, top, total = _add_tile(
            acc, top, total, q, keys, values, block_table, sequence, table_stride, kv_head, scale,
            position, is_read, seen, NUM_KV_HEADS, PAGE, DK, DV, BLOCK_DK, BLOCK_DV, SOFTCAP,
            False, WIDEN,
        )  # fmt: skip

    acc, total = _with_sinks(acc, top, total, sinks + head, is_row, HAS_SINKS)
    acc = acc / tl.where(is_row, total, 1.0)[:, None]
    place = (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * DV + at_v[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty),
             mask=is_row[:, None] & (at_v < DV)[None, :])  # fmt: skip
