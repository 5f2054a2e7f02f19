"""Documents of requests: pages are items with keys of their own, found again in every cache."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.testing.fake_worker import IMAGE_TOKEN
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import FovealError, InvalidRequest, MediaInvalid, Unsupported
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.pdf_files import pdf_of


def page(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def part(data: bytes, path: str = "messages[0].content[0].file.file_data") -> MediaPart:
    text = base64.b64encode(data).decode()
    return MediaPart(modality="image", url=f"data:application/pdf;base64,{text}", path=path)


def options(**more: Any) -> PrepareOptions:
    return PrepareOptions(request_id="r", sampling=SamplingParams(max_tokens=1), **more)


class Counted:
    """The workers of an input, with counters."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.num_documents = self.num_items = 0
        self.gate: asyncio.Event | None = None
        self.began = asyncio.Event()

    async def page_digests(self, *given: Any) -> Any:
        self.num_documents += 1
        self.began.set()
        if self.gate is not None:
            await self.gate.wait()
        return await self.inner.page_digests(*given)

    async def process(self, *given: Any) -> Any:
        self.num_items += 1
        return await self.inner.process(*given)


@pytest.fixture
async def counted(start_input: Callable[..., Any]) -> Any:
    """(input, its counted workers)"""
    made = await start_input()
    workers = Counted(made.workers)
    made.workers = made.documents._workers = workers
    yield made, workers
    made.documents.check_integrity()


async def items_of(made: Any, pages: Any, **more: Any) -> list[bytes]:
    parts = [MediaPart(modality="image", path="p", page=one) for one in pages]
    request = await made.prepare([1, *[IMAGE_TOKEN] * len(parts)], parts, options(**more))
    return [request.items[which].mm_hash for _, which in request.placements]


async def test_a_known_document_and_a_known_page_cost_nothing(counted: Any) -> None:
    made, workers = counted
    document = part(pdf_of([page(0), page(1)]))
    [pages] = await made.pages([document], options())
    keys = await items_of(made, pages)
    assert len(set(keys)) == 2
    assert (workers.num_documents, workers.num_items) == (1, 2)

    [again] = await made.pages([document], options())
    assert await items_of(made, again) == keys
    assert (workers.num_documents, workers.num_items) == (1, 2)

    [other] = await made.pages([part(pdf_of([page(2), page(1)], note="longer"))], options())
    found = await items_of(made, other)
    assert found[1] == keys[1]
    assert (workers.num_documents, workers.num_items) == (2, 3)


async def test_who_asks_at_once_waits_for_one_drawing(counted: Any) -> None:
    made, workers = counted
    workers.gate = asyncio.Event()
    document = part(pdf_of([page(0)]))
    asked = [asyncio.create_task(made.pages([document], options())) for _ in range(3)]
    await workers.began.wait()
    workers.gate.set()
    found = await asyncio.gather(*asked)
    assert len({pages[0][0].digest for pages in found}) == workers.num_documents == 1


async def test_all_pages_read_one_copy_of_the_document(counted: Any) -> None:
    """A base64 text that each page decoded would be held once for each page."""
    made, _ = counted
    data = pdf_of([page(0), page(1), page(2)])
    [pages] = await made.pages([part(data)], options())
    given_up = asyncio.create_task(pages[0].read())
    await asyncio.sleep(0)
    given_up.cancel()
    first, *others = await asyncio.gather(*[one.read() for one in pages])
    assert bytes(first) == data
    assert all(one is first for one in others)


async def test_salts_separate_documents(counted: Any) -> None:
    made, workers = counted
    document = part(pdf_of([page(0)]))
    [plain] = await made.pages([document], options())
    [salted] = await made.pages([document], options(cache_salt="a"))
    assert workers.num_documents == 2
    assert await items_of(made, plain) != await items_of(made, salted, cache_salt="a")


async def test_errors_name_the_part(counted: Any) -> None:
    made, _ = counted
    with pytest.raises(MediaInvalid, match=r"^messages\[0\].*: document cannot be read") as caught:
        await made.pages([part(b"%PDF-1.7")], options())
    assert caught.value.param == "messages[0].content[0].file.file_data"


async def test_pages_count_as_images(start_input: Callable[..., Any]) -> None:
    limits = ModalitiesConfig(image=ModalityLimits(max_per_prompt=3))
    made = await start_input(modalities=limits)
    documents = [part(pdf_of([page(i), page(i + 1)]), f"d{i}") for i in range(2)]
    with pytest.raises(InvalidRequest, match="have 4 pages up to d1, the limit is 3") as caught:
        await made.pages(documents, options())
    assert caught.value.param == "d1"
    [pages] = await made.pages(documents[:1], options())
    with pytest.raises(InvalidRequest, match="4 image parts, the limit is 3"):
        await items_of(made, [*pages, *pages])


async def test_without_images_no_document_is_read(start_input: Callable[..., Any]) -> None:
    limits = ModalitiesConfig(image=ModalityLimits(max_per_prompt=0))
    made = await start_input(modalities=limits)
    with pytest.raises(Unsupported, match="image input is switched off"):
        await made.pages([part(b"anything")], options())


async def test_what_is_known_of_documents_is_bounded(
    counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, workers = counted
    monkeypatch.setattr("foveal_runtime.frontend.items.documents.MAX_KNOWN_PAGES", 3)
    first, second = part(pdf_of([page(0), page(1)])), part(pdf_of([page(2), page(3)]))
    for document in (first, second, second, first):
        await made.pages([document], options())
    assert workers.num_documents == 3
    with pytest.raises(FovealError):
        await made.pages([part(b"%PDF-")], options())
