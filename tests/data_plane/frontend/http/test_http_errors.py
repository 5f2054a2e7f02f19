"""Every refusal has the OpenAI error shape, the right status and the field at fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from foveal_runtime.frontend.protocol.responses import ErrorResponse
from foveal_runtime.plan.errors import (
    EngineFailure,
    MediaConflict,
    MediaForbidden,
    NoEngine,
    Overloaded,
)

USER = {"role": "user", "content": "hi"}

BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "other"}, "model", "does not exist"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"role": "a b", "content": "x"}]}, "messages[0].role", "pattern"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].image_url", "[0].image_url is missing, and so is the uuid"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]},
     "messages[0].content[0].image_url.url", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "smell", "smell": {}}]}]},
     "messages[0].content[0]", "smell"),
    ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
     "messages[0].content[0]", "the field 'type' is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a <image> b"}]}]},
     "messages[0].content[0].text", "<image>"),
    ({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a <ima"}, {"type": "text", "text": "ge> b"}]}]},
     "messages", "0 image parts became 1"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "uuid": "nobody"}]}]},
     "messages[0].content[0]", "nobody"),
    ({"temperature": -1}, "temperature", "greater"),
    ({"temperature": "warm"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"min_p": 2}, "min_p", "less"),
    ({"max_tokens": 0}, "max_tokens", "greater"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens", "4096"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most 8"),
    ({"n": 65}, "n", "64"),
    ({"n": 2, "best_of": 3}, "best_of", "equals n"),
    ({"stop": ["a", ""]}, "stop[1]", "at least 1"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": 5}, "stop", "be a valid string or a valid list"),
    ({"messages": [5]}, "messages[0]", "be an object"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "below"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"0" * 12 + "9" * 9: 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "not a token id"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "tokens: must be -1 or at least 1"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
    ({"cache_salt": "a@b"}, "cache_salt", "'@'"),
    ({"cache_salt": "a" * 129}, "cache_salt", "128"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"lora_request": {"name": "x"}}, "lora_request", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "takes no effort"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    ({"temprature": 0}, "temprature", "unknown field"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "may not"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "exclude",
    ),
    ({"continue_final_message": True}, "continue_final_message", "assistant"),
]  # fmt: skip


def check_shape(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body: dict[str, Any] = response.json()
    ErrorResponse.model_validate(body)
    assert "Traceback" not in response.text
    return body["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_what_fastapi_refuses_is_refused_alike(harness: Any, path: str) -> None:
    """Bodies of `application/json` are checked without it, others of JSON by it."""
    changes = [change for change, _, _ in BAD_CHAT]
    bodies: list[Any] = [harness.body(**{"prompt": 1, "input": 1} | change) for change in changes]
    for body in (*bodies, {}, [], None, 1, {"messages": [[1]]}):
        kinds = ("application/json; charset=utf-8", "application/more+json")
        answers = [
            await harness.http.post(path, json=body, headers={"content-type": kind})
            for kind in kinds
        ]
        assert answers[0].status_code == answers[1].status_code >= 400
        assert answers[0].json() == answers[1].json()


async def test_bad_chat_requests(harness: Any) -> None:
    for change, param, fragment in BAD_CHAT:
        response = await harness.http.post(
            "/v1/chat/completions", json={"messages": [USER], **change}
        )
        error = check_shape(response, 404 if param == "model" else 400)
        assert error["param"] == param, (change, error)
        assert fragment in error["message"], (change, error)
    assert not harness.generator.requests


BAD_TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "at least 1"),
    ({"prompt": [[]]}, "prompt", "at least 1"),
    ({"prompt": [1, "a"]}, "prompt", ""),
    ({"prompt": [-1]}, "prompt", "greater"),
    ({"prompt": [10**6]}, "prompt", "below"),
    ({"prompt": ["a"] * 30, "n": 3}, "n", "64"),
    ({"prompt": ["a"] * 65}, "prompt", "65 prompts; at most 64"),
    ({"prompt": [[97]] * 65}, "prompt", "65 prompts; at most 64"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"prompt": "see <image>"}, "prompt", "placeholder of image"),
    ({"prompt": "a" * 5000}, "prompt", "5000 tokens"),
    ({"prompt": "a" * 100_000}, "prompt", "100000 characters"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search", "not supported"),
]


async def test_bad_text_requests(harness: Any) -> None:
    for change, param, fragment in BAD_TEXT:
        error = check_shape(await harness.http.post("/v1/completions", json=change), 400)
        assert error["param"].startswith(param), (str(change)[:80], error)
        assert fragment in error["message"], (str(change)[:80], error)


@pytest.mark.parametrize(("path", "field"), [("/tokenize", "prompt"), ("/v1/embeddings", "input")])
async def test_a_text_that_is_too_long_is_named(start: Any, path: str, field: str) -> None:
    async with start(task="both") as harness:
        answer = await harness.http.post(path, json={field: "a" * 200_000})
        error = check_shape(answer, 400)
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


async def test_accepted_and_meaningless(harness: Any) -> None:
    response = await harness.chat(
        user="me", metadata={"a": "b"}, store=True, service_tier="auto", tools=[], tool_choice=None,
        parallel_tool_calls=False, response_format={"type": "text"}, modalities=["text"],
        guided_json=None, best_of=1, tool_choice_2=None,
    )  # fmt: skip
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "the body is a list; send a JSON object"),
        (b'"hi"', "the body is a text; send a JSON object"),
        (b"true", "the body is a boolean; send a JSON object"),
        (b"0.5", "the body is a number; send a JSON object"),
        (b"", "the body is empty; send a JSON object and the header content-type"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"messages": ' + b"[" * 100_000, "JSON"),
    ],
)
async def test_broken_bodies(harness: Any, content: bytes, message: str) -> None:
    """An empty one was told "Field required", without a field."""
    response = await harness.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert message.lower() in check_shape(response, 400)["message"].lower()


async def test_a_compressed_body_is_refused_by_its_header(harness: Any) -> None:
    """It was told to be no JSON, from its first byte on."""
    body = gzip.compress(json.dumps(harness.body()).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        answer = await harness.http.post(path, content=body, headers=headers)
        assert answer.status_code == 400
        assert "Content-Encoding is 'gzip'" in answer.json()["error"]["message"]
    answer = await harness.http.post(
        "/v1/chat/completions", json=harness.body(), headers={"content-encoding": "identity"}
    )
    assert answer.status_code == 200


async def test_paths_and_methods(harness: Any) -> None:
    assert check_shape(await harness.http.get("/v1/nothing"), 404)["code"] == "not_found"
    error = check_shape(await harness.http.get("/v1/chat/completions"), 405)
    assert error["code"] == "method_not_allowed"
    assert error["message"] == "/v1/chat/completions does not take GET; use POST"
    assert check_shape(await harness.http.get("/v1/models/other"), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/openai/v1/responses", "did you mean /v1/responses?"),
        ("/openai/deployments/tiny/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/V1/Chat/Completions", "did you mean /v1/chat/completions?"),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/v1/chatcompletions", "did you mean /v1/chat/completions?"),
        ("/v1/responses/resp_1", "/docs shows the paths that are"),
        ("/v1/nothing", "/docs shows the paths that are"),
        ("/" + "x" * 5000, "/docs shows the paths that are"),
    ],
)
async def test_a_path_that_is_not_served_names_the_one_that_is(
    harness: Any, path: str, says: str
) -> None:
    """A base URL with or without /v1 is the usual mistake; it was told "Not Found" alone."""
    error = check_shape(await harness.http.post(path, json={}), 404)
    assert error["message"] == f"{path[:200]} is not served here; {says}"


async def test_a_slash_at_the_end_changes_nothing(start: Any, tmp_path: Path) -> None:
    """It was a redirect to http://, which is no address behind a proxy that ends TLS, with the body
    sent twice; and the list of models was the served one."""
    keys = tmp_path / "keys"
    keys.write_text("secret")
    async with start(api_key_file=str(keys)) as harness:
        refused = await harness.http.post("/v1/chat/completions/", json=harness.body())
        check_shape(refused, 401)
        harness.http.headers["authorization"] = "Bearer secret"
        answer = await harness.http.post("/v1/chat/completions/", json=harness.body())
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
        assert (await harness.http.get("/v1/models/")).json()["object"] == "list"
        assert (await harness.http.get("/")).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineFailure("the encoder returned 3 rows, promised 4"), 500),
        (NoEngine("none", retry_after_seconds=7), 503),
        (Overloaded("full"), 503),
        (MediaForbidden("no", param="messages[0]"), 403),
    ],
)
async def test_engine_errors_have_their_status(harness: Any, error: Any, status: int) -> None:
    """Streamed or not: what fails before the first token is an HTTP error, not an event."""
    harness.generator.error = error
    for stream in (False, True):
        response = await harness.chat(stream=stream)
        found = check_shape(response, status)
        assert found["code"] == error.code
        if status == 503:
            assert int(response.headers["retry-after"]) >= 1


async def test_clients_do_not_send_again_what_conflicts(harness: Any) -> None:
    """They take each 409 for one that may pass: the media went up three times."""
    harness.generator.error = MediaConflict("the uuid was bound to other content before")
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": [USER]}
    async with openai.AsyncOpenAI(base_url=f"{harness.url}/v1", api_key="none") as one:
        with pytest.raises(openai.ConflictError):
            await one.chat.completions.create(**options)
    async with anthropic.AsyncAnthropic(base_url=harness.url, api_key="none") as other:
        with pytest.raises(anthropic.ConflictError):
            await other.messages.create(**options)
    assert len(harness.generator.requests) == 2


async def test_error_in_the_middle_of_a_stream(harness: Any) -> None:
    harness.generator.error = EngineFailure("gone")
    harness.generator.error_after = 3
    events = await harness.stream(**harness.body())
    assert events[-1]["error"]["code"] == "engine_error"
    assert len(events) == 1 + 3 + 1


async def test_unexpected_error_is_a_500_with_its_request_id(harness: Any, caplog: Any) -> None:
    def broken(_: Any) -> list[int]:
        raise RuntimeError("secret detail")

    harness.generator.script = broken
    response = await harness.http.post(
        "/v1/chat/completions", json=harness.body(), headers={"x-request-id": "abc.1"}
    )
    error = check_shape(response, 500)
    assert "abc.1" in error["message"]
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "abc.1"
    assert "secret detail" in caplog.text


async def test_equal_request_ids_are_different_requests(harness: Any) -> None:
    """A client that sends one id twice would otherwise be refused by the engine as a duplicate."""
    headers = {"x-request-id": "same"}
    for _ in range(2):
        response = await harness.http.post(
            "/v1/chat/completions", json=harness.body(), headers=headers
        )
        assert response.json()["id"] == "chatcmpl-same"
    first, second = (request.request_id for request in harness.generator.requests)
    assert first != second
    assert first.startswith("same.")


async def test_request_ids_that_could_harm_are_replaced(harness: Any) -> None:
    for bad in ("a b", "x" * 200, "../etc", "a\tb"):
        response = await harness.http.get("/livez", headers={"x-request-id": bad})
        assert response.headers["x-request-id"] != bad
        assert len(response.headers["x-request-id"]) == 32


async def test_the_schema_names_every_status_of_a_failure(harness: Any) -> None:
    """408 was missing, and 422 was taken for the framework's own, which is never sent."""
    document = (await harness.http.get("/openapi.json")).json()
    assert "HTTPValidationError" not in str(document)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
        responses = document["paths"][path]["post"]["responses"]
        for status in ("408", "422"):
            content = responses[status]["content"]["application/json"]["schema"]
            assert content["$ref"].endswith("Error") or content["$ref"].endswith("ErrorResponse")
    assert "408" in document["paths"]["/tokenize"]["post"]["responses"]
    assert "422" not in document["paths"]["/tokenize"]["post"]["responses"]
