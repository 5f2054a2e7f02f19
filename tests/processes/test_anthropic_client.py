"""The anthropic package, unmodified, against real processes: texts equal those of chat."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta

import anthropic
import pytest
from evaluate import to_request

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def client(shared):
    with anthropic.Anthropic(base_url=shared[1].url, api_key="none", max_retries=0) as client:
        yield client


def turns_of(sample):
    """The sample's question with its pictures as Anthropic's blocks."""
    system, turns = [], []
    for message in to_request(sample, "tiny-vlm")["messages"]:
        content = message["content"]
        if message["role"] == "system":
            system.append(content if isinstance(content, str) else content[0]["text"])
            continue
        if not isinstance(content, str):
            content = [_block(part) for part in content]
        turns.append({"role": message["role"], "content": content})
    return {"messages": turns} | ({"system": "\n".join(system)} if system else {})


def _block(part):
    if part["type"] == "text":
        return {**part, "cache_control": {"type": "ephemeral"}}
    head, _, data = part["image_url"]["url"].partition(",")
    assert base64.b64decode(data)
    media_type = head.removeprefix("data:").removesuffix(";base64")
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": media_type, "data": data},
    }


def options(sample, longest_reply):
    return {
        "model": "tiny-vlm", "max_tokens": longest_reply, **turns_of(sample),
        "extra_body": {"temperature": 0},  # not among the package's own arguments any more
    }  # fmt: skip


def test_models(client):
    page = client.models.list(limit=20)
    (model,) = page
    assert (model.id, model.display_name, model.type) == ("tiny-vlm", "tiny-vlm", "model")
    assert (page.first_id, page.has_more) == ("tiny-vlm", False)
    age = datetime.now(UTC) - model.created_at
    assert timedelta(0) <= age < timedelta(hours=1)
    assert client.models.retrieve("tiny-vlm") == model
    with pytest.raises(anthropic.NotFoundError, match="this server has 'tiny-vlm'"):
        client.models.retrieve("other")


def test_answers_are_those_of_chat(client, samples, longest_reply):
    for sample in samples[::7]:
        answer = client.messages.create(**options(sample, longest_reply))
        assert answer.content[0].text == sample.reference
        assert answer.role == "assistant"
        assert answer.type == "message"
        if answer.usage.output_tokens < longest_reply:
            assert answer.stop_reason == "end_turn"


def test_an_image_sent_by_one_api_is_a_hit_for_the_other(shared, client, samples, longest_reply):
    sample = next(sample for sample in samples if sample.pictures)
    asker = shared[1]
    asker.check(sample)
    before = asker.metric("foveal_media_items_processed_total")
    answer = client.messages.create(**options(sample, longest_reply))
    assert answer.content[0].text == sample.reference
    assert answer.usage.cache_read_input_tokens > 0
    assert asker.metric("foveal_media_items_processed_total") == before


def test_stream_helper(client, samples, longest_reply):
    for sample in samples[:3]:
        with client.messages.stream(**options(sample, longest_reply)) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == sample.reference == final.content[0].text
        assert final.usage.output_tokens > 0
        assert final.stop_reason


def test_tokens_are_counted_as_they_are_used(client, samples):
    sample = next(sample for sample in samples if sample.pictures)
    counted = client.messages.count_tokens(model="tiny-vlm", **turns_of(sample))
    usage = client.messages.create(**options(sample, 1)).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


LOOK = {
    "name": "look", "description": "Looks for shapes in the image.",
    "input_schema": {
        "type": "object", "required": ["shape", "count"], "additionalProperties": False,
        "properties": {
            "shape": {"enum": ["circle", "square"]}, "count": {"enum": [1, 2, 3]},
        },
    },
}  # fmt: skip


def check_call(blocks):
    [call] = [block for block in blocks if block.type == "tool_use"]
    assert call.name == "look"
    assert set(call.input) == {"shape", "count"}
    assert call.input["shape"] in ("circle", "square")
    assert call.input["count"] in (1, 2, 3)
    return call


def test_a_tool_s_round_trip(client, samples):
    """Asked by name or at all, streamed or not; then the answer after the result, an image."""
    sample = next(sample for sample in samples if sample.pictures)
    arguments = options(sample, 600) | {"tools": [LOOK]}
    named = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    asked = client.messages.create(**arguments, tool_choice=named)
    call = check_call(asked.content)
    assert asked.stop_reason == "tool_use"

    required = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**arguments, tool_choice=required) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"input_json", "content_block_stop"} <= kinds
    assert check_call(final.content).input == call.input
    assert final.stop_reason == "tool_use"

    image = next(b for b in arguments["messages"][-1]["content"] if b["type"] == "image")
    said = [{"type": "text", "text": "Seen:"}, image]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": said, "is_error": False}
    arguments["messages"] += [
        {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}
    ]  # fmt: skip
    answer = client.messages.create(**arguments, tool_choice={"type": "none"})
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.usage.cache_read_input_tokens > 0


def test_a_schema_binds_an_answer(client, samples):
    bound = {"format": {"type": "json_schema", "schema": LOOK["input_schema"]}}
    answer = client.messages.create(**options(samples[0], 600), output_config=bound)
    assert answer.stop_reason == "end_turn"
    assert set(json.loads(answer.content[0].text)) == {"shape", "count"}


def test_errors_are_the_packages_own(client, samples):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**options(samples[0], 4), "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**options(samples[0], -1))
