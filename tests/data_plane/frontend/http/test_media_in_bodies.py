"""Media that are read where they stand in a request's body, beside the same media as texts."""

from __future__ import annotations

import base64
import gc
import json
import random
from typing import Any

import pytest

from foveal_runtime.frontend.http.asgi import json_bodies
from foveal_runtime.frontend.http.asgi.json_bodies import decode_body, decode_json
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.protocol import body_text
from foveal_runtime.frontend.protocol.body_text import Body, BodyText
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest
from foveal_runtime.plan.errors import InvalidRequest

URL = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 40).decode()


def body_of(*pieces: bytes) -> Body:
    body = Body()
    assert all(body.add(piece) for piece in pieces)
    return body


def chat(*addresses: Any, field: str = "image_url", **more: Any) -> dict[str, Any]:
    parts = [{"type": field, field: address} for address in addresses]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **more}


def plain(value: Any) -> Any:
    """With texts for what was left in the body."""
    if isinstance(value, BodyText):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(child) for name, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list) else value


def left(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(left, value.values() if isinstance(value, dict) else value))
    return isinstance(value, BodyText)


def what_it_says(decode: Any, body: Any) -> Any:
    try:
        return decode(body)
    except InvalidRequest as error:
        return error.message


def as_objects(value: Any) -> Any:
    """A bare address is an object with it."""
    if isinstance(value, list):
        return [as_objects(child) for child in value]
    if not isinstance(value, dict):
        return value
    return {
        name: {"url": child}
        if name == "image_url" and isinstance(child, str)
        else as_objects(child)
        for name, child in value.items()
    }


def test_media_stay_in_the_body_and_are_what_a_text_is() -> None:
    data = json.dumps(chat({"url": URL, "detail": "low"}, URL)).encode()
    value = decode_body(body_of(data[:1000], data[1000:]))
    assert left(value) == 2
    assert plain(value) == chat({"url": URL, "detail": "low"}, {"url": URL})
    request = ChatCompletionRequest.model_validate(value)
    found = request.messages[0].content[0].image_url.url  # type: ignore[index, union-attr]
    assert isinstance(found, BodyText)
    assert (found[:5], len(found), found.find(","), found.find("~")) == (
        "data:", len(URL), URL.find(","), -1,
    )  # fmt: skip
    assert hashing.UrlTextMap.key(found) == hashing.UrlTextMap.key(URL)
    assert hashing.UrlTextMap.key(found, b"salt") == hashing.UrlTextMap.key(URL, b"salt")
    decoded = hashing.decode_data_url(found, max_bytes=1 << 20)
    assert decoded == hashing.decode_data_url(URL, max_bytes=1 << 20) == bytes(range(256)) * 40


@pytest.mark.parametrize(
    "value",
    [
        chat("data:" + "é" * 9000), chat("data:" + '\\"' * 9000), chat("data:" + "\x7f" * 9000),
        chat("data:short"), chat("http://x/" + "a" * 9000), {"messages": URL}, [URL], URL,
        {URL: 1}, {"messages": [{"content": [{"text": URL}]}]}, chat(URL, user=URL),
        {"messages": [{"content": [{"image_url": {"url": 'x"' + URL}}]}]},
        {"messages": [1, {"content": [1, {"image_url": 1, "video_url": {"url": 1}}]}, {}]},
        chat(URL, text="x" * 30_000),
    ],
)  # fmt: skip
def test_everything_else_is_a_text(value: Any) -> None:
    decoded = decode_body(body_of(json.dumps(value, ensure_ascii=False).encode()))
    assert not left(decoded)
    assert decoded == value


def test_the_last_of_two_fields_of_a_name_counts() -> None:
    data = b'{"messages":[{"content":[{"image_url":"%s","image_url":"data:x"}]}]}' % URL.encode()
    assert decode_body(body_of(data)) == decode_json(data)


def test_bodies_that_are_damaged_are_refused_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "LONG_BYTES", 12)
    rng = random.Random(24)
    num_left = num_refused = 0
    for _ in range(4000):
        data = bytearray(json.dumps(chat("data:" + "A" * rng.randrange(99), URL[:60])).encode())
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.randrange(3)] = rng.choice(
                (b"", b'"', b"\\", b"\x00", b"\xff", b"\\u0041", b"}", b",", b'"data:', b"\n")
            )
        expected = what_it_says(decode_json, bytes(data))
        found = what_it_says(decode_body, body_of(bytes(data)))
        num_left += left(found) > 0
        num_refused += isinstance(expected, str)
        assert as_objects(plain(found)) == as_objects(expected), bytes(data)
    assert num_left > 300
    assert num_refused > 1000


def test_a_buffer_serves_another_body_once_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_text, "_free", free := [])
    value = decode_body(body_of(json.dumps(chat(URL)).encode()))
    gc.collect()
    assert free == []
    text = value["messages"][0]["content"][0]["image_url"]["url"]
    looking = text.bytes_of(slice(0, 9))
    del value, text
    gc.collect()
    assert free == [], "a view is still there"
    assert bytes(looking) == URL[:9].encode()
    body = body_of(b"[1]")
    assert decode_body(body) == [1]
    buffer = body.buffer
    del body
    gc.collect()
    assert free == [buffer]
    assert Body().buffer is buffer
    bodies = [Body() for _ in range(9)]
    del bodies
    gc.collect()
    assert len(free) <= 2


def test_a_body_is_not_longer_than_its_buffer() -> None:
    body = body_of(b"x" * body_text.BUFFER_BYTES)
    assert not body.add(b"x")
    assert body.content() == b"x" * body_text.BUFFER_BYTES
    assert json_bodies.WHOLE_BYTES <= body_text.BUFFER_BYTES


async def test_requests_hand_their_media_over_in_the_body(harness: Any) -> None:
    for more in ({}, {"stream": True}):
        part = {"type": "image_url", "image_url": {"url": URL}}
        response = await harness.chat([part, {"type": "text", "text": "hi"}], **more)
        assert response.status_code == 200, response.text
        [image], _ = harness.processor.seen[-1]
        assert isinstance(image.url, BodyText)
        assert str(image.url) == URL
