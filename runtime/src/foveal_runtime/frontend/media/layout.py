"""Sample items of a processor, and the layout of images that come as encoder outputs.

Called by `processors` in media workers, once at start: the prompt around a sample image is the one
that embeddings of an image get, too. Never decodes a user's media.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from foveal_runtime.frontend.media.protocol import GRID, EmbedsLayout
from foveal_runtime.frontend.media.timed import Frames

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
    """Numbers of one encoder output, all levels (Qwen3-VL's deepstack) together."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    vision = getattr(config, "vision_config", None)
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return int(config.get_text_config().hidden_size) * levels
