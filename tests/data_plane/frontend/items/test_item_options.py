"""Processor options of a request whose media differ in kind."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.media.protocol import PlaceholderInfo
from foveal_runtime.plan.sampling import SamplingParams

IMAGE, VIDEO = 4, 7


async def test_each_item_gets_its_own_options(start_input: Any, picture: Any) -> None:
    """`fps` for the video was a 400, because the image's processor does not know it."""
    inputs = await start_input()
    image = inputs.info.placeholders[0]
    inputs.info = msgspec.structs.replace(
        inputs.info,
        placeholders=(image, PlaceholderInfo(1, "<video>", VIDEO, VIDEO, "<video>", "rule")),
        options=(frozenset({"scale"}), frozenset({"fps"}), frozenset()),
    )
    file = picture()
    process, seen = inputs.workers.process, []

    async def spy(modality: int, options: bytes, *more: Any) -> Any:
        seen.append((modality, msgspec.json.decode(options)))
        return await process(0, options, file)

    inputs.workers.process = spy
    frames = "data:video/jpeg;base64," + base64.b64encode(file).decode()
    parts = [
        MediaPart(modality="image", path="messages[0].content[0]", data=file),
        MediaPart(modality="video", path="messages[0].content[1]", url=frames),
    ]

    async def prepare(**given: Any) -> Any:
        sampling = SamplingParams(max_tokens=50)
        options = PrepareOptions(request_id="r", sampling=sampling, mm_processor_kwargs=given)
        return await inputs.prepare([IMAGE, VIDEO], parts, options)

    first = await prepare(scale=2, fps=3)
    assert sorted(seen) == [(0, {"scale": 2}), (1, {"fps": 3})]
    second = await prepare(scale=2, videos_kwargs={"fps": 3})
    assert len(seen) == 2, "the same options, and so the same items"
    third = await prepare(scale=2, fps=4)
    assert sorted(seen[2:]) == [(1, {"fps": 4})]
    keys = [[item.mm_hash for item in found.items] for found in (first, second, third)]
    assert keys[0] == keys[1]
    assert keys[0][0] == keys[2][0]
    assert keys[0][1] != keys[2][1]
