"""Tool calls and reasoning through Messages and Responses: events in order, and what is sent on."""

from __future__ import annotations

import json
from typing import Any

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.http.answers import Tally
from foveal_runtime.frontend.http.apis.anthropic import MessageWriter
from foveal_runtime.frontend.http.apis.openai_responses import ResponseWriter
from foveal_runtime.frontend.protocol.openai_responses import ResponsesRequest, response_fields

PARAMETERS = {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"],
    "additionalProperties": False,
}  # fmt: skip
LOOK = {"name": "look", "description": "Looks closer.", "input_schema": PARAMETERS}
FUNCTION = {
    "type": "function", "name": "look", "description": "Looks closer.", "parameters": PARAMETERS,
    "strict": True,
}  # fmt: skip
CALLS = '{"name": "look", "arguments": {"at": "left"}}\n{"name": "look", "arguments": {"at": "up"}}'


def message(**more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "hi"}]
    return {"model": "tiny", "max_tokens": 400, "messages": turns, "tools": [LOOK], **more}


async def events_of(harness: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with harness.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_calls_are_blocks_of_a_message(harness: Any) -> None:
    harness.say[0] = CALLS
    answer = (await harness.http.post("/v1/messages", json=message())).json()
    assert answer["stop_reason"] == "tool_use", answer
    blocks = [(b["type"], b["name"], b["input"]) for b in answer["content"]]
    assert blocks == [("tool_use", "look", {"at": "left"}), ("tool_use", "look", {"at": "up"})]
    prompt = bytes(t for t in harness.generator.requests[-1].token_ids if t < 256).decode()
    assert "Looks closer." in prompt


async def test_calls_of_a_stream_of_messages(harness: Any) -> None:
    harness.say[0] = CALLS
    events = await events_of(harness, "/v1/messages", message())
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1]
    assert all(e["content_block"]["input"] == {} for e in starts)
    arguments = ["", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            arguments[event["index"]] += event["delta"]["partial_json"]
    assert [json.loads(one) for one in arguments] == [{"at": "left"}, {"at": "up"}]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_choices_of_messages_bind(harness: Any) -> None:
    other = {**LOOK, "name": "stop"}
    choice = {"type": "tool", "name": "stop"}
    body = message(tools=[LOOK, other], tool_choice=choice)
    assert (await harness.http.post("/v1/messages", json=body)).status_code == 200
    grammar = harness.generator.requests[-1].sampling.grammar
    assert "stop" in grammar
    assert "look" not in grammar
    for asked in (body, message(tool_choice={"type": "none"})):  # which takes tools out of it
        await harness.http.post("/v1/messages", json=asked)
        counted = {name: value for name, value in asked.items() if name != "max_tokens"}
        found = await harness.http.post("/v1/messages/count_tokens", json=counted)
        assert found.json()["input_tokens"] == len(harness.generator.requests[-1].token_ids)


async def test_calls_are_items_of_a_response(harness: Any) -> None:
    harness.say[0] = CALLS
    body = {"model": "tiny", "input": "hi", "tools": [FUNCTION]}
    answer = (await harness.http.post("/v1/responses", json=body)).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"] * 2, answer
    assert json.loads(answer["output"][0]["arguments"]) == {"at": "left"}
    assert answer["output"][0]["call_id"] != answer["output"][1]["call_id"]
    assert answer["output"][0]["id"] != answer["output"][1]["id"]
    events = await events_of(harness, "/v1/responses", body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds.count("function_call_arguments.done") == 2
    done = [e for e in events if e["type"].endswith("arguments.done")]
    for index, event in enumerate(done):
        deltas = [
            e["delta"] for e in events
            if e["type"].endswith("arguments.delta") and e["output_index"] == index
        ]  # fmt: skip
        assert "".join(deltas) == event["arguments"]
        assert event["output_index"] == index
    assert events[-1]["response"]["output"][0]["arguments"] == done[0]["arguments"]


async def test_a_response_is_continued_with_its_own_items(harness: Any) -> None:
    harness.say[0] = CALLS
    body = {"model": "tiny", "input": [{"role": "user", "content": "hi"}], "tools": [FUNCTION]}
    answer = (await harness.http.post("/v1/responses", json=body)).json()
    body["input"] += answer["output"] + [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "a dog"}
        for item in answer["output"]
    ]
    harness.say[0] = "A dog."
    last = (await harness.http.post("/v1/responses", json=body)).json()
    assert last["output"][0]["content"][0]["text"] == "A dog."


def test_reasoning_of_one_turn_is_kept_whole() -> None:
    """Of reasoning before a message and before the call after it, the first was lost."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = [
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [{"text": "first "}]},
        {"role": "assistant", "content": "t"},
        {"type": "reasoning", "content": [{"text": "then"}]}, call,
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ]  # fmt: skip
    request = ResponsesRequest.model_validate({"input": items})
    messages = response_fields(request)["messages"]
    assert [one.get("reasoning_content") for one in messages] == [None, "first then", None]


def tally() -> Tally:
    found = Tally(1)
    found.add(0, Delta(num_tokens=5, num_reasoning_tokens=3))
    return found


def test_reasoning_is_a_block_before_the_text() -> None:
    writer = MessageWriter("r", "tiny")
    counted = tally()
    events = [
        *writer.begin(counted), *writer.reasoning("h"), *writer.reasoning("m"), *writer.text("yes"),
        *writer.end(Delta(finish_reason="stop"), counted),
    ]  # fmt: skip
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "ping", "content_block_delta",
        "content_block_delta", "content_block_delta", "content_block_stop", "content_block_start",
        "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[5]["delta"]["type"] == "signature_delta"
    thinking, text = writer.body()["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "yes")
    assert thinking["signature"]


def test_reasoning_is_an_item_before_the_message() -> None:
    writer = ResponseWriter("r", "tiny", ResponsesRequest(input="x"))
    counted = tally()
    events = [
        *writer.begin(counted), *writer.reasoning("hm"), *writer.text("yes"),
        *writer.end(Delta(finish_reason="stop"), counted),
    ]  # fmt: skip
    reasoning, text = writer.body()["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text["content"][0]["text"] == "yes"
    assert writer.body()["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    done = next(e for e in events if e["type"] == "response.reasoning_text.done")
    assert (done["text"], done["output_index"]) == ("hm", 0)


async def test_as_many_tools_are_taken_by_every_api(harness: Any) -> None:
    """Chat completions took 128, and with them what the other two had promised to take."""
    harness.generator.context_tokens = 10**6
    nothing = {"type": "object", "properties": {}}
    names = [f"f{number}" for number in range(300)]
    tools = [{"name": name, "input_schema": nothing} for name in names]
    response = await harness.http.post("/v1/messages", json=message(tools=tools))
    assert response.status_code == 200, response.text
    tools = [{"type": "function", "name": name, "parameters": nothing} for name in names]
    given = {"model": "tiny", "input": "hi", "tools": tools}
    response = await harness.http.post("/v1/responses", json=given)
    assert response.status_code == 200, response.text
    assert '"f299"' in harness.prompt
