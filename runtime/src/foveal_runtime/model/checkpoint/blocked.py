"""Quantised linear layers as kernels read them: the C kernels of CPUs, the Triton ones of GPUs.

Called by the loader and, for plans, on torch's meta device. Whatever a checkpoint stores whole
codes as, and what is quantised while it is loaded, ends up in one layout: blocks of outputs on
CPUs, where small steps read it in one call (decoder_layers) and longer ones layer by layer; output
by output on GPUs. Layers in another order of inputs, or of floating-point codes, stay as they are
stored; GPUs multiply with the latter as they are.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.checkpoint.dequantize import (
    CODES,
    KERNELS,
    SCRATCH_BYTES,
    Codes,
    QuantizedLinear,
    multiply_dequantized,
    order_of,
    piece_rows,
    rows_of,
    scales_of,
)
from foveal_runtime.model.checkpoint.quantized import StoredAs
from foveal_runtime.model.cpu import packing
from foveal_runtime.model.cpu.kernels import Product
from foveal_runtime.model.cpu.packing import DTYPES, multiply

if TYPE_CHECKING:
    from foveal_runtime.model.gpu.codes import Coded
    from foveal_runtime.model.gpu.products import GpuProduct

BLOCKED = "blocked"
_WIDTHS = (64, 48, 32, 16)
"""Outputs of a CPU's block: multiples of the lanes of any instruction set."""
_WORD_CODES = 8
"""4-bit codes of one output in an element of 32 bits: the inputs come in multiples of them."""
_PAIRS = (-1, 4, 2)
"""How a CPU's word counts them: neighbours are in its two halves, so that a table of bfloat16
numbers gives pairs of inputs (`kernels/products.h`)."""
_PART, _PLACES = 128, (-1, 2, 4, 8, 2)
"""On GPUs: inputs whose 4-bit codes share their words, and how they are counted there: of (halves
of a part, fours, words, neighbours) the words come before the fours (`gpu.codes.Coded`)."""
_TRIED_ROWS = (3, 20, 68)
"""Of few sequences, of more, and of prompts, which have kernels of their own."""
_SLAB_BYTES = SCRATCH_BYTES // 2
"""Weights that are widened at a time for a GPU's products of many rows."""
_TOLERANCE = 0.03
"""Of the largest product: rounding to bfloat16, often."""
_log = logging.getLogger(__name__)


def block_quantized(model: nn.Module, device: str = "cpu") -> int:
    """Lays out the quantised layers of a model for "cpu" or "cuda", in place; returns how many."""
    layers = [one for one in model.modules() if isinstance(one, QuantizedLinear)]
    if layers and (why := _missing(device)):
        _log.warning("quantised weights are widened for every product: %s", why)
        return 0
    if layers and next(layers[0].buffers()).is_meta:
        return _plan_blocks(layers, device)
    count = sum(block_layer(one, device) for one in layers)
    if device == "cuda":
        _try_kernels(layers, next(model.parameters()).dtype)
    return count


def _plan_blocks(layers: Sequence[QuantizedLinear], device: str) -> int:
    """As `block_quantized` without values, where layers that are stored alike need one look: of
    experts there are thousands."""
    known: dict[object, tuple[bool, QuantizedLinear]] = {}
    for layer in layers:
        shapes = ((name, one.shape, one.dtype) for name, one in layer.named_buffers(recurse=False))
        kind = (layer.layout, layer.out_features, layer.in_features, *shapes)
        if kind not in known:
            known[kind] = block_layer(layer, device), layer
        elif known[kind][0]:
            _set_buffers(layer, dict(known[kind][1].named_buffers(recurse=False)))
            layer.layout = known[kind][1].layout
    return sum(one.layout.kind == BLOCKED for one in layers)


def _set_buffers(layer: QuantizedLinear, found: Mapping[str, torch.Tensor]) -> None:
    for name in [name for name, _ in layer.named_buffers(recurse=False)]:
        delattr(layer, name)
    for name, tensor in found.items():
        layer.register_buffer(name, tensor)


