"""Products of a decode step's few rows with weights: reading the weights is all that takes time.

One row is multiplied by plain arithmetic, up to MAX_ROWS by tensor cores, with what follows the
product inside: a bias, the gate of an MLP, the sum with the hidden state. More rows go through
cuBLAS.
"""

from __future__ import annotations

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


class GpuProduct:
    """A linear layer without a module, and what follows it.

    Attributes:
        weight: (N, K); with an activation (2 N, K), of gate and up.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = ""
    ) -> None:
        """`activation`: of `activated`; then results are activation(gate) * up."""
        self.weight, self._bias = weight, bias
        self._activation = activation
        self._size = len(weight) // (2 if activation else 1)
        there = weight.device
        self._early = kernels.early_start(there)
        self._is_usual = weight.element_size() == 2 or knobs.runtime.interpret
        self._multiprocessors = 1
        if there.type == "cuda":
            facts = torch.cuda.get_device_properties(there)
            self._multiprocessors = facts.multi_processor_count

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, is_own: bool = False
    ) -> torch.Tensor:
        """x (T, K) to (T, N), plus `residual` (T, N), where there is no bias and no activation;
        `is_own`: nobody needs `residual` afterwards."""
        if self._is_usual and 0 < len(x) <= MAX_ROWS:
            return self._of_few(x.contiguous(), residual)
        if residual is not None:
            weight = self.weight.t()
            return residual.addmm_(x, weight) if is_own else torch.addmm(residual, x, weight)
        made = linear(x, self.weight, self._bias)
        if not self._activation:
            return made
        out = made.new_empty((len(made), self._size))
        kernels.gate_kernel[len(made), -(-self._size // _GATE_BLOCK)](
            made, out, WIDTH=self._size, ACTIVATION=self._activation, BLOCK=_GATE_BLOCK
        )
        return out

    def _of_few(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        count, width = x.shape
        out = x.new_empty((count, self._size))
        tensors = (
            x, self.weight, out if self._bias is None else self._bias,
            out if residual is None else residual, out,
        )  # fmt: skip
        most_k = max(16, next_power_of_2(width))
        what = {
            "N": self._size, "K": width, "ACTIVATION": self._activation,
            "HAS_BIAS": self._bias is not None, "HAS_RESIDUAL": residual is not None,
            **self._early,
        }  # fmt: skip
        if count == 1:
            block_n, block_k, warps = VECTOR_TILE
            product_kernels.vector_kernel[-(-self._size // block_n),](
                *tensors, **what, BLOCK_N=block_n, BLOCK_K=min(block_k, most_k), num_warps=warps
            )
            return out
        num_programs = -(-self._size // ROWS_TILES[0][0])
        tile = ROWS_TILES[num_programs <= 2 * self._multiprocessors]
        block_n, block_k, warps, stages = tile
        product_kernels.rows_kernel[num_programs,](
            *tensors, count, **what, ROWS=MAX_ROWS, BLOCK_N=block_n,
            BLOCK_K=min(block_k, most_k), WIDEN=bool(knobs.runtime.interpret),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out
