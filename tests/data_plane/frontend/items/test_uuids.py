"""A uuid stands for one content, whatever requests say at once."""

import asyncio

import pytest

from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.plan.errors import MediaConflict
from foveal_runtime.plan.sampling import SamplingParams

IMAGE = 4


def options() -> PrepareOptions:
    return PrepareOptions(request_id="r", sampling=SamplingParams(max_tokens=50))


def image(data: bytes | None = None, number: int = 0) -> MediaPart:
    path = f"messages[0].content[{number}]"
    return MediaPart(modality="image", data=data, uuid="cat", path=path)


async def test_a_uuid_of_two_contents_in_one_request(start_input, picture):
    """The later one became its meaning: a reference to the first one got another image."""
    inputs = await start_input()
    parts = [image(picture(number), number) for number in range(2)]
    with pytest.raises(MediaConflict) as caught:
        await inputs.prepare([IMAGE, IMAGE], parts, options())
    assert caught.value.param == "messages[0].content[1]"
    first = await inputs.prepare([IMAGE, IMAGE], [parts[0], parts[0]], options())
    assert len(first.binds) == 1


async def test_a_uuid_of_two_contents_in_requests_at_once(start_input, picture):
    inputs = await start_input()
    asked = [inputs.prepare([IMAGE], [image(picture(n))], options()) for n in range(2)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in found].count(MediaConflict) == 1
    [kept] = [one for one in found if not isinstance(one, MediaConflict)]
    named = await inputs.prepare([IMAGE], [image()], options())
    assert named.items[0].mm_hash == kept.items[0].mm_hash
