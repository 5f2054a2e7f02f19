"""The Triton kernels of products with quantised weights.

Launched by `gpu.codes`. What they take is not memory alone: each code is several instructions, so
these are few, no code is widened by two warps, and scales are multiplied with sums of a group.
Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foveal_runtime.model.gpu.launch import kernel
from foveal_runtime.model.gpu.product_kernels import finished, own_rows

PART = tl.constexpr(128)
"""Inputs that a warp multiplies at a time."""
STEP = tl.constexpr(16)
"""Of them, what tensor cores take at once."""


@triton.jit
def _numbers_of_pairs(words, j: tl.constexpr, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """The j-th pair of 4-bit codes of each word and `_offset`: (parts, outputs, 8) to numbers
    (..., 16). A code is written behind a power of two: two instructions a pair."""
    if dtype == tl.float32:
        low, high = words >> (4 * j), words >> (4 * j + 16)
        found = ((tl.join(low, high) & 15) ^ 8).to(dtype)
    else:
        pair = (words >> (4 * j)) & 0x000F000F
        if dtype == tl.bfloat16:
            pair = pair ^ 0x43084308
        else:
            pair = pair ^ 0x64086408
        found = _from_bits(tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)), dtype, WIDEN)
    return tl.reshape(found, [words.shape[0], words.shape[1], STEP])


@triton.constexpr_function
def _offset(kind, dtype):
    """What numbers are larger than their codes."""
    if kind != "int4":
        return 0.0
    return 136.0 if dtype == tl.bfloat16 else 1032.0 if dtype == tl.float16 else 8.0


@triton.jit
def _from_bits(bits, dtype: tl.constexpr, WIDEN: tl.constexpr):
    found = bits.to(dtype, bitcast=True)
    if WIDEN:
        found = found.to(tl.float32)
    return found


@triton.jit
def _numbers_of_bytes(codes, KIND: tl.constexpr, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """Codes of a byte each as numbers of a type that holds them."""
    if KIND == "int8":
        bits = (codes.to(tl.int32) & 0xFF) ^ 0x4B000080
        found = bits.to(tl.float32, bitcast=True) - 8388736.0
        return found if WIDEN else found.to(dtype)
    # The bits of a float8_e4m3fn are those of a bfloat16 that is 2 ** 120 times smaller, of a
    # float16 that is 256 times. A conversion takes four times as long as other instructions.
    bits = codes.to(tl.int16)
    if dtype == tl.bfloat16:
        found = _from_bits((bits << 4) & -0x7810, dtype, WIDEN)
        return found * 1329227995784915872903807060280344576.0
    found = ((bits << 7) & -0x4080).to(tl.float16, bitcast=True)
    return found.to(dtype) * 256.0


@triton.jit
def _bytes(places, is_there, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        found = tl.load(places, eviction_policy="evict_first")
    else:
        mask = is_there[:, None, :]
        found = tl.load(places, mask=mask, other=0, eviction_policy="evict_first")
    return found


@triton.jit
def _of_group(
    scales, zeros, line, first, GROUPS: tl.constexpr, SHARE: tl.constexpr, DEEP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of lines of the weight and the groups of inputs `first`, of each
    part."""
    group = tl.minimum(first // DEEP, GROUPS - 1)
    at = (line // SHARE)[None, :] * GROUPS + group[:, None]
    scale = tl.load(scales + at).to(tl.float32)[:, :, None]
    zero = scale
    if HAS_ZEROS:
        zero = tl.load(zeros + at).to(tl.float32)[:, :, None]
    return scale, zero


@triton.jit
def _multiplied(
    numbers, zero, rows, sums, OFFSET: tl.constexpr, HAS_ZEROS: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    if OFFSET > 0:
        numbers -= OFFSET
    if HAS_ZEROS:
        numbers -= zero.to(numbers.dtype)
    if WIDEN:
        numbers = numbers.to(tl.float32)
        rows = rows.to(tl.float32)
    return tl.dot(numbers, rows, sums, input_precision="ieee")


@kernel
@triton.jit(do_not_specialize=["count"])
def coded_rows_kernel(
    x, codes, scales, zeros, bias, residual, out, count,
    N: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    K: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, DEEP: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `rows_kernel`, with a quantised weight: grid (pieces of count, pieces of N), so that those
    who need the same codes run side by side. Each of PARTS warps multiplies PART inputs at a time.
    WIDEN: the interpreter cannot compute in bfloat16."""
    dtype: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = (K + PART - 1) // PART * (PART // 8) if KIND == "int4" else K
    TILE: tl.constexpr = PARTS * PART
    IS_WHOLE: tl.constexpr = (K + TILE - 1) // TILE * TILE == K
    OFFSET: tl.constexpr = _offset(KIND, dtype)
    EACH: tl.constexpr = 2 if ACTIVATION != "" else 1  # lines of the weight an output: gate, up
    own = tl.program_id(1)
    n, _ = own_rows(codes, own, BLOCK_N, N, WIDTH, ACTIVATION, EARLY)
    line = tl.arange(0, BLOCK_N * EACH)
    line = tl.minimum(own * BLOCK_N + line % BLOCK_N, N - 1) + line // BLOCK_N * N
    line = line.to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    k = part[:, None] * PART + tl.arange(0, STEP)[None, :]
    places = x + row[None, None, :] * K + k[:, :, None]
    is_row = (row < count)[None, None, :]
    if KIND == "int4":
        word = part[:, None] * (PART // 8) + tl.arange(0, 8)[None, :]
        code = codes + line[None, :, None] * WIDTH + word[:, None, :]
    else:
        code = codes + line[None, :, None] * WIDTH + k[:, None, :]
    nothing = tl.zeros([PARTS, BLOCK_N * EACH, ROWS], tl.float32)
    sums, found = nothing, nothing
    scale, zero = _of_group(scales, zeros, line, part * 0, GROUPS, SHARE, DEEP, HAS_ZEROS)
    for start in range(0, K, TILE):
        for i in tl.static_range(PART // STEP):
            if GROUPS > 1 and (i == 0 or i * STEP % DEEP == 0):
                first = start + part * PART + i * STEP
                scale, zero = _of_group(scales, zeros, line, first, GROUPS, SHARE, DEEP, HAS_ZEROS)
            is_there = k < K - start - i * STEP
            mask = is_row if IS_WHOLE else is_row & is_there[:, :, None]
            rows = tl.load(places + start + i * STEP, mask=mask, other=0.0)
            if KIND == "int4":
                if i % 4 == 0:
                    words = tl.load(code + start // 8 + 2 * i, eviction_policy="evict_first")
                numbers = _numbers_of_pairs(words, i % 4, dtype, WIDEN)
            else:
                read = _bytes(code + start + i * STEP, is_there, IS_WHOLE)
                numbers = _numbers_of_bytes(read, KIND, dtype, WIDEN)
            found = _multiplied(numbers, zero, rows, found, OFFSET, HAS_ZEROS, WIDEN)
            if GROUPS > 1 and ((i + 1) * STEP % DEEP == 0 or (i + 1) * STEP == PART):
                sums += found * scale
                found = nothing
    if GROUPS == 1:
        sums = found * scale
    whole = tl.sum(sums, 0)
    up = whole
    if ACTIVATION != "":
        whole, up = tl.split(tl.permute(tl.reshape(whole, [2, BLOCK_N, ROWS]), [1, 2, 0]))
    is_there = (row < count)[None, :] & (n < N)[:, None]
    place = row[None, :] * N + n[:, None]
    whole = finished(whole, up, bias, residual, place, n[:, None], is_there,
                     out.dtype.element_ty, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
    tl.store(out + place, whole.to(out.dtype.element_ty), mask=is_there)


@kernel
@triton.jit(do_not_specialize=["first", "count"])
def widen_kernel(
    codes, scales, zeros, out, first, count,
    K: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, DEEP: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weights of `count` outputs from `first` on to out (count, K): grid (pieces of count,
    pieces of K)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_there = (n < count)[:, None] & (k < K)[None, :]
    row = n[:, None].to(tl.int64)
    whole = first + row
    if KIND == "int4":
        word = k // PART * (PART // 8) + k % PART // 64 * 8 + k % 16 // 2
        shift = k % 64 // 16 * 4 + k % 2 * 16
        width: tl.constexpr = (K + PART - 1) // PART * (PART // 8)
        words = tl.load(codes + whole * width + word[None, :], mask=is_there, other=0)
        weight = (((words >> shift[None, :]) & 15) ^ 8).to(tl.float32) - 8.0
    else:
        read = tl.load(codes + whole * K + k[None, :], mask=is_there, other=0)
        weight = _numbers_of_bytes(read, KIND, tl.float32, False)
    at = whole // SHARE * GROUPS + (k // DEEP)[None, :]
    if HAS_ZEROS:
        weight -= tl.load(zeros + at, mask=is_there, other=0.0).to(tl.float32)
    weight *= tl.load(scales + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * K + k[None, :], weight.to(out.dtype.element_ty), mask=is_there)
