"""Linear layers whose weights stay quantised: the layouts that checkpoints keep them in, and the
registry of kernels that multiply with them.

Made by `placement` where an nn.Linear stood. Weights alone are quantised here: rows are never
rounded, whatever the checkpoint's scheme says about activations, so a layer computes what a plain
one with the dequantised weights computes. Layouts and their sources: `weight` with scales and
`weight_packed` as compressed-tensors 0.20 writes them, `weight_scale_inv` as in DeepSeek-V3's
files, `qweight` as AutoAWQ (GEMM) and AutoGPTQ write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.checkpoint.quantized import StoredAs

BLOCK_NUMBERS = 1 << 21
"""Weights that are dequantised at a time."""
SCRATCH_BYTES = 5 * 4 * BLOCK_NUMBERS
"""Bound of a product's temporary memory: unpacked codes, their order, the result and its cast."""
_STEP = 32  # outputs of a block come in multiples, so that no packed number is cut
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight codes in a number belongs to output 0, 1, ...: AutoAWQ interleaves them."""


class QuantizedLinear(nn.Module):  # type: ignore[misc]
    """Stands where an nn.Linear stood; its buffers have the names, shapes and types of the file."""

    def __init__(
        self, linear: nn.Linear, layout: StoredAs, stored: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.layout = layout
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (..., K) to rows @ weight + bias (..., N), in the rows' type."""
        kernel = KERNELS.get((rows.device.type, self.layout.kind), multiply_dequantized)
        return kernel(self, rows)

    def dequantized(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Outputs start ... stop of the weight, float32 (stop - start, K). `start` is a multiple of
        32; so is `stop`, or it is the last."""
        return DEQUANTIZE[self.layout.kind](self, start, stop or self.out_features)


Kernel = Callable[[QuantizedLinear, torch.Tensor], torch.Tensor]


def multiply_dequantized(layer: QuantizedLinear, rows: torch.Tensor) -> torch.Tensor:
    """The product by plain torch, some outputs at a time: on any device, and what other kernels
    are compared with."""
    out = rows.new_empty(*rows.shape[:-1], layer.out_features)
    step = max(_STEP, BLOCK_NUMBERS // layer.in_features // _STEP * _STEP)
    for start in range(0, layer.out_features, step):
        stop = min(start + step, layer.out_features)
        bias = None if layer.bias is None else layer.bias[start:stop]
        weight = layer.dequantized(start, stop).to(rows.dtype)
        out[..., start:stop] = functional.linear(rows, weight, bias)
    return out


KERNELS: dict[tuple[str, str], Kernel] = {}
"""(device type, kind of layout) → what multiplies faster than `multiply_dequantized` there."""


def _plain(layer: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    zeros = getattr(layer, "weight_zero_point", None)
    part = None if zeros is None else _rows_of(layer, zeros, start, stop)
    return _scale(layer, layer.weight[start:stop].float(), part, start, stop)


def _packed(layer: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    bits = layer.layout.bits
    codes = _unpack(layer.weight_packed[start:stop], bits)[:, : layer.in_features]
    zeros = getattr(layer, "weight_zero_point", None)
    if zeros is None:
        return _scale(layer, codes.float().sub_(1 << bits - 1), None, start, stop)
    points = _unpack(zeros[start * bits // 32 : -(-stop * bits // 32)].t(), bits).t()
    return _scale(layer, codes.float(), points[: stop - start].float(), start, stop)


def _awq(layer: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    def columns(packed: torch.Tensor) -> torch.Tensor:
        codes = _unpack(packed[:, start // 8 : stop // 8], 4).unflatten(1, (-1, 8))
        return codes[..., _AWQ_PLACES].flatten(1).t().float()

    return _scale(layer, columns(layer.qweight), columns(layer.qzeros), start, stop)


def _gptq(layer: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    bits = layer.layout.bits
    codes = _unpack(layer.qweight[:, start:stop].t(), bits)[:, : layer.in_features].float()
    zeros = _unpack(layer.qzeros[:, start * bits // 32 : stop * bits // 32], bits).t()
    points = (zeros + layer.layout.zero_offset) & (1 << bits) - 1
    return _scale(layer, codes, points.float(), start, stop)


DEQUANTIZE: dict[str, Callable[[QuantizedLinear, int, int], torch.Tensor]] = {
    "plain": _plain,
    "packed": _packed,
    "awq": _awq,
    "gptq": _gptq,
}


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 (n, m) to codes (n, m * 32 / bits), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & (1 << bits) - 1).flatten(1)


def _rows_of(layer: QuantizedLinear, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Outputs start ... stop of a table over (groups of outputs, groups of inputs)."""
    if layer.layout.kind in ("awq", "gptq"):
        return table[:, start:stop].t().float()
    if table.dim() < 2:
        table = table.reshape(-1, 1)
    if layer.layout.rows == 1:
        return table[start:stop].float()
    places = torch.arange(start, stop, device=table.device) // layer.layout.rows
    return table[places].float()


def _scale(
    layer: QuantizedLinear, codes: torch.Tensor, zeros: torch.Tensor | None, start: int, stop: int
) -> torch.Tensor:
    """(codes - zeros) * scales; tables are (outputs, groups of inputs)."""
    scales = _rows_of(layer, getattr(layer, layer.layout.scale), start, stop)
    order = getattr(layer, "g_idx", getattr(layer, "weight_g_idx", None))
    codes = codes.contiguous()
    if order is None and layer.in_features % scales.shape[1] == 0 and (
        layer.in_features // scales.shape[1] == layer.layout.columns or scales.shape[1] == 1
    ):  # fmt: skip
        grouped = codes.view(len(codes), scales.shape[1], -1)
        if zeros is not None:
            grouped.sub_(zeros.unsqueeze(-1))
        grouped.mul_(scales.unsqueeze(-1))
        return codes
    if order is None:
        order = torch.arange(layer.in_features, device=codes.device) // layer.layout.columns
    if zeros is not None:
        codes.sub_(zeros[:, order])
    return codes.mul_(scales[:, order])
