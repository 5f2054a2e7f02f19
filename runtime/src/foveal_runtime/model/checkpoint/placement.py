"""Where a quantised checkpoint's layers belong in transformers' model.

Used while a model is built, before a weight is read: by transformers itself, through a quantiser
that is registered here, and by `meta_model` for plans. What a layer is stored as is read from the
headers of the weight files, so layers that a scheme leaves out (vision towers, heads) stay plain
modules; transformers' own renaming of weights tells which module they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear, order_of, scales_of
from foveal_runtime.model.checkpoint.experts import (
    ExpertLayer,
    QuantizedExperts,
    RepeatedExperts,
    find_layers,
    linear_of,
    opened,
    quantized_experts,
    why_unknown,
)
from foveal_runtime.model.checkpoint.quantized import (
    describe,
    layout_of,
    quantized_layers,
    refusal,
)
from foveal_runtime.model.checkpoint.weights import StoredTensor, stored_tensors

METHOD = "foveal-weight-only"
_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "U8": torch.uint8,
}


_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})


def quantization_of(config: Any) -> str:
    """The format of a checkpoint's weights in a few words, of its read configuration; "" = plain"""
    found = getattr(config, "quantization_config", None)
    return describe(found["scheme"]) if found else ""


class _Names:
    """What tensors of the files are called in the model, by transformers' own renaming."""

    def __init__(self, model: Any) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._prefix, self.plain = model.base_model_prefix, model.state_dict()

    def key(self, name: str, is_converted: bool = True) -> tuple[str, str | None]:
        """The name in the model, and the pattern of what converts it; None = it stays as it is."""
        found: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters * is_converted, self._prefix, self.plain
        )
        return found


def converted_names(model: Any, path: str) -> set[str]:
    """Tensors in the files of which transformers makes others while it loads them into `model`: it
    stacks experts, say."""
    names = _Names(model)
    return {name for name in stored_tensors(path) if names.key(name)[1] is not None}


def place_layers(model: Any, path: str, scheme: Mapping[str, Any]) -> None:
    """Puts a QuantizedLinear, its buffers on torch's meta device, where the checkpoint `path` has
    one, and QuantizedExperts, to be filled, where it has those. Raises UnsupportedQuantization for
    what cannot be computed."""
    names, quantised, tensors = _Names(model), quantized_layers(path), stored_tensors(path)
    plain = names.plain
    placed = _place_experts(model, path, scheme, names, quantised, tensors)
    tied = getattr(model, "all_tied_weights_keys", {})
    tied = {*tied, *tied.values()}
    for stored_name, stored in quantised.items():
        key, converter = names.key(f"{stored_name}.weight")
        if stored_name in placed or key not in plain:
            continue  # transformers does not load it either
        if converter is not None:
            raise refusal(path, f"{stored_name}, which transformers stacks with others")
        name = key.removesuffix(".weight")
        linear = model.get_submodule(name) if name != key else None
        if type(linear) is not nn.Linear or key in tied:
            kind = f"a {type(linear).__name__}" if linear else "one tensor of a larger module"
            what = "tied to another" if key in tied else kind
            raise refusal(path, f"{stored_name}, {what}, no linear layer of its own")
        layout, kept = layout_of(path, scheme, (stored_name, name), stored, linear)
        buffers = {
            suffix: torch.empty(stored[suffix].shape, dtype=_TYPES[stored[suffix].dtype],
                                device="meta") for suffix in kept
        }  # fmt: skip
        model.set_submodule(name, QuantizedLinear(linear, layout, buffers))
    for stored_name, one in tensors.items():
        if one.dtype in _PLAIN or stored_name.endswith((".weight", ".weight_packed", ".qweight")):
            continue
        key, _ = names.key(stored_name)
        if key in plain and plain[key].is_floating_point() and stored_name not in placed:
            # transformers would take the numbers without their scales.
            raise refusal(path, f"{stored_name}, {one.dtype} numbers outside a linear layer")


