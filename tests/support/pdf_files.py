"""Small PDF files for tests: images as pages, without loss, and text drawn with shapes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from PIL import Image

POINTS_PER_PIXEL = 72 / 150
"""A page of this scale is drawn pixel for pixel."""


def pdf_of(images: Sequence[Image.Image], note: str = "") -> bytes:
    """Each image fills a page of its size at 150 dots an inch. `note` is a comment: other bytes,
    the same pages."""
    objects: list[bytes] = []

    def add(body: bytes) -> int:
        objects.append(body)
        return len(objects)

    add(b"<< /Type /Catalog /Pages 2 0 R >>")
    add(b"")
    kids = []
    for image in images:
        width, height = image.size
        points = [side * POINTS_PER_PIXEL for side in image.size]
        pixels = _stream(
            image.convert("RGB").tobytes(),
            f"/Type /XObject /Subtype /Image /Width {width} /Height {height} "
            "/ColorSpace /DeviceRGB /BitsPerComponent 8",
        )
        drawn = add(pixels)
        content = add(_stream(f"{points[0]:.4f} 0 0 {points[1]:.4f} 0 0 cm /I Do".encode()))
        page = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {points[0]:.4f} {points[1]:.4f}] "
            f"/Contents {content} 0 R /Resources << /XObject << /I {drawn} 0 R >> >> >>"
        )
        kids.append(add(page.encode()))
    refs = " ".join(f"{kid} 0 R" for kid in kids)
    objects[1] = f"<< /Type /Pages /Kids [{refs}] /Count {len(kids)} >>".encode()
    return file_of(objects, note)


def file_of(objects: Sequence[bytes], note: str = "", trailer: str = "") -> bytes:
    """The file of numbered objects, the first of which is the catalogue."""
    out = bytearray(b"%PDF-1.7\n%" + note.encode() + b"\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    for offset in offsets:
        out += b"%010d 00000 n \n" % offset
    size = len(objects) + 1
    end = f"trailer\n<< /Size {size} /Root 1 0 R {trailer} >>\nstartxref\n{table}\n%%EOF\n"
    return bytes(out + end.encode())


def page_with(content: bytes, resources: str = "", box: str = "0 0 200 100") -> bytes:
    """A document of one page with the given drawing operators."""
    page = (
        f"<< /Type /Page /Parent 2 0 R /MediaBox [{box}] /Contents 4 0 R "
        f"/Resources << {resources} >> >>"
    )
    return file_of([
        b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        page.encode(), _stream(content),
    ])  # fmt: skip


def _stream(data: bytes, entries: str = "") -> bytes:
    packed = zlib.compress(data)
    head = f"<< {entries} /Filter /FlateDecode /Length {len(packed)} >>\nstream\n"
    return head.encode() + packed + b"\nendstream"
