"""Paged attention in plain torch, one sequence at a time: the oracle for every other backend.

Gathers a sequence's keys and values from the pool and runs SDPA, or explicit softmax where SDPA
cannot express the layer (softcap, sinks). Correct on every device and dtype; never the fast path
for decoding.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from foveal_runtime.model.attention import (
    FP8,
    FP8_MAX,
    BackendRequest,
    ForwardContext,
    LayerGeometry,
    register,
)


class TorchBackend:
    """Stateless; see AttentionBackend for shapes."""

    is_static = False

    def write_kv(
        self,
        layer: LayerGeometry,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
    ) -> None:
        slots = context.slots_of(layer)
        _put(context.pool.keys[layer.index], slots, key)
        _put(context.pool.values[layer.index], slots, value)

    def attend(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        context: ForwardContext,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = query.new_empty(query.shape[0], layer.num_heads, layer.value_dim)
        start, whole, table = 0, context.groups_of(layer), context.table_of(layer)
        for i, (q_len, kv_len) in enumerate(zip(context.q_lens, context.kv_lens, strict=True)):
            window = slice(start, start + q_len)
            groups = None if whole is None else whole[window]
            out[window] = attend_sequence(
                layer, query[window], context, table[i], kv_len, groups, sinks
            )
            start += q_len
        return out


def _put(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Torch moves no float8, but bytes."""
    if pool.dtype == FP8:
        pool, rows = pool.view(torch.uint8), to_fp8(rows).view(torch.uint8)
    pool.index_copy_(0, slots, rows)


def _take(pool: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if pool.dtype == FP8:
        return pool.view(torch.uint8).index_select(0, rows).view(FP8).to(dtype)
    return pool.index_select(0, rows)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)


def attend_sequence(
    layer: LayerGeometry,
    query: torch.Tensor,
    context: ForwardContext,
    block_ids: torch.Tensor,
    kv_len: int,
    groups: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence: query (q, H, Dk) are its last q tokens. Returns (q, H, Dv)."""
    pool = context.pool
    # What lies before the window of the first of them may be another's by now.
    first = max(kv_len - query.shape[0] - layer.window + 1, 0) if layer.window else 0
    rows = gather_rows(block_ids, kv_len, pool.block_size)[first:]
    keys = _take(pool.keys[layer.index], rows, query.dtype).transpose(0, 1)
    values = _take(pool.values[layer.index], rows, query.dtype).transpose(0, 1)
    heads = query.transpose(0, 1)
    is_sdpa = layer.softcap is None and sinks is None
    # A whole prompt: SDPA then skips the half that nobody sees, and no mask has to be made.
    is_causal = is_sdpa and is_plain_prompt(layer, query.shape[0], kv_len, groups)
    mask = None if is_causal else visible(layer, query.shape[0], kv_len, groups, query.device)
    mask = mask if mask is None else mask[:, first:]
    if is_sdpa:
        out = scaled_dot_product_attention(
            heads[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=is_causal,
            scale=layer.scaling,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
        )[0]
    else:
        out = explicit_attention(layer, heads, keys, values, mask, sinks)
    return out.transpose(0, 1)


def gather_rows(block_ids: torch.Tensor, kv_len: int, block_size: int) -> torch.Tensor:
    """Pool rows of positions 0 ... kv_len - 1."""
    num_blocks = -(-kv_len // block_size)
    offsets = torch.arange(block_size, device=block_ids.device)
    rows = block_ids[:num_blocks, None].long() * block_size + offsets
    return rows.flatten()[:kv_len]


def is_plain_prompt(
    layer: LayerGeometry, q_len: int, kv_len: int, groups: torch.Tensor | None
) -> bool:
    """Whether plain causal attention from the first position on is all that is asked for."""
    return (
        q_len == kv_len
        and groups is None
        and layer.sliding_window is None
        and layer.chunk_size is None
    )


def visible(
    layer: LayerGeometry,
    q_len: int,
    kv_len: int,
    groups: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Bool mask (q_len, kv_len), True where a query may look; None when all may look at all."""
    if q_len == 1 and layer.sliding_window is None and layer.chunk_size is None:
        return None
    q_pos = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    kv_pos = torch.arange(kv_len, device=device)[None, :]
    mask = kv_pos <= q_pos
    if groups is not None:
        same = (groups[:, None] == groups[None, :]) & (groups[:, None] >= 0)
        mask[:, kv_len - q_len :] |= same
    if layer.sliding_window is not None:
        mask &= kv_pos > q_pos - layer.sliding_window
        if groups is not None and layer.groups_ignore_window:
            mask[:, kv_len - q_len :] |= same
    if layer.chunk_size is not None:
        mask &= kv_pos // layer.chunk_size == q_pos // layer.chunk_size
    return mask


def explicit_attention(
    layer: LayerGeometry,
    heads: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """heads (H, q, Dk), keys (Hkv, kv, Dk), values (Hkv, kv, Dv) to (H, q, Dv), softmax in fp32."""
    repeats = layer.num_heads // layer.num_kv_heads
    keys = keys.repeat_interleave(repeats, 0)
    values = values.repeat_interleave(repeats, 0)
    scores = torch.matmul(heads, keys.transpose(1, 2)).float() * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def _create(request: BackendRequest) -> TorchBackend:
    return TorchBackend()


register("torch", _create)