def _place_experts(
    model: Any, path: str, scheme: Mapping[str, Any], names: _Names,
    quantised: Mapping[str, Mapping[str, StoredTensor]], tensors: Mapping[str, StoredTensor],
) -> set[str]:  # fmt: skip
    """Returns what is placed: layers by their names in the files, stacked tensors by theirs."""

    def owner_of(name: str) -> tuple[str, nn.Module] | None:
        key, _ = names.key(name, is_converted=False)
        owner = key.rpartition(".")[0]
        return (owner, model.get_submodule(owner)) if key in names.plain else None

    places, found = set[str](), dict[str, list[Any]]()
    for stored_name, owner, *layer in find_layers(tensors, quantised, owner_of):
        found.setdefault(owner, []).append((stored_name, *layer))
        places.add(stored_name)
    for owner, layers in found.items():
        experts = model.get_submodule(owner)
        have: dict[int, set[str]] = {}
        for _, number, name, _ in layers:
            have.setdefault(number, set()).add(name)
        if why := why_unknown(experts, have):
            raise refusal(path, f"{describe(scheme)}, {owner}, {why}")
        made, linears = [], {name: linear_of(experts, name) for name in have[0]}
        for stored_name, number, name, slices in layers:
            where, linear = (stored_name, f"{owner}.{number}.{name}"), linears[name]
            stored = {suffix: one.header for suffix, one in slices.items()}
            layout, kept = layout_of(path, scheme, where, stored, linear)
            bias = getattr(experts, f"{name}_bias", None)
            source = None if bias is None else (f"{stored_name}_bias", bias.dtype)
            there = tensors.get(source[0]) if source else None
            fits = there and there.dtype in _TYPES and there.shape == getattr(bias, "shape", ())
            if source and not fits:
                what = f"{there.dtype} {list(there.shape)}" if there else "missing"
                raise refusal(path, f"{describe(scheme)}, {source[0]}: {what}")
            kept_slices = {suffix: slices[suffix] for suffix in kept}
            made.append(ExpertLayer(number, name, linear, layout, kept_slices, source))
        kind = QuantizedExperts if hasattr(experts, "_apply_gate") else RepeatedExperts
        model.set_submodule(owner, kind(experts, made))
        # Qwen3-Omni's block would draw its experts' initial values itself.
        model.get_submodule(owner.rpartition(".")[0])._is_hf_initialized = True
    if found:  # they are read here: transformers need not list them as unknown to it
        model._keys_to_ignore_on_load_unexpected.add(r"\.experts\.")
    return places


def fill_experts(model: nn.Module, path: str) -> None:
    """Gives experts their layers once transformers has loaded the rest; on its meta device where
    the model is there."""
    waiting = quantized_experts(model)
    if waiting and next(model.parameters()).is_meta:
        tensors = stored_tensors(path)
        for one in waiting:
            one.fill(lambda name: torch.empty(
                tensors[name].shape, dtype=_TYPES[tensors[name].dtype], device="meta"
            ))  # fmt: skip
    elif waiting:
        with opened(path) as read:
            for one in waiting:
                one.fill(read)


def settle_orders(model: nn.Module, path: str, scheme: Mapping[str, Any]) -> None:
    """Once weights are there: compressed-tensors writes groups of -1 for inputs that are in their
    order. Raises UnsupportedQuantization for groups that have no scales."""
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear) or (order := order_of(layer)) is None:
            continue
        least, most = (int(one) for one in order.aminmax())
        count = scales_of(layer, 0, 1).shape[1]
        if least < 0 and hasattr(layer, "weight_g_idx"):
            del layer.weight_g_idx
        elif least < 0 or most >= count:
            what = f"{name}, whose inputs are in groups {least} to {most}, with {count} scales"
            raise refusal(path, f"{describe(scheme)}, {what}")


@register_quantization_config(METHOD)
class _Config(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(self, path: str = "", scheme: Any = None, **_: object) -> None:
        self.quant_method = METHOD
        self.path = path
        self.scheme = scheme or {}


@register_quantizer(METHOD)
class _Placement(HfQuantizer):  # type: ignore[misc]
    """Gives transformers' loading the modules; it then reads their buffers like any weight."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: object) -> Any:
        config: Any = self.quantization_config
        place_layers(model, config.path, config.scheme)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: object) -> Any:
        config: Any = self.quantization_config
        fill_experts(model, config.path)
        settle_orders(model, config.path, config.scheme)
        self.remove_quantization_config(model)
        return model
