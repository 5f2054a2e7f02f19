"""Finds out which fields of a processor are bytes in disguise: `wire.palette` stores those short.

Called by `processors` in media workers, once at start, with the processor itself: it shows images
that hold every byte value in every channel and looks at what comes out. Nothing here knows any
processor's arithmetic; what it concludes is proven again for every item that is packed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from foveal_runtime.wire.palette import LEVELS, Codebook, Floats, Layout, inner_of

log = logging.getLogger(__name__)

Fields = Mapping[str, tuple[str, np.ndarray[Any, Any]]]

_CHANNELS = 3
_SIDE = 256
_SAMPLE = 1 << 16
_LAYOUTS: dict[Layout, int] = {"one": 1, "axis": _CHANNELS, "row": _CHANNELS, "last": _CHANNELS}


def probe_images(blocks: int) -> list[Image.Image]:
    """RGB images of `blocks` x `blocks` even squares; together each channel has every value.

    Squares survive whatever a processor does to the size: the middle of each stays even.
    """
    images = []
    for first in range(0, LEVELS, blocks * blocks):
        levels = np.arange(first, first + blocks * blocks).reshape(blocks, blocks)
        shifted = [(levels + shift) % LEVELS for shift in (0, 85, 170)]
        squares = np.stack(shifted, axis=-1).astype(np.uint8)
        size = _SIDE // blocks
        images.append(Image.fromarray(squares.repeat(size, 0).repeat(size, 1), "RGB"))
    return images


def learn(process: Callable[[Image.Image], Fields]) -> dict[str, Codebook]:
    """Field → codebook, for those float32 fields that have exactly 256 values a channel.

    `process` gives the processor's fields of one image; what it raises goes through.
    """
    for blocks in (8, 4):  # larger squares, and more images, where small ones blur into others
        levels = _levels(process, blocks)
        books: dict[str, Codebook] = {}
        for layout in _LAYOUTS:
            for (name, other), groups in sorted(levels.items()):
                is_whole = all(len(found) == LEVELS for found in groups)
                if other == layout and name not in books and is_whole:
                    tables = np.stack([_table(found) for found in groups])
                    books[name] = Codebook(layout, tables)
        if books or not levels:
            break
    log.info("fields stored as bytes: %s", ", ".join(sorted(books)) or "none")
    return books


def _levels(
    process: Callable[[Image.Image], Fields], blocks: int
) -> dict[tuple[str, Layout], list[set[int]]]:
    """The bit patterns of each channel, for every field and layout that a table could hold."""
    seen: dict[tuple[str, Layout], list[set[int]]] | None = None
    for image in probe_images(blocks):
        fields = {
            name: array
            for name, (dtype, array) in process(image).items()
            if dtype == "float32" and array.size >= LEVELS
        }
        if seen is None:
            pairs = [(name, layout) for name in fields for layout in _LAYOUTS]
            seen = {pair: [set() for _ in range(_LAYOUTS[pair[1]])] for pair in pairs}
        for name, layout in list(seen):
            if name not in fields or not _see(seen[name, layout], layout, fields[name]):
                del seen[name, layout]
        if not seen:
            break
    return seen or {}


def _see(groups: list[set[int]], layout: Layout, array: np.ndarray[Any, Any]) -> bool:
    """Adds the bit patterns of a sample of each channel; False when no table holds them."""
    inner = inner_of(layout, array.shape, len(groups))
    if not inner:
        return False
    bits = np.ascontiguousarray(array).view(np.uint32).reshape(-1, len(groups), inner)
    for index, levels in enumerate(groups):
        flat = bits[:, index].reshape(-1)
        if len(flat) > _SAMPLE:
            flat = flat[np.random.default_rng(0).integers(0, len(flat), _SAMPLE)]
        levels.update(np.unique(flat).tolist())
    return all(len(levels) <= LEVELS for levels in groups)


def _table(levels: set[int]) -> Floats:
    return np.sort(np.array(sorted(levels), np.uint32).view(np.float32))
