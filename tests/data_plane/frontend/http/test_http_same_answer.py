"""What cannot change the answer is not refused, item by item: the engine gets the same request."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
FIRST, IMAGE, ANSWER = ("messages", 0), ("messages", 0, "content", 1), ("messages", 1)
TEXT = ("messages", 0, "content", 0)
HINT = {"type": "ephemeral"}

PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 8, "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PIXEL}}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]},
    RESPONSES: {"max_output_tokens": 8, "input": [
        {"role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PIXEL}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]},
    MESSAGES: {"max_tokens": 8, "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image", "source": SOURCE}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]},
}  # fmt: skip
"""One conversation, as each of the APIs writes it."""

CHANGES: list[tuple[str, str, dict[tuple[Any, ...], Any]]] = [
    (CHAT, "unknown keys of messages", {(*FIRST, "odd"): {"a": [1]}, (*ANSWER, "odd"): None}),
    (CHAT, "unknown keys of parts", {(*TEXT, "odd"): 1, (*IMAGE, "odd"): {}, (*IMAGE, "index"): 0,
                                     (*IMAGE, "image_url", "odd"): [1]}),
    (CHAT, "detail", {(*IMAGE, "image_url", "detail"): "high", (*IMAGE, "detail"): "low"}),
    (CHAT, "an image's URL as text", {(*IMAGE, "image_url"): PIXEL}),
    (CHAT, "tool_calls: []", {(*ANSWER, "tool_calls"): []}),
    (CHAT, "tool_calls: null", {(*ANSWER, "tool_calls"): None, (*FIRST, "tool_calls"): None}),
    (CHAT, "annotations", {(*ANSWER, "annotations"): [{"type": "url_citation", "url_citation": {
        "url": "https://example.org", "title": "x", "start_index": 0, "end_index": 1}}]}),
    (CHAT, "annotations of parts", {(*TEXT, "annotations"): []}),
    (CHAT, "refusal", {(*ANSWER, "refusal"): None}),
    (CHAT, "reasoning_content", {(*ANSWER, "reasoning_content"): "hm"}),
    (CHAT, "reasoning", {(*ANSWER, "reasoning"): "hm", (*ANSWER, "reasoning_details"): [{}]}),
    (CHAT, "cache_control", {(*ANSWER, "cache_control"): HINT, (*TEXT, "cache_control"): HINT,
                             (*IMAGE, "cache_control"): None}),
    (CHAT, "what answers hold", {(*ANSWER, "id"): "m", (*ANSWER, "audio"): None,
                                 (*ANSWER, "function_call"): None, (*ANSWER, "parsed"): None,
                                 (*ANSWER, "status"): "completed", (*ANSWER, "type"): "message"}),
    (CHAT, "an answer as parts", {(*ANSWER, "content"): [{"type": "output_text", "text": "b"}]}),
    (CHAT, "a refusal as a part", {(*ANSWER, "content"): [{"type": "refusal", "refusal": "b"}]}),
    (CHAT, "numbers as strings", {("max_tokens",): "8", ("temperature",): "1.0", ("n",): "1",
                                  ("top_p",): "1", ("presence_penalty",): "0",
                                  ("frequency_penalty",): "0.0"}),
    (CHAT, "whole numbers as fractions", {("max_tokens",): 8.0, ("n",): 1.0}),
    (CHAT, "max_completion_tokens", {("max_tokens",): None, ("max_completion_tokens",): 8}),
    (CHAT, "include_obfuscation", {("stream",): True, ("stream_options",): {
        "include_obfuscation": True, "include_usage": True}}),
    (CHAT, "verbosity", {("verbosity",): "low"}),
    (CHAT, "options without effect", {
        ("user",): "u", ("metadata",): {"a": "b"}, ("store",): True, ("service_tier",): "auto",
        ("safety_identifier",): "s", ("prompt_cache_key",): "k", ("prediction",): {},
        ("prompt_cache_retention",): "24h", ("prompt_cache_options",): {"mode": "implicit"},
        ("request_id",): "r", ("session_id",): "s", ("stream_interval",): 2,
        ("return_mm_kwargs",): False, ("include_reasoning",): True,
        ("parallel_tool_calls",): False}),
    (CHAT, "neutral values of what is not served", {
        ("use_beam_search",): False, ("echo",): False, ("media_io_kwargs",): {}, ("audio",): None,
        ("functions",): [], ("function_call",): "none", ("modalities",): ["text"],
        ("logits_processors",): [], ("length_penalty",): 1.0, ("extra_body",): {}}),
    (CHAT, "no tools", {("tools",): [], ("tool_choice",): "none"}),
    (CHAT, "null options", {("tools",): None, ("tool_choice",): None, ("response_format",): None,
                            ("stop",): None, ("logprobs",): None, ("logit_bias",): None}),
    (RESPONSES, "unknown keys of items", {("input", 0, "odd"): 1,
                                          ("input", 0, "content", 0, "odd"): None}),
    (RESPONSES, "what answers hold", {
        ("input", 1, "id"): "msg_1", ("input", 1, "status"): "completed",
        ("input", 1, "content", 0, "annotations"): [], ("input", 1, "content", 0, "logprobs"): []}),
    (RESPONSES, "detail", {("input", 0, "content", 1, "detail"): "auto",
                           ("input", 0, "content", 1, "file_id"): None}),
    (RESPONSES, "store", {("store",): True}),
    (RESPONSES, "store: false", {("store",): False}),
    (RESPONSES, "truncation", {("truncation",): "auto"}),
    (RESPONSES, "truncation: disabled", {("truncation",): "disabled"}),
    (RESPONSES, "null options", {("previous_response_id",): None, ("instructions",): None,
                                 ("background",): None, ("conversation",): None}),
    (RESPONSES, "verbosity", {("text",): {"format": {"type": "text"}, "verbosity": "low"}}),
    (RESPONSES, "numbers as strings", {("max_output_tokens",): "8", ("temperature",): "1"}),
    (RESPONSES, "include", {("include",): ["reasoning.encrypted_content"]}),
    (RESPONSES, "include_obfuscation", {("stream",): True, ("stream_options",): {
        "include_obfuscation": False}}),
    (MESSAGES, "cache_control", {
        (*TEXT, "cache_control"): HINT, (*IMAGE, "cache_control"): {**HINT, "ttl": "1h"},
        ("cache_control",): HINT}),
    (MESSAGES, "unknown keys", {(*FIRST, "odd"): 1, (*TEXT, "citations"): None}),
    (MESSAGES, "an answer as blocks", {(*ANSWER, "content"): [
        {"type": "text", "text": "b", "citations": None}]}),
    (MESSAGES, "what answers hold", {
        (*ANSWER, "id"): "msg_1", (*ANSWER, "stop_reason"): "end_turn"}),
    (MESSAGES, "numbers as strings", {("max_tokens",): "8", ("temperature",): "1"}),
    (MESSAGES, "options without effect", {("metadata",): {"user_id": "u"}, ("betas",): ["x"],
                                          ("service_tier",): "auto", ("speed",): "standard",
                                          ("user_profile_id",): "p"}),
]  # fmt: skip


def changed(body: dict[str, Any], changes: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for path, value in changes.items():
        place: Any = body
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
    return body


async def asked(harness: Any, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """(tokens, media, sampling without the seed) of the request that reaches the engine."""
    response = await harness.http.post(path, json=body)
    assert response.status_code == 200, response.text
    request = harness.generator.requests[-1]
    media = [item.mm_hash for item in request.items]
    return list(request.token_ids), media, msgspec.structs.replace(request.sampling, seed=0)


@pytest.mark.parametrize(
    ("path", "changes"),
    [pytest.param(path, changes, id=f"{path[4:]}: {name}") for path, name, changes in CHANGES],
)
async def test_the_request_is_the_same(
    harness: Any, path: str, changes: dict[tuple[Any, ...], Any]
) -> None:
    plain = await asked(harness, path, PLAIN[path])
    assert len(plain[1]) == 1
    assert await asked(harness, path, changed(PLAIN[path], changes)) == plain


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("address", [{}, None, {"url": None}])
async def test_an_empty_address_beside_a_uuid(harness: Any, kind: str, address: Any) -> None:
    harness.processor.known_uuids.add("u")
    part = {"type": f"{kind}_url", f"{kind}_url": address, "uuid": "u"}
    assert (await harness.chat([part])).status_code == 200
    del part["uuid"]
    assert (await harness.chat([part])).status_code == 400


@pytest.mark.parametrize(
    "path_and_body",
    [(CHAT, {"use_beam_search": True}), (CHAT, {"echo": True}),
     (CHAT, {"media_io_kwargs": {"video": {"num_frames": 3}}}), (CHAT, {"temprature": 1}),
     ("/v1/completions", {"prompt": "a", "use_beam_search": True}),
     ("/v1/completions", {"prompt": "a", "temprature": 1})],
)  # fmt: skip
async def test_what_could_change_it_is_refused_by_name(harness: Any, path_and_body: Any) -> None:
    path, more = path_and_body
    response = await harness.http.post(path, json={**PLAIN.get(path, {}), **more})
    assert response.status_code == 400
    name = list(more)[-1]
    assert response.json()["error"]["param"] == name
    assert name in response.json()["error"]["message"]


async def test_tokenize_counts_media(harness: Any) -> None:
    messages = PLAIN[CHAT]["messages"]
    counted = (await harness.http.post("/tokenize", json={"messages": messages})).json()
    answer = (await harness.http.post(CHAT, json=PLAIN[CHAT])).json()
    assert counted["count"] == answer["usage"]["prompt_tokens"]
