"""Samples that show what a processor does, and what is learnt from them, once at start.

Called by `processors` in media workers; never decodes a user's media. The prompt around a sample
image is the one that embeddings of an image get, too. Images that hold every byte value in every
channel tell which fields are bytes in disguise, which `wire.item` stores short: nothing here knows
any processor's arithmetic, and what is concluded is proven again for every item that is packed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from foveal_runtime.frontend.media.protocol import GRID, EmbedsLayout
from foveal_runtime.frontend.media.timed import Frames
from foveal_runtime.wire.item import LEVELS, Codebook, Floats, Layout, inner_of

Sample = tuple[Sequence[int], Sequence[tuple[int, int]], Mapping[str, Any]]
"""Of an image: its replacement ids, the (start, length) runs of them that take encoder outputs, and
the processor's output."""
SHAPES = ((192, 256), (768, 1024), (192, 1024))
"""Height and width of images that families which cut images by their size cut differently."""


def sample(modality: int, sampling_rate: int) -> Any:
    """A deterministic item, large enough for any processor's smallest size."""
    if modality == 0:
        return image(192, 256)
    if modality == 1:
        return Frames(np.stack([np.asarray(image(192, 256))] * 8), list(range(8)), 8, 2.0)
    seconds = np.arange(sampling_rate or 16000, dtype=np.float32) / (sampling_rate or 16000)
    return np.sin(2 * np.pi * 440 * seconds).astype(np.float32) * 0.5


def embeds_layout(model_path: str, samples: Sequence[Sample]) -> EmbedsLayout:
    """From images of `SHAPES`, the first of which gives the layout: all must have the same."""
    for _, runs, _ in samples:
        if len(runs) != 1:
            reason = f"its images take {len(runs)} separate stretches of a prompt, by their size"
            return EmbedsLayout(reason=reason)
    neighbours = {(tuple(ids[:at]), tuple(ids[at + n :])) for ids, ((at, n),), _ in samples}
    if len(neighbours) != 1:
        return EmbedsLayout(reason="the tokens beside an image tell its size")
    ((head, tail),) = neighbours
    _, ((_, length),), output = samples[0]
    merge = 0
    if output.get(GRID) is not None:
        num_patches = int(np.prod(np.asarray(output[GRID]).reshape(-1)))
        merge = math.isqrt(num_patches // length)
        if merge * merge * length != num_patches:
            return EmbedsLayout(reason=f"its {GRID} does not tell the number of encoder outputs")
    try:
        width = _width(model_path)
    except Exception as error:  # a foreign configuration raises anything; images are served still
        return EmbedsLayout(reason=f"the width of its encoder outputs is not known: {error}"[:200])
    return EmbedsLayout(
        width=width,
        head=head,
        tail=tail,
        merge=merge,
    )


def image(height: int, width: int) -> Image.Image:
    """A deterministic one."""
    ramp = (np.arange(height * width * 3, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)
    return Image.fromarray(ramp.reshape(height, width, 3), "RGB")


def _width(model_path: str) -> int:
    """Numbers of one encoder output, all levels (Qwen3-VL's deepstack, Granite 4's) together."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    config = getattr(config, "thinker_config", config)
    vision = getattr(config, "vision_config", None)
    fields = ((vision, "deepstack_visual_indexes"), (config, "deepstack_layer_map"),
              (config, "spatial_target_layers"))  # fmt: skip
    levels = 1 + sum(len(getattr(part, name, None) or ()) for part, name in fields)
    return int(config.get_text_config().hidden_size) * levels


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


def heard_samples(
    process: Callable[[np.ndarray[Any, Any]], Fields], counts: Sequence[int], rate: int
) -> int:
    """The first of `counts` samples beyond which audio changes nothing: a processor cuts off what
    is longer in silence. 0 where it takes all. `process` gives its fields of some audio."""
    for count in counts:
        quiet = np.zeros(count + rate, np.float32)
        loud = np.concatenate([quiet[:count], sample(2, rate)])
        try:
            one, other = process(quiet), process(loud)
        except Exception as error:  # it raises anything, and then takes no such audio at all
            log.warning("audio of %d samples: %s: %s", count, type(error).__name__, error)
            continue
        if all(np.array_equal(one[name][1], other[name][1]) for name in one):
            return count
    return 0


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
