"""Times attention on this CPU: compiled kernels, torch, and memory bandwidth.

    python e2e/bench/micro/attention.py [--threads 2] [--repeats 7]

Per case: best of `repeats` for one layer in milliseconds and torch's time over the kernel's. For
decoding, also the kernel's reading rate over that of a plain sum of an array larger than the
caches; for encoders, the operations that it does in a second.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable

import torch

from foveal_runtime.model.attention import ForwardContext, KVPool, LayerGeometry
from foveal_runtime.model.attention.cpu import CpuBackend
from foveal_runtime.model.attention.dense import attend
from foveal_runtime.model.attention.torch_backend import TorchBackend
from foveal_runtime.model.cpu.kernels import load_kernel, load_prefill_kernel

SHAPES = {"12/4 heads D64": (12, 4, 64), "32/8 heads D128": (32, 8, 128)}
BATCHES = {
    "1 x 2000": [2000], "8 x 200": [200] * 8, "8 x 2000": [2000] * 8, "32 x 200": [200] * 32,
    "32 x 200..2000": [200 + 1800 * i // 31 for i in range(32)],
}  # fmt: skip


TOWERS = {
    "CLIP, 576 tokens, 8 heads of 64": (576, 8, 64),
    "SigLIP so400m, 729, 16 of 72": (729, 16, 72),
    "1,024, 16 of 64": (1024, 16, 64),
    "Qwen2-VL, 1,296, 16 of 80": (1296, 16, 80),
    "Qwen2.5-VL, a window of 64, 16 of 80": (64, 16, 80),
    "Whisper base, 1,500, 8 of 64": (1500, 8, 64),
}


def make_batch(
    layer: LayerGeometry, lengths: list[int], dtype: torch.dtype
) -> tuple[ForwardContext, torch.Tensor]:
    block_size = 16
    needed = [-(-n // block_size) for n in lengths]
    pool = KVPool([layer], sum(needed) + 1, block_size, dtype, torch.device("cpu"))
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    order = (torch.randperm(sum(needed)) + 1).int()
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for i, part in enumerate(order.split(needed)):
        table[i, : len(part)] = part
    n = len(lengths)
    context = ForwardContext(
        backend=TorchBackend(), pool=pool, q_start=torch.arange(n + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table=table,
        slots=torch.zeros(n, dtype=torch.int64), seq_of_token=torch.arange(n, dtype=torch.int32),
        pos_of_token=torch.tensor(lengths, dtype=torch.int32) - 1, q_lens=[1] * n, kv_lens=lengths,
    )  # fmt: skip
    return context, torch.randn(n, layer.num_heads, layer.key_dim).to(dtype)


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def compare_towers(repeats: int) -> None:
    kernel = load_prefill_kernel()
    if isinstance(kernel, str):
        raise SystemExit(kernel)
    print(f"{'encoders':<50}{'kernel ms':>10}{'torch ms':>10}{'ratio':>7}{'Gop/s':>8}")
    for (name, (tokens, heads, dim)), dtype in itertools.product(
        TOWERS.items(), (torch.float32, torch.bfloat16)
    ):
        q, k, v = (torch.randn(1, tokens, heads, dim).to(dtype).transpose(1, 2) for _ in range(3))

        def by_torch(q=q, k=k, v=v) -> torch.Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).contiguous()

        fast = best_seconds(functools.partial(attend, kernel, q, k, v, None), repeats)
        slow = best_seconds(by_torch, repeats)
        rate = 4 * tokens**2 * heads * dim / fast
        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        print(f"{label:<50}{fast * 1e3:>10.3f}{slow * 1e3:>10.3f}{slow / fast:>7.2f}"
              f"{rate / 1e9:>8.0f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernel = load_kernel()
    if isinstance(kernel, str):
        raise SystemExit(kernel)
    big = torch.ones(96 * 1024 * 1024 // 4)
    bandwidth = big.nbytes / best_seconds(big.sum, options.repeats)
    print(f"variant {kernel.variant}, {options.threads} threads, "
          f"array sum reads {bandwidth / 1e9:.1f} GB/s")  # fmt: skip
    print(f"{'case':<44}{'kernel ms':>10}{'torch ms':>10}{'ratio':>7}{'GB/s':>7}{'of sum':>8}")
    for (shape, (heads, kv, dim)), (name, lengths), dtype in itertools.product(
        SHAPES.items(), BATCHES.items(), (torch.float32, torch.bfloat16)
    ):
        layer = LayerGeometry(0, heads, kv, dim, dim, dim**-0.5)
        context, query = make_batch(layer, lengths, dtype)
        backend, oracle = CpuBackend(kernel, None), TorchBackend()
        fast = best_seconds(lambda: backend.attend(layer, query, context), options.repeats)  # noqa: B023
        slow = best_seconds(lambda: oracle.attend(layer, query, context), options.repeats)  # noqa: B023
        rate = sum(lengths) * layer.values_per_token * query.element_size() / fast
        label = f"{shape}, {name}, {str(dtype).removeprefix('torch.')}"
        print(f"{label:<44}{fast * 1e3:>10.3f}{slow * 1e3:>10.3f}{slow / fast:>7.1f}"
              f"{rate / 1e9:>7.1f}{rate / bandwidth:>8.2f}", flush=True)  # fmt: skip
    compare_towers(options.repeats)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
