"""Quantised copies of tiny checkpoints, and plain ones that hold the same weights dequantised.

compressed-tensors writes its own layouts. The others are packed here, code by code: FP8 blocks as
in DeepSeek-V3's files (scales multiply, whatever their name says), `qweight` as AutoAWQ's GEMM
version and AutoGPTQ 0.7 pack it (gptq_v2: GPTQModel, zero points as they are).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

LAYERS = r"(layers|blocks)\.\d+\.(self_attn|mlp|feed_forward|experts)\.([\w.]+\.)?\w+_proj\.weight$"
PLAIN = "layers.1.mlp.down_proj"
"""A layer that every scheme leaves as it is, beside towers and heads."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


@dataclass
class Format:
    """`write(weight, generator)` → the stored tensors by suffix, and the weight they stand for."""

    scheme: dict[str, Any]
    write: Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
    ignored: str = "ignore"
    extra: dict[str, Any] = field(default_factory=dict)


def make(
    source: Path,
    target: Path,
    name: str,
    change: Callable[[Tensors], None] | None = None,
    stack: Callable[[Tensors], Tensors] | None = None,
):
    """Writes `target`/stored and `target`/plain; returns their paths. `change` may spoil what is
    stored of each layer, `stack` what of all. Experts are stored one by one, unless it stacks
    them."""
    chosen = FORMATS[name]
    generator = torch.Generator().manual_seed(7)
    file = next(source.glob("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    stored: Tensors = {}
    plain: Tensors = {}
    ignored = set()
    is_flipped = config["model_type"] in INPUTS_FIRST
    for key, tensor in unstacked(load_file(file), is_flipped).items():
        layer = key.removesuffix(".weight")
        is_tower = any(part in key for part in ("vision", "visual", "audio_tower"))
        if not re.search(LAYERS, key) or is_tower or layer.endswith(PLAIN):
            stored[key] = plain[key] = tensor
            ignored |= {layer} if tensor.dim() == 2 and key.endswith(".weight") else set()
            continue
        parts, plain[key] = chosen.write(tensor, generator)
        if change:
            change(parts)
        stored |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    scheme = {**chosen.scheme, chosen.ignored: sorted(ignored)}
    if stack:
        stored = stack(stored)
    plain = restacked(plain, load_file(file), is_flipped)
    for folder, tensors in (("stored", stored), ("plain", plain)):
        shutil.copytree(source, target / folder)
        save_file(tensors, target / folder / file.name, {"format": "pt"})
    config["quantization_config"] = scheme
    (target / "stored" / "config.json").write_text(json.dumps(config))
    return target / "stored", target / "plain"


STACK = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")
INPUTS_FIRST = ("llama4_text", "llama4", "gpt_oss")
"""Families whose stacked experts have inputs before outputs."""


def unstacked(tensors: Tensors, is_flipped: bool) -> Tensors:
    """Stacked experts as files have them one by one."""
    found: Tensors = {}
    for key, tensor in tensors.items():
        if not (match := STACK.fullmatch(key)):
            found[key] = tensor
            continue
        names = ["down"] if match[2] == "down" else ["gate", "up"]
        for number, one in enumerate(tensor.transpose(1, 2) if is_flipped else tensor):
            for name, part in zip(names, one.chunk(len(names)), strict=True):
                found[f"{match[1]}{number}.{name}_proj.weight"] = part.contiguous()
    return found


def restacked(tensors: Tensors, like: Tensors, is_flipped: bool) -> Tensors:
    """The other way round: with the names of `like`."""
    found: Tensors = {}
    for key, one in like.items():
        if not (match := STACK.fullmatch(key)):
            found[key] = tensors[key]
            continue
        names = ["down"] if match[2] == "down" else ["gate", "up"]
        whole = torch.stack([
            torch.cat([tensors[f"{match[1]}{number}.{name}_proj.weight"] for name in names])
            for number in range(len(one))
        ])  # fmt: skip
        found[key] = (whole.transpose(1, 2) if is_flipped else whole).contiguous()
    return found


def compressed(form: str, scale_type: torch.dtype = torch.float32, **arguments: Any) -> Format:
    """One of compressed-tensors' formats, with a scale for what `arguments` say shares one."""
    weights = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(form)
    most = 448.0 if weights.type == "float" else 2 ** (weights.num_bits - 1) - 1

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        outs, ins = weight.shape
        strategy = str(getattr(weights.strategy, "value", weights.strategy))
        rows, columns = {
            "tensor": (outs, ins), "channel": (1, ins), "group": (1, weights.group_size),
            "block": weights.block_structure,
        }[strategy]  # fmt: skip
        padded = torch.nn.functional.pad(weight, (0, -ins % columns, 0, -outs % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = (blocks.abs().amax((1, 3)) / most).to(scale_type)
        given = {"weight": weight, "weight_scale": scale}
        if strategy == "tensor":
            given["weight_scale"] = scale.reshape(1)
        if not weights.symmetric:
            zeros = torch.randint(-3, 4, scale.shape, generator=generator).to(torch.int8)
            given["weight_zero_point"] = zeros
        stored = compressor.compress(given, scheme)
        exact = {**stored, "weight_scale": stored["weight_scale"].float()}
        dense = compressor.decompress(exact, scheme)["weight"]
        return stored, dense.float().contiguous()

    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json())}
    return Format(
        {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "input_activations": {"num_bits": 8}}},
        },
        write,
    )


