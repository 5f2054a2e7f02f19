"""A model's shape: its attention layers as a few tokens run through it show them.

Called once after loading; before it on torch's meta device, where a model built from config.json
alone costs a fraction of a second and no memory, to refuse a number of ranks and by the profiler. A
configuration file says much of this too, but not what tensor parallelism, latent attention or a
family's own head size make of it; the call itself does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from foveal_runtime.model.adapters import Adapter
from foveal_runtime.model.attention import LayerGeometry
from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.checkpoint.loader import (
    PLAIN_TYPES,
    STATE_TYPES,
    LoadedModel,
    meta_model,
)
from foveal_runtime.model.context import forward_context
from foveal_runtime.plan.errors import StartupError

_NUM_TOKENS = 3
_REFUSALS = (ValueError, TypeError, AttributeError, KeyError, RuntimeError)
_HARMLESS_TENSORS = {"s_aux", "position_ids", "cache_position"}


class _Recorder:
    """Takes the place of attention: notes shapes and options, returns zeros."""

    def __init__(self, adapter: Adapter) -> None:
        self.layers: dict[int, LayerGeometry] = {}
        self._adapter = adapter
        # Storage of a layer's new keys → the layer, and the keys, lest other ones take their place.
        self._owners: dict[int, tuple[int, torch.Tensor]] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        index = int(module.layer_idx)
        self._check(module, index, options)
        scaling = options.get("scaling")
        window = options.get("sliding_window") or _masked_window(module, index)
        # A layer that is handed the very keys of another one has none of its own.
        owner, _ = self._owners.setdefault(key.untyped_storage()._cdata, (index, key))
        self.layers[index] = LayerGeometry(
            index=owner,
            layer=index,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            scaling=float(scaling) if scaling is not None else query.shape[2] ** -0.5,
            sliding_window=window,
            softcap=options.get("softcap"),
            has_sinks=options.get("s_aux") is not None,
            chunk_size=_chunk_size(module, index),
            groups_ignore_window=self._adapter.groups_ignore_window,
            ignores_groups=self._adapter.groups_in_windows and window is None,
            reads_only=owner != index,
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    def _check(self, module: torch.nn.Module, index: int, options: dict[str, Any]) -> None:
        if index in self.layers:
            raise StartupError(f"attention of layer {index} runs twice in one step: not supported")
        causal = getattr(module, "is_causal", True) is not False
        if not causal and self._adapter.bidirectional == "none":
            raise StartupError(f"attention of layer {index} is not causal: not supported")
        unknown = {k for k, v in options.items() if isinstance(v, torch.Tensor)}
        unknown -= _HARMLESS_TENSORS
        if unknown:
            raise StartupError(
                f"attention of layer {index} takes {', '.join(sorted(unknown))}: not supported"
            )


def _chunk_size(module: torch.nn.Module, index: int) -> int | None:
    """Llama 4 applies its chunks in the mask alone, so the call does not show them."""
    config: Any = module.config
    return int(config.attention_chunk_size) if _is(config, index, "chunked_attention") else None


def _masked_window(module: torch.nn.Module, index: int) -> int | None:
    """Qwen2-MoE applies its windows in the mask alone."""
    config: Any = module.config
    return config.sliding_window or None if _is(config, index, "sliding_attention") else None


def _is(config: Any, index: int, layer_type: str) -> bool:
    types = getattr(config, "layer_types", None) or ()
    return index < len(types) and types[index] == layer_type


def probe_layers(loaded: LoadedModel, head: Head) -> tuple[LayerGeometry, ...]:
    """Geometry of every layer on this rank, by index. Raises StartupError if it makes no sense."""
    recorder = _Recorder(loaded.adapter)
    kind = loaded.config.model_type
    try:
        logits = _run(loaded, head, recorder)
    except StartupError as error:
        raise StartupError(f"model_type {kind!r}: {error.message}") from error
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        reason = " ".join(str(error).split())[:200]
        raise StartupError(f"model_type {kind!r} is not supported: {reason}") from error
    count = int(loaded.text_config.num_hidden_layers)
    kinds = list(getattr(loaded.text_config, "layer_types", None) or [""] * count)
    without = PLAIN_TYPES | STATE_TYPES - {"hybrid"}
    expected = {number for number in range(count) if kinds[number] not in without}
    if not expected:
        raise StartupError(
            f"model_type {kind!r} is not supported: none of {count} decoder layers has attention, "
            "so there are no keys and values to cache"
        )
    if recorder.layers.keys() != expected:
        raise StartupError(
            f"model_type {kind!r} is not supported: {len(recorder.layers)} of {len(expected)} "
            "decoder layers use replaceable attention"
        )
    states = {shape.layer for shape in probe_states(loaded, head)}
    if states != {number for number in range(count) if kinds[number] in STATE_TYPES}:
        raise StartupError(
            f"model_type {kind!r} is not supported: layers {sorted(states)} keep a state, which is "
            "not what layer_types in config.json says"
        )
    assert logits.shape[0] == _NUM_TOKENS
    layers = [recorder.layers[number] for number in sorted(recorder.layers)]
    owners = [layer.layer for layer in layers if not layer.reads_only]
    return tuple(replace(layer, index=owners.index(layer.index)) for layer in layers)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The recurrent state of one sequence in one decoder layer.

    Attributes:
        parts: "conv" or "recurrent" → (shape without the sequences' dimension, dtype).
    """

    layer: int
    parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def size_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())


def probe_states(loaded: LoadedModel, head: Head) -> tuple[StateShape, ...]:
    """What transformers' own cache holds of the layers without attention after a few tokens;
    empty for families that have only attention."""
    if not loaded.adapter.has_state:
        return ()
    cache = DynamicCache(config=loaded.text_config)
    _run(loaded, head, _Recorder(loaded.adapter), cache)
    found = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
            parts = {
                name: (tuple(state.shape[1:]), state.dtype)
                for name, state in states.items()
                if state is not None
            }
            if parts:
                found.append(StateShape(number, parts))
    return tuple(found)


def _run(
    loaded: LoadedModel, head: Head, recorder: _Recorder, cache: DynamicCache | None = None
) -> torch.Tensor:
    """Logits of a few tokens, with the recorder in place of attention."""
    device = next(loaded.decoder.parameters()).device
    positions = torch.arange(_NUM_TOKENS, device=device)[None]
    if loaded.rope_axes:
        positions = positions.expand(loaded.rope_axes, 1, -1)
    for module in loaded.decoder.modules() if device.type == "meta" else ():
        # Which experts are chosen is not known there; what transformers computes without choosing
        # wraps the forward.
        forward = type(module).forward
        if type(module).__name__.endswith("Experts") and not hasattr(forward, "__wrapped__"):
            module.forward = _as_given
    with torch.inference_mode(), forward_context(recorder):
        ids = torch.zeros(_NUM_TOKENS, dtype=torch.long, device=device)
        output = loaded.decoder(
            inputs_embeds=loaded.embed_tokens(ids)[None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            **loaded.layer_inputs(ids),
        )
        return head.logits(output.last_hidden_state[0])


def _as_given(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states)


def meta_layers(path: str, dtype: str = "auto") -> tuple[LayerGeometry, ...]:
    """Geometry of every decoder layer on one device. Raises StartupError."""
    loaded = meta_model(path, dtype)
    return probe_layers(loaded, Head(loaded.model, loaded.core_name))
