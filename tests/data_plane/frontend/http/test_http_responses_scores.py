"""Log probabilities of the Responses API, those of the text alone, and the count of a prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter

from foveal_runtime.frontend.testing.fake_tokenizer import TEMPLATE
from foveal_runtime.plan.config import Admission

PATH = "/v1/responses"
SCORES = "message.output_text.logprobs"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": PARAMETERS}
CALL = '{"name": "look", "arguments": {"at": "left"}}'


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", "include": [SCORES], "top_logprobs": 2, **more}


def text_of(entries: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


async def scores_of(harness: Any, **more: Any) -> list[dict[str, Any]]:
    """Of a whole answer, which a stream's events repeat in parts and in its last one."""
    answer = (await harness.http.post(PATH, json=body(**more))).json()
    Response.model_validate(answer, strict=True)
    parts = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
    found: list[dict[str, Any]] = [entry for part in parts for entry in part["logprobs"]]
    events = await harness.events(PATH, body(**more))
    check: Any = TypeAdapter(ResponseStreamEvent)
    streamed: list[dict[str, Any]] = []
    for event in events:
        check.validate_python(event)
        if event["type"] == "response.output_text.delta":
            streamed += event["logprobs"]
        elif event["type"] == "response.output_text.done":
            assert event["logprobs"] == found
        elif event["type"] == "response.content_part.added":
            assert not event["part"].get("logprobs")
    assert streamed == found
    last = events[-1]["response"]["output"]
    assert [item.get("content", [{}])[0].get("logprobs") for item in last] == [
        item.get("content", [{}])[0].get("logprobs") for item in answer["output"]
    ]
    return found


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_entries_are_the_tokens_of_the_text(harness: Any, size: int) -> None:
    harness.generator.tokens_per_output = size
    harness.say[0] = "Grüße, world!"
    found = await scores_of(harness)
    assert text_of(found) == "Grüße, world!"
    assert [entry["token"] for entry in found[:2]] == ["G", "r"]
    tops = [[one["token"] for one in entry["top_logprobs"]] for entry in found[:2]]
    assert tops == [["G", "H"], ["r", "s"]]
    assert text_of(await scores_of(harness, stop=["world"])) == "Grüße, "
    assert text_of(await scores_of(harness, max_output_tokens=2)) == "Gr"
    assert not (await scores_of(harness, top_logprobs=0))[0]["top_logprobs"]


@pytest.mark.parametrize("size", [1, 4, 100])
async def test_reasoning_and_calls_have_no_entries(start: Any, size: int) -> None:
    template = TEMPLATE + "{# <think></think><tool_call> #}"
    async with start(chat_template=template, tool_format="hermes") as harness:
        harness.generator.tokens_per_output = size
        harness.say[0] = "<think>I look</think>\n\nI look.\n<tool_call>\n" + CALL
        assert text_of(await scores_of(harness, tools=[LOOK])) == "I look."
        harness.say[0] = "<think>no text</think>\n\n<tool_call>\n" + CALL
        assert await scores_of(harness, tools=[LOOK]) == []


async def test_who_asks_for_none_gets_none(harness: Any) -> None:
    """Some clients send `top_logprobs` alone."""
    assert await scores_of(harness, include=["reasoning.encrypted_content"], top_logprobs=0) == []
    assert text_of(await scores_of(harness, include=None)) == "Hello, world!"
    over = await harness.http.post(PATH, json=body(top_logprobs=21))
    assert over.json()["error"]["param"] == "top_logprobs"


async def test_those_that_a_stream_repeats_at_its_end_are_charged(start: Any) -> None:
    """The last event has all of them, so that they are held as those of a whole answer."""
    async with start(admission=Admission(max_answer_scores=3000)) as harness:
        harness.say[0] = "x" * 2000
        events = await harness.events(PATH, body())
        assert events[-1]["type"] == "response.incomplete"
        assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 1000
        harness.generator.hold = asyncio.Event()
        asked = asyncio.create_task(harness.events(PATH, body(max_output_tokens=400)))
        await harness.until(lambda: harness.generator.running)
        assert harness.app.gate.num_scores == 400 * 3
        harness.generator.hold.set()
        await asked
        assert harness.app.gate.num_scores == 0


COUNTED: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief."},
    {"tools": [LOOK]},
    {"tools": [LOOK], "tool_choice": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"effort": "high"}},
    {"input": [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "a"},
               {"role": "user", "content": "b"}], "truncation": "auto"},
]  # fmt: skip


async def test_a_prompt_counts_as_many_tokens_as_it_has(start: Any) -> None:
    """Tools that `tool_choice` takes out of the prompt were counted, and variables were not."""
    template = "{{ reasoning_effort }}{{ enable_thinking }}{{ tools }}" + TEMPLATE
    async with start(chat_template=template, tool_format="hermes") as harness:
        for change in COUNTED:
            asked = {"model": "tiny", "input": "hi", **change}
            counted = await harness.http.post(f"{PATH}/input_tokens", json=asked)
            assert counted.status_code == 200, counted.text
            found = InputTokenCountResponse.model_validate(counted.json(), strict=True)
            answer = (await harness.http.post(PATH, json=asked)).json()
            assert found.input_tokens == answer["usage"]["input_tokens"] > 0, change
        alone = await harness.http.post(f"{PATH}/input_tokens", json={"instructions": "s"})
        assert alone.json()["input_tokens"] > 0
        for path, param in ((PATH, "input"), (f"{PATH}/input_tokens", "input")):
            refused = await harness.http.post(path, json={"model": "tiny"})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
