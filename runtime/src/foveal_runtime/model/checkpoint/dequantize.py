"""Linear layers whose weights stay quantised: the layouts that checkpoints keep them in, and the
registry of kernels that multiply with them.

Made by `placement` where an nn.Linear stood, or here of a plain one's weight. Weights alone are
quantised: rows are never rounded, whatever the checkpoint's scheme says about activations, so a
layer computes what a plain one with the dequantised weights computes. Layouts and their sources:
`weight` with scales and `weight_packed` as compressed-tensors 0.20 writes them, `weight_scale_inv`
as in DeepSeek-V3's files, `qweight` as AutoAWQ (GEMM) and AutoGPTQ write it, `blocks` as in
GPT-OSS's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.checkpoint.quantized import StoredAs
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.telemetry.memory import trim_heap

BLOCK_NUMBERS = 1 << 21
"""Weights that are dequantised at a time."""
SCRATCH_BYTES = 5 * 4 * BLOCK_NUMBERS
"""Bound of a product's temporary memory: unpacked codes, their order, the result and its cast."""
_STEP = 32  # outputs of a block come in multiples, so that no packed number is cut
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight codes in a number belongs to output 0, 1, ...: AutoAWQ interleaves them."""
_FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""What a code of e2m1 is (OCP Microscaling Formats 1.0, 5.3.3)."""


Kind = Literal["int8", "int4"]
"""What weights are quantised to while they are loaded."""


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
        stop = stop or self.out_features
        codes, zeros = CODES[self.layout.kind](self, start, stop)
        return _scale(self, codes, zeros, start, stop)


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


def quantize_linears(
    decoder: nn.Module,
    kind: Kind,
    device: torch.device | str | None = None,
    lay_out: Callable[[QuantizedLinear], object] | None = None,
) -> int:
    """Quantises the linear layers of a loaded decoder, in place; returns how many.

    int8: codes of -127 ... 127 with a scale for each output. int4: codes of -8 ... 7 with a
    scale for each output and GROUPS inputs. Layers whose sizes are not multiples of 16 outputs and
    32 inputs stay as they are; stacked experts are those of `experts.quantize_experts`.
    A layer is quantised on `device` (None: where it is), then goes to `lay_out`, and its plain
    weight is let go before the next one: what is held beyond the result is one layer.
    Raises StartupError as `quantizable`.
    """
    since_trim = 0
    places = quantizable(decoder, kind)
    for parent, name in places:
        layer = quantize_linear(getattr(parent, name), kind, device)
        setattr(parent, name, layer)
        if lay_out is not None:
            lay_out(layer)
        since_trim += layer.in_features * layer.out_features
        if since_trim >= TRIM_NUMBERS:
            trim_heap()
            since_trim = 0
    return len(places)


def quantizable(decoder: nn.Module, kind: str) -> list[tuple[nn.Module, str]]:
    """The parents and names of the layers that `quantize_linears` quantises. Raises StartupError
    where there is none, as in GPT-2, whose layers are transformers' Conv1D."""
    places = [
        (parent, name)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child.out_features % 16 | child.in_features % 32
    ]
    if not places:
        raise StartupError(
            f"quantization {kind}: nothing would be quantised, because {type(decoder).__name__} "
            "has no torch.nn.Linear whose outputs are a multiple of 16 and whose inputs are one "
            "of 32; leave quantization out",
            param="quantization",
        )
    return places


TRIM_NUMBERS = 1 << 22
"""The C library keeps what is freed: after so many weights it gives that back."""
_PIECE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Weights that are rounded, or laid out, at a time: in float32, a few times in all, 1 MiB, which a
CPU's cache holds, or 16 MiB, so that a GPU does not wait for the starts of dozens of kernels."""
GROUPS = (64, 32)
"""Inputs that share a scale in 4 bits: the first that divides them."""
_SCALES = {8: (127.0,), 4: (-8.0, -9.0, -7.0, 7.0, 8.0)}
"""Codes tried for a group's largest number, with its sign; the least error in squares wins."""


