"""The Triton kernels of a decoder layer between its products: norms, gates, and heads on their way.

Launched by `layers.gpu_layer` and `gpu.products` only, which know the shapes. Arithmetic is
float32, and what goes to memory has the activations' dtype.

A kernel with EARLY begins while the one before it ends (programmatic dependent launch): it takes
the places that the last one leaves, and may fetch what nobody writes. It must call `wait_for_last`
before it reads what an earlier one wrote, or writes anything; all that waits is complete then,
because each of them has waited itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foveal_runtime.model.gpu.launch import kernel

LINE = tl.constexpr(128)
"""Bytes of the device's cache that come together."""
_EARLY_CAPABILITY = (9, 0)


@functools.cache
def early_start(device: torch.device) -> dict[str, Any]:
    """Arguments for launching kernels that have EARLY: they hide their beginning, 0.5 to 1.3 us of
    each on an H100, where a decode step has 200."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _EARLY_CAPABILITY:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def fetch_ahead(places):
    """Brings the lines at some addresses into the device's cache, and waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Lets the next kernel begin, and waits until all earlier ones are complete."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """swish, gelu, gelu's approximation by tanh, or relu."""
    if ACTIVATION == "swish":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        decay = tl.exp(-2.0 * tl.abs(inner))
        size = (1.0 - decay) / (1.0 + decay)
        return 0.5 * x * (1.0 + tl.where(inner < 0, -size, size))
    return tl.maximum(x, 0.0)


@kernel
@triton.jit
def norm_kernel(
    x, weight, residual, out, x_stride, eps,
    WIDTH: tl.constexpr, OFFSET: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """RMS norm of a row of x, times (weight + OFFSET), plus the row of `residual`: grid (rows).
    `residual` and `out` have their rows side by side."""
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    found = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(found * found, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + OFFSET
    found = found * scale * factor
    if HAS_RESIDUAL:
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found += tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, found.to(out.dtype.element_ty), mask=inside)


@kernel
@triton.jit
def gate_kernel(
    pairs, out, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """activation(gate) * up of rows (gate, up), each WIDTH long: grid (rows, pieces)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(pairs + row * 2 * WIDTH + at, mask=inside, other=0.0)
    up = tl.load(pairs + (row * 2 + 1) * WIDTH + at, mask=inside, other=0.0)
    opened = activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + at, (opened * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _turned(
    heads, at, cos, sin, norm, eps,
    DIM: tl.constexpr, TURNED: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One head's values, after a norm of heads and its rotary embedding, in float32."""
    inside = at < DIM
    half: tl.constexpr = TURNED // 2
    partner = tl.where(at < half, at + half, tl.where(at < TURNED, at - half, at))
    value = tl.load(heads + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(heads + partner, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
        value *= scale * (tl.load(norm + at, mask=inside, other=0.0).to(tl.float32) + OFFSET)
        other *= scale * (tl.load(norm + partner, mask=inside, other=0.0).to(tl.float32) + OFFSET)
    is_turned = at < TURNED
    c = tl.load(cos + at, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=is_turned, other=0.0).to(tl.float32)
    return value * c + tl.where(at < half, -other, other) * s


@kernel
@triton.jit
def heads_kernel(
    merged, cos, sin, query_norm, key_norm, slots, query, keys, values, query_eps, key_eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    TURNED: tl.constexpr, HAS_QUERY_NORM: tl.constexpr, HAS_KEY_NORM: tl.constexpr,
    OFFSET: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Turns the queries and keys of rows (queries, keys, values), and writes keys and values to
    their slots of the pool: grid (tokens, query heads + twice the kv heads)."""
    wait_for_last(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    source = merged + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * DIM
    cos += token * TURNED
    sin += token * TURNED
    if head < NUM_HEADS:
        found = _turned(source, at, cos, sin, query_norm, query_eps, DIM, TURNED,
                        HAS_QUERY_NORM, OFFSET)  # fmt: skip
        place = (token * NUM_HEADS + head) * DIM + at
        tl.store(query + place, found.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        if head < NUM_HEADS + NUM_KV_HEADS:
            found = _turned(source, at, cos, sin, key_norm, key_eps, DIM, TURNED,
                            HAS_KEY_NORM, OFFSET)  # fmt: skip
            if LARGEST > 0:
                found = tl.minimum(tl.maximum(found, -LARGEST), LARGEST)
            place = (slot * NUM_KV_HEADS + head - NUM_HEADS) * DIM + at
            tl.store(keys + place, found.to(keys.dtype.element_ty), mask=inside)
        else:
            found = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
            if LARGEST > 0:
                found = tl.minimum(tl.maximum(found, -LARGEST), LARGEST)
            place = (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * DIM + at
            tl.store(values + place, found.to(values.dtype.element_ty), mask=inside)
