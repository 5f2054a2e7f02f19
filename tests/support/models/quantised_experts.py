"""Experts as some files have them: all of a layer in one quantised tensor."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.models.quantised import Tensors

_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(_scale_inv)?")


def stacked_fp8(tensors: Tensors) -> Tensors:
    """Experts that are stored one by one to one tensor (experts, inputs, outputs), as Qwen3-VL's
    FP8 files have them, and their scales beside it."""
    found: Tensors = {}
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        if not (match := _SINGLE.fullmatch(key)):
            found[key] = tensor
            continue
        name = "down_proj" if match[3] == "down" else "gate_up_proj"
        whole = f"{match[1]}.{name}{match[4] or ''}"
        parts.setdefault(whole, {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for name, experts in parts.items():
        rows = []
        for _, one in sorted(experts.items()):
            both = [one["down"]] if "down" in one else [one["gate"], one["up"]]
            rows.append(torch.cat([part.view(torch.uint8) for part in both]).view(both[0].dtype))
        found[name] = torch.stack([row.t() for row in rows]).contiguous()
    return found


def make_mxfp4(source: Path, target: Path) -> tuple[Path, Path]:
    """GPT-OSS with experts as OpenAI's files have them, of random codes, and a plain twin by
    transformers' reader of such files. Returns the paths."""
    generator = torch.Generator().manual_seed(5)
    file = next(source.glob("*.safetensors"))
    plain, stored = load_file(file), Tensors()
    for key, tensor in list(plain.items()):
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = tensor
            continue
        count, ins, outs = tensor.shape
        shape = (count, outs, ins // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, shape[:3], generator=generator, dtype=torch.uint8)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        plain[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    for folder, tensors in (("stored", stored), ("plain", plain)):
        shutil.copytree(source, target / folder)
        save_file(tensors, target / folder / file.name, {"format": "pt"})
    (target / "stored" / "config.json").write_text(json.dumps(config))
    return target / "stored", target / "plain"
