"""OpenAI's Responses API: prompts from items, events in order, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from foveal_runtime.plan.errors import EngineFailure

PATH = "/v1/responses"
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def body(given: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": given, **more}


async def events_of(harness: Any, **more: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = await harness.events(PATH, body(**more))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_whole_answer(harness: Any) -> None:
    sent = body(instructions="s", metadata={"a": "b"}, store=True)
    answer = (await harness.http.post(PATH, json=sent, headers={"x-request-id": "r1"})).json()
    assert harness.prompt == "<|system|>s<|end|><|user|>hi<|end|><|assistant|>"
    assert (answer["id"], answer["status"], answer["store"]) == ("resp_r1", "completed", False)
    [item] = answer["output"]
    assert item["content"][0]["text"] == "Hello, world!"
    assert answer["usage"]["input_tokens"] == len(harness.generator.requests[-1].token_ids)
    assert answer["metadata"] == {"a": "b"}


async def test_events_come_in_order(harness: Any) -> None:
    events = await events_of(harness)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"].endswith("output_text.delta")]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4 : 4 + len(deltas)] == ["output_text.delta"] * len(deltas)
    assert kinds[4 + len(deltas) :] == [
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in deltas) == "Hello, world!"
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert events[2]["item"]["content"] == []
    assert {event["item_id"] for event in deltas} == {last["output"][0]["id"]}


@pytest.mark.parametrize("limit", [3, 64])
async def test_answers_are_those_of_the_published_types(harness: Any, limit: int) -> None:
    """Clients in typed languages, and the Python library when it is told to validate, refuse an
    answer that lacks a required field."""
    answer = (await harness.http.post(PATH, json=body(max_output_tokens=limit))).json()
    Response.model_validate(answer, strict=True)
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    event: Any = TypeAdapter(ResponseStreamEvent)
    for sent in await events_of(harness, max_output_tokens=limit):
        assert event.validate_python(sent).type == sent["type"]


async def test_a_cut_answer_is_incomplete(harness: Any) -> None:
    for name in ("max_output_tokens", "max_completion_tokens"):  # as in chat: it did nothing
        answer = (await harness.http.post(PATH, json=body(**{name: 3}))).json()
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (await events_of(harness, max_output_tokens=3))[-1]["type"] == "response.incomplete"


async def test_a_conversation_of_every_item(harness: Any) -> None:
    items = [
        {"role": "developer", "content": "s"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PIXEL},
        ]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
        ]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "red"}, {"type": "input_image", "image_url": PIXEL},
        ]},
    ]  # fmt: skip
    response = await harness.http.post(PATH, json=body(items))
    assert response.status_code == 200, response.text
    assert harness.prompt == (
        '<|system|>s<|end|><|user|>a<image><|end|><|assistant|>b{"name": "look", "arguments": '
        '{"at": 1}}<|end|><|user|>red<image><|end|><|assistant|>'
    )


async def test_oldest_messages_go_until_the_rest_fits(harness: Any) -> None:
    harness.generator.context_tokens = 400
    items = [{"role": "system", "content": "stay"}]
    for number in range(20):
        items.append({"role": "user", "content": f"question {number:3d} {'x' * 20}"})
        items.append({"role": "assistant", "content": f"answer {number:3d}"})
    items.append({"role": "user", "content": "last"})
    refused = await harness.http.post(PATH, json=body(items))
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    taken = await harness.http.post(PATH, json=body(items, truncation="auto", max_output_tokens=64))
    assert taken.status_code == 200, taken.text
    prompt = harness.prompt
    assert prompt.startswith("<|system|>stay<|end|><|user|>question")
    assert prompt.endswith("<|user|>last<|end|><|assistant|>")
    num_tokens = len(harness.generator.requests[-1].token_ids)
    assert 400 - 64 - 80 < num_tokens <= 400 - 64, "no more goes than must"


async def test_schemas_bind_answers(harness: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer = await harness.http.post(PATH, json=body(text=text))
    assert answer.status_code == 200, answer.text
    assert harness.generator.requests[-1].sampling.grammar
    assert answer.json()["text"] == text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"previous_response_id": "resp_1"}, "send all items"),
        ({"conversation": "c"}, "send all items"),
        ({"background": True}, "background"),
        ({"wrong": 1}, "wrong"),
        ({"n": 2}, "n is not supported"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "keeps no items"),
        ({"input": [{"role": "user", "content": [{"type": "odd"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input has no message"),
        ({"min_p": 7}, "min_p"),
        ({"include": 5}, "include: Input should be a valid list"),
    ],
)
async def test_refusals_name_the_field(harness: Any, change: dict[str, Any], named: str) -> None:
    response = await harness.http.post(PATH, json=body(**{"given": "hi"} | {
        "given" if name == "input" else name: value for name, value in change.items()
    }))  # fmt: skip
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"], response.text


async def test_fields_of_codex_without_meaning_are_taken(harness: Any) -> None:
    more = {"client_metadata": {"x-codex-installation-id": "i"}, "access_programs": ["p"]}
    response = await harness.http.post(PATH, json=body(**more))
    assert response.status_code == 200, response.text


async def test_a_failure_within_a_stream_is_an_event(harness: Any) -> None:
    harness.generator.error, harness.generator.error_after = EngineFailure("it broke"), 3
    last = (await events_of(harness))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