def _try_kernels(layers: Sequence[QuantizedLinear], dtype: torch.dtype) -> None:
    """Compares products of the GPU's kernels with those of dequantised weights, for one layer of
    each kind and shape, so that nothing is compiled while clients wait; a kind whose products
    differ, or fail, is left to the latter."""
    found = {
        (one.layout, _is_fp8(one), one.out_features, one.in_features, one.bias is None): one
        for one in layers
    }
    for layer in found.values():
        kind = layer.layout.kind
        if ("cuda", kind) not in KERNELS:
            continue
        for count in _TRIED_ROWS:
            rows = torch.randn(count, layer.in_features, device=next(layer.buffers()).device)
            rows = rows.to(dtype)
            try:
                got, wanted = multiply_on_gpu(layer, rows), multiply_dequantized(layer, rows)
                apart = float((got.float() - wanted.float()).abs().max() / wanted.abs().max())
                why = "" if apart <= _TOLERANCE else f"products differ by {apart:.2g}"
            except Exception as error:  # a compiler's, or a driver's
                why = " ".join(str(error).split())[:200] or type(error).__name__
            if why:
                del KERNELS["cuda", kind]
                _log.warning("%d-bit weights (%s) are widened for every product: %s",
                             layer.layout.bits, kind, why)  # fmt: skip
                break


def block_layer(layer: QuantizedLinear, device: str = "cpu") -> bool:
    """Whether the layer now is in the kernel's layout; without a kernel it stays as it is."""
    if layer.layout.kind == BLOCKED:
        return True
    return not _missing(device) and _block(layer, _WIDTHS if device == "cpu" else (1,))


def _missing(device: str) -> str:
    """Why there is no kernel for the device; "" = there is one."""
    if device == "cuda":
        is_planned = not torch.cuda.is_available()  # somewhere else
        return "" if is_planned or importlib.util.find_spec("triton") else "there is no Triton here"
    kernel = packing.loaded_kernel()
    return kernel if isinstance(kernel, str) else ""


