"""Structured output and tools with the openai package on real processes, also while engines die."""

from __future__ import annotations

import json
import os
import random
from typing import Literal

import httpx
import jsonschema
import openai
import pytest
from evaluate import to_request
from pydantic import BaseModel, Field

NUM_KILLS = int(os.environ.get("FOVEAL_JSON_KILLS", "3"))

pytestmark = pytest.mark.timeout(600 + 100 * NUM_KILLS)


class Line(BaseModel):
    article: str
    count: int


class Invoice(BaseModel):
    number: str
    lines: list[Line]
    is_paid: bool


SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "paid": {"type": "boolean"}},
    "required": ["name", "paid"],
    "additionalProperties": False,
}
"""Small enough that the answer of a model that is not trained for it ends."""


class Look(BaseModel):
    """Looks at a part of the image."""

    part: Literal["left", "right"]
    times: int = Field(ge=1, le=9)


class Name(BaseModel):
    """Gives what is seen a name."""

    name: str = Field(max_length=12)


TOOLS = [openai.pydantic_function_tool(Look), openai.pydantic_function_tool(Name)]
CLASSES = {"Look": Look, "Name": Name}


def client_of(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)


def options(sample, **more) -> dict:
    body = {"name": "x", "schema": SMALL, "strict": True}
    return {
        "model": "tiny-vlm", "messages": to_request(sample, "tiny-vlm")["messages"],
        "max_tokens": 600, "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": body}, **more,
    }  # fmt: skip


def test_answers_about_images_validate_at_every_temperature(client, samples):
    for temperature in (0, 1, 2):
        whole = client.chat.completions.create(**options(samples[0], temperature=temperature, n=2))
        for choice in whole.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SMALL)


def test_parse_helper_and_stream_helper(client, samples):
    """What OpenAI's package makes of a pydantic class, as it is."""
    arguments = {
        "model": "tiny-vlm", "messages": to_request(samples[0], "tiny-vlm")["messages"],
        "response_format": Invoice,
        "temperature": 0, "max_tokens": 900,
    }  # fmt: skip
    try:
        answer = client.chat.completions.parse(**arguments)
    except openai.LengthFinishReasonError as error:  # the model is not trained to end its strings
        content = error.completion.choices[0].message.content
        assert content.lstrip().startswith("{")
    else:
        assert isinstance(answer.choices[0].message.parsed, Invoice)
    with client.chat.completions.stream(
        **{**arguments, "response_format": openai.NOT_GIVEN}, extra_body={
            "structured_outputs": {"choice": ["red", "blue"]}}
    ) as stream:  # fmt: skip
        text = "".join(e.delta for e in stream if e.type == "content.delta")
    assert text in ("red", "blue")


@pytest.mark.parametrize("stream", [False, True])
def test_options_that_leave_no_token_are_refused(client, samples, stream):
    """It was the engine's failure, which clients send again and alerts count."""
    with pytest.raises(openai.BadRequestError, match="options leave no token to choose"):
        client.chat.completions.create(
            **options(samples[0], stream=stream), extra_body={"allowed_token_ids": [5]}
        )


def with_tools(sample, **more) -> dict:
    return {
        "model": "tiny-vlm", "messages": to_request(sample, "tiny-vlm")["messages"],
        "max_tokens": 600, "seed": 3,
        "tools": TOOLS, "tool_choice": "required", **more,
    }  # fmt: skip


def check_calls(calls):
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        CLASSES[call.function.name].model_validate_json(call.function.arguments)


def test_calls_are_valid_at_every_temperature(client, samples):
    """Of tools that the model was never taught."""
    for seed, temperature in enumerate((0, 1, 2, 2, 2, 2)):
        arguments = with_tools(samples[0], temperature=temperature, seed=seed, n=3)
        whole = client.chat.completions.create(**arguments, parallel_tool_calls=False)
        for choice in whole.choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            check_calls(choice.message.tool_calls)
            assert len(choice.message.tool_calls) == 1
    several = client.chat.completions.create(**with_tools(samples[0], temperature=2, n=4))
    for choice in several.choices:
        assert choice.finish_reason == "tool_calls"
        check_calls(choice.message.tool_calls)


