"""JSON and calls of tools that the bundled model was taught: true answers, nothing forces them."""

from __future__ import annotations

import json
import random

import openai
import pytest
from evaluate import reply_of
from scenes import draw_scene, to_data_url
from structured import tool

pytestmark = pytest.mark.timeout(600)
TOOLS = [tool("look"), tool("compare")]
OBJECT = {
    "type": "object", "additionalProperties": False, "required": ["place", "colour", "shape"],
    "properties": {name: {"type": "string"} for name in ("place", "colour", "shape")},
}  # fmt: skip
SCENE = {
    "type": "object", "additionalProperties": False, "required": ["objects"],
    "properties": {"objects": {"type": "array", "items": OBJECT}},
}  # fmt: skip


def asked(pictures, text: str) -> dict:
    parts = [
        {"type": "image_url", "image_url": {"url": to_data_url(picture.image)}}
        for picture in pictures
    ]
    content = [*parts, {"type": "text", "text": text}]
    return {
        "model": "tiny-vlm", "messages": [{"role": "user", "content": content}], "temperature": 0,
        "max_tokens": 160,
    }  # fmt: skip


def test_answers_are_those_of_plain_transformers(shared, structured_samples):
    """With tools in the prompt, calls, results and JSON: neither the grammar of calls nor that of
    JSON changes what the model says."""
    for sample in structured_samples:
        answer = shared[1].post(sample)
        assert answer.status_code == 200, answer.text
        said = reply_of(answer.json()["choices"][0]["message"])
        assert said == sample.reference, sample.family


def test_a_call_that_the_model_decides_on(client):
    """The model finds the place in the picture, calls, and tells what the tool returned: a text
    that contradicts the picture, then a picture."""
    for seed in range(4):
        rng = random.Random(f"calls/{seed}")
        picture, found = draw_scene(rng, 2), draw_scene(rng, 1)
        thing = picture.things[0]
        request = asked([picture], f"use look at the {thing.name}.") | {"tools": TOOLS}
        with client.chat.completions.stream(**request) as stream:
            choice = stream.get_final_completion().choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "look"
        assert json.loads(call.function.arguments) == {"place": thing.place}
        url = {"url": to_data_url(found.image)}
        name = found.things[0].name
        article = "an" if name[0] == "o" else "a"
        for result, told in (
            ("a purple triangle", "a purple triangle"),
            ([{"type": "image_url", "image_url": url}], f"{article} {name}"),
        ):
            history = [
                *request["messages"], choice.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": result},
            ]  # fmt: skip
            answer = client.chat.completions.create(**request | {"messages": history})
            assert answer.choices[0].message.content == f"the {thing.place} shows {told}."
            assert answer.choices[0].finish_reason == "stop"


def test_tools_that_nobody_asks_for_are_not_called(client):
    picture = draw_scene(random.Random("unasked"), 3)
    answer = client.chat.completions.create(
        **asked([picture], "how many objects are there?"), tools=TOOLS
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == "3"


@pytest.mark.parametrize("bound", [False, True], ids=["free", "schema"])
def test_json_is_true(client, bound):
    form = {
        "type": "json_schema",
        "json_schema": {"name": "scene", "schema": SCENE, "strict": True},
    }
    for seed in range(4):
        picture = draw_scene(random.Random(f"json/{seed}"), seed + 1)
        answer = client.chat.completions.create(
            **asked([picture], "describe the image in JSON."),
            response_format=form if bound else openai.NOT_GIVEN,
        )
        assert json.loads(answer.choices[0].message.content)["objects"] == [
            {"place": thing.place, "colour": thing.colour, "shape": thing.shape}
            for thing in picture.things
        ]
