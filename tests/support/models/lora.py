"""Random LoRA adapters as PEFT writes them, and transformers' models with one in their weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from foveal_runtime.model.checkpoint.loader import class_for, read_config

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
CONFIG = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False,
    "modules_to_save": None, "target_modules": list(TARGETS),
}  # fmt: skip


def decoder_linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in TARGETS and "layers." in name
        and "vision" not in name and "tower" not in name
    }  # fmt: skip


def write_adapter(folder: Path, model: torch.nn.Module, seed: int, **config: object) -> Path:
    """A random adapter of all linear layers of the decoder, as PEFT writes it."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in decoder_linears(model).items():
        for part, shape in (
            ("A", (RANK, linear.in_features)), ("B", (linear.out_features, RANK)),
        ):  # fmt: skip
            tensor = torch.randn(shape, generator=draw) * 0.1
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def plain(path: str) -> torch.nn.Module:
    return class_for(read_config(path)).from_pretrained(path).eval()


def merged(path: str, adapter: Path, scale: float = ALPHA / RANK) -> torch.nn.Module:
    """transformers' model with the adapter in its weights."""
    model = plain(path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, linear in decoder_linears(model).items():
            key = f"base_model.model.{name}.lora_"
            linear.weight += scale * tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
    return model
