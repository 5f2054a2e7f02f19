"""Images as encoder outputs: what a file may hold, keys of their own, and the switch."""

import asyncio
import base64
import io
import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from foveal_runtime.frontend.items import input_processor
from foveal_runtime.frontend.items.embeds import embeds_item
from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.media.protocol import EmbedsLayout, Load
from foveal_runtime.frontend.protocol.messages import ImageEmbedsPart
from foveal_runtime.frontend.testing.fake_worker import EMBED_WIDTH, FakeProcessor
from foveal_runtime.frontend.text.parts import media_part
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    MediaConflict,
    MediaInvalid,
    MediaTooLarge,
    MediaUnknown,
    Unsupported,
)
from foveal_runtime.plan.media import ItemMeta
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import EMBEDS, view_item

IMAGE = 4
INFO = FakeProcessor(Load("/tiny", b"n" * 16, ModalitiesConfig())).examine(b"n" * 16)
ON_A_GRID = msgspec.structs.replace(INFO, embeds=EmbedsLayout(width=EMBED_WIDTH, merge=2))


def rows(count: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, EMBED_WIDTH), dtype=np.float32)


def file(tensor: np.ndarray | None = None, **more: np.ndarray) -> bytes:
    return save({EMBEDS: rows() if tensor is None else tensor, **more})


def part(data: bytes | None, uuid: str | None = None) -> MediaPart:
    """As a request has it."""
    text = None if data is None else base64.b64encode(data).decode()
    given = ImageEmbedsPart(type="image_embeds", image_embeds=text, uuid=uuid)
    return media_part(given, "messages[0].content[1]")


OPTIONS = PrepareOptions(request_id="r", sampling=SamplingParams(max_tokens=50))


def bf16(numbers: np.ndarray, shape: list[int] | None = None) -> bytes:
    """A file whose tensor is bfloat16, which numpy has not."""
    shape = list(numbers.shape) if shape is None else shape
    head = {EMBEDS: {"dtype": "BF16", "shape": shape, "data_offsets": [0, numbers.nbytes]}}
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + numbers.tobytes()


def test_outputs_stand_where_the_images_would():
    item = view_item(embeds_item(file(), INFO))
    assert item.header.replacement == (5, IMAGE, IMAGE, IMAGE, 6)
    assert item.header.embed_runs == ((1, 3),)
    assert item.fields[EMBEDS].dtype == "float32"
    assert np.array_equal(item.fields[EMBEDS].numpy()[0], rows())


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_shorter_numbers_stay_as_they_are(kind):
    given = rows().astype(np.float16) if kind == "float16" else np.full((2, EMBED_WIDTH), 1, "<u2")
    data = file(given) if kind == "float16" else bf16(given)
    field = view_item(embeds_item(data, INFO)).fields[EMBEDS]
    assert field.dtype == kind
    assert field.numpy()[0].tobytes() == given.tobytes()


def test_a_grid_comes_along():
    grid = np.array([1, 4, 6])
    item = view_item(embeds_item(file(rows(6), image_grid_thw=grid), ON_A_GRID))
    assert item.fields["image_grid_thw"].numpy().tolist() == [[1, 4, 6]]


def torch_file() -> bytes:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(torch.ones(3, EMBED_WIDTH), buffer)
    return buffer.getvalue()


NOT_FINITE = rows()
NOT_FINITE[1, 1] = np.inf
CUT_OFF = file()[:-1]


