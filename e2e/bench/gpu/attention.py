"""Times the Triton attention kernels of one layer on a GPU, as shares of what the GPU can do.

    python -m e2e.bench.gpu.attention [--out FILE.json] [--sweep one|all]

Decode: bytes of keys and values a second over the rate of copying. Prefill: operations of the
visible pairs a second over the rate of one large product. Beside them run torch's attention and,
where it is installed, FlashInfer's. Calls are recorded in a graph over
several layers' pools, so that neither launches nor the last call's cache are measured. --sweep
varies the numbers of Tuning that decoding has: one at a time, or all in all combinations.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from e2e.bench.gpu.common import Results, copy_rate, median_seconds, parser, product_rate
from e2e.bench.gpu.peers import decode_peers, prefill_peers
from foveal_runtime.model.attention import (
    AttentionBackend,
    BackendRequest,
    ForwardContext,
    KVPool,
    LayerGeometry,
    create_backend,
)
from foveal_runtime.model.attention.torch_backend import TorchBackend
from foveal_runtime.model.runner.graphs import Capturer, CudaCapturer
from tests.support.models.rerun_capturer import RerunCapturer

NUM_LAYERS = 4
PAGE = 16
SHAPES = {"32/8 heads of 128": (32, 8, 128), "28/4 heads of 128": (28, 4, 128),
          "64/8 heads of 64": (64, 8, 64)}  # fmt: skip
DECODE = [(1, 2048), (16, 2048), (16, 8192), (64, 2048), (128, 1024), (16, 32768)]
PREFILL = [(2048, 2048), (8192, 8192), (2048, 16384)]
SWEEP = {"decode_tile_bytes": [8192, 16384, 32768], "decode_warps": [1, 2, 4, 8],
         "decode_stages": [2, 3, 4], "programs_each": [1, 2, 3, 4, 8]}  # fmt: skip


def make_layers(heads: int, kv_heads: int, dim: int, **rules: Any) -> list[LayerGeometry]:
    return [LayerGeometry(i, heads, kv_heads, dim, dim, dim**-0.5, **rules)
            for i in range(NUM_LAYERS)]  # fmt: skip


def make_batch(
    layers: list[LayerGeometry], lengths: list[tuple[int, int]], device: str
) -> tuple[ForwardContext, torch.Tensor]:
    """(query tokens, context) of each sequence; blocks are scattered over the pool."""
    needed = [-(-kv // PAGE) for _, kv in lengths]
    there, kind = torch.device(device), torch.bfloat16
    pool = KVPool(layers, sum(needed) + 1, PAGE, kind, there)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    order = (torch.randperm(sum(needed)) + 1).int()
    for i, part in enumerate(order.split(needed)):
        table[i, : len(part)] = part
    tokens = [(i, kv - q + j) for i, (q, kv) in enumerate(lengths) for j in range(q)]
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]

    def load(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=there)

    context = ForwardContext(
        backend=TorchBackend(), pool=pool, q_start=load([0, *itertools.accumulate(q_lens)]),
        seq_lens=load(kv_lens), block_table=table.to(there),
        slots=torch.zeros(len(tokens), dtype=torch.int64, device=there),
        seq_of_token=load([i for i, _ in tokens]), pos_of_token=load([p for _, p in tokens]),
        q_lens=q_lens, kv_lens=kv_lens,
    )  # fmt: skip
    shape = (layers[0].num_heads, len(tokens), layers[0].key_dim)
    return context, torch.randn(shape, device=there).to(kind).transpose(0, 1)


def call_seconds(
    backend: AttentionBackend,
    layers: list[LayerGeometry],
    context: ForwardContext,
    query: torch.Tensor,
    device: str,
) -> float:
    """Of one call, out of a recording of several."""
    rounds = 1 if device == "cpu" else 4

    def work() -> None:
        for layer in layers * rounds:
            backend.attend(layer, query, context)

    return recorded_seconds(work, device) / (rounds * len(layers))


def recorder(device: str) -> Callable[[Callable[[], None]], float]:
    return lambda work: recorded_seconds(work, device)


def recorded_seconds(work: Callable[[], None], device: str) -> float:
    capturer: Capturer = CudaCapturer() if device == "cuda" else RerunCapturer()
    repeats = 1 if device == "cpu" else 15
    return median_seconds(capturer.capture(work), device, repeats)


def check(backend: AttentionBackend, layers: list[LayerGeometry], device: str) -> float:
    """Relative error against the torch backend, over a small mixed batch."""
    context, query = make_batch(layers, [(1, 700), (1, 33), (90, 200), (1, 5)], device)
    got = backend.attend(layers[0], query, context).float()
    want = TorchBackend().attend(layers[0], query, context).float()
    error = float((got - want).norm() / want.norm())
    assert error < 2e-2, error
    return error


def measure(options: argparse.Namespace) -> None:
    results, device = Results(options), options.device
    copies = results.limit("copy_bytes_per_second", copy_rate(device, options.tiny))
    products = results.limit("product_ops_per_second", product_rate(device, options.tiny))
    shapes = {"4/2 heads of 16": (4, 2, 16)} if options.tiny else SHAPES
    decode = [(2, 40)] if options.tiny else DECODE
    prefill = [(8, 24)] if options.tiny else PREFILL
    for shape, numbers in shapes.items():
        layers = make_layers(*numbers)
        request = BackendRequest(tuple(layers), PAGE, torch.bfloat16, torch.device(device))
        backend: Any = create_backend("triton", request)
        results.row(case="correct", shape=shape, error=check(backend, layers, device))
        kv_bytes = layers[0].values_per_token * 2
        for batch, length in decode:
            context, query = make_batch(layers, [(1, length)] * batch, device)
            seconds = call_seconds(backend, layers, context, query, device)
            rate = batch * length * kv_bytes / seconds
            results.row(case="decode", shape=shape, batch=batch, context=length,
                        microseconds=seconds * 1e6, gb_per_second=rate / 1e9,
                        share=rate / copies)  # fmt: skip
            for name, seconds in decode_peers(layers, context, query, recorder(device)):
                results.row(case=name, shape=shape, batch=batch, context=length,
                            microseconds=seconds * 1e6,
                            gb_per_second=batch * length * kv_bytes / seconds / 1e9)  # fmt: skip
            if options.sweep and (batch, length) == decode[min(1, len(decode) - 1)]:
                for tuning in tunings(backend.tuning, options.sweep):
                    sweep(results, backend, tuning, layers, context, query, device, kv_bytes)
        for new, length in prefill:
            context, query = make_batch(layers, [(new, length)], device)
            seconds = call_seconds(backend, layers, context, query, device)
            pairs = sum(range(length - new + 1, length + 1))
            operations = 4 * layers[0].num_heads * layers[0].key_dim * pairs
            rate = operations / seconds
            results.row(case="prefill", shape=shape, new=new, context=length,
                        microseconds=seconds * 1e6, tflops=rate / 1e12,
                        share=rate / products)  # fmt: skip
            for name, seconds in prefill_peers(layers, context, query, recorder(device)):
                results.row(case=name, shape=shape, new=new, context=length,
                            microseconds=seconds * 1e6,
                            tflops=operations / seconds / 1e12)  # fmt: skip


def tunings(usual: Any, how: str | None) -> list[Any]:
    """The usual one first; the others differ from it in one number, or in any."""
    if how is None:
        return [usual]
    named = [[(name, value) for value in values] for name, values in SWEEP.items()]
    changes = [[one] for values in named for one in values]
    if how == "all":
        changes = [list(one) for one in itertools.product(*named)]
    found = [usual, *(replace(usual, **dict(change)) for change in changes)]
    return [one for i, one in enumerate(found) if one not in found[:i]]


def sweep(
    results: Results, backend: Any, tuning: Any, layers: list[LayerGeometry],
    context: ForwardContext, query: torch.Tensor, device: str, kv_bytes: int,
) -> None:  # fmt: skip
    usual, backend.tuning = backend.tuning, tuning
    try:
        seconds = call_seconds(backend, layers, context, query, device)
    finally:
        backend.tuning = usual
    results.row(case="sweep", **{name: getattr(tuning, name) for name in SWEEP},
                microseconds=seconds * 1e6,
                gb_per_second=sum(context.kv_lens) * kv_bytes / seconds / 1e9)  # fmt: skip


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--sweep", choices=["one", "all"], help="vary the numbers of Tuning")
    with torch.inference_mode():
        measure(made.parse_args())
