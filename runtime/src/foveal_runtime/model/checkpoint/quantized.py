"""The quantisation schemes of checkpoints, and the refusal of those that no code here can run.

Called by the loader right after config.json is read and before any weight is, so the profile, the
plan that needs one and the engine give the same answer. Without this check transformers widens some
formats silently (an FP8 model takes twice the bytes that its files have) and fails in others with
an ImportError in the middle of loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from foveal_runtime.model.checkpoint.weights import stored_dtypes
from foveal_runtime.plan.errors import StartupError

LOADERS: Mapping[str, Callable[..., Any]] = {}
"""quant_method → what loads it. A method that is not here is refused."""

_SIDE_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""Files beside config.json that say the same for producers that do not write into it."""
_PACKED_DTYPES = ("F8_", "F4", "F6_")
"""Prefixes of the tensor types that only quantised weights have."""


class UnsupportedQuantization(StartupError):
    """The checkpoint's weights are quantised in a format that cannot be run."""

    code = "unsupported_quantization"


def check_quantization(path: str, config: Any) -> None:
    """Raises UnsupportedQuantization, in one line that names the format, unless a loader has it.

    Tensor types in the headers of the weight files count as well: quantised ones that config.json
    is silent about would be widened as they are loaded.
    """
    declared = list(_schemes(path, config))
    for scheme in declared:
        if method_of(scheme) not in LOADERS:
            raise _refusal(path, describe(scheme))
    if declared or not any(Path(path).glob("*.safetensors")):
        return
    found = sorted(dtype for dtype in stored_dtypes(path) if dtype.startswith(_PACKED_DTYPES))
    if found:
        raise _refusal(path, f"{', '.join(found)} tensors that config.json does not explain")


def _refusal(path: str, what: str) -> UnsupportedQuantization:
    known = ", ".join(sorted(LOADERS))
    instead = f"; supported are {known} and" if known else "; use"
    return UnsupportedQuantization(
        f"model {path}: weights are quantised ({what}), which is not supported{instead} the "
        "checkpoint with float32, bfloat16 or float16 weights"
    )


def _schemes(path: str, config: Any) -> Iterator[dict[str, Any]]:
    """Every scheme that the checkpoint declares: of the model, of its parts, in files beside."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            scheme = getattr(part, key, None)
            if scheme:
                yield scheme if isinstance(scheme, dict) else scheme.to_dict()
    for name, method in _SIDE_FILES.items():
        file = Path(path) / name
        if not file.is_file():
            continue
        try:
            found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            found = {}
        yield {"quant_method": method, **found.get("quantization", found)}


def method_of(scheme: Mapping[str, Any]) -> str:
    """The scheme's quant_method, under the name that the field uses."""
    method = scheme.get("quant_method")
    if method is None:
        flags = ("load_in_4bit", "load_in_8bit")
        method = "bitsandbytes" if any(scheme.get(flag) for flag in flags) else "unknown method"
    name = str(getattr(method, "value", method))
    return "bitsandbytes" if name.startswith("bitsandbytes") else name


def describe(scheme: Mapping[str, Any]) -> str:
    """The format in a few words, e.g. "compressed-tensors, pack-quantized, int4, groups of 128"."""
    words = [method_of(scheme)]
    groups = scheme.get("config_groups")
    weights: Mapping[str, Any] = scheme
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights = (first.get("weights") if isinstance(first, Mapping) else None) or {}
    for name in ("format", "quant_algo", "bnb_4bit_quant_type"):
        if isinstance(scheme.get(name), str):
            words.append(scheme[name])
    bits = weights.get("num_bits") or weights.get("bits")
    if isinstance(bits, int):
        words.append(f"{weights.get('type', 'int')}{bits}")
    elif scheme.get("load_in_8bit"):
        words.append("int8")
    size = weights.get("group_size")
    if isinstance(size, int) and size > 0:
        words.append(f"groups of {size}")
    block = scheme.get("weight_block_size")
    if isinstance(block, list | tuple):
        words.append(f"blocks of {'x'.join(map(str, block))}")
    return ", ".join(words)
