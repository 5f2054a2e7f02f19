"""Preparing requests: what a hit skips, what a uuid means, what is joined, what is refused."""

import asyncio
import base64
import subprocess
import sys

import numpy as np
import pytest

from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.plan.config import (
    InjectionConfig,
    MediaSources,
    ModalitiesConfig,
    ModalityLimits,
)
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    MediaConflict,
    MediaForbidden,
    MediaInvalid,
    MediaTooLarge,
    MediaUnknown,
    Unsupported,
)
from foveal_runtime.plan.media import ItemMeta
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import view_item

IMAGE = 4


def options(**changes: object) -> PrepareOptions:
    return PrepareOptions(
        **({"request_id": "r", "sampling": SamplingParams(max_tokens=50)} | changes)
    )


def image(**changes: object) -> MediaPart:
    return MediaPart(**({"modality": "image", "path": "messages[0].content[1]"} | changes))


class Mirrors:
    """What engines would have announced."""

    def __init__(self, limit: int = 0) -> None:
        self.items: dict[bytes, tuple[int, ItemMeta]] = {}
        self.aliases: dict[bytes, bytes] = {}
        self.limit = limit
        self.puts: list = []
        self.keeps = True

    def lookup_item(self, mm_hash):
        return self.items.get(mm_hash)

    def lookup_alias(self, alias):
        return self.aliases.get(alias)

    def max_model_len(self):
        return self.limit

    def has_cache(self):
        return self.keeps

    def put(self, items, values):
        self.puts.append((items, values))
        return len(items)


async def test_a_repeat_decodes_nothing(start_input, picture, data_url):
    inputs = await start_input()
    url = data_url(picture())
    first = await inputs.prepare([1, IMAGE, 2], [image(url=url)], options())
    again = await inputs.prepare([IMAGE, 3], [image(url=url)], options())
    assert first.items[0].mm_hash == again.items[0].mm_hash
    assert first.items[0].meta == again.items[0].meta == ItemMeta(0, 6, 4)
    assert inputs.stats.processed_items[0] == 1
    assert inputs.stats.url_text_hits == 1
    assert (first.items[0].cost.was_processed, again.items[0].cost.was_processed) == (True, False)
    value = await again.items[0].source.value()
    assert len(value) == again.items[0].size_bytes
    assert view_item(value).meta == again.items[0].meta


async def test_what_an_engine_announced_is_not_processed_here(start_input, picture, data_url):
    mirrors = Mirrors()
    inputs = await start_input(mirrors, processor_bytes=0)
    part = image(data=picture())
    known = (await inputs.prepare([IMAGE], [part], options())).items[0]
    mirrors.items[known.mm_hash] = (known.size_bytes, known.meta)
    request = await inputs.prepare([IMAGE], [image(url=data_url(picture()))], options())
    assert request.items[0].meta == known.meta
    assert inputs.stats.processed_items[0] == 1
    # A stale announcement: the engine asks after all, and the value can still be made.
    assert len(await request.items[0].source.value()) == known.size_bytes
    assert inputs.stats.processed_items[0] == 2
    assert inputs.stats.value_source["recomputed"] == 2


