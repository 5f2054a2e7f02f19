"""Errors name fields as they were sent: no translation's, and no branches of a union."""

from __future__ import annotations

from typing import Any

import pytest

PIXEL = {"type": "url", "url": "ftp://example.org/x.png"}
BAD = "<image>"
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
ASKED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [
        {"type": "text", "text": "x"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
    ]},
]  # fmt: skip


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": BAD}]}, "messages[0].content contains"),
        ({"messages": [user(text("a"), text(BAD))]}, "messages[0].content[1].text contains"),
        (
            {"messages": [user(text("a")), user(text("b"), text(BAD))]},
            "messages[1].content[1].text",
        ),
        ({"system": BAD}, "system contains"),
        ({"system": [text("a"), text(BAD)]}, "system[1].text contains"),
        (
            {"messages": [user({"type": "image", "source": PIXEL})]},
            "messages[0].content[0]: unknown",
        ),
        (
            {"messages": [*ASKED, user(text("b"), {**RESULT, "content": [text("a"), text(BAD)]})]},
            "messages[2].content[1].content[1].text contains",
        ),
        (
            {"messages": [*ASKED, user(text("b"), {**RESULT, "tool_use_id": "c2"})]},
            "messages[2].content[1].tool_use_id is 'c2'",
        ),
        (
            {"messages": [user(document(type="text", data=BAD))]},
            "messages[0].content[0].source.data contains",
        ),
        (
            {"messages": [user(text("a"), document(type="base64", data="x", media_type="a/b"))]},
            "messages[0].content[1].source.data is a/b",
        ),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
            "tools[0].input_schema must",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name:"),
        ({"min_p": 7}, "min_p: "),
    ],
)
async def test_messages(harness: Any, change: dict[str, Any], named: str) -> None:
    """`system` made messages[0] of the client messages[1]."""
    body = {"model": "tiny", "max_tokens": 9, "system": "s", "messages": [user(text("hi"))]}
    for stream in (False, True):
        sent = body | change | {"stream": stream}
        answer = await harness.http.post("/v1/messages", json=sent)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(named), answer.text
    if "contains" in named:
        answer = await harness.http.post("/v1/messages/count_tokens", json=body | change)
        assert answer.json()["error"]["message"].startswith(named), answer.text


CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "x"}
SAID = {"role": "user", "content": "hi"}
IMAGE = {"type": "input_image", "image_url": "ftp://example.org/x.png"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": BAD}, "input"),
        ({"instructions": BAD}, "instructions"),
        ({"input": [SAID, {"role": "user", "content": BAD}]}, "input[1].content"),
        ({"input": [SAID, {"role": "user", "content": [IMAGE]}]}, "input[1].content[0]"),
        (
            {
                "input": [
                    SAID,
                    {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]},
                ]
            },
            "input[1].content[0].image_url",
        ),
        ({"input": [SAID, {"type": "reasoning", "summary": [{"text": BAD}]}, CALL]}, "input[1]"),
        (
            {"input": [SAID, CALL, {**CALL, "call_id": "c2", "arguments": BAD}]},
            "input[2].arguments",
        ),
        ({"input": [SAID, CALL, {**OUTPUT, "output": BAD}]}, "input[2].output"),
        ({"input": [SAID, CALL, {**OUTPUT, "call_id": "c9"}]}, "input[2].call_id"),
        ({"input": [SAID, CALL, OUTPUT, {"role": "user", "content": BAD}]}, "input[3].content"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "a", "parameters": {"type": "array"}}]},
            "tools[0].parameters",
        ),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"min_p": 7}, "min_p"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
            "text.format.schema",
        ),
    ],
)
@pytest.mark.parametrize("instructions", [None, "s"])
async def test_responses(
    harness: Any, change: dict[str, Any], param: str, instructions: str | None
) -> None:
    """`param` was messages[0], tools[0].function or reasoning_effort, which nobody had sent."""
    body = {"model": "tiny", "input": "hi", "instructions": instructions}
    answer = await harness.http.post("/v1/responses", json=body | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert "messages[" not in error["message"]


async def test_a_shortened_conversation_names_the_items_that_were_sent(harness: Any) -> None:
    harness.generator.context_tokens = 120
    items = [{"role": "user", "content": "x" * 50} for _ in range(6)]
    items.append({"role": "user", "content": [IMAGE]})
    body = {"model": "tiny", "input": items, "truncation": "auto", "max_output_tokens": 8}
    answer = await harness.http.post("/v1/responses", json=body)
    assert answer.json()["error"]["param"] == "input[6].content[0]"


HI = [{"role": "user", "content": "hi"}]


def part(**content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [content]}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "chat/completions",
            {"tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.function",
        ),
        ("chat/completions", part(type="input_text"), "messages[0].content[0].text"),
        ("chat/completions", part(type="refusal"), "messages[0].content[0].refusal"),
        ("chat/completions", part(type="file"), "messages[0].content[0].file"),
        (
            "chat/completions",
            part(type="image_url", image_url={"url": 1}),
            "messages[0].content[0].image_url.url",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ("messages", part(type="tool_use"), "messages[0].content[0].id"),
        ("messages", part(type="thinking"), "messages[0].content[0].thinking"),
        (
            "responses",
            {"input": [{"type": "reasoning", "summary": [{"text": 3}]}]},
            "input[0].summary[0].text",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ("responses", {"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ],
)
async def test_no_branch_of_a_union_is_a_field(
    harness: Any, path: str, body: dict[str, Any], param: str
) -> None:
    """`param` was tool_choice.NamedTool.function or content[0].input_text.text."""
    base = {"input": "hi"} if path == "responses" else {"messages": HI, "max_tokens": 9}
    answer = await harness.http.post(f"/v1/{path}", json=base | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{param}: ")
    assert error.get("param", param) == param
