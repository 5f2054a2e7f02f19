"""Times layers with a recurrence on this CPU: with the kernel, by transformers' fallback, and their
linears.

    python -m e2e.bench.micro.recurrent [--threads 1] [--repeats 5]

A layer of Qwen3.5-0.8B's shape (a gated delta rule) and one of Granite 4.0 H Tiny's (Mamba-2) with
packed weights. Per case, the three in turn, `repeats` times: the least CPU milliseconds of each (of
all threads), then how many times the linear layers the whole layer takes, both ways, and the
fallback's time over the kernel's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GraniteMoeHybridConfig, Qwen3_5TextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from foveal_runtime.model.cpu.kernels import load_recurrent_kernels
from foveal_runtime.model.cpu.packing import pack_linears
from foveal_runtime.model.layers import delta_rule, mamba
from foveal_runtime.model.layers.delta_rule import DeltaRule
from foveal_runtime.model.layers.recurrence import Rule, make_rule
from foveal_runtime.model.layers.state import StateForward

CASES = {
    "decode of 1": [1], "decode of 8": [1] * 8, "decode of 32": [1] * 32,
    "prefill of 64": [64], "prefill of 256": [256], "prefill of 1,024": [1024],
    "31 decoded beside a chunk of 225": [1] * 31 + [225],
}  # fmt: skip


def delta_net() -> nn.Module:
    config = Qwen3_5TextConfig(
        hidden_size=1024, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0)


def mixer() -> nn.Module:
    config = GraniteMoeHybridConfig(
        hidden_size=1536, mamba_expand=2, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
        mamba_n_groups=1, layer_types=["linear_attention"], num_hidden_layers=1,
    )  # fmt: skip
    return GraniteMoeHybridMambaLayer(config, 0)


LAYERS: dict[str, tuple[Callable[[], nn.Module], type[Rule], tuple[int, int, int]]] = {
    "delta rule": (delta_net, DeltaRule, (16, 128, 128)),
    "Mamba-2": (mixer, mamba.MambaRule, (48, 64, 128)),
}


def packed(layer: Any, dtype: torch.dtype) -> Any:
    for weight in layer.parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight[0].numel() ** -0.5)
    model = nn.ModuleList([layer.to(dtype).eval()])
    pack_linears(model)
    return model[0]


def some_states(layer: Any, sizes: tuple[int, ...], num_slots: int) -> dict[str, torch.Tensor]:
    return {
        "conv": torch.randn(num_slots, layer.conv_dim, 4).to(layer.conv1d.weight.dtype),
        "recurrent": torch.randn(num_slots, *sizes) / 4,
    }


def fallback(layer: Any) -> StateForward:
    """In such pieces as `state` makes."""
    plain = StateForward(layer, "cache_params")
    for one in mamba.mixers_of(layer):
        mamba.settle(one)
        plain.limits = (mamba.ROWS, mamba.num_sequences(one))
    return plain


def least(ways: list[Callable[[], object]], repeats: int) -> list[float]:
    """The least CPU seconds of each way, taken in turn."""
    best = [float("inf")] * len(ways)
    for turn in range(repeats + 1):  # the first warms up
        for number, way in enumerate(ways):
            start = time.process_time()
            way()
            if turn:
                best[number] = min(best[number], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = load_recurrent_kernels()
    if isinstance(kernels, str):
        raise SystemExit(kernels)
    print(f"{options.threads} threads, CPU ms of all; linears = 1")
    print(f"{'case':<56}{'linears':>9}{'kernel':>9}{'fallback':>9}{'kernel':>8}{'fallback':>9}"
          f"{'gain':>7}")  # fmt: skip
    for title, (make, kind, sizes) in LAYERS.items():
        for dtype in (torch.float32, torch.bfloat16):
            layer = packed(make(), dtype)
            plain = fallback(layer)
            rule = make_rule(kind, layer, kernels, plain, some_states(layer, sizes, 2))
            project = (mamba if kind is mamba.MambaRule else delta_rule).project
            for name, lengths in CASES.items():
                rows = torch.randn(1, sum(lengths), layer.out_proj.out_features).to(dtype)
                states = some_states(layer, sizes, len(lengths))
                starts = [sum(lengths[:i]) for i in range(len(lengths))]
                table = torch.tensor([*zip(starts, lengths, range(len(lengths)), strict=True)])
                mixed = rows.new_zeros(1, sum(lengths), layer.out_proj.in_features)
                ways: list[Callable[[], object]] = [
                    lambda: (project(layer, rows), layer.out_proj(mixed)),  # noqa: B023
                    lambda: rule(rows, states, table),  # noqa: B023
                    lambda: plain.split(rows, states, table),  # noqa: B023
                ]
                linears, fast, slow = least(ways, options.repeats)
                label = f"{title}: {name}, {str(dtype).removeprefix('torch.')}"
                print(f"{label:<56}{linears * 1e3:>9.2f}{fast * 1e3:>9.2f}{slow * 1e3:>9.2f}"
                      f"{fast / linears:>8.2f}{slow / linears:>9.2f}{slow / fast:>7.1f}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    with torch.inference_mode():
        main()
