"""From a drawn image to the model's pixels, on the same road as the processor takes.

Used by the training scripts only; `train.py` checks before its first step that both roads agree.
"""

from __future__ import annotations

import io
import random

import numpy as np
import torch
from blueprint import SIDE
from PIL import Image
from scenes import to_bytes
from transformers import LlavaProcessor

JPEG_SHARE = 0.15


def through_jpeg(rng: random.Random, image: Image.Image) -> Image.Image:
    """The image, now and then with the blemishes of a JPEG."""
    if rng.random() < JPEG_SHARE:
        return Image.open(io.BytesIO(to_bytes(image, "JPEG", rng.randint(60, 95))))
    return image


def squeeze(image: Image.Image) -> np.ndarray:
    """The image's bytes at the model's size, resampled as the processor does it."""
    return np.array(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def normalise(pixels: torch.Tensor, processor: LlavaProcessor) -> torch.Tensor:
    """Bytes (image, row, column, colour) to what the processor would hand to the model."""
    mean = torch.tensor(processor.image_processor.image_mean)
    deviation = torch.tensor(processor.image_processor.image_std)
    return ((pixels.float() / 255 - mean) / deviation).permute(0, 3, 1, 2).contiguous()