def _block(layer: QuantizedLinear, widths: Sequence[int]) -> bool:
    """(outputs N, inputs K) of `wide` outputs, in groups of `deep` inputs, to codes
    (N / wide, K, wide) and scales (N / wide, K / deep, wide)."""
    outs, ins, bits = layer.out_features, layer.in_features, layer.layout.bits
    if not _has_whole_codes(layer):
        return False
    scales = scales_of(layer, 0, outs)
    deep = ins if scales.shape[1] == 1 else layer.layout.columns
    if not _is_blockable(layer, deep):
        return False
    wide = next((one for one in widths if outs % one == 0), widths[-1])
    dtype, length = (torch.int32, _num_words(ins, wide)) if bits == 4 else (torch.int8, ins)
    whole = torch.empty(-(-outs // wide), length, wide, dtype=dtype, device=scales.device)
    least = math.lcm(wide, 32)  # codes are read from multiples of 32 on
    step = outs if scales.is_meta else max(least, piece_rows(ins, scales.device) // least * least)
    points = []
    for start in range(0, outs, step):
        stop = min(start + step, outs)
        codes, zeros = CODES[layer.layout.kind](layer, start, stop)
        points.append(zeros)
        whole[start // wide : -(-stop // wide)] = _block_codes(codes, bits, wide)
    found = {"codes": whole, "scales": _columns(scales, wide)}
    if points[0] is not None:
        found["zeros"] = _columns(torch.cat([one for one in points if one is not None]), wide)
    _set_buffers(layer, found)
    layer.layout = StoredAs(BLOCKED, bits, "scales", wide, deep)
    return True


def _block_codes(codes: torch.Tensor, bits: int, wide: int) -> torch.Tensor:
    """Codes (n, K) to int8 (n / wide, K, wide), or eight of 4 bits in an int32 element: those side
    by side on CPUs, on GPUs as `gpu.codes.Coded` says."""
    if bits != 4:
        return _columns(codes.to(torch.int8), wide)
    codes = (codes.to(torch.int8) & 15).view(torch.uint8)
    if wide == 1:
        codes = functional.pad(codes, (0, -codes.shape[1] % _PART)).unflatten(1, _PLACES)
        return _words(codes.permute(0, 1, 2, 4, 5, 3)).flatten(1).unsqueeze(2)
    codes = functional.pad(codes, (0, 0, 0, -len(codes) % wide)).unflatten(0, (-1, wide))
    return _words(codes.unflatten(2, _PAIRS).permute(0, 2, 1, 4, 3))


def _words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 (..., 2, 4) of 4 bits to int32 (...), the first ones lowest."""
    low, high = codes.contiguous().unflatten(-1, (2, 2)).unbind(-1)
    return (low | high << 4).flatten(-2).view(torch.int32).squeeze(-1)


def _num_words(ins: int, wide: int) -> int:
    """Of the 4-bit codes of an output."""
    return (-(-ins // _PART) * _PART if wide == 1 else ins) // _WORD_CODES


def _has_whole_codes(layer: QuantizedLinear) -> bool:
    weight = getattr(layer, "weight", None)
    return layer.layout.kind != "mxfp4" and (weight is None or weight.dtype == torch.int8)


def _is_blockable(layer: QuantizedLinear, deep: int) -> bool:
    ins = layer.in_features
    if layer.layout.bits == 4 and (ins % _WORD_CODES or deep % _WORD_CODES):
        return False
    order = order_of(layer)
    if order is None or order.is_meta:
        return not layer.layout.is_reordered
    in_order = torch.arange(ins, dtype=order.dtype, device=order.device) // deep
    return bool(torch.equal(order, in_order))


def _columns(table: torch.Tensor, wide: int) -> torch.Tensor:
    """(N, n) to (N / wide, n, wide), filled up with zeros."""
    whole = functional.pad(table, (0, 0, 0, -table.shape[0] % wide))
    return whole.unflatten(0, (-1, wide)).transpose(1, 2).contiguous()


def _codes(layer: QuantizedLinear, start: int, stop: int) -> Codes:
    wide = layer.layout.rows
    first, last = start // wide, -(-stop // wide)
    codes = layer.codes[first:last]
    if layer.layout.bits == 4:
        shifts = torch.arange(28, -1, -4, dtype=torch.int32, device=codes.device)
        codes = (codes.unsqueeze(2) << shifts[:, None]) >> 28
        if wide == 1:
            places = codes.view(len(codes), -1, 2, 8, 2, 4).permute(0, 1, 2, 5, 3, 4)
            codes = places.flatten(1)[:, : layer.in_features, None]
        else:
            codes = codes.unflatten(2, _PAIRS[:0:-1]).transpose(2, 3).flatten(1, 3)
    rows = codes.transpose(1, 2).flatten(0, 1)[start - first * wide : stop - first * wide]
    zeros = getattr(layer, "zeros", None)
    return rows.float(), None if zeros is None else rows_of(layer, zeros, start, stop)


CODES[BLOCKED] = _codes


def product_of(layer: QuantizedLinear) -> Product | None:
    """As the kernels take it, or None for one that they cannot read. The addresses are good while
    the layer keeps its buffers."""
    if layer.layout.kind != BLOCKED:
        return None
    zeros, bias, wide = getattr(layer, "zeros", None), layer.bias, layer.layout.rows
    each = _WORD_CODES if layer.layout.bits == 4 else 1
    return Product(
        weight=layer.codes.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        scales=layer.scales.data_ptr(),
        zeros=None if zeros is None else zeros.data_ptr(),
        ins=layer.in_features,
        outs=layer.out_features,
        wide=wide,
        deep=layer.layout.columns,
        bits=layer.layout.bits,
        out_stride=layer.codes[0].numel(),
        in_stride=wide * layer.layout.columns // each,
    )


def multiply_blocked(layer: QuantizedLinear, rows: torch.Tensor) -> torch.Tensor:
    """rows (..., K) to (..., N) by the C kernel, in the rows' type, summed in float32."""
    is_same = layer.bias is None or layer.bias.dtype == rows.dtype
    if rows.dtype not in DTYPES or not is_same:
        return multiply_dequantized(layer, rows)
    product = product_of(layer)
    assert product is not None
    return multiply(rows, product)


KERNELS["cpu", BLOCKED] = multiply_blocked


def multiply_on_gpu(layer: QuantizedLinear, rows: torch.Tensor) -> torch.Tensor:
    """rows (..., K) to (..., N) by the Triton kernels, in the rows' type, summed in float32."""
    is_same = layer.bias is None or layer.bias.dtype == rows.dtype
    weight = _coded(layer) if is_same and rows.is_floating_point() else None
    if weight is None:
        return multiply_dequantized(layer, rows)
    from foveal_runtime.model.gpu.codes import CodedProduct  # torch for CPUs: no Triton

    product = CodedProduct(weight, layer.bias, scratch_bytes=_SLAB_BYTES)
    return product(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])


def product_on_gpu(
    layers: Sequence[QuantizedLinear], bias: torch.Tensor | None, activation: str = ""
) -> GpuProduct | None:
    """One product with the weights of layers of the same inputs (`gpu.products`), of whose codes,
    scales and zero points the layers keep views where they have them as the product does; None
    where the kernels cannot multiply with all of them at once."""
    from foveal_runtime.model.gpu.codes import CodedProduct, merged

    weights = []
    for one in layers:
        kernel = KERNELS.get((next(one.buffers()).device.type, one.layout.kind))
        weight = _coded(one) if kernel is multiply_on_gpu else None
        if weight is None:
            return None
        weights.append(weight)
    whole = merged(weights)
    if whole is None:
        return None
    sizes = [one.out_features for one in layers]
    for layer, view in zip(layers, whole.codes.split(sizes), strict=True):
        if layer.layout.kind == BLOCKED:
            layer.codes = view.unsqueeze(2)
        else:
            layer.weight = view
    if whole.share == weights[0].share and layers[0].layout.kind == BLOCKED:
        for name, table in (("scales", whole.scales), ("zeros", whole.zeros)):
            if table is not None:
                views = table.split([len(one.scales) for one in weights])
                for layer, view in zip(layers, views, strict=True):
                    setattr(layer, name, view.unsqueeze(2))
    return CodedProduct(whole, bias, activation, scratch_bytes=_SLAB_BYTES)


def _coded(layer: QuantizedLinear) -> Coded | None:
    """As the GPU's kernels take it; None for one that they cannot read."""
    from foveal_runtime.model.gpu.codes import Coded

    layout = layer.layout
    if layout.kind == BLOCKED:
        zeros: torch.Tensor | None = getattr(layer, "zeros", None)
        if zeros is not None:
            zeros = zeros.squeeze(2)
        codes, scales = layer.codes.squeeze(2), layer.scales.squeeze(2)
        return Coded(codes, scales, zeros, layout.rows, layout.columns, layer.in_features)
    if not _is_fp8(layer):
        return None
    table = getattr(layer, layout.scale)
    table = table.reshape(-1, 1) if table.dim() < 2 else table
    return Coded(layer.weight, table, None, layout.rows, layout.columns, layer.in_features)


def _is_fp8(layer: QuantizedLinear) -> bool:
    """Whether a layer's codes are floats as they are stored, in groups of inputs in their order."""
    in_order = order_of(layer) is None and not layer.layout.is_reordered
    return (
        in_order
        and layer.layout.kind == "plain"
        and layer.weight.dtype == torch.float8_e4m3fn
        and not hasattr(layer, "weight_zero_point")
    )


KERNELS["cuda", BLOCKED] = KERNELS["cuda", "plain"] = multiply_on_gpu
