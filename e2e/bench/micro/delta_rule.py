"""Times a gated delta net on this CPU: with the kernel, by transformers' fallback, and its linears.

    python -m e2e.bench.micro.delta_rule [--threads 1] [--repeats 5]

One layer of Qwen3.5-0.8B's shape with packed weights. Per case, the three in turn, `repeats` times:
the least CPU milliseconds of each (of all threads), then how many times the linear layers the whole
layer takes, both ways, and the fallback's time over the kernel's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from foveal_runtime.model.cpu.kernels import load_delta_kernel
from foveal_runtime.model.cpu.packing import pack_linears
from foveal_runtime.model.layers.delta_rule import make_delta_rule
from foveal_runtime.model.layers.state import StateForward

WIDTH = 1024
CASES = {
    "decode of 1": [1], "decode of 8": [1] * 8, "decode of 32": [1] * 32,
    "prefill of 64": [64], "prefill of 256": [256], "prefill of 1,024": [1024],
    "31 decoded beside a chunk of 225": [1] * 31 + [225],
}  # fmt: skip


def make_layer(dtype: torch.dtype) -> Qwen3_5GatedDeltaNet:
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    layer = Qwen3_5GatedDeltaNet(config, 0)
    for weight in layer.parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight[0].numel() ** -0.5)
    model = nn.ModuleList([layer.to(dtype).eval()])
    pack_linears(model)
    return model[0]


def make_states(layer: Qwen3_5GatedDeltaNet, num_slots: int) -> dict[str, torch.Tensor]:
    sizes = (layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    return {
        "conv": torch.randn(num_slots, layer.conv_dim, 4).to(layer.conv1d.weight.dtype),
        "recurrent": torch.randn(num_slots, *sizes) / 4,
    }


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
    kernel = load_delta_kernel()
    if isinstance(kernel, str):
        raise SystemExit(kernel)
    print(f"{options.threads} threads, CPU ms of all; linears = 1")
    print(f"{'case':<44}{'linears':>9}{'kernel':>9}{'fallback':>9}{'kernel':>8}{'fallback':>9}"
          f"{'gain':>7}")  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_layer(dtype)
        plain = StateForward(layer, "cache_params")
        rule = make_delta_rule(layer, kernel, plain.compute, make_states(layer, 2))
        for name, lengths in CASES.items():
            rows = torch.randn(1, sum(lengths), WIDTH).to(dtype)
            states = make_states(layer, len(lengths))
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            table = torch.tensor([*zip(starts, lengths, range(len(lengths)), strict=True)])
            mixed = rows.new_zeros(1, sum(lengths), layer.value_dim)
            linears, fast, slow = least(
                [
                    lambda: (rule.project(rows), layer.out_proj(mixed)),  # noqa: B023
                    lambda: rule(rows, states, table),  # noqa: B023
                    lambda: plain.split(rows, states, table),  # noqa: B023
                ],
                options.repeats,
            )
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            print(f"{label:<44}{linears * 1e3:>9.2f}{fast * 1e3:>9.2f}{slow * 1e3:>9.2f}"
                  f"{fast / linears:>8.2f}{slow / linears:>9.2f}{slow / fast:>7.1f}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    with torch.inference_mode():
        main()
