"""Encoded images and pages of documents → RGB, within limits checked before any pixel exists.

Runs in media workers only (a broken codec must not take the HTTP process along). Every input gives
the right image or a MediaInvalid / MediaTooLarge that names the value and the limit; never a
bare library error.

Decisions: the first frame of an animated GIF, WebP or PNG is the image; transparency is
composited on white; EXIF orientation is applied; 16-bit grey is scaled to 8 bits; CMYK, palette,
YCbCr and bilevel images are converted to RGB. A page of a PDF is drawn on white at 150 dots an
inch, fewer where its paper is very large, with its annotations and filled-in form fields.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from blake3 import blake3
from PIL import Image, ImageOps, UnidentifiedImageError

from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import InvalidRequest, MediaInvalid, MediaTooLarge

PAGE_SCALE = 150 / 72
"""Pixels a point: 150 dots an inch."""
MAX_PAGE_PIXELS = 8_000_000

Image.init()
FORMATS = tuple(
    name
    for name in ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
    if name in Image.OPEN
)
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_GREYS = {"L;2": 85, "L;4": 17}
"""How Pillow reads grey of two and four bits, and by how much it multiplies it."""
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")

# Our own limit is checked on the header; Pillow's would only warn up to twice its own.
Image.MAX_IMAGE_PIXELS = None


def decode_image(data: bytes | memoryview, limits: ModalityLimits) -> Image.Image:
    """The image as RGB. Raises MediaInvalid or MediaTooLarge."""
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
        _scale_clear(image)
        image.load()
        _turn(image)
        read = shrunk(to_rgb(image), limits.resize_pixels)
        if read is image and image.format not in ("JPEG", "PNG"):
            return read.copy()  # a WebP's decoder would stay, and its canvas
        return read


def _scale_clear(image: Image.Image) -> None:
    """A PNG's one colour that is not seen, in place, as its pixels are read: to eight bits."""
    clear = image.info.get("transparency")
    tiles = getattr(image, "tile", None) if image.format == "PNG" else None
    stored = str(tiles[0].args) if tiles else ""
    if isinstance(clear, int) and stored in _GREYS:
        image.info["transparency"] = clear * _GREYS[stored]
    elif isinstance(clear, tuple) and stored == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in clear)


def _turn(image: Image.Image) -> None:
    """As its EXIF says, in place; as it is where damage hides that. What is turned stays so where
    only the rest of the EXIF is damaged, which Pillow writes anew after that."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # Pillow raises anything at all on damaged EXIF
        return


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
    clear = image.info.get("transparency")  # a PNG's one grey that is not seen
    scaled = scaled if clear is None else np.where(values == clear, 255, scaled)
    return Image.fromarray(scaled.astype(np.uint8), "L").convert("RGB")


def page_digests(data: bytes | memoryview, limits: ModalityLimits) -> list[bytes]:
    """32 bytes for each page of a PDF, over its size and pixels: the same page of another document
    has the same. Raises MediaInvalid, MediaTooLarge, or InvalidRequest for too many pages."""
    with _document(data, limits) as document:
        most = min(limits.max_pages, limits.max_per_prompt)
        if len(document) > most:
            raise InvalidRequest(
                f"the document has {len(document)} pages, the limit is {most}; send fewer pages"
            )
        found = []
        for number in range(len(document)):
            image = _draw(document, number, limits)
            digest = blake3(f"foveal.page {image.width}x{image.height} ".encode())
            found.append(digest.update(image.tobytes()).digest())
        return found


def decode_page(data: bytes | memoryview, number: int, limits: ModalityLimits) -> Image.Image:
    """One page of a PDF as RGB; `number` counts from 0. Raises as `page_digests` does."""
    with _document(data, limits) as document:
        return shrunk(_draw(document, number, limits), limits.resize_pixels)


@contextmanager
def _document(data: bytes | memoryview, limits: ModalityLimits) -> Iterator[Any]:
    import pypdfium2

    check_bytes(data, limits, "document")
    if b"%PDF-" not in bytes(data[:1024]):
        raise MediaInvalid(f"document cannot be read: it is no PDF ({describe(data)})")
    try:
        with closing(pypdfium2.PdfDocument(bytes(data))) as document:
            if len(document) < 1:
                raise MediaInvalid("document has no pages")
            if document.get_formtype() != pypdfium2.raw.FORMTYPE_NONE:
                document.init_forms()
            yield document
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise MediaInvalid(
                "document is encrypted with a password; send it without one"
            ) from error
        raise MediaInvalid(f"document cannot be read: {_one_line(error)}") from error
    except MemoryError as error:
        raise MediaTooLarge("document needs more memory than a media worker has") from error


def _draw(document: Any, number: int, limits: ModalityLimits) -> Image.Image:
    import pypdfium2

    try:
        with closing(document[number]) as page:
            width, height = page.get_size()
            if not (0 < width < math.inf and 0 < height < math.inf):
                raise MediaInvalid(f"page {number + 1} of the document has no size")
            most = min(MAX_PAGE_PIXELS, limits.processed_pixels)
            # A side that is a whole number of pixels but for rounding gets no pixel more.
            scale = min(PAGE_SCALE, math.sqrt(most / (width * height))) * (1 - 1e-5)
            check_pixels(math.ceil(width * scale), math.ceil(height * scale), limits)
            with closing(page.render(scale=scale)) as bitmap:
                return to_rgb(bitmap.to_pil())
    except (pypdfium2.PdfiumError, IndexError) as error:
        raise MediaInvalid(
            f"page {number + 1} of the document cannot be drawn: {_one_line(error)}"
        ) from error


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
    if head[4:8] == b"ftyp" and head[8:12] in _HEIC:
        return "it is HEIC; convert it to JPEG"
    return f"{len(data)} bytes of unknown content"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__
