"""Images by number, as data URLs: another number, another image; the same in every run."""

from __future__ import annotations

import base64
import io
import random
from typing import NamedTuple

from PIL import Image, ImageChops


class ImageKind(NamedTuple):
    """How an image is made: sides in pixels, "png" or "jpeg"."""

    width: int = 336
    height: int = 336
    format: str = "png"

    @classmethod
    def parse(cls, text: str) -> ImageKind:
        """From "336x336" or "1024x1024.jpeg". Raises ValueError."""
        size, _, form = text.partition(".")
        width, _, height = size.partition("x")
        if form not in ("", "png", "jpeg"):
            raise ValueError(f"{text!r}: the format is png or jpeg")
        if not (
            width.isdecimal() and height.isdecimal() and 0 < int(width) * int(height) < 1 << 28
        ):
            raise ValueError(f"{text!r}: write 336x336 or 1024x1024.jpeg")
        return cls(int(width), int(height), form or "png")


def draw(number: int, kind: ImageKind) -> bytes:
    """The file. A gradient under five bits of noise: as hard to compress as a photograph, so a
    PNG of 336 x 336 has about 240 kB (320 kB in base64)."""
    rng = random.Random(f"image {number}")
    size = (kind.width, kind.height)
    noise = Image.frombytes("RGB", size, rng.randbytes(3 * kind.width * kind.height))
    noise = noise.point([value >> 3 for value in range(256)] * 3)
    shades = [
        Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(size)
        for _ in range(3)
    ]
    base = Image.merge("RGB", shades).point([value * 7 // 8 // 8 * 8 for value in range(256)] * 3)
    file = io.BytesIO()
    ImageChops.add(base, noise).save(file, kind.format, compress_level=1)
    return file.getvalue()


def data_url(number: int, kind: ImageKind) -> str:
    return f"data:image/{kind.format};base64," + base64.b64encode(draw(number, kind)).decode()
