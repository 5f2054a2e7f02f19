"""LoRA adapters as documents and requests name them.

Used by every package: documents say where an adapter lies, requests and cache keys what it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from foveal_runtime.plan.errors import StartupError

MAX_NAME_CHARS = 256
LORA_WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 512
"""The largest that other servers take, too; common adapters have 8 to 64."""
TERM_BYTES = 32 << 20
"""What a layer computes of adapters' terms at once: of as many rows as fit, and at least of one."""
_CONFIG, _PICKLE = "adapter_config.json", "adapter_model.bin"
_CHANGES_MORE = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "rank_pattern": "ranks that differ by layer (rank_pattern)",
    "alpha_pattern": "scales that differ by layer (alpha_pattern)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "parameters outside linear layers (target_parameters)",
    "trainable_token_indices": "token embeddings (trainable_token_indices)",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
}
_OWN_BASES = ("pissa", "olora", "loftq", "corda")
"""Ways of beginning that change the base weights, which the adapter then belongs to."""
NOT_LOADED = "no adapter of this name is loaded"
"""How an engine's answer to an order to unload ends where there is nothing to do."""


class LoraSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter to load: the name that requests give as `model`, and its directory."""

    name: str
    path: str


class LoraRef(msgspec.Struct, frozen=True, array_like=True):
    """A loaded adapter: its name, and a digest of its files, which is its identity in every cache
    key: another adapter under the same name never finds what this one computed."""

    name: str
    digest: bytes


def lora_sources(texts: Iterable[str]) -> tuple[LoraSource, ...]:
    """Of NAME=DIRECTORY each. Raises StartupError."""
    found = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise StartupError(f"--lora {text}: write NAME=DIRECTORY")
        found.append(LoraSource(name, str(Path(path).resolve())))
    return tuple(found)


def check_lora_names(names: list[str], served_name: str = "") -> None:
    """Raises StartupError for a name that no request could give, or that is taken. Engines leave
    out `served_name`: only frontends know what clients call the model."""
    for number, name in enumerate(names):
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            raise StartupError(f"LoRA adapter {name!r}: a name has 1 to 256 printable characters")
        if name == served_name:
            raise StartupError(f"LoRA adapter {name!r}: the served model has this name already")
        if name in names[:number]:
            raise StartupError(f"LoRA adapter {name!r}: the name is given twice")


def read_adapter_config(source: LoraSource) -> dict[str, Any]:
    """adapter_config.json, which must ask for nothing but LoRA. Raises StartupError."""
    root = Path(source.path)
    try:
        config = json.loads((root / _CONFIG).read_bytes())
    except OSError as error:
        raise adapter_refusal(source, f"{source.path}/{_CONFIG}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise adapter_refusal(source, f"{_CONFIG} is not valid JSON") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise adapter_refusal(source, f"{_CONFIG} does not say peft_type LORA")
    for key, what in _CHANGES_MORE.items():
        if config.get(key):
            raise adapter_refusal(source, f"{_CONFIG} asks for {what}: not supported")
    if config.get("bias", "none") != "none":
        raise adapter_refusal(source, f"bias {config['bias']!r} is not supported: train with none")
    if str(config.get("init_lora_weights")).lower().startswith(_OWN_BASES):
        raise adapter_refusal(
            source, f"init_lora_weights {config['init_lora_weights']!r} changes the base weights; "
            "convert it to plain LoRA as it is saved"
        )  # fmt: skip
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 0 < rank <= MAX_RANK:
        raise adapter_refusal(source, f"rank {rank} is not between 1 and {MAX_RANK}")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise adapter_refusal(source, "lora_alpha is no finite number")
    if not (root / LORA_WEIGHTS).is_file():
        if (root / _PICKLE).is_file():
            raise adapter_refusal(
                source, f"its weights are only there as a pickle ({_PICKLE}), which can run code "
                "when read; convert them to safetensors"
            )  # fmt: skip
        raise adapter_refusal(source, f"{source.path} has no {LORA_WEIGHTS}")
    return config


def adapter_refusal(source: LoraSource, reason: str) -> StartupError:
    return StartupError(f"LoRA adapter {source.name!r}: {reason}")
