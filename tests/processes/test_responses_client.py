"""The openai package's Responses client, unmodified, against real processes."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from evaluate import to_request

pytestmark = pytest.mark.timeout(900)
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["shape", "count"],
    "properties": {
        "shape": {"enum": ["circle", "square"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
}  # fmt: skip


def options(sample, longest_reply):
    items = []
    for message in to_request(sample, "tiny-vlm")["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            content = [_part(part) for part in content]
        items.append({"role": message["role"], "content": content})
    return {
        "model": "tiny-vlm", "input": items, "temperature": 0, "max_output_tokens": longest_reply,
    }  # fmt: skip


def _part(part):
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}


def test_answers_are_those_of_chat(client, samples, longest_reply):
    for sample in samples[::7]:
        whole = client.responses.create(**options(sample, longest_reply))
        assert whole.output_text == sample.reference
        assert whole.usage.output_tokens > 0


def test_stream_helper(client, samples, longest_reply):
    for sample in samples[:3]:
        # A limit of its own: the package takes no `incomplete` response for a final one.
        with client.responses.stream(**options(sample, 2 * longest_reply)) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(texts) == sample.reference == final.output_text


def test_log_probabilities_are_those_of_chat(client, samples, longest_reply):
    sample = samples[0]
    asked = options(sample, 2 * longest_reply) | {
        "include": ["message.output_text.logprobs"], "top_logprobs": 3,
    }  # fmt: skip
    scores = client.responses.create(**asked).output[0].content[0].logprobs
    assert "".join(one.token for one in scores) == sample.reference
    with client.responses.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert [one.logprob for event in deltas for one in event.logprobs] == [
        one.logprob for one in scores
    ]
    assert final.output[0].content[0].logprobs == scores
    chat = client.chat.completions.create(
        **to_request(sample, "tiny-vlm"), logprobs=True, top_logprobs=3
    )
    found = chat.choices[0].logprobs.content[: len(scores)]
    assert [one.token for one in found] == [one.token for one in scores]
    for one, other in zip(found, scores, strict=True):
        tops = [(top.token, top.logprob) for top in other.top_logprobs]
        assert [(top.token, top.logprob) for top in one.top_logprobs] == tops


def test_input_tokens_are_counted(client, samples):
    for sample in samples[:3]:
        asked = options(sample, 2)
        counted = client.responses.input_tokens.count(model="tiny-vlm", input=asked["input"])
        usage = client.responses.create(**asked).usage
        assert counted.input_tokens == usage.input_tokens


def test_schemas_bind_answers(client, samples):
    bound = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(**{**options(samples[0], 600), "text": bound})
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)


LOOK = {
    "type": "function", "name": "look", "description": "Looks for shapes in the image.",
    "strict": True, "parameters": SCHEMA,
}  # fmt: skip


def check_call(items):
    [call] = [item for item in items if item.type == "function_call"]
    assert call.name == "look"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    return call


def test_a_tool_s_round_trip(client, samples):
    """Asked by name or at all, streamed or not; then the answer after the result, an image."""
    sample = next(sample for sample in samples if sample.pictures)
    arguments = options(sample, 600) | {"tools": [LOOK], "parallel_tool_calls": False}
    named = {"type": "function", "name": "look"}
    asked = client.responses.create(**arguments, tool_choice=named)
    call = check_call(asked.output)
    with client.responses.stream(**arguments, tool_choice="required") as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == check_call(final.output).arguments == call.arguments

    image = next(p for p in arguments["input"][-1]["content"] if p["type"] == "input_image")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [image]}
    arguments["input"] += [*(item.model_dump() for item in asked.output), result]
    answer = client.responses.create(**arguments, tool_choice="none")
    assert answer.output_text
    assert answer.usage.input_tokens_details.cached_tokens > 0


def test_its_own_output_is_taken_back(client, samples, longest_reply):
    """A client continues by sending the items that it got."""
    arguments = options(samples[0], longest_reply)
    first = client.responses.create(**arguments)
    arguments["input"] += [item.model_dump() for item in first.output]
    arguments["input"].append({"role": "user", "content": "And now?"})
    assert client.responses.create(**arguments).output_text
    with pytest.raises(openai.BadRequestError, match="send all items"):
        client.responses.create(**options(samples[0], 4), previous_response_id=first.id)
