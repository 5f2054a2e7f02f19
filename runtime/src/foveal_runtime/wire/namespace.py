"""The namespace of a model: what frontends and engines must agree on before they talk.

Sixteen bytes in every HELLO, computed by both sides from the model directory alone, so that a
frontend never feeds one model's images to another. Called once per process start.

With `revision` set the operator vouches for the content; otherwise it is derived: configuration and
tokenizer files whole, weights by name, size and sampled blocks (reading 100 GB at start would cost
minutes and tell little more).
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from foveal_runtime.plan.errors import StartupError

_WHOLE = {".json", ".model", ".jinja", ".txt"}
_WEIGHTS = {".safetensors", ".bin", ".pt"}
_MAX_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 64 << 10
_NUM_BLOCKS = 16


def model_namespace(path: str | Path, revision: str = "") -> bytes:
    """16 bytes that differ when weights, configuration, tokenizer or processor differ.

    Raises StartupError when the directory cannot be read.
    """
    root = Path(path)
    hasher = blake3(b"foveal.model\x00" + revision.encode() + b"\x00")
    try:
        files = sorted(p for p in root.iterdir() if p.is_file())
        if not any(p.name == "config.json" for p in files):
            raise StartupError(f"model directory {path} has no config.json")
        for file in files:
            _update(hasher, file, with_weights=not revision)
    except OSError as error:
        raise StartupError(f"cannot read model directory {path}: {error.strerror}") from error
    return hasher.digest(length=16)


def _update(hasher: blake3, file: Path, *, with_weights: bool) -> None:
    size = file.stat().st_size
    if file.suffix in _WHOLE and size <= _MAX_WHOLE_BYTES:
        blocks = [file.read_bytes()]
    elif file.suffix in _WEIGHTS and with_weights:
        with file.open("rb") as handle:
            blocks = []
            for index in range(_NUM_BLOCKS):
                handle.seek(max(0, size - _BLOCK_BYTES) * index // (_NUM_BLOCKS - 1))
                blocks.append(handle.read(_BLOCK_BYTES))
    else:
        return
    hasher.update(f"{file.name}\x00{size}\x00".encode())
    for block in blocks:
        hasher.update(len(block).to_bytes(8, "little") + block)