async def test_equal_content_is_one_item_however_it_came(start_input, picture, data_url, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    inputs = await start_input(media_sources=MediaSources(file_root=str(tmp_path)))
    parts = [
        image(url=data_url(picture())),
        image(url="file:///a.png"),
        image(data=picture(1)),
        image(data=picture()),
    ]
    request = await inputs.prepare([IMAGE, 1, IMAGE, IMAGE, IMAGE], parts, options())
    assert len(request.items) == 2
    assert request.placements == [(0, 0), (2, 0), (3, 1), (4, 0)]
    assert inputs.stats.processed_items[0] == 2


async def test_another_image_behind_the_same_url_is_another_item(start_input, picture):
    """Elsewhere a cache of embeddings is keyed by the URL's text: one session got the image that
    another had seen there."""
    served = [picture(0), picture(1), picture(0)]

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = served.pop(0)
        head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        sources = MediaSources(allowed_domains=("localhost",), allow_private_addresses=True)
        inputs = await start_input(media_sources=sources)
        url = f"http://localhost:{server.sockets[0].getsockname()[1]}/same.png"
        keys = []
        for _ in range(3):
            request = await inputs.prepare([IMAGE, 1], [image(url=url)], options())
            keys.append(request.items[0].mm_hash)
    assert served == [], "each request fetched"
    assert keys[0] == keys[2] != keys[1]
    assert inputs.stats.processed_items[0] == 2
    assert sum(dict(inputs.stats.stages.items())["fetch"].counts) == 3


async def test_many_requests_for_one_picture_are_one_flight(start_input, picture):
    inputs = await start_input()
    part = image(data=picture())
    tasks = [inputs.prepare([IMAGE], [part], options()) for _ in range(8)]
    requests = await asyncio.gather(*tasks)
    assert inputs.stats.processed_items[0] == 1
    assert inputs.processing.joins == 7
    # The one who came first paid; for the others the processor did not run.
    assert sum(request.items[0].cost.was_processed for request in requests) == 1


async def test_a_caller_that_leaves_does_not_take_the_work_along(start_input, tmp_path):
    inputs = await start_input()
    part = image(data=f"!slow:{tmp_path / 'go'}".encode())
    first = asyncio.create_task(inputs.prepare([IMAGE], [part], options()))
    second = asyncio.create_task(inputs.prepare([IMAGE], [part], options()))
    async with asyncio.timeout(120):
        while inputs.processing.joins == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    first.cancel()
    (tmp_path / "go").touch()
    assert (await second).items[0].meta is not None
    assert inputs.stats.processed_items[0] == 1


async def test_options_tenants_and_salt_separate_keys(start_input, picture):
    inputs = await start_input()
    part = image(data=picture())
    variants = [
        options(),
        options(mm_processor_kwargs={"scale": 2.0}),
        options(tenant=b"t"),
        options(tenant=b"u"),
    ]
    requests = [await inputs.prepare([IMAGE], [part], variant) for variant in variants]
    assert len({r.items[0].mm_hash for r in requests}) == 4
    salts = {r.cache_salt for r in requests}
    assert len(salts) == 3
    salted = await inputs.prepare([IMAGE], [part], options(cache_salt="x"))
    assert salted.cache_salt not in salts
    assert salted.items[0].mm_hash not in {r.items[0].mm_hash for r in requests}
    values = [await r.items[0].source.value() for r in requests[:2]]
    plain, scaled = (view_item(v).fields["pixel_values"].numpy() for v in values)
    assert np.array_equal(scaled, 2 * plain)


async def test_uuids_name_content_at_first_sight(start_input, picture):
    inputs = await start_input()
    first = await inputs.prepare([IMAGE], [image(data=picture(), uuid="cat")], options())
    assert len(first.binds) == 1
    again = await inputs.prepare([IMAGE], [image(uuid="cat")], options())
    assert again.items[0].mm_hash == first.items[0].mm_hash
    assert len(await again.items[0].source.value()) == first.items[0].size_bytes
    with pytest.raises(MediaConflict) as caught:
        await inputs.prepare([IMAGE], [image(data=picture(1), uuid="cat")], options())
    assert caught.value.status == 409
    assert caught.value.param == "messages[0].content[1]"
    other = await inputs.prepare(
        [IMAGE], [image(data=picture(1), uuid="cat")], options(tenant=b"t")
    )
    assert other.items[0].mm_hash != first.items[0].mm_hash


@pytest.mark.parametrize("mine", [{"tenant": b"a"}, {"cache_salt": "a"}], ids=["tenant", "salt"])
async def test_salts_share_nothing(start_input, picture, mine):
    """Text of data: URLs, uuids and processed items of one salt are unknown under another."""
    inputs = await start_input()
    text = base64.b64encode(picture()).decode()
    part = image(url=f"data:image/png;base64,{text}", uuid="cat")
    first = await inputs.prepare([IMAGE], [part], options(**mine))
    for stranger in (options(), options(tenant=b"b"), options(cache_salt="b"),
                     options(tenant=b"b", cache_salt="a")):  # fmt: skip
        with pytest.raises(MediaUnknown):
            await inputs.prepare([IMAGE], [image(uuid="cat")], stranger)
    other = image(url=part.url)
    before = inputs.stats.processed_items[0]
    strange = await inputs.prepare([IMAGE], [other], options(cache_salt="b"))
    assert strange.items[0].mm_hash != first.items[0].mm_hash
    assert inputs.stats.processed_items[0] == before + 1
    assert (inputs.cache.hits, inputs.stats.url_text_hits) == (0, 0)
    again = await inputs.prepare([IMAGE], [other], options(**mine))
    named = await inputs.prepare([IMAGE], [image(uuid="cat")], options(**mine))
    assert again.items[0].mm_hash == named.items[0].mm_hash == first.items[0].mm_hash
    assert (inputs.cache.hits, inputs.stats.url_text_hits) == (2, 1)


async def test_unknown_uuids_are_named(start_input, picture):
    inputs = await start_input()
    parts = [image(data=picture()), image(uuid="ghost", path="messages[2].content[0]")]
    with pytest.raises(MediaUnknown, match=r"image 1 .*ghost") as caught:
        await inputs.prepare([IMAGE, IMAGE], parts, options())
    assert caught.value.status == 400
    assert caught.value.param == "messages[2].content[0]"


async def test_a_uuid_whose_value_is_gone_is_unknown_or_held_elsewhere(start_input, picture):
    mirrors = Mirrors()
    inputs = await start_input(mirrors)
    first = await inputs.prepare([IMAGE], [image(data=picture(), uuid="cat")], options())
    inputs.reset_cache()
    with pytest.raises(MediaUnknown):
        await inputs.prepare([IMAGE], [image(uuid="cat")], options())
    known = first.items[0]
    mirrors.items[known.mm_hash] = (known.size_bytes, known.meta)
    request = await inputs.prepare([IMAGE], [image(uuid="cat")], options())
    assert request.items[0].is_held_only
    with pytest.raises(MediaUnknown):
        await request.items[0].source.value()


async def test_a_uuid_learned_from_the_engines(start_input, picture):
    """Another frontend saw the picture first; this one knows the uuid from announcements."""
    mirrors = Mirrors()
    elsewhere = await start_input()
    first = await elsewhere.prepare([IMAGE], [image(data=picture(), uuid="cat")], options())
    here = await start_input(mirrors)
    mirrors.aliases.update(first.binds)
    known = first.items[0]
    mirrors.items[known.mm_hash] = (known.size_bytes, known.meta)
    request = await here.prepare([IMAGE], [image(uuid="cat")], options())
    assert request.items[0].mm_hash == known.mm_hash
    with pytest.raises(MediaConflict):
        await here.prepare([IMAGE], [image(data=picture(1), uuid="cat")], options())


async def test_a_failed_request_binds_nothing(start_input, picture):
    inputs = await start_input()
    parts = [image(data=picture(), uuid="cat"), image(data=b"<html>")]
    with pytest.raises(MediaInvalid):
        await inputs.prepare([IMAGE, IMAGE], parts, options())
    await inputs.prepare([IMAGE], [image(data=picture(1), uuid="cat")], options())


async def test_refusals_name_the_part(start_input, picture):
    limits = ModalitiesConfig(
        image=ModalityLimits(max_per_prompt=2, max_bytes=4096),
        video=ModalityLimits(max_per_prompt=0),
    )
    inputs = await start_input(modalities=limits)
    good = image(data=picture(side=8))
    cases = [
        ([IMAGE] * 3, [good] * 3, InvalidRequest, "limit is 2"),
        ([IMAGE], [image(data=b"x" * 5000)], MediaTooLarge, "4096"),
        ([IMAGE], [image(data=b"")], MediaInvalid, "empty"),
        ([IMAGE], [image(data=b"<html>")], MediaInvalid, "HTML"),
        ([IMAGE], [image(url="data:image/png;base64,%%")], MediaInvalid, "base64"),
        ([IMAGE], [image(url="http://x.example/")], MediaForbidden, "not allowed"),
        ([IMAGE], [image(url="file:///x")], MediaForbidden, "switched off"),
        ([IMAGE], [image()], InvalidRequest, "url or a uuid"),
        ([7], [image(modality="video", data=b"x")], Unsupported, "switched off"),
        ([7], [image(modality="audio", data=b"x")], Unsupported, "no audio"),
    ]
    for ids, parts, error, words in cases:
        with pytest.raises(error, match=words) as caught:
            await inputs.prepare(ids, parts, options())
        assert caught.value.param == "messages[0].content[1]"
    assert inputs.stats.media_errors["media_invalid"] == 3


async def test_options_must_be_plain_json(start_input, picture):
    inputs = await start_input()
    for bad in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises(InvalidRequest):
            await inputs.prepare([IMAGE], [image(data=picture())], options(mm_processor_kwargs=bad))


async def test_the_expanded_prompt_must_fit(start_input, picture):
    inputs = await start_input(Mirrors(limit=12))
    request = await inputs.prepare([1, 2, IMAGE], [image(data=picture())], options())
    assert request.sampling.max_tokens == 4
    with pytest.raises(ContextLengthExceeded, match="12"):
        await inputs.prepare([1] * 6 + [IMAGE], [image(data=picture())], options())


async def test_text_only_requests_touch_nothing(start_input):
    inputs = await start_input()
    request = await inputs.prepare([1, 2, 3], [], options())
    assert (request.items, request.placements, request.binds) == ([], [], [])
    assert inputs.is_warm()


async def test_values_are_held_only_as_long_as_needed(start_input, picture):
    """Between processing and sending a value lives once; the raw media is what lasts."""
    inputs = await start_input(processor_bytes=0)
    source = (await inputs.prepare([IMAGE], [image(data=picture())], options())).items[0].source
    await source.value()
    await source.value()
    assert inputs.stats.value_source == {"recomputed": 2, "retained": 1}
    source.release()
    with pytest.raises(MediaUnknown):
        await source.value()


def test_the_http_process_loads_no_torch():
    code = (
        "import sys, foveal_runtime.frontend.items.input_processor;"
        "import foveal_runtime.frontend.engines.client;"
        " print(sorted({'torch', 'transformers', 'PIL'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


# ---- injection ----
async def pack_elsewhere(inputs, data: bytes) -> tuple[str, bytes]:
    """What an external processor of the same model would hand over: our key and the item."""
    request = await inputs.prepare([IMAGE], [image(data=data)], options())
    value = bytes(await request.items[0].source.value())
    inputs.reset_cache()
    return request.items[0].mm_hash.hex(), value


async def test_injected_items_are_hits_afterwards(start_input, picture):
    mirrors = Mirrors()
    inputs = await start_input(mirrors)
    name, value = await pack_elsewhere(inputs, picture())
    kwargs = {"image": [value]}
    inputs.inject_into_mm_cache({"image": [name]}, kwargs)
    assert inputs.stats.mm_queries[0] == 1
    assert inputs.stats.mm_hits[0] == 0
    assert kwargs == {"image": [value]}
    assert len(mirrors.puts) == 1
    request = await inputs.prepare([IMAGE], [image(data=picture())], options())
    assert not request.items[0].cost.was_processed
    assert inputs.stats.processed_items[0] == 1


async def test_tensors_are_packed_and_not_changed(start_input):
    inputs = await start_input()
    pixels = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    item = {"pixel_values": pixels, "replacement": [5, IMAGE, IMAGE, 6]}
    inputs.inject_into_mm_cache({"image": ["cat"]}, {"image": [item]})
    assert sorted(item) == ["pixel_values", "replacement"]
    request = await inputs.prepare([IMAGE], [image(uuid="cat")], options())
    assert request.items[0].meta == ItemMeta(0, 4, 2)
    stored = view_item(await request.items[0].source.value())
    assert np.array_equal(stored.fields["pixel_values"].numpy(), pixels)
    assert stored.header.embed_runs == ((1, 2),)


async def test_injection_never_fails_its_caller(start_input, caplog):
    inputs = await start_input()
    inputs.inject_into_mm_cache(
        {"image": ["a", "b", "c", "d"], "smell": ["e"]},
        {"image": [b"not an item", None, {"x": object()}], "smell": [b"x"]},
    )
    assert inputs.stats.injection_failures == 3
    assert "cannot inject" in caplog.text
    assert inputs.stats.mm_queries == [0, 0, 0]


async def test_injection_does_nothing_when_caches_are_off(start_input):
    mirrors = Mirrors()
    mirrors.keeps = False
    inputs = await start_input(mirrors, processor_bytes=0)
    inputs.inject_into_mm_cache({"image": ["a"]}, {"image": [b"not an item"]})
    assert inputs.stats.injection_failures == 0
    assert not mirrors.puts


async def test_the_first_injected_value_stays(start_input):
    inputs = await start_input()
    for shade in (1, 2):
        pixels = np.full((1, 3, 2, 2), shade, np.float32)
        item = {"pixel_values": pixels, "replacement": [IMAGE]}
        inputs.inject_into_mm_cache({"image": ["cat"]}, {"image": [item]})
    request = await inputs.prepare([IMAGE], [image(uuid="cat")], options())
    stored = view_item(await request.items[0].source.value())
    assert stored.fields["pixel_values"].numpy().max() == 1
    assert inputs.stats.injection_failures == 1


async def test_the_endpoint_has_its_own_namespace_unless_trusted(start_input, picture):
    import msgspec

    for trusted in (False, True):
        config = InjectionConfig(enabled=True, trusted=trusted)
        inputs = await start_input(injection=config)
        name, value = await pack_elsewhere(inputs, picture())
        body = msgspec.msgpack.encode(
            {"items": [{"modality": "image", "name": name, "value": value}]}
        )
        items = inputs.injector.read_payload(body, "application/msgpack")
        answer = inputs.injector.store_payload(items, b"")
        assert answer == {"stored": 1, "sent": 0}
        request = await inputs.prepare([IMAGE], [image(data=picture())], options())
        assert request.items[0].cost.was_processed is not trusted


async def test_bad_payloads_are_client_errors(start_input):
    inputs = await start_input(injection=InjectionConfig(enabled=True))
    inject = inputs.injector.read_payload
    for body in (b"", b"{}", b'{"items": 3}', b'{"items": [{"modality": "smell", "name": ""}]}'):
        with pytest.raises(InvalidRequest):
            inject(body, "application/json")
    field = '{"x": {"dtype": "float32", "shape": [2], "data": "AAAA"}}'
    for item in (
        '{"modality": "image", "name": "a", "value": "AAAA"}',
        '{"modality": "image", "name": "a", "fields": ' + field + "}",
        '{"modality": "image", "name": "a", "replacement": [4], "fields": ' + field + "}",
    ):
        with pytest.raises(MediaInvalid, match=r"items\[0\]"):
            inject(b'{"items": [%s]}' % item.encode(), "application/json")
