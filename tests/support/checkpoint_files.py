"""Checkpoints that nobody can load but every check accepts, and the mistakes that they may have."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec

from foveal_runtime.plan.profile import ItemProfile, ModelProfile

GIB = 1024**3
CONFIG = {"model_type": "qwen3_vl", "vision_config": {}, "text_config": {}}
PROFILE = ModelProfile(
    max_model_len=32768,
    weight_bytes=15 * GIB,
    kv_bytes_per_token=56 * 1024,
    embed_width=3584,
    items={"image": ItemProfile(num_tokens=4096, num_embeds=4096, processed_bytes=40 << 20)},
)


def safetensors(num_bytes: int = 16, kept: int | None = None, dtype: str = "BF16") -> bytes:
    header = {"w": {"dtype": dtype, "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes if kept is None else kept)


def checkpoint(folder: Path, config: Any = CONFIG, **files: bytes | str | None) -> Path:
    """A directory that passes every check; `files` replace or (None) remove some."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, bytes | str | None] = {
        "config.json": json.dumps(config), "tokenizer.json": "{}",
        "preprocessor_config.json": "{}", "model.safetensors": safetensors(),
        **{name.replace("__", "-").replace("_json", ".json"): data for name, data in files.items()},
    }  # fmt: skip
    for name, data in wanted.items():
        if data is not None:
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def write_profile(folder: Path) -> str:
    """PROFILE as a file for --profile."""
    (folder / "profile.json").write_bytes(msgspec.json.encode(PROFILE))
    return str(folder / "profile.json")