def piece_rows(ins: int, device: torch.device) -> int:
    """Rows of `ins` weights that are rounded, or laid out, at a time; at least one."""
    return max(1, _PIECE_NUMBERS[device.type] // ins)


def quantize_linear(
    linear: nn.Linear, kind: Kind, device: torch.device | str | None = None
) -> QuantizedLinear:
    """One of them, on `device` (None: where it is), in the layout of compressed-tensors."""
    bits = {"int8": 8, "int4": 4}[kind]
    outs, ins, weight = linear.out_features, linear.in_features, linear.weight.data
    device = weight.device if device is None or weight.is_meta else device
    columns = ins if bits == 8 else next(size for size in GROUPS if ins % size == 0)
    dtype = torch.int8 if bits == 8 else torch.int32
    stored = torch.empty(outs, ins * bits // 8 // dtype.itemsize, dtype=dtype, device=device)
    scale = torch.empty(outs, ins // columns, device=device)
    step = outs if weight.is_meta else piece_rows(ins, torch.device(device))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=device)
    for start in range(0, outs, step):
        some = slice(start, start + step)
        codes, scale[some] = _codes_and_scales(weight[some].to(device), bits, columns)
        if bits == 4:
            words = codes.to(torch.int32).add_(8).unflatten(1, (-1, 8)).bitwise_left_shift_(shifts)
            codes = words.sum(2, dtype=torch.int32)
        stored[some] = codes
    if bits == 8:
        layout, name = StoredAs("plain", columns=ins), "weight"
    else:
        layout, name = StoredAs("packed", bits, columns=columns), "weight_packed"
    return QuantizedLinear(linear, layout, {name: stored, "weight_scale": scale})


def _codes_and_scales(
    weight: torch.Tensor, bits: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, K) to whole codes (n, K) in float32 and scales (n, K / columns)."""
    groups = weight.float().unflatten(1, (-1, columns))
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    tiny = torch.finfo(torch.float32).tiny
    best: tuple[torch.Tensor, ...] = ()
    for code in _SCALES[bits]:
        scale = most / code
        scale = scale.where(scale.abs() > tiny, 1.0)  # of zeros alone
        codes = (groups / scale).round_().clamp_(-(1 << bits - 1), (1 << bits - 1) - 1)
        error = (codes * scale).sub_(groups).square_().sum(2, keepdim=True)
        tried = (error, codes, scale)
        if best:
            tried = tuple(
                new.where(error < best[0], old) for new, old in zip(tried, best, strict=True)
            )
        best = tried
    return best[1].flatten(1), best[2].squeeze(2)


Codes = tuple[torch.Tensor, torch.Tensor | None]
"""Codes of some outputs (n, K) in float32, and the zero points of their groups (n, groups)."""


def _plain(layer: QuantizedLinear, start: int, stop: int) -> Codes:
    zeros = getattr(layer, "weight_zero_point", None)
    part = None if zeros is None else rows_of(layer, zeros, start, stop)
    return layer.weight[start:stop].float(), part


def _packed(layer: QuantizedLinear, start: int, stop: int) -> Codes:
    bits = layer.layout.bits
    codes = _unpack(layer.weight_packed[start:stop], bits)[:, : layer.in_features]
    codes = codes.float().sub_(1 << bits - 1)
    zeros = getattr(layer, "weight_zero_point", None)
    if zeros is None:
        return codes, None
    points = _unpack(zeros[start * bits // 32 : -(-stop * bits // 32)].t(), bits).t()
    return codes, points[: stop - start].float().sub_(1 << bits - 1)


def _awq(layer: QuantizedLinear, start: int, stop: int) -> Codes:
    def columns(packed: torch.Tensor) -> torch.Tensor:
        codes = _unpack(packed[:, start // 8 : stop // 8], 4).unflatten(1, (-1, 8))
        return codes[..., _AWQ_PLACES].flatten(1).t().float().sub_(8)

    return columns(layer.qweight), columns(layer.qzeros)


def _gptq(layer: QuantizedLinear, start: int, stop: int) -> Codes:
    bits = layer.layout.bits
    half = 1 << bits - 1
    codes = _unpack(layer.qweight[:, start:stop].t(), bits)[:, : layer.in_features].float()
    zeros = _unpack(layer.qzeros[:, start * bits // 32 : stop * bits // 32], bits).t()
    points = (zeros + layer.layout.zero_offset) & (1 << bits) - 1
    return codes.sub_(half), points.float().sub_(half)


def _mxfp4(layer: QuantizedLinear, start: int, stop: int) -> Codes:
    table = torch.tensor(_FP4, device=layer.blocks.device)
    pairs = layer.blocks[start:stop].flatten(1)
    return table[torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).int()], None


CODES: dict[str, Callable[[QuantizedLinear, int, int], Codes]] = {
    "mxfp4": _mxfp4,
    "plain": _plain,
    "packed": _packed,
    "awq": _awq,
    "gptq": _gptq,
}
"""Kind of layout → what its codes are, those of integers as signed ones."""


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 (n, m) to codes (n, m * 32 / bits), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & (1 << bits) - 1).flatten(1)


def scales_of(layer: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    """Scales of outputs start ... stop, float32 (stop - start, groups of inputs)."""
    table = getattr(layer, layer.layout.scale)
    if layer.layout.kind == "mxfp4":  # a float's exponent alone
        return (table[start:stop].int() << 23).view(torch.float32)
    return rows_of(layer, table, start, stop)


def order_of(layer: QuantizedLinear) -> torch.Tensor | None:
    """Which group each input belongs to, where the groups are not the inputs in their order."""
    return getattr(layer, "g_idx", getattr(layer, "weight_g_idx", None))


def rows_of(layer: QuantizedLinear, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Outputs start ... stop of a table over (groups of outputs, groups of inputs)."""
    if table.dim() == 3:  # as the kernels of CPUs read it (`blocked`)
        return table.transpose(1, 2).flatten(0, 1)[start:stop]
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
    scales, order = scales_of(layer, start, stop), order_of(layer)
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
