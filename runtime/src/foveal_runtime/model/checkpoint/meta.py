"""A model's shape without its weights: built on torch's meta device from config.json alone.

Used before anything is loaded: to refuse a number of ranks, and by the profiler. Costs a fraction
of a second and no memory, whatever the size of the model.
"""

from __future__ import annotations

import torch

from foveal_runtime.model.attention import LayerGeometry
from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.checkpoint.loader import (
    DTYPES,
    LoadedModel,
    adapter_for,
    check_class,
    class_for,
    prepare,
    read_config,
)
from foveal_runtime.model.checkpoint.placement import place_layers
from foveal_runtime.model.checkpoint.probe import probe_layers


def meta_model(path: str, dtype: str = "auto") -> LoadedModel:
    """The checkpoint's model with parameters that have shapes and no values.

    Raises StartupError for models that could not be loaded either.
    """
    config = read_config(path)
    model_class = class_for(config)
    check_class(config, model_class)
    adapter = adapter_for(config)
    kind = DTYPES.get(dtype) or _config_dtype(config)
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=kind)
        if quantized := getattr(config, "quantization_config", None):
            place_layers(model, path, quantized["scheme"])
    return prepare(model.eval().requires_grad_(False), adapter)


def meta_layers(path: str, dtype: str = "auto") -> tuple[LayerGeometry, ...]:
    """Geometry of every decoder layer on one device. Raises StartupError."""
    loaded = meta_model(path, dtype)
    return probe_layers(loaded, Head(loaded.model, loaded.core_name))


def _config_dtype(config: object) -> torch.dtype:
    for one in (config, config.get_text_config()):  # type: ignore[attr-defined]
        kind = getattr(one, "dtype", None)
        if isinstance(kind, torch.dtype):
            return kind
    return torch.float32
