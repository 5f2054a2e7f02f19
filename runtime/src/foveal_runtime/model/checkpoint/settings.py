"""Settings of config.json that say how transformers computes, or where parts come from.

Used by the loader. Published checkpoints carry settings of the machine that they were trained on;
what is not the model's own is put back, and what would be looked up elsewhere is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from foveal_runtime.plan.errors import StartupError

_ATTENTION = (None, "eager", "sdpa")
"""What needs no other package, nor kernels of a hub."""


def settle_part(config: Any) -> Any:
    """What is served of a model with several parts: Omni's thinker, which says text. What else
    speaks is not read, and what is said of the whole holds for it."""
    part = getattr(config, "thinker_config", None)
    if part is None:
        return config
    for name in ("dtype", "quantization_config"):
        if getattr(part, name, None) is None and hasattr(config, name):
            setattr(part, name, getattr(config, name))
    return part


def settle_outputs(config: Any) -> None:
    """Outputs as the runner reads them, by implementations that are there: attention of decoders
    is paged, and towers need none of those that a checkpoint was trained with."""
    for _, part in _parts_of("", config):
        part.return_dict = True
        part.output_hidden_states = False
        part.output_attentions = False
        if part._attn_implementation not in _ATTENTION:
            part._attn_implementation = None
        part._experts_implementation = None


def check_towers(path: str, config: Any) -> None:
    """Refuses towers of timm's that are not just named, in any part of a configuration: timm would
    ask a hub about "hf-hub:…", and read a file that an argument names."""
    for field, part in _parts_of("", config):
        for key in ("architecture", "backbone"):
            name = getattr(part, key, None)
            if isinstance(name, str) and ":" in name:
                raise StartupError(
                    f"model {path}: {field}{key} in config.json is {name!r}, which would be "
                    "looked up elsewhere; give the name that timm itself has for it"
                )
        for key, value in ((field and getattr(part, "model_args", None)) or {}).items():
            if not _names_nothing(value):
                raise StartupError(
                    f"model {path}: {field}model_args in config.json has {key!r}, which is not "
                    "supported, since it may name a file; numbers alone are; leave it out"
                )


def _names_nothing(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_names_nothing, value))
    return value is None or value == "" or isinstance(value, bool | int | float)


def _parts_of(field: str, config: Any) -> Iterator[tuple[str, Any]]:
    """The configuration and all in it, each with its field as a prefix ("vision_config.")."""
    yield field, config
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            yield from _parts_of(f"{field}{name}.", part)


def keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Parameters of a model without values get the type that transformers loads them in, where a
    family keeps some in float32 whatever the model's type is."""
    kept = "|".join(name.replace("*", ".*") for name in model._get_dtype_plan(dtype))
    for name, parameter in model.named_parameters():
        if kept and re.search(kept, name):
            parameter.data = parameter.data.float()
