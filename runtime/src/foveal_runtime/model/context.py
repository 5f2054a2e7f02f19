"""The link between HF decoders and paged attention: the current ForwardContext and the function.

The runner enters `forward_context` around each decoder call; the decoder's layers call
`paged_attention` through transformers' AttentionInterface. No mask function is registered under
the same name, and that makes transformers build no masks at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from foveal_runtime.model.adapters import Adapter
from foveal_runtime.model.attention import ForwardContext, LayerGeometry
from foveal_runtime.plan.errors import StartupError

ATTENTION_NAME = "foveal_paged"


class LayerCall(Protocol):
    """What a layer's attention call ends up in: paged attention, or the probe's recorder."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """query (T, H, Dk), key (T, Hkv, Dk), value (T, Hkv, Dv); returns (T, H, Dv)."""
        ...


class PagedCall:
    """Writes the new keys and values, unless they are another layer's, then attends, by the layer's
    measured geometry."""

    def __init__(
        self, layers: Sequence[LayerGeometry], context: ForwardContext, adapter: Adapter
    ) -> None:
        self._layers = {layer.index if layer.layer < 0 else layer.layer: layer for layer in layers}
        self._context = context
        self._correct_query = adapter.correct_query

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer = self._layers[module.layer_idx]
        context = self._context
        if self._correct_query is not None:
            query = self._correct_query(module, query, context.pos_of_token)
        dtype = context.pool.compute_dtype  # some families leave rope in float32
        if not layer.reads_only:
            context.backend.write_kv(layer, key.to(dtype), value.to(dtype), context)
        out = context.backend.attend(layer, query.to(dtype), context, options.get("s_aux"))
        return out.to(value.dtype)


_current = threading.local()


@contextmanager
def forward_context(call: LayerCall) -> Iterator[None]:
    """Makes `call` the target of this thread's attention layers. Does not nest."""
    assert getattr(_current, "call", None) is None
    _current.call = call
    try:
        yield
    finally:
        _current.call = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query (1, H, T, Dk) in, (1, T, H, Dv) out."""
    if attention_mask is not None:
        raise StartupError("its layers make attention masks of their own: not supported")
    assert query.shape[0] == 1
    out = _current.call(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