@pytest.mark.parametrize(
    ("data", "info", "message"),
    [
        (b"\x80\x04K\x01.", INFO, "pickle"),
        (b"hello, this is no tensor", INFO, "not a safetensors file"),
        (CUT_OFF, INFO, "not a safetensors file"),
        ((1 << 60).to_bytes(8, "little") + b"{}", INFO, "not a safetensors file"),
        (file(rows()[:, :7]), INFO, rf"\[3, 7\]; this model takes \[outputs, {EMBED_WIDTH}\]"),
        (file(rows()[None]), INFO, "shape"),
        (file(rows(0)), INFO, "shape"),
        (file(NOT_FINITE), INFO, "finite"),
        (file(np.concatenate([rows(300), NOT_FINITE])), INFO, "finite"),
        (bf16(np.full((2, EMBED_WIDTH), 0x7F80, "<u2")), INFO, "finite"),
        (file(rows().astype(np.int64)), INFO, "I64"),
        (file(rows().astype(np.float64)), INFO, "F64"),
        (file(pixel_values=rows()), INFO, "pixel_values"),
        (save({"x": rows()}), INFO, "'x'"),
        (save({}), INFO, "missing"),
        (bf16(np.ones(1, "<u2"), [1] * 70), INFO, "70 dimensions"),
        (bf16(np.ones(0, "<u2"), [0, 1 << 62, 1 << 62]), INFO, "not a safetensors file"),
        (file(), ON_A_GRID, "which the file lacks"),
        (file(image_grid_thw=np.array([1, 4, 4])), ON_A_GRID, "does not make 3 outputs"),
        (file(image_grid_thw=np.array([1, 1, 12])), ON_A_GRID, "does not make 3 outputs"),
        (file(image_grid_thw=np.array([1, 2])), ON_A_GRID, "three whole numbers"),
        (file(image_grid_thw=np.array([-1, -2, 6])), ON_A_GRID, "three whole numbers"),
        (file(image_grid_thw=np.array([1 << 40] * 3)), ON_A_GRID, "three whole numbers"),
        (file(image_grid_thw=np.array([1.0, 2.0, 6.0])), ON_A_GRID, "three whole numbers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(data, info, message):
    with pytest.raises(MediaInvalid, match=message):
        embeds_item(data, info)


def test_a_file_of_torch_is_never_unpickled():
    with pytest.raises(MediaInvalid, match="pickle"):
        embeds_item(torch_file(), INFO)


def test_models_that_cannot_take_them_say_why():
    for layout, reason in ((None, "no images as"), (EmbedsLayout(reason="it is odd"), "it is odd")):
        with pytest.raises(Unsupported, match=reason):
            embeds_item(file(), msgspec.structs.replace(INFO, embeds=layout))


async def test_they_are_off_by_default(start_input):
    inputs = await start_input()
    with pytest.raises(Unsupported, match="--enable-mm-embeds") as refused:
        await inputs.prepare([IMAGE], [part(file())], OPTIONS)
    assert refused.value.param == "messages[0].content[1]"


async def test_a_repeat_is_a_hit_under_a_key_of_its_own(start_input):
    inputs = await start_input(media_embeds=True)
    data = file()
    first = await inputs.prepare([1, IMAGE, 2], [part(data)], OPTIONS)
    assert first.items[0].meta == ItemMeta(0, 5, 3)
    assert inputs.stats.mm_hits[0] == 0
    again = await inputs.prepare([IMAGE, IMAGE], [part(data), part(file(rows(seed=1)))], OPTIONS)
    assert again.items[0].mm_hash == first.items[0].mm_hash != again.items[1].mm_hash
    assert inputs.stats.processed_items[0] == 0
    salted = await inputs.prepare([IMAGE], [part(data)], replace(OPTIONS, cache_salt="s"))
    assert salted.items[0].mm_hash != first.items[0].mm_hash
    # The same bytes as an image are another thing, and no image.
    claimed = MediaPart(modality="image", data=data, path="x")
    with pytest.raises(MediaInvalid):
        await inputs.prepare([IMAGE], [claimed], OPTIONS)


async def test_files_are_read_one_at_a_time(start_input, monkeypatch):
    """Each takes three times its size while it is read, which no plan counts for many."""
    inputs, running, most = await start_input(media_embeds=True), 0, 0

    async def slow(num_bytes, work):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return work()

    monkeypatch.setattr(input_processor, "off_loop", slow)
    files = [part(file(rows(seed=seed))) for seed in range(4)]
    await inputs.prepare([IMAGE] * 4, files, OPTIONS)
    assert most == 1


async def test_a_uuid_names_them(start_input):
    inputs = await start_input(media_embeds=True)
    first = await inputs.prepare([IMAGE], [part(file(), "cat")], OPTIONS)
    again = await inputs.prepare([IMAGE], [part(None, "cat")], OPTIONS)
    assert again.items[0].mm_hash == first.items[0].mm_hash
    with pytest.raises(MediaConflict):
        await inputs.prepare([IMAGE], [part(file(rows(seed=1)), "cat")], OPTIONS)
    with pytest.raises(MediaUnknown):  # never as an image
        await inputs.prepare([IMAGE], [MediaPart(modality="image", uuid="cat")], OPTIONS)


async def test_a_uuid_may_name_an_image_too(start_input, picture):
    """They shared their names: the image was refused with 409 for other content."""
    inputs = await start_input(media_embeds=True)
    given = await inputs.prepare([IMAGE], [part(file(), "cat")], OPTIONS)
    shown = MediaPart(modality="image", data=picture(), uuid="cat", path="x")
    image = await inputs.prepare([IMAGE], [shown], OPTIONS)
    again = await inputs.prepare([IMAGE], [part(None, "cat")], OPTIONS)
    assert again.items[0].mm_hash == given.items[0].mm_hash != image.items[0].mm_hash


async def test_bytes_and_tokens_are_bounded(start_input):
    small = ModalitiesConfig(image=ModalityLimits(max_bytes=100))
    inputs = await start_input(media_embeds=True, modalities=small)
    with pytest.raises(MediaTooLarge):
        await inputs.prepare([IMAGE], [part(file())], OPTIONS)

    class Short:
        def __getattr__(self, name):
            return lambda *_: 4 if name == "max_model_len" else None

    inputs = await start_input(Short(), media_embeds=True)
    with pytest.raises(ContextLengthExceeded):
        await inputs.prepare([IMAGE], [part(file())], OPTIONS)
    assert len(inputs.cache) == 0
