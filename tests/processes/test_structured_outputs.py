"""Structured output with the openai package against real processes, also while engines die."""

from __future__ import annotations

import json
import os
import random

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

NUM_KILLS = int(os.environ.get("FOVEAL_JSON_KILLS", "3"))

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600 + 100 * NUM_KILLS)]


class Line(BaseModel):
    article: str
    count: int


class Invoice(BaseModel):
    number: str
    lines: list[Line]
    is_paid: bool


def messages_of(sample):
    from evaluate import to_request

    return to_request(sample, "tiny-vlm")["messages"]


SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "paid": {"type": "boolean"}},
    "required": ["name", "paid"],
    "additionalProperties": False,
}
"""Small enough that the answer of a model that is not trained for it ends."""


@pytest.fixture(scope="module")
def pair(deployment_of, start_seconds):
    deployment = deployment_of(num_engines=2)
    deployment.start()
    deployment.wait_ready(start_seconds)
    yield deployment
    deployment.stop(10)


@pytest.fixture(scope="module")
def client(pair):
    url = pair.frontends[0].url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def options(sample, **more) -> dict:
    body = {"name": "x", "schema": SMALL, "strict": True}
    return {
        "model": "tiny-vlm", "messages": messages_of(sample), "max_tokens": 600, "seed": 3,
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
        "model": "tiny-vlm", "messages": messages_of(samples[0]), "response_format": Invoice,
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


def test_completions_are_bound_too(client):
    answer = client.completions.create(
        model="tiny-vlm", prompt="a", temperature=1, n=3, max_tokens=20,
        extra_body={"structured_outputs": {"regex": "[0-9]{3}"}},
    )  # fmt: skip
    assert all(len(c.text) == 3 and c.text.isdigit() for c in answer.choices)


def test_a_json_stream_outlives_its_engines(pair, client, samples, start_seconds):
    """The state of a grammar follows from the tokens that were sent: wherever an engine dies, the
    answer is that of a run in which none did."""
    seed = int(os.environ.get("FOVEAL_SEED", "1"))
    rng = random.Random(seed)
    for number in range(NUM_KILLS):
        arguments = options(
            samples[number % len(samples)], temperature=rng.choice([0.0, 1.0, 2.0]),
            seed=number, presence_penalty=rng.choice([0.0, 0.5]), n=2,
        )  # fmt: skip
        whole = client.chat.completions.create(**arguments)
        texts = ["", ""]
        kill_at = rng.randint(1, 40)
        victims = list(pair.engines)
        for count, chunk in enumerate(client.chat.completions.create(**arguments, stream=True)):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            if count == kill_at:
                busiest(victims).kill_group()
        assert texts == [c.message.content for c in whole.choices], (seed, number)
        for text in texts:
            jsonschema.validate(json.loads(text), SMALL)
        for engine in victims:
            if not engine.is_alive:
                engine.start()
        pair.wait_ready(start_seconds)


def busiest(engines):
    """The engine that runs most: the stream's own."""

    def running(engine) -> int:
        return httpx.get(engine.url + "/debug/integrity", timeout=30).json()["num_running"]

    return max(engines, key=running)
