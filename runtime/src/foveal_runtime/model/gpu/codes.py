"""Products with quantised weights on GPUs, by Triton: codes are widened where they are multiplied.

Few rows read each code once, inside the product; for more, a slab of the weight is widened for
cuBLAS. Both compute what a plain layer with the dequantised weights computes: code minus zero
point, times its scale, in float32, then rounded to the rows' type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs

from foveal_runtime.model.gpu import code_kernels
from foveal_runtime.model.gpu.launch import next_power_of_2
from foveal_runtime.model.gpu.products import GpuProduct

MOST_FEW, _MOST_ROWS = 64, 32
"""Rows up to which a product reads codes itself, and of one program."""
TILE = 16, 4, 3
"""Lines of the weight, most warps and stages of a product's tile. No sweep on a GPU: chosen by
counting what compiled kernels do (docs/decisions/weight-only-kernel.md)."""
_WIDEN_TILE = 32, 128


class Coded(NamedTuple):
    """A quantised weight (N, K).

    Attributes:
        codes: int8 or float8_e4m3fn (N, K), or int32 (N, W) of eight 4-bit codes each: of a part
            of 128 inputs, the halves of word i have inputs 64 (i // 8) + 2 (i % 8) and the next,
            and 16, 32, 48 behind these, the lowest bits first.
        scales: any float (N / share, K / deep), rounded up.
        zeros: likewise, or None.
        share, deep: outputs and inputs of one scale.
        width: K.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    share: int
    deep: int
    width: int


def merged(weights: Sequence[Coded]) -> Coded | None:
    """The outputs of some weights one behind the other, or None where their codes, inputs or
    groups of inputs are of different kinds."""
    first = weights[0]
    if len(weights) == 1:
        return first
    kinds = {(one.codes.dtype, one.width, one.deep, one.zeros is None) for one in weights}
    if len(kinds) > 1:
        return None
    share = first.share
    is_whole = all(len(one.codes) % share == 0 for one in weights[:-1])
    if not is_whole or any(one.share != share for one in weights):
        share = 1
    zeros = None
    if first.zeros is not None:
        zeros = torch.cat([_table(one, one.zeros, share) for one in weights])
    return Coded(
        torch.cat([one.codes.view(torch.uint8) for one in weights]).view(first.codes.dtype),
        torch.cat([_table(one, one.scales, share) for one in weights]),
        zeros,
        share,
        first.deep,
        first.width,
    )


def warps_of(width: int, num_groups: int, deep: int) -> int:
    """Of a product's tile; 0 where codes cannot be multiplied in place, because what tensor cores
    take at once, or a warp, is no whole number of groups or the other way round."""
    part, step = int(code_kernels.PART), int(code_kernels.STEP)
    if num_groups > 1 and (deep % step or (deep % part and part % deep)):
        return 0
    return math.gcd(TILE[1], -(-width // part))


def _table(weight: Coded, table: torch.Tensor, share: int) -> torch.Tensor:
    """Scales or zero points, with so many outputs each; `share` is the weight's, or 1."""
    if weight.share == share:
        return table
    return table.repeat_interleave(weight.share, dim=0)[: len(weight.codes)]


class CodedProduct(GpuProduct):
    """With a quantised weight."""

    def __init__(
        self, weight: Coded, bias: torch.Tensor | None, activation: str = "", *, scratch_bytes: int
    ) -> None:
        """`bias`: in the type of the rows to come. `scratch_bytes` bounds what is widened at a
        time."""
        num_groups = weight.scales.shape[1]
        self._warps = warps_of(weight.width, num_groups, weight.deep)
        super().__init__(len(weight.codes), bias, activation, MOST_FEW if self._warps else 0)
        codes = weight.codes
        if codes.dtype == torch.float8_e4m3fn:
            codes = codes.view(torch.int8)  # any GPU reads bytes
        zeros = weight.scales if weight.zeros is None else weight.zeros
        self._tensors = codes, weight.scales, zeros
        self._constants = {
            "K": weight.width, "GROUPS": num_groups, "SHARE": weight.share, "DEEP": weight.deep,
            "KIND": _KINDS[weight.codes.dtype], "HAS_ZEROS": weight.zeros is not None,
        }  # fmt: skip
        self._scratch_bytes = scratch_bytes

    def _compute_few(
        self, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, out: torch.Tensor,
        what: dict[str, Any],
    ) -> None:  # fmt: skip
        count = len(x)
        num_lines, _, stages = TILE
        block_n = num_lines // (2 if what["ACTIVATION"] else 1)
        num_rows = min(max(16, next_power_of_2(count)), _MOST_ROWS)
        code_kernels.coded_rows_kernel[-(-count // num_rows), -(-self.size // block_n)](
            x, *self._tensors, bias, residual, out, count, **what, **self._constants,
            ROWS=num_rows, BLOCK_N=block_n, PARTS=self._warps,
            WIDEN=bool(knobs.runtime.interpret) and x.dtype == torch.bfloat16,
            num_warps=self._warps, num_stages=stages,
        )  # fmt: skip

    def _of_many(
        self, x: torch.Tensor, residual: torch.Tensor | None, is_own: bool
    ) -> torch.Tensor:
        (count, width), outs = x.shape, len(self._tensors[0])
        out = residual if is_own and residual is not None else x.new_empty((count, outs))
        slab = max(1, min(outs, self._scratch_bytes // (width * x.element_size())))
        wide = x.new_empty((slab, width))
        block_n, block_k = _WIDEN_TILE
        for first in range(0, outs, slab):
            some = slice(first, min(first + slab, outs))
            size = some.stop - first
            code_kernels.widen_kernel[-(-size // block_n), -(-width // block_k)](
                *self._tensors, wide, first, size, **self._constants,
                BLOCK_N=block_n, BLOCK_K=block_k,
            )  # fmt: skip
            columns = wide[:size].t()
            there = residual[:, some] if residual is not None else None
            if there is None and self._bias is not None:
                there = self._bias[some]
            if there is None:
                torch.mm(x, columns, out=out[:, some])
            else:
                torch.addmm(there, x, columns, out=out[:, some])
        return out


_KINDS = {torch.int32: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
