"""Encoded images → RGB, within limits that are checked on the header, before any pixel exists.

Runs in media workers only (a broken codec must not take the HTTP process along). Every input gives
the right image or a MediaInvalid / MediaTooLarge that names the value and the limit; never a
bare library error.

Decisions: the first frame of an animated GIF, WebP or PNG is the image; transparency is
composited on white; EXIF orientation is applied; 16-bit grey is scaled to 8 bits; CMYK, palette,
YCbCr and bilevel images are converted to RGB.
"""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import MediaInvalid, MediaTooLarge

Image.init()
FORMATS = tuple(
    name
    for name in ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
    if name in Image.OPEN
)
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")

# Our own limit is checked on the header; Pillow's would only warn up to twice its own.
Image.MAX_IMAGE_PIXELS = None


def decode_image(data: bytes | memoryview, limits: ModalityLimits) -> Image.Image:
    """The picture as RGB. Raises MediaInvalid or MediaTooLarge."""
    check_bytes(data, limits, "image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of damage and then raises or copes
            return _read(data, limits)
    except (MediaInvalid, MediaTooLarge):
        raise
    except UnidentifiedImageError as error:
        raise MediaInvalid(
            f"image cannot be read: not one of {', '.join(FORMATS)} ({describe(data)})"
        ) from error
    except MemoryError as error:
        raise MediaTooLarge("image needs more memory than a media worker has") from error
    except Exception as error:  # Pillow's plugins raise anything at all on damaged files
        raise MediaInvalid(f"image cannot be decoded: {_one_line(error)}") from error


def _read(data: bytes | memoryview, limits: ModalityLimits) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_pixels(image.width, image.height, limits)
        image.load()
        return shrunk(to_rgb(ImageOps.exif_transpose(image) or image), limits.resize_pixels)


def check_bytes(data: bytes | memoryview, limits: ModalityLimits, what: str) -> None:
    if len(data) > limits.max_bytes:
        raise MediaTooLarge(f"{what} has {len(data)} bytes, the limit is {limits.max_bytes}")
    if len(data) == 0:
        raise MediaInvalid(f"{what} is empty")


def check_pixels(width: int, height: int, limits: ModalityLimits) -> None:
    if width <= 0 or height <= 0:
        raise MediaInvalid(f"image has no pixels: {width}x{height}")
    if width * height > limits.max_pixels:
        raise MediaTooLarge(
            f"image is {width}x{height} = {width * height} pixels, the limit is {limits.max_pixels}"
        )


def shrunk(image: Image.Image, pixels: int) -> Image.Image:
    """The image with at most `pixels` pixels in its own proportions; as it is when 0 or small
    enough."""
    size = fitted(image.width, image.height, pixels)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def fitted(width: int, height: int, pixels: int) -> tuple[int, int]:
    """(width, height) of the largest size of the same proportions with at most `pixels` pixels."""
    if not 0 < pixels < width * height:
        return width, height
    scale = math.sqrt(pixels / (width * height))
    narrow, wide = sorted((width, height))
    side = max(1, int(narrow * scale))
    other = max(1, min(int(wide * scale), pixels // side))
    return (side, other) if width <= height else (other, side)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as 8-bit RGB."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _wide_to_rgb(image)
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", rgba.size, (255, 255, 255))
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")


def _wide_to_rgb(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if values.dtype.kind == "f":
        raise MediaInvalid("image has floating-point samples; send 8- or 16-bit samples")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise MediaInvalid(f"image samples reach from {low} to {high}; send 8 or 16 bits")
    # Pillow widens 16-bit grey to mode I and 8-bit TIFFs too: only then are values below 256.
    scaled = values if image.mode == "I" and high < 256 else values // 257
    return Image.fromarray(scaled.astype(np.uint8), "L").convert("RGB")


def describe(data: bytes | memoryview) -> str:
    """What the first bytes look like, for error messages; never the bytes themselves."""
    head = bytes(data[:64]).lstrip().lower()
    if head.startswith((b"<!doctype", b"<html")):
        return "it is an HTML page"
    if head.startswith(b"<svg") or head.startswith(b"<?xml"):
        return "it is XML or SVG"
    if head.startswith(b"%pdf"):
        return "it is a PDF"
    if head.startswith((b"{", b"[")):
        return "it looks like JSON"
    return f"{len(data)} bytes of unknown content"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__
