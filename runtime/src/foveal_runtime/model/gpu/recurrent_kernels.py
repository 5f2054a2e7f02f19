"""The Triton kernels of one token of each sequence through a recurrence: its short convolution, and
the gated delta rule or Mamba-2's.

Launched by `layers.gpu_recurrence` only, which knows the shapes. States are advanced where the pool
keeps them; a slot below 0 is nobody's, whose rows are computed from zeros and kept nowhere.
Arithmetic is float32, rounded where transformers rounds; what goes to memory has the activations'
dtype, states are float32. Barriers stand between what is read and what is then written in its
place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foveal_runtime.model.gpu.launch import kernel


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rounded(x, like):
    """To the dtype that `like` points to, and back."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@kernel
@triton.jit
def convolve_kernel(
    mixed, past, weight, bias, slots, out, mixed_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A convolution of the last TAPS - 1 inputs and a new one, or its SiLU, channels by themselves:
    grid (sequences, blocks of channels). past: (slots, WIDTH, TAPS), in place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    slot = tl.load(slots + row)
    is_kept = at < tl.where(slot >= 0, WIDTH, 0)
    place = past + (slot * WIDTH + at) * TAPS
    new = tl.load(mixed + row * mixed_stride + at, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(
        weight + at * TAPS + TAPS - 1, mask=inside, other=0.0
    ).to(tl.float32)  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        seen = tl.load(place + tap + 1, mask=is_kept, other=0.0)
        total += seen.to(tl.float32) * tl.load(
            weight + at * TAPS + tap, mask=inside, other=0.0
        ).to(tl.float32)  # fmt: skip
        tl.debug_barrier()
        tl.store(place + tap, seen, mask=is_kept)
    tl.debug_barrier()
    tl.store(place + TAPS - 1, new, mask=is_kept)
    if HAS_SILU:
        total = _rounded(total, out)
        total *= _sigmoid(total)
    tl.store(out + row * WIDTH + at, total.to(out.dtype.element_ty), mask=inside)


@kernel
@triton.jit
def delta_kernel(
    mixed, gate, rate, step, decay, shift, norm, slots, state, out, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One head's gated delta rule, its norm and its gate: grid (sequences, value heads). mixed:
    (rows, queries, keys, values) behind their convolution; state: (slots, HEADS, KEYS, VALUES)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k = tl.arange(0, KEY_BLOCK)
    v = tl.arange(0, VALUE_BLOCK)
    has_k = k < KEYS
    has_v = v < VALUES
    slot = tl.load(slots + row)
    own = mixed + row * (2 * KEY_HEADS * KEYS + HEADS * VALUES)
    shared = own + head // (HEADS // KEY_HEADS) * KEYS + k
    query = tl.load(shared, mask=has_k, other=0.0).to(tl.float32)
    key = tl.load(shared + KEY_HEADS * KEYS, mask=has_k, other=0.0).to(tl.float32)
    value = tl.load(own + 2 * KEY_HEADS * KEYS + head * VALUES + v, mask=has_v, other=0.0)
    query *= scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
    key /= tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    raw = tl.load(step + row * HEADS + head).to(tl.float32) + tl.load(shift + head)
    kept = tl.exp(tl.load(decay + head) * _softplus(raw))
    beta = _rounded(_sigmoid(tl.load(rate + row * HEADS + head).to(tl.float32)), out)

    place = state + (slot * HEADS + head) * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    is_kept = has_k[:, None] & (v < tl.where(slot >= 0, VALUES, 0))[None, :]
    now = tl.load(place, mask=is_kept, other=0.0) * kept
    seen = tl.sum(now * key[:, None], 0)
    now += key[:, None] * ((value.to(tl.float32) - seen) * beta)[None, :]
    read = _rounded(tl.sum(now * query[:, None], 0), out)
    tl.debug_barrier()
    tl.store(place, now, mask=is_kept)

    normed = read * tl.rsqrt(tl.sum(read * read, 0) / VALUES + eps)
    weight = tl.load(norm + v, mask=has_v, other=0.0).to(tl.float32)
    normed = _rounded(_rounded(normed, out) * weight, out)
    opening = tl.load(gate + (row * HEADS + head) * VALUES + v, mask=has_v, other=0.0)
    opening = opening.to(tl.float32)
    gated = normed * opening * _sigmoid(opening)
    tl.store(out + (row * HEADS + head) * VALUES + v, gated.to(out.dtype.element_ty), mask=has_v)


@kernel
@triton.jit
def mamba_kernel(
    mixed, step, decay, shift, skip, slots, state, out, step_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """One head's recurrence: grid (sequences, heads). mixed: (rows, values, keys, queries) behind
    their convolution; state: (slots, HEADS, VALUES, KEYS)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k = tl.arange(0, KEY_BLOCK)
    v = tl.arange(0, VALUE_BLOCK)
    has_k = k < KEYS
    has_v = v < VALUES
    slot = tl.load(slots + row)
    own = mixed + row * (HEADS * VALUES + 2 * GROUPS * KEYS)
    shared = own + HEADS * VALUES + head // (HEADS // GROUPS) * KEYS + k
    value = tl.load(own + head * VALUES + v, mask=has_v, other=0.0).to(tl.float32)
    key = tl.load(shared, mask=has_k, other=0.0).to(tl.float32)
    query = tl.load(shared + GROUPS * KEYS, mask=has_k, other=0.0).to(tl.float32)
    raw = tl.load(step + row * step_stride + head).to(tl.float32) + tl.load(shift + head)
    size = _rounded(_softplus(_rounded(raw, out)), out)
    kept = tl.exp(tl.load(decay + head) * size)

    place = state + (slot * HEADS + head) * KEYS * VALUES + v[:, None] * KEYS + k[None, :]
    is_kept = (v < tl.where(slot >= 0, VALUES, 0))[:, None] & has_k[None, :]
    now = tl.load(place, mask=is_kept, other=0.0) * kept
    now += (value * size)[:, None] * key[None, :]
    read = tl.sum(now * query[None, :], 1) + value * tl.load(skip + head)
    tl.debug_barrier()
    tl.store(place, now, mask=is_kept)
    tl.store(out + (row * HEADS + head) * VALUES + v, read.to(out.dtype.element_ty), mask=has_v)