def ordered_groups(actorder: str, size: int = 16) -> Format:
    """W4A16 as compressed-tensors stored it while it had this `actorder`: inputs are rounded in the
    order of their activations, and stored in their own beside the group of each."""
    plain = compressed("pack-quantized", num_bits=4, strategy="group", group_size=size)

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=generator)
        stored, dense = plain.write(weight[:, order], generator)
        places = order.argsort()
        codes = unpack_from_int32(stored["weight_packed"], 4, weight.shape)[:, places]
        packed = {"weight_packed": pack_to_int32(codes, 4), "weight_g_idx": places.int() // size}
        return stored | packed, dense[:, places].contiguous()

    plain.scheme["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    return Format(plain.scheme, write)


def fp8(*block: int) -> Format:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        dense = torch.empty_like(weight)
        rows, columns = block or weight.shape
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[place].abs().max() / 448
                codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
                dense[place] = codes[place].float() * scales[i, j]
        return {"weight": codes, "weight_scale_inv": scales if block else scales.reshape(())}, dense

    scheme: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return Format(scheme | ({"weight_block_size": block} if block else {}), write,
                  "modules_to_not_convert")  # fmt: skip


def _word(codes: list[int], bits: int) -> int:
    """Codes, the first in the lowest bits, as a signed number of 32 bits."""
    word = sum(code << bits * place for place, code in enumerate(codes))
    return word - (1 << 32) if word >> 31 else word


def _pack_rows(codes: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """(n, m) to int32 (n, m * bits / 32); `order`: which code of each word comes first, second."""
    each = 32 // bits
    order = order or tuple(range(each))
    words = [
        [_word([row[start + place] for place in order], bits) for start in range(0, len(row), each)]
        for row in codes.tolist()
    ]
    return torch.tensor(words, dtype=torch.int32)


def grouped(kind: str, bits: int = 4, size: int = 16, is_ordered: bool = True, **more: Any):
    """AWQ's and GPTQ's: codes 0 ... 2^bits - 1 with a zero point and a scale for each group."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        ins = weight.shape[1]
        group_of = torch.arange(ins) // (size if size > 0 else ins)
        if not is_ordered:
            group_of = group_of[torch.randperm(ins, generator=generator)]
        count = int(group_of.max()) + 1
        shape = (count, weight.shape[0])
        # GPTQ cannot store a zero point of 0 before v2: it is kept minus 1.
        zeros = torch.randint(1, (1 << bits) - 1, shape, generator=generator)
        scales = torch.rand(shape, generator=generator) * 0.02 + 0.01
        scales = scales.to(torch.float16)
        codes = weight.t() / scales.float()[group_of] + zeros[group_of]
        codes = codes.round().clamp(0, (1 << bits) - 1).long()
        dense = (codes - zeros[group_of]).float() * scales.float()[group_of]
        if kind == "awq":
            parts = {
                "qweight": _pack_rows(codes, 4, AWQ_ORDER),
                "qzeros": _pack_rows(zeros, 4, AWQ_ORDER),
            }
        else:
            kept = zeros - int(more.get("checkpoint_format") != "gptq_v2")
            parts = {
                "qweight": _pack_rows(codes.t(), bits).t(),
                "qzeros": _pack_rows(kept, bits),
                "g_idx": group_of.to(torch.int32),
            }
        return {**parts, "scales": scales}, dense.t().contiguous()

    scheme = {"quant_method": kind, "bits": bits, "group_size": size, **more}
    if kind == "awq":
        return Format({**scheme, "version": "gemm", "zero_point": True}, write,
                      "modules_to_not_convert")  # fmt: skip
    return Format({**scheme, "desc_act": not is_ordered, "sym": False}, write)


BF16 = torch.bfloat16
FORMATS = {
    "fp8 blocks": fp8(16, 32),
    "fp8": fp8(),
    "W4A16": compressed("pack-quantized", num_bits=4, strategy="group", group_size=16),
    "W4A16 asymmetric": compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "W4A16 ordered by activations": ordered_groups("group"),
    "W4A16 by channel": compressed("pack-quantized", BF16, num_bits=4, strategy="channel"),
    "W8A16": compressed("pack-quantized", num_bits=8, strategy="channel"),
    "W8A16 asymmetric": compressed(
        "pack-quantized", num_bits=8, strategy="channel", symmetric=False
    ),
    "W8A8": compressed("int-quantized", BF16, num_bits=8, strategy="channel"),
    "W8A8 asymmetric": compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "W8A8 by tensor": compressed("int-quantized", num_bits=8, strategy="tensor"),
    "FP8 dynamic": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "FP8 by block": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
    "AWQ": grouped("awq"),
    "AWQ by channel": grouped("awq", size=-1),
    "GPTQ": grouped("gptq"),
    "GPTQ v2": grouped("gptq", checkpoint_format="gptq_v2"),
    "GPTQ int8": grouped("gptq", bits=8),
    "GPTQ ordered by activations": grouped("gptq", is_ordered=False),
}
