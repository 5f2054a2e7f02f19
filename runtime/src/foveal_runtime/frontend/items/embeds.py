"""Images that come as encoder outputs: from a client's safetensors file to an item.

Called by input_processor where a request has an `image_embeds` part. The file is data and nothing
else (no pickle), and every number of it is checked against the model before an engine sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import safetensors

from foveal_runtime.frontend.media.protocol import GRID, ProcessorInfo
from foveal_runtime.plan.errors import MediaInvalid, Unsupported
from foveal_runtime.wire.item import EMBEDS, pack_item

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PICKLES = (b"PK\x03\x04", b"\x80")
_MAX_DIMENSIONS = 3
_ROWS = 256
MAX_GRID_SIDE = 1 << 15


def embeds_item(data: bytes | memoryview, info: ProcessorInfo) -> bytes:
    """The serialised item (`wire.item`) of a file with the tensors `image_embeds` (outputs, width)
    and, for models that place images by their grid, `image_grid_thw` (3) or (1, 3).

    Raises MediaInvalid that says what is wrong, Unsupported for a model that takes none.
    """
    placeholder, layout = info.placeholder(0), info.embeds
    if placeholder is None or layout is None or layout.reason:
        reason = f": {layout.reason}" if layout is not None and layout.reason else ""
        raise Unsupported(f"this model takes no images as embeddings{reason}")
    tensors = _read(bytes(data))
    unknown = sorted(tensors.keys() - {EMBEDS, GRID})
    if unknown or EMBEDS not in tensors:
        what = f"there is {unknown[0]!r}" if unknown else "it is missing"
        raise MediaInvalid(f"the file must hold the tensor {EMBEDS} and, at most, {GRID}; {what}")
    kind, rows = tensors[EMBEDS]
    if kind not in _DTYPES:
        raise MediaInvalid(f"{EMBEDS} is {kind}; send one of {', '.join(_DTYPES)}")
    if rows.ndim != 2 or rows.shape[1] != layout.width or not len(rows):
        raise MediaInvalid(
            f"{EMBEDS} has the shape {list(rows.shape)}; this model takes [outputs, {layout.width}]"
        )
    if not _is_finite(kind, rows):
        raise MediaInvalid(f"{EMBEDS} holds a number that is not finite")
    fields = {EMBEDS: (_DTYPES[kind], rows[None])}
    if layout.merge:
        grid = _grid(tensors, len(rows), layout.merge)
        fields[GRID] = ("int64", np.array([grid], np.int64))
    start, token = len(layout.head), placeholder.embed_token_id
    replacement = (*layout.head, *[token] * len(rows), *layout.tail)
    return pack_item(0, replacement, ((start, len(rows)),), fields)


def _read(data: bytes) -> dict[str, tuple[str, np.ndarray]]:
    """Name → (dtype as the format spells it, array); bfloat16 as its bits."""
    if data.startswith(_PICKLES):
        raise MediaInvalid(
            "this looks like a file of torch.save, which is a pickle and is never read: send a "
            "safetensors file"
        )
    numbers: Mapping[str, str] = {
        "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    }  # fmt: skip
    tensors = {}
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        for name, tensor in found:
            kind, shape = str(tensor["dtype"]), tensor["shape"]
            if len(shape) > _MAX_DIMENSIONS:
                raise MediaInvalid(
                    f"{name!r:.80} has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are read"
                )
            array = np.frombuffer(tensor["data"], numbers.get(kind, "u1"))
            tensors[str(name)] = kind, array.reshape(shape) if kind in numbers else array
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise MediaInvalid(f"not a safetensors file: {error}") from error
    return tensors


def _is_finite(kind: str, rows: np.ndarray) -> bool:
    """A part at a time: the whole would take as much memory again."""
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        bad = (part & 0x7F80) == 0x7F80 if kind == "BF16" else ~np.isfinite(part)
        if bad.any():
            return False
    return True


def _grid(tensors: Mapping[str, tuple[str, np.ndarray]], num_rows: int, merge: int) -> list[int]:
    """Time, height and width in patches, which must make `num_rows` outputs."""
    if GRID not in tensors:
        raise MediaInvalid(f"this model places images by {GRID}, which the file lacks")
    kind, array = tensors[GRID]
    grid: Sequence[int] = array.reshape(-1).tolist() if kind in ("I64", "I32") else ()
    if len(grid) != 3 or not all(0 < side <= MAX_GRID_SIDE for side in grid):
        raise MediaInvalid(f"{GRID} must be three whole numbers from 1 to {MAX_GRID_SIDE}")
    if grid[1] % merge or grid[2] % merge or math.prod(grid) != num_rows * merge**2:
        raise MediaInvalid(
            f"{GRID} {list(grid)} does not make {num_rows} outputs; {merge} x {merge} patches make "
            "one, so height and width must be multiples of that"
        )
    return list(grid)
