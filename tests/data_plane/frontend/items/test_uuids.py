"""A uuid stands for one content, whatever requests say at once."""

import asyncio

import pytest

from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.plan.errors import MediaConflict, MediaUnknown
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


@pytest.mark.parametrize("first", [0, 1])
async def test_a_uuid_alone_beside_its_own_content(start_input, picture, first):
    """It was a 400, "send the image again", where the image was in the same request."""
    inputs = await start_input()
    parts = [image(picture() if number == first else None, number) for number in range(2)]
    request = await inputs.prepare([IMAGE, IMAGE], parts, options())
    assert len(request.items) == 1
    assert [item for _, item in request.placements] == [0, 0]
    assert request.items[0].source.can_make
    assert inputs.stats.processed_items[0] == 1


async def test_a_uuid_alone_beside_other_content(start_input, picture):
    inputs = await start_input()
    other = MediaPart(modality="image", data=picture(), uuid="dog", path="messages[0].content[1]")
    with pytest.raises(MediaUnknown) as caught:
        await inputs.prepare([IMAGE, IMAGE], [image(), other], options())
    assert caught.value.param == "messages[0].content[0]"
