"""Anthropic's Messages API: prompts, events in order, errors in its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from foveal_runtime.frontend.protocol.anthropic import CountTokensRequest, chat_fields
from foveal_runtime.plan.errors import EngineFailure

PATH = "/v1/messages"
PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
MCP_SERVERS = [{"type": "url", "name": "s", "url": "https://example.org/sse"}]


def body(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": content}],
    } | (more)


async def events_of(harness: Any, **more: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = await harness.events(PATH, body(**more))
    return events


async def test_whole_answer(harness: Any) -> None:
    answer = (await harness.http.post(PATH, json=body(), headers={"x-request-id": "r1"})).json()
    assert answer["id"] == "msg_r1"
    assert answer["content"] == [{"type": "text", "text": "Hello, world!"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["input_tokens"] == len(harness.generator.requests[-1].token_ids)
    assert usage["output_tokens"] > 0


async def test_events_come_in_order(harness: Any) -> None:
    events = await events_of(harness)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == "Hello, world!"
    start = events[0]["message"]
    assert start["content"] == []
    assert start["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


async def test_anthropics_clients_get_its_errors_and_ids_wherever_they_ask(harness: Any) -> None:
    """Their errors had no request id, and those of paths that are not served no type."""
    turns: Any = [{"role": "user", "content": "hi"}]
    async with anthropic.AsyncAnthropic(
        base_url=harness.url, api_key="none", max_retries=0
    ) as client:
        message = await client.messages.create(model="tiny", max_tokens=4, messages=turns)
        assert message._request_id == message.id.removeprefix("msg_")
        for asked in (
            client.messages.create(model="other", max_tokens=4, messages=turns),
            client.models.retrieve("other"),
            client.messages.batches.list(),
        ):
            with pytest.raises(anthropic.NotFoundError) as caught:
                await asked
            assert caught.value.request_id
            assert caught.value.type == "not_found_error"


async def test_more_tokens_than_the_context_are_cut_to_it(harness: Any) -> None:
    """Claude Code asks for 32,000 of a model that it does not know, litellm for 128,000."""
    answer = await harness.http.post(PATH, json=body(max_tokens=128_000))
    assert answer.status_code == 200, answer.text
    num_prompt = len(harness.generator.requests[-1].token_ids)
    assert harness.generator.requests[-1].sampling.max_tokens == 4096 - num_prompt
    refused = await harness.http.post(PATH, json=body("x" * 5000))
    assert "prompt is too long" in refused.json()["error"]["message"]


async def test_reasons_to_stop(harness: Any) -> None:
    for stop in ({"stop_sequences": [", "]}, {"stop": ", "}):  # as in chat: it did nothing
        answer = (await harness.http.post(PATH, json=body(**stop))).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", ", ")
        assert answer["content"][0]["text"] == "Hello"
    answer = (await harness.http.post(PATH, json=body(max_tokens=3))).json()
    assert answer["stop_reason"] == "max_tokens"


async def test_a_conversation_of_every_block(harness: Any) -> None:
    hint = {"type": "ephemeral"}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}
    result = [{"type": "text", "text": "red"}, {"type": "image", "source": PIXEL}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": hint}]},
        {"role": "user", "content": [{"type": "image", "source": PIXEL}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": result, "is_error": False},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    system = [{"type": "text", "text": "s", "cache_control": hint}]
    response = await harness.http.post(PATH, json=body(messages=messages, system=system))
    assert response.status_code == 200, response.text
    assert harness.prompt == (
        '<|system|>s<|end|><|user|>a<image><|end|><|assistant|>b{"name": "look", "arguments": '
        '{"at": 1}}<|end|><|user|>red<image>c<|end|><|assistant|>'
    )


async def test_a_last_assistant_turn_is_continued(harness: Any) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The"}]
    response = await harness.http.post(PATH, json=body(messages=turns))
    assert response.status_code == 200, response.text
    assert harness.prompt.endswith("<|assistant|>The")


async def test_tokens_are_counted_with_images(harness: Any) -> None:
    content = [{"type": "image", "source": PIXEL}, {"type": "text", "text": "a"}]
    counted = body(content, system="s")
    del counted["max_tokens"]
    found = await harness.http.post(f"{PATH}/count_tokens", json=counted)
    assert found.status_code == 200, found.text
    whole = (await harness.http.post(PATH, json=body(content, system="s"))).json()
    assert found.json() == {"input_tokens": whole["usage"]["input_tokens"]}


@pytest.mark.parametrize("as_text", [True, False])
async def test_claude_codes_billing_line_is_no_part_of_the_prompt(
    harness: Any, as_text: bool
) -> None:
    """It differs in each request, at the start of the prompt: nothing was found in the cache."""
    line = "x-anthropic-billing-header: cc_version=2.1.0; cch=%s;"
    prompts = []
    for number in ("a1b2c", "d3e4f"):
        text = line % number
        blocks = [{"type": "text", "text": one} for one in (text, "You are x.", "Be brief.")]
        system = f"{text}\nYou are x.\nBe brief." if as_text else blocks
        response = await harness.http.post(PATH, json=body(system=system))
        assert response.status_code == 200, response.text
        prompts.append(harness.prompt)
    between = "\n" if as_text else ""
    assert prompts[0].startswith(f"<|system|>You are x.{between}Be brief.<|end|><|user|>")
    assert prompts[0] == prompts[1]
    await harness.http.post(PATH, json=body(system=line % "a"))
    assert harness.prompt.startswith("<|user|>")
    await harness.http.post(PATH, json=body(system=f"Never write {line}"))
    assert harness.prompt.startswith(f"<|system|>Never write {line}<|end|>")


@pytest.mark.parametrize("options", [
    {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"metadata": {"user_id": "u"}},
    {"service_tier": "auto", "betas": ["x"]}, {"top_k": 5, "temperature": 0.5, "top_p": 0.9},
    {"min_p": 0.1}, {"tools": [], "tool_choice": {"type": "none"}},
    {"mcp_servers": None}, {"mcp_servers": []}, {"container": None}, {"container": {"skills": []}},
    {"context_management": {}}, {"context_management": {"edits": []}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
])  # fmt: skip
async def test_options_that_are_taken(harness: Any, options: dict[str, Any]) -> None:
    assert (await harness.http.post(PATH, json=body(**options))).status_code == 200


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"wrong": 1}, "wrong"),
        ({"n": 2}, "n is not supported"),
        ({"mcp_servers": MCP_SERVERS}, "mcp_servers is not supported"),
        ({"container": {"skills": [{"skill_id": "x"}]}}, "container is not supported"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management is not supported",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management is not supported",
        ),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "s"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"min_p": 7}, "min_p"),
        (
            {"chat_template_kwargs": "x", "thinking": {"type": "disabled"}},
            "chat_template_kwargs",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}
                ]
            },
            "messages[0].content[0].source.url",
        ),
    ],
)
async def test_refusals_name_the_field(harness: Any, change: dict[str, Any], named: str) -> None:
    response = await harness.http.post(PATH, json=body(**change))
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"], error


async def test_tools_of_servers_are_refused_where_unknown_options_are_left_out(start: Any) -> None:
    """Nobody asks those servers, so the answer would be another."""
    async with start(ignore_unknown_options=True) as harness:
        assert (await harness.http.post(PATH, json=body(wrong=1))).status_code == 200
        response = await harness.http.post(PATH, json=body(mcp_servers=MCP_SERVERS))
        assert response.status_code == 400


async def test_errors_have_the_shape_of_the_api(harness: Any) -> None:
    answer = await harness.http.post(PATH, json=body(model="other"))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    answer = await harness.http.post(PATH, content=b"{")
    assert answer.json()["type"] == "error"
    assert (await harness.http.get(PATH)).json()["type"] == "error"


async def test_a_failure_within_a_stream_is_an_event(harness: Any) -> None:
    harness.generator.error, harness.generator.error_after = EngineFailure("it broke"), 3
    events = await events_of(harness)
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


async def test_the_key_of_its_clients_is_taken(start: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    async with start(api_key_file=str(tmp_path / "keys")) as harness:
        refused = await harness.http.post(PATH, json=body(), headers={"x-api-key": "wrong"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        taken = await harness.http.post(PATH, json=body(), headers={"x-api-key": "secret"})
        assert taken.status_code == 200


def test_turns_of_one_role_are_one_message() -> None:
    """Each turn copied all that stood before it: seconds for 8192 of them."""
    turns = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": f"{number} "}]}
        for number in range(8192)
    ]
    request = CountTokensRequest.model_validate({"messages": turns})
    (message,) = chat_fields(request)["messages"]
    thought = "".join(f"{number} " for number in range(8192))
    assert message == {"role": "assistant", "content": [], "reasoning_content": thought}


async def test_arguments_count_what_they_are(harness: Any) -> None:
    """Each call counted as 20,000 characters: after 797 of them a conversation was refused."""
    call = {"type": "tool_use", "name": "a", "input": {}}
    calls = [{**call, "id": f"c{n}"} for n in range(900)]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": calls}]
    messages.append({"role": "user", "content": "and now?"})
    answer = await harness.http.post(PATH, json=body(messages=messages))
    assert "more than 4096 tokens" in answer.text, "the context refuses it, as it is"