def test_a_named_tool_and_none(client, samples):
    choice = {"type": "function", "function": {"name": "Name"}}
    answer = client.chat.completions.create(**with_tools(samples[0], tool_choice=choice))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "Name"
    assert answer.choices[0].finish_reason == "tool_calls"
    answer = client.chat.completions.create(**with_tools(samples[0], tool_choice="none"))
    assert answer.choices[0].message.tool_calls is None
    choice["function"]["name"] = "Dig"
    with pytest.raises(openai.BadRequestError, match="'Dig'"):
        client.chat.completions.create(**with_tools(samples[0], tool_choice=choice))


def test_a_tool_round_trip_with_the_helpers(client, samples):
    """parse and stream as they are, then the tool's result."""
    arguments = with_tools(samples[0], temperature=1, parallel_tool_calls=False)
    message = client.chat.completions.parse(**arguments).choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Look | Name)
    with client.chat.completions.stream(**arguments) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(e.arguments_delta for e in deltas) == done.arguments == call.function.arguments
    assert len(deltas) > 1
    assert final.choices[0].finish_reason == "tool_calls"
    history = [
        *arguments["messages"], message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "a red circle"},
    ]  # fmt: skip
    answer = client.chat.completions.create(**{
        **arguments, "messages": history, "tool_choice": "auto", "max_tokens": 20})  # fmt: skip
    assert answer.choices[0].finish_reason
    history.pop(-2)
    with pytest.raises(openai.BadRequestError, match=call.id):
        client.chat.completions.create(**{**arguments, "messages": history})


def test_completions_are_bound_too(client):
    answer = client.completions.create(
        model="tiny-vlm", prompt="a", temperature=1, n=3, max_tokens=20,
        extra_body={"structured_outputs": {"regex": "[0-9]{3}"}},
    )  # fmt: skip
    assert all(len(c.text) == 3 and c.text.isdigit() for c in answer.choices)


@pytest.fixture
def pair(start):
    deployment, (asker,) = start(num_engines=2)
    with client_of(asker.url) as client:
        yield deployment, client


@pytest.mark.extended
def test_a_bound_stream_outlives_its_engines(pair, samples, start_seconds):
    """The state of a grammar follows from the tokens that were sent: wherever an engine dies, the
    answer is that of a run in which none did. JSON and calls of tools in turn."""
    deployment, client = pair
    seed = int(os.environ.get("FOVEAL_SEED", "1"))
    rng = random.Random(seed)
    for number in range(NUM_KILLS):
        arguments = (with_tools if number % 2 else options)(
            samples[number % len(samples)], temperature=rng.choice([0.0, 1.0, 2.0]),
            seed=number, presence_penalty=rng.choice([0.0, 0.5]), n=2,
        )  # fmt: skip
        whole = client.chat.completions.create(**arguments)
        texts, calls = ["", ""], [{}, {}]
        kill_at = rng.randint(1, 40)
        victims = list(deployment.engines)
        for count, chunk in enumerate(client.chat.completions.create(**arguments, stream=True)):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                add_calls(calls[choice.index], choice.delta.tool_calls or ())
            if count == kill_at:
                busiest(victims).kill_group()
        for choice, text, found in zip(whole.choices, texts, calls, strict=True):
            message = choice.message
            assert text == (message.content or ""), (seed, number)
            sent = [[one.function.name, one.function.arguments] for one in message.tool_calls or ()]
            assert list(found.values()) == sent, (seed, number)
            if number % 2:
                assert choice.finish_reason in ("tool_calls", "length")
            else:
                jsonschema.validate(json.loads(text), SMALL)
        for engine in victims:
            if not engine.is_alive:
                engine.start()
        deployment.wait_ready(start_seconds)


def add_calls(calls, pieces) -> None:
    for piece in pieces:
        known = calls.setdefault(piece.index, [piece.function.name, ""])
        known[1] += piece.function.arguments


def busiest(engines):
    """The engine that runs most: the stream's own."""

    def running(engine) -> int:
        return httpx.get(engine.url + "/debug/integrity", timeout=120).json()["num_running"]

    return max(engines, key=running)
