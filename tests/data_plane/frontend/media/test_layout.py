"""Images whose channels stay together while the library processes them, bit by bit as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

from foveal_runtime.frontend.media.layout import keep_channels_together

RNG = np.random.default_rng(24)


class Holder:
    """A processor, as far as its image processor goes."""

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(RNG.integers(0, 256, shape, np.uint8))


KINDS = [
    hf.CLIPImageProcessor(size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}),
    hf.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 64, "width": 64}),
    hf.CLIPImageProcessor(do_resize=False, crop_size={"height": 32, "width": 32}),
    hf.SiglipImageProcessor(size={"height": 56, "width": 40}),
    hf.ViTImageProcessor(size={"height": 32, "width": 32}, do_normalize=False),
]


@pytest.mark.parametrize("plain", KINDS, ids=lambda kind: type(kind).__name__)
def test_tensors_are_those_of_the_library(plain: Any) -> None:
    kept = type(plain)(**plain.to_dict())
    keep_channels_together(Holder(kept))
    assert type(kept) is not type(plain)
    assert kept.to_json_string() == plain.to_json_string()
    images = [picture(int(w), int(h)) for w, h in RNG.integers(3, 200, (60, 2))]
    images += [picture(3, 50), picture(50, 3), picture(1, 1), picture(33, 20, "L")]
    for image in images:
        expected, found = (
            one(images=[image], return_tensors="pt")["pixel_values"] for one in (plain, kept)
        )
        assert torch.equal(found, expected), image.size


def test_processors_with_steps_of_their_own_are_left_alone() -> None:
    for own in (hf.Qwen2VLImageProcessor(), hf.Idefics3ImageProcessor(), None):
        kind = type(own)
        keep_channels_together(Holder(own))
        assert type(own) is kind
    keep_channels_together(object())
