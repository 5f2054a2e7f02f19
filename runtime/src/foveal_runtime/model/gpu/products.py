"""Products of a decode step's few rows with weights: reading the weights is all that takes time.

One row is multiplied by plain arithmetic, up to MAX_ROWS by tensor cores, with what follows the
product inside: a bias, the gate of an MLP, the sum with the hidden state. More rows go through
cuBLAS.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch.nn.functional import linear
from triton import knobs

from foveal_runtime.model.gpu import kernels, product_kernels
from foveal_runtime.model.gpu.launch import next_power_of_2

MAX_ROWS = 16
VECTOR_TILE = 4, 2048, 8
"""Rows of the weight, columns and warps of `vector_kernel`. The best of sweeps on an H100
(docs/decisions/gpu-layers.md), as the next."""
ROWS_TILES = (16, 512, 2, 3), (16, 256, 1, 4)
"""And stages, of `rows_kernel`: usually, and where that is at most two programs each
multiprocessor."""
_GATE_BLOCK = 1024


class GpuProduct(abc.ABC):
    """A linear layer without a module, and what follows it.

    Attributes:
        size: N, numbers of a row of results.
        most_few: rows of 16 bits up to which one kernel computes all of it.
    """

    def __init__(
        self, num_outputs: int, bias: torch.Tensor | None, activation: str, most_few: int
    ) -> None:
        """`num_outputs` of the weight. `activation`: of `kernels.activated`; then the weight is
        that of gate and up, and results are activation(gate) * up."""
        self._bias, self._activation = bias, activation
        self.size = num_outputs // (2 if activation else 1)
        self.most_few = most_few

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, is_own: bool = False
    ) -> torch.Tensor:
        """x (T, K) to (T, N), plus `residual` (T, N), where there is no bias and no activation;
        `is_own`: nobody needs `residual` afterwards."""
        is_usual = x.element_size() == 2 or knobs.runtime.interpret
        if is_usual and 0 < len(x) <= self.most_few:
            out = x.new_empty((len(x), self.size))
            bias = out if self._bias is None else self._bias
            self._compute_few(x.contiguous(), bias, out if residual is None else residual, out, {
                "N": self.size, "ACTIVATION": self._activation,
                "HAS_BIAS": self._bias is not None, "HAS_RESIDUAL": residual is not None,
                **kernels.early_start(x.device),
            })  # fmt: skip
            return out
        made = self._of_many(x, residual, is_own)
        if not self._activation:
            return made
        out = made.new_empty((len(made), self.size))
        kernels.gate_kernel[len(made), -(-self.size // _GATE_BLOCK)](
            made, out, WIDTH=self.size, ACTIVATION=self._activation, BLOCK=_GATE_BLOCK
        )
        return out

    @abc.abstractmethod
    def _compute_few(
        self, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, out: torch.Tensor,
        what: dict[str, Any],
    ) -> None:  # fmt: skip
        """All of it, to `out`, by a kernel. `what` says which of the tensors are none."""

    @abc.abstractmethod
    def _of_many(
        self, x: torch.Tensor, residual: torch.Tensor | None, is_own: bool
    ) -> torch.Tensor:
        """What comes before the activation."""


class PlainProduct(GpuProduct):
    """With plain weights (N, K); with an activation (2 N, K)."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = ""
    ) -> None:
        super().__init__(len(weight), bias, activation, MAX_ROWS)
        self._weight = weight
        self._multiprocessors = 1
        if weight.is_cuda:
            facts = torch.cuda.get_device_properties(weight.device)
            self._multiprocessors = facts.multi_processor_count

    def _compute_few(
        self, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, out: torch.Tensor,
        what: dict[str, Any],
    ) -> None:  # fmt: skip
        count, width = x.shape
        tensors = x, self._weight, bias, residual, out
        most_k = max(16, next_power_of_2(width))
        if count == 1:
            block_n, block_k, warps = VECTOR_TILE
            product_kernels.vector_kernel[-(-self.size // block_n),](
                *tensors, **what, K=width, BLOCK_N=block_n, BLOCK_K=min(block_k, most_k),
                num_warps=warps,
            )  # fmt: skip
            return
        num_programs = -(-self.size // ROWS_TILES[0][0])
        tile = ROWS_TILES[num_programs <= 2 * self._multiprocessors]
        block_n, block_k, warps, stages = tile
        product_kernels.rows_kernel[num_programs,](
            *tensors, count, **what, K=width, ROWS=MAX_ROWS, BLOCK_N=block_n,
            BLOCK_K=min(block_k, most_k), WIDEN=bool(knobs.runtime.interpret),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def _of_many(
        self, x: torch.Tensor, residual: torch.Tensor | None, is_own: bool
    ) -> torch.Tensor:
        if residual is None:
            return linear(x, self._weight, self._bias)
        columns = self._weight.t()
        return residual.addmm_(x, columns) if is_own else torch.addmm(residual, x, columns)
