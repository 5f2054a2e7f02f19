"""Documents in media workers: pages drawn within limits, broken and hostile files refused."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foveal_runtime.frontend.media.decode import MAX_PAGE_PIXELS, decode_page, page_digests
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import FovealError, InvalidRequest, MediaInvalid, MediaTooLarge
from tests.support.pdf_files import file_of, page_with, pdf_of

LIMITS = ModalityLimits()


def picture(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def test_a_page_is_drawn_as_it_is() -> None:
    image = picture(1)
    page = decode_page(pdf_of([picture(0), image]), 1, LIMITS)
    assert page.mode == "RGB"
    assert np.array_equal(np.asarray(page), np.asarray(image))


def test_vectors_are_drawn_on_white() -> None:
    page = decode_page(page_with(b"1 0 0 rg 50 25 100 50 re f"), 0, LIMITS)
    assert page.size == (417, 209)
    assert page.getpixel((208, 104)) == (255, 0, 0)
    assert page.getpixel((10, 10)) == (255, 255, 255)


def test_a_page_is_known_by_what_it_shows() -> None:
    first = page_digests(pdf_of([picture(0), picture(1)]), LIMITS)
    other = page_digests(pdf_of([picture(2), picture(0)], note="another file"), LIMITS)
    assert first[0] == other[1]
    assert len({*first, *other}) == 3
    assert all(len(digest) == 32 for digest in first)


def test_large_paper_is_drawn_smaller() -> None:
    page = decode_page(page_with(b"", box="0 0 14400 7200"), 0, LIMITS)
    assert 0.99 * MAX_PAGE_PIXELS < page.width * page.height <= 1.01 * MAX_PAGE_PIXELS
    small = decode_page(pdf_of([picture(0)]), 0, ModalityLimits(resize_pixels=1000))
    assert small.width * small.height <= 1000


ENCRYPTED = file_of(
    [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [] /Count 0 >>"],
    trailer=f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'ab' * 32}> /U <{'cd' * 32}> >> "
    f"/ID [<{'00' * 16}> <{'00' * 16}>]",
)
LOOP = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"]
COUNT = [LOOP[0], b"<< /Type /Pages /Kids [] /Count 2147483647 >>"]


@pytest.mark.parametrize(
    ("data", "limits", "error", "says"),
    [
        (b"", LIMITS, MediaInvalid, "empty"),
        (b"no document", LIMITS, MediaInvalid, "it is no PDF"),
        (b"%PDF-1.7 nothing", LIMITS, MediaInvalid, "cannot be read"),
        (pdf_of([picture(0)])[:300], LIMITS, MediaInvalid, "cannot be read"),
        (ENCRYPTED, LIMITS, MediaInvalid, "encrypted with a password"),
        (file_of(LOOP), LIMITS, MediaInvalid, "page 1 of the document cannot be drawn"),
        (file_of(COUNT), LIMITS, FovealError, "document"),
        (pdf_of([picture(0)] * 3), ModalityLimits(max_pages=2), InvalidRequest, "3 pages, the lim"),
        (pdf_of([picture(0)] * 3), ModalityLimits(max_per_prompt=2), InvalidRequest, "limit is 2"),
        (pdf_of([picture(0)]), ModalityLimits(max_bytes=100), MediaTooLarge, "the limit is 100"),
    ],
    ids=["empty", "text", "head", "cut", "encrypted", "loop", "count", "pages", "items", "bytes"],
)
def test_bad_documents_are_refused(
    data: bytes, limits: ModalityLimits, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        page_digests(data, limits)


async def test_a_worker_answers_for_documents_and_their_pages(start_workers: Any) -> None:
    pool, _ = await start_workers()
    document = pdf_of([picture(0), picture(1)])
    done = await pool.page_digests(document)
    assert done.value == b"".join(page_digests(document, LIMITS))
    values = [(await pool.process(0, b"{}", document, page=i)).value for i in range(2)]
    assert values[0] != values[1]


@pytest.mark.extended
async def test_a_document_that_ends_or_holds_workers_is_refused(start_workers: Any) -> None:
    pool, _ = await start_workers(document_timeout_seconds=1.0)
    with pytest.raises(MediaInvalid, match="document cannot be processed: it ended two"):
        await pool.page_digests(b"!kill")
    with pytest.raises(MediaInvalid, match="document took longer than 1 s"):
        await pool.page_digests(b"!hang")
    assert len((await pool.page_digests(pdf_of([picture(0)]))).value) == 32


def mutations(seed: int, count: int) -> list[bytes]:
    """Documents with flipped, cut, repeated and rewritten bytes; numbers become enormous."""
    drawn = random.Random(seed)
    whole = [pdf_of([picture(0)]), page_with(b"0 0 1 rg 0 0 9 9 re f BT (x) Tj ET"), ENCRYPTED]
    found = []
    for number in range(count):
        data = bytearray(whole[number % len(whole)])
        for _ in range(drawn.randint(1, 8)):
            at = drawn.randrange(20, len(data))
            kind = drawn.randrange(4)
            if kind == 0:
                data[at] = drawn.randrange(256)
            elif kind == 1:
                del data[at : at + drawn.randint(1, 40)]
            elif kind == 2:
                data[at:at] = data[at : at + drawn.randint(1, 40)]
            else:
                digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
                data[(at := drawn.choice(digits)) : at + 1] = b"9" * drawn.choice((3, 9, 20))
        found.append(bytes(data))
    return found


BOMBS = {
    "an image of 2^32 pixels": page_with(
        b"9 0 0 9 0 0 cm BI /W 65535 /H 65535 /CS /RGB /BPC 8 ID x EI"
    ),
    "a form that draws itself": page_with(b"/F Do", "/XObject << /F 4 0 R >>"),
    "deep graphics states": page_with(b"q " * 200_000),
    "deep arrays": page_with(b"[" * 200_000),
}


async def test_mutated_documents_end_in_pages_or_a_clear_error(start_workers: Any) -> None:
    """In a worker with bounded memory: whatever they do to it, the next document is served."""
    pool, _ = await start_workers(max_memory_bytes=512 << 20, document_timeout_seconds=20.0)
    seed = 20261123
    num_read = 0
    for number, data in enumerate([*mutations(seed, 150), *BOMBS.values()]):
        [end] = await asyncio.gather(pool.page_digests(data), return_exceptions=True)
        if isinstance(end, BaseException):
            assert isinstance(end, InvalidRequest), (seed, number, end)
            assert "\n" not in end.message, (seed, number)
        else:
            assert len(end.value) % 32 == 0
            num_read += 1
    assert num_read > 10
    assert len((await pool.page_digests(pdf_of([picture(0)]))).value) == 32
