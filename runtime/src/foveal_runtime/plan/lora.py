"""LoRA adapters as documents and requests name them.

Used by every package: documents say where an adapter lies, requests and cache keys what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from foveal_runtime.plan.errors import StartupError

MAX_NAME_CHARS = 256
LORA_WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 512
"""The largest that other servers take, too; common adapters have 8 to 64."""
TERM_BYTES = 32 << 20
"""What a layer computes of adapters' terms at once: of as many rows as fit, and at least of one."""
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
