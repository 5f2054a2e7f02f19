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
from foveal_runtime.model.checkpoint.quantized import (
    describe,
    layout_of,
    quantized_layers,
    refusal,
)
from foveal_runtime.model.checkpoint.weights import stored_tensors

METHOD = "foveal-weight-only"
_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
}


_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})


def quantization_of(config: Any) -> str:
    """The format of a checkpoint's weights in a few words, of its read configuration; "" = plain"""
    found = getattr(config, "quantization_config", None)
    return describe(found["scheme"]) if found else ""


def place_layers(model: Any, path: str, scheme: Mapping[str, Any]) -> None:
    """Puts a QuantizedLinear, its buffers on torch's meta device, where the checkpoint `path` has
    one. Raises UnsupportedQuantization for a layer that cannot be computed."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    plain = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", {})
    tied = {*tied, *tied.values()}
    for stored_name, stored in quantized_layers(path).items():
        key, converter = rename_source_key(
            f"{stored_name}.weight", renamings, converters, model.base_model_prefix, plain
        )
        if converter is not None:
            raise refusal(path, f"{stored_name}, which transformers stacks with others")
        if key not in plain:
            continue  # transformers does not load it either
        name = key.removesuffix(".weight")
        linear = model.get_submodule(name)
        if type(linear) is not nn.Linear or key in tied:
            what = "tied to another" if key in tied else f"a {type(linear).__name__}"
            raise refusal(path, f"{stored_name}, {what}, no linear layer of its own")
        layout, kept = layout_of(path, scheme, (stored_name, name), stored, linear)
        buffers = {
            suffix: torch.empty(stored[suffix].shape, dtype=_TYPES[stored[suffix].dtype],
                                device="meta") for suffix in kept
        }  # fmt: skip
        model.set_submodule(name, QuantizedLinear(linear, layout, buffers))
    for stored_name, one in stored_tensors(path).items():
        if one.dtype in _PLAIN or stored_name.endswith((".weight", ".weight_packed", ".qweight")):
            continue
        key, _ = rename_source_key(
            stored_name, renamings, converters, model.base_model_prefix, plain
        )
        if key in plain and plain[key].is_floating_point():
            # transformers would take the numbers without their scales.
            raise refusal(path, f"{stored_name}, {one.dtype} numbers outside a linear layer")


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
        settle_orders(model, config.path, config.scheme)
        self.remove_quantization_config(model)
        return model
