"""Batches of noise for attention backends, and what the oracle says about them.

FOVEAL_DEVICE=cuda puts what a backend gets on a GPU; the oracle always computes in float32 on the
CPU, from the same (perhaps rounded) numbers.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import fields, replace

import torch

from foveal_runtime.model.attention import ForwardContext, KVPool, LayerGeometry
from foveal_runtime.model.attention.torch_backend import TorchBackend

DEVICE = torch.device(os.environ.get("FOVEAL_DEVICE", "cpu"))
CPU = torch.device("cpu")
ORACLE = TorchBackend()


def geometry(dim: int, group: int, kv_heads: int = 2, **kwargs) -> LayerGeometry:
    options = {"scaling": dim**-0.5, **kwargs}
    return LayerGeometry(0, kv_heads * group, kv_heads, dim, dim, **options)


def batch(
    layer: LayerGeometry,
    lengths: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    groups: list[int] | None = None,
) -> tuple[ForwardContext, torch.Tensor]:
    """A pool of noise, scattered blocks, and one (q_len, kv_len) per sequence. On the CPU."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-kv // block_size) for _, kv in lengths]
    pool = KVPool([layer], sum(needed) + 1, block_size, dtype, CPU)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    order = (torch.randperm(sum(needed), generator=generator) + 1).int()
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for i, part in enumerate(order.split(needed)):
        table[i, : len(part)] = part
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    tokens = [(i, kv - q + j) for i, (q, kv) in enumerate(lengths) for j in range(q)]
    context = ForwardContext(
        backend=ORACLE,
        pool=pool,
        q_start=torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=table,
        slots=torch.tensor([int(table[i, p // block_size]) * block_size + p % block_size
                            for i, p in tokens]),
        seq_of_token=torch.tensor([i for i, _ in tokens], dtype=torch.int32),
        pos_of_token=torch.tensor([p for _, p in tokens], dtype=torch.int32),
        q_lens=q_lens,
        kv_lens=kv_lens,
        groups=None if groups is None else torch.tensor(groups, dtype=torch.int32),
    )  # fmt: skip
    shape = (layer.num_heads, len(tokens), layer.key_dim)  # strides as HF decoders give them
    query = torch.randn(shape, generator=generator).to(dtype).transpose(0, 1)
    return context, query


def on_device(context: ForwardContext) -> ForwardContext:
    """The same batch where the backend under test computes."""
    found = {f.name: getattr(context, f.name) for f in fields(context)}
    moved = {k: v.to(DEVICE) for k, v in found.items() if isinstance(v, torch.Tensor)}
    return replace(context, **moved, pool=pool_as(context.pool, context.pool.dtype, DEVICE))


def pool_as(pool: KVPool, dtype: torch.dtype, device: torch.device = CPU) -> KVPool:
    compute = pool.compute_dtype if dtype == pool.dtype else dtype
    copied = KVPool([], pool.num_blocks, pool.block_size, dtype, device, compute)
    copied.keys = [t.to(device=device, dtype=dtype, copy=True) for t in pool.keys]
    copied.values = [t.to(device=device, dtype=dtype, copy=True) for t in pool.values]
    return copied


def wanted(
    layer: LayerGeometry,
    query: torch.Tensor,
    context: ForwardContext,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The oracle's float32 answer on the CPU."""
    wide = replace(context, pool=pool_as(context.pool, torch.float32))
    return ORACLE.attend(layer, query.float(), wide, sinks)
