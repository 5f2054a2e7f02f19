"""Other attention kernels over the same shapes: torch's, and FlashInfer's where it is installed.

Torch has each context in one piece; FlashInfer reads the very pages of the batch. Both are called
once for each layer, so that no call finds its keys in the device's cache.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from foveal_runtime.model.attention import ForwardContext, LayerGeometry

Record = Callable[[Callable[[], None]], float]
"""Seconds that recorded work takes."""
_WORKSPACE_BYTES = 256 << 20


def decode_peers(
    layers: Sequence[LayerGeometry], context: ForwardContext, query: torch.Tensor, record: Record
) -> Iterator[tuple[str, float]]:
    """(name, seconds of one call) of one token for each sequence; all contexts are as long."""
    yield "torch decode", _torch_seconds(layers, context, query[:, :, None], None, record)
    if (flashinfer := _flashinfer(query)) is not None:
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
        made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        made.plan(*_pages(context), *_shape(layers, context), **_kinds(query))
        yield "flashinfer decode", _paged_seconds(made, layers, context, query, record)


def prefill_peers(
    layers: Sequence[LayerGeometry], context: ForwardContext, query: torch.Tensor, record: Record
) -> Iterator[tuple[str, float]]:
    """(name, seconds of one call) of the last tokens of one sequence."""
    new, length = context.q_lens[0], context.kv_lens[0]
    asked, mask = query.transpose(0, 1)[None], causal_lower_right(new, length)
    yield "torch prefill", _torch_seconds(layers, context, asked, mask, record)
    if (flashinfer := _flashinfer(query)) is not None:
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
        made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        starts = context.q_start.cpu()
        made.plan(starts, *_pages(context), *_shape(layers, context), causal=True, **_kinds(query))
        yield "flashinfer prefill", _paged_seconds(made, layers, context, query, record)


def _torch_seconds(
    layers: Sequence[LayerGeometry], context: ForwardContext, query: torch.Tensor, mask: Any,
    record: Record,
) -> float:  # fmt: skip
    """query (n, H, new, D)."""
    dense, layer = query.contiguous(), layers[0]
    shape = (2, len(context.kv_lens), layer.num_kv_heads, context.kv_lens[0], layer.key_dim)
    contexts = [torch.randn(shape, device=query.device).to(query.dtype) for _ in layers]

    def work() -> None:
        for keys, values in contexts:
            scaled_dot_product_attention(dense, keys, values, attn_mask=mask, enable_gqa=True)

    return record(work) / len(layers)


def _flashinfer(query: torch.Tensor) -> Any:
    is_there = importlib.util.find_spec("flashinfer") is not None
    return importlib.import_module("flashinfer") if query.is_cuda and is_there else None


def _pages(context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First page of each sequence (n + 1), all pages one after the other, tokens on the last."""
    page = context.pool.block_size
    counts = [-(-length // page) for length in context.kv_lens]
    pages = [row[:count] for row, count in zip(context.block_table, counts, strict=True)]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    last = torch.tensor([(length - 1) % page + 1 for length in context.kv_lens]).int()
    return starts, torch.cat(pages), last


def _shape(layers: Sequence[LayerGeometry], context: ForwardContext) -> tuple[int, int, int, int]:
    layer = layers[0]
    return layer.num_heads, layer.num_kv_heads, layer.key_dim, context.pool.block_size


def _kinds(query: torch.Tensor) -> dict[str, torch.dtype]:
    return {"q_data_type": query.dtype, "kv_data_type": query.dtype}


def _paged_seconds(
    made: Any, layers: Sequence[LayerGeometry], context: ForwardContext, query: torch.Tensor,
    record: Record,
) -> float:  # fmt: skip
    pool, dense = context.pool, query.contiguous()
    shape = (pool.num_blocks, pool.block_size, *pool.keys[0].shape[1:])
    caches = [(pool.keys[one.index].view(shape), pool.values[one.index].view(shape))
              for one in layers]  # fmt: skip

    def work() -> None:
        for cache in caches:
            made.run(dense, cache)

    return record(work) / len(layers)
