"""Attention of encoders on CPUs: every token sees every other, by the kernel for prompts.

The loader gives it to the towers that have transformers' `sdpa`. What the kernel does not take (a
mask, a bias, float16, gradients, ...) is computed by that, call by call, as it would be without.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from foveal_runtime.model.cpu.kernels import (
    BFLOAT16,
    DONE,
    FLOAT32,
    MAX_GROUP_VALUES,
    MAX_HEAD_DIM,
    NO_MEMORY,
    DenseJob,
    PrefillKernel,
    load_prefill_kernel,
)

DENSE_NAME, REPLACED_NAME = "foveal_dense", "sdpa"
_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_log = logging.getLogger(__name__)


@functools.cache
def _kernel() -> PrefillKernel | None:
    """A process has one CPU."""
    kernel = load_prefill_kernel()
    if isinstance(kernel, str):
        _log.warning("encoders use the slower torch attention: %s", kernel)
        return None
    return kernel


def switch_towers(core: nn.Module, decoder: nn.Module) -> int:
    """Gives all models of transformers' inside `core` that have REPLACED_NAME, and are neither part
    of the decoder nor around it, the kernel; returns how many."""
    if _kernel() is None:
        return 0
    inside = set(decoder.modules())
    configs = {id(getattr(module, "config", None)) for module in inside}
    count = 0
    for tower in core.modules():
        if (
            isinstance(tower, PreTrainedModel)
            and tower not in inside
            and id(tower.config) not in configs
            and all(module is not decoder for module in tower.modules())
            and tower.config._attn_implementation == REPLACED_NAME
            and tower._can_set_attn_implementation()
        ):
            tower.set_attn_implementation({"": DENSE_NAME})  # parts of its own: their own turn
            count += 1
    return count


def dense_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query (B, H, Tq, D), key and value (B, Hkv, T, D) in,
    (B, Tq, H, D) out."""
    kernel = _kernel()
    sees_all = not (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    is_plain = attention_mask is None and not dropout and sees_all
    if kernel is not None and is_plain and _is_plain(options) and _is_taken(query, key, value):
        return attend(kernel, query, key, value, scaling), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **options
    )
    return out, None


def _is_plain(options: dict[str, Any]) -> bool:
    """Nothing that changes what sdpa computes."""
    return all(options.get(name) is None for name in ("position_bias", "softcap", "cache"))


def _is_taken(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    (batch, heads, num_queries, dim), (_, kv_heads, num_keys, _) = query.shape, key.shape
    tensors = (query, key, value)
    return (
        all(one.device.type == "cpu" and one.dtype == query.dtype for one in tensors)
        and query.dtype in _DTYPES
        and key.shape == value.shape == (batch, kv_heads, num_keys, dim)
        and min(batch, num_queries, num_keys, kv_heads) > 0
        and heads % kv_heads == 0
        and 0 < dim <= MAX_HEAD_DIM
        and dim % 2 == 0
        and heads // kv_heads * dim <= MAX_GROUP_VALUES
        and not any(one.requires_grad for one in tensors)
    )


def attend(
    kernel: PrefillKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """As dense_attention, of what is taken. A row's bits depend on its own sequence only."""
    batch, heads, num_queries, dim = query.shape
    out = query.new_empty(batch, num_queries, heads, dim)
    q, k, v = (_tokens(one) for one in (query, key, value))
    code = kernel.run_dense(
        DenseJob(
            dtype=_DTYPES[query.dtype],
            head_dim=dim,
            num_heads=heads,
            num_kv_heads=key.shape[1],
            num_sequences=batch,
            num_queries=num_queries,
            num_keys=key.shape[2],
            num_threads=torch.get_num_threads(),
            scaling=dim**-0.5 if scaling is None else scaling,
            query=q.data_ptr(),
            keys=k.data_ptr(),
            values=v.data_ptr(),
            query_token_stride=q.stride(0),
            query_head_stride=q.stride(1),
            key_token_stride=k.stride(0),
            key_head_stride=k.stride(1),
            value_token_stride=v.stride(0),
            value_head_stride=v.stride(1),
            out=out.data_ptr(),
        )
    )
    if code == NO_MEMORY:
        raise MemoryError("encoder attention: no memory for its list of tasks")
    assert code == DONE, query.shape
    return out


def _tokens(rows: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) as (B * T, H, D), in place where its strides allow that."""
    tokens = rows.transpose(1, 2).flatten(0, 1)
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()


AttentionInterface.register(DENSE_NAME, dense_attention)
AttentionMaskInterface.register(DENSE_NAME, sdpa_mask)  # or there would be no masks at all
