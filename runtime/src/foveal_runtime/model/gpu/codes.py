"""Products with quantised weights on GPUs, by Triton: codes are widened where they are multiplied.

Few rows read each code once, inside the product; for more, a slab of the weight is widened for
cuBLAS. Both compute what a plain layer with the dequantised weights computes: code minus zero
point, times its scale, in float32, then rounded to the rows' type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import knobs

from foveal_runtime.model.gpu import product_kernels
from foveal_runtime.model.gpu.launch import next_power_of_2

MOST_FEW = 32
"""Rows up to which a product reads codes itself."""
TILES = {2: (16, 128, 4, 3), 4: (16, 128, 4, 2)}
"""By bytes of the rows' numbers: outputs, inputs, warps and stages of a product's tile."""
WIDEN_TILE = 32, 128


class Coded(NamedTuple):
    """A quantised weight (N, K).

    Attributes:
        codes: int32 (N, K / 8) of eight 4-bit codes, the lowest bits first; int8 (N, K); or
            float8_e4m3fn (N, K).
        scales: any float (N / share, K / deep), rounded up.
        zeros: likewise, or None.
        share, deep: outputs and inputs of one scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    share: int
    deep: int


def multiply_codes(
    x: torch.Tensor, weight: Coded, bias: torch.Tensor | None, scratch_bytes: int
) -> torch.Tensor:
    """x (..., K) to x @ weight + bias (..., N), in its type; `bias` has it, too. `scratch_bytes`
    bounds what is widened at a time."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    count, width = rows.shape
    outs = len(weight.codes)
    out = rows.new_empty((count, outs))
    if 0 < count <= MOST_FEW:
        block_n, block_k, warps, stages = TILES[rows.element_size()]
        product_kernels.coded_rows_kernel[-(-outs // block_n),](
            rows, *_tensors(weight), out if bias is None else bias, out, count,
            N=outs, **_constants(weight, width), HAS_BIAS=bias is not None,
            ROWS=max(16, next_power_of_2(count)), BLOCK_N=block_n, BLOCK_K=block_k,
            WIDEN=bool(knobs.runtime.interpret) and rows.dtype == torch.bfloat16,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    elif count:
        _multiply_slabs(rows, weight, bias, out, scratch_bytes)
    return out.view(*x.shape[:-1], outs)


def _multiply_slabs(
    rows: torch.Tensor, weight: Coded, bias: torch.Tensor | None, out: torch.Tensor, most: int
) -> None:
    outs, width = out.shape[1], rows.shape[1]
    slab = max(1, min(outs, most // (width * rows.element_size())))
    wide = rows.new_empty((slab, width))
    block_n, block_k = WIDEN_TILE
    for first in range(0, outs, slab):
        some = slice(first, min(first + slab, outs))
        size = some.stop - first
        product_kernels.widen_kernel[-(-size // block_n), -(-width // block_k)](
            *_tensors(weight), wide, first, size, **_constants(weight, width),
            BLOCK_N=block_n, BLOCK_K=block_k,
        )  # fmt: skip
        columns = wide[:size].t()
        if bias is None:
            torch.mm(rows, columns, out=out[:, some])
        else:
            torch.addmm(bias[some], rows, columns, out=out[:, some])


def _tensors(weight: Coded) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = weight.codes
    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)  # any GPU reads bytes
    return codes, weight.scales, weight.scales if weight.zeros is None else weight.zeros


_KINDS = {torch.int32: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def _constants(weight: Coded, width: int) -> dict[str, Any]:
    return {
        "K": width, "GROUPS": weight.scales.shape[1], "SHARE": weight.share, "DEEP": weight.deep,
        "KIND": _KINDS[weight.codes.dtype], "HAS_ZEROS": weight.zeros is not None,
    }  # fmt: skip
