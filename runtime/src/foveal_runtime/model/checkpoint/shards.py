"""The part of a model's parameters that tensor parallelism leaves whole on every rank.

Used by the profiler on a model without weights. Follows the plan by which transformers shards the
model as an engine's ranks load it: encoders, norms and some biases have no rule there.
"""

from __future__ import annotations

import re
from typing import Any

from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear

_SHARDED = ("colwise", "rowwise", "packed", "embedding")
"""Prefixes of the styles that cut a module's parameters; the others only move activations."""


def parameter_bytes(model: Any) -> int:
    """Bytes of all parameters, tied ones once, and of quantised weights as they are stored."""
    quantized = (one for one in model.modules() if isinstance(one, QuantizedLinear))
    held = [*model.parameters(), *(buffer for one in quantized for buffer in one.buffers())]
    return sum(one.numel() * one.element_size() for one in held)


def replicated_bytes(model: Any) -> int:
    """Bytes of the parameters that every rank holds in full; all of them without a plan."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    return sum(
        one.numel() * one.element_size()
        for name, one in model.named_parameters()
        if not _is_sharded(name, plan)
    )


def _is_sharded(name: str, plan: dict[str, str]) -> bool:
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    owner, _, last = generic.rpartition(".")
    style = plan.get(generic) or plan.get(owner) or ""
    return style.startswith(_SHARDED) and not (style.startswith("rowwise") and last == "bias")
