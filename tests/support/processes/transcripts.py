"""Conversations of agents as they sent them: whole histories with calls, results, images, odd keys.

Written for these tests after the shapes that a coding agent (chat completions) and a browser agent
(Anthropic's Messages) send. `requests_of` gives the requests of a conversation in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
_PATH = {"type": "string", "description": "relative to the repository"}
CODING_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name, "description": text, "strict": False,
            "parameters": {
                "type": "object", "properties": properties, "required": list(properties),
                "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#",
            },
        },
    }
    for name, text, properties in (
        ("read_file", "Reads lines of a file.", {"path": _PATH, "limit": {"type": "integer"}}),
        ("edit", "Replaces a text.", {"path": _PATH, "old": {"type": "string"}}),
        ("run", "Runs a command.", {"command": {"type": "string"}}),
    )
]  # fmt: skip


def _call(number: int, name: str, arguments: str) -> dict[str, Any]:
    """An assistant's message as SDKs dump it: every field they know, most of them null."""
    call = {
        "id": f"call_{number:024d}", "type": "function", "index": 0,
        "function": {"name": name, "arguments": arguments},
    }  # fmt: skip
    return {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [call], "reasoning_content": "i look there first",
        "provider_specific_fields": {"refusal": None}, "thinking_blocks": [],
    }  # fmt: skip


def _result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number:024d}", "content": content, **more}


def coding_agent(images: Sequence[str]) -> dict[str, Any]:
    """`images` are data: URLs: a screenshot of the user's and one that a tool took."""
    shot, after = ({"type": "image_url", "image_url": {"url": url}} for url in images[:2])
    text = {"type": "text", "text": "you are a careful engineer. answer with small changes."}
    return {
        "model": "tiny-vlm", "max_tokens": 8, "temperature": 0, "stream": False,
        "tools": CODING_TOOLS, "tool_choice": "auto", "parallel_tool_calls": True, "n": 1,
        "user": "u-1", "metadata": {"turn": "a"}, "store": False, "verbosity": "low",
        "prompt_cache_key": "k", "service_tier": "auto",
        "messages": [
            {"role": "system", "content": [{**text, **EPHEMERAL}]},
            {"role": "user", "content": [
                {"type": "text", "text": "the square is not blue. see the image"},
                {**shot, "cache_control": None},
            ]},
            _call(1, "read_file", '{"path": "shape.css", "limit": 40}'),
            _result(1, "1 .square {\n2   color: red;\n3 }\n", name="read_file"),
            {**_call(2, "edit", '{"path": "shape.css", "old": "red"}'), "content": "it is red."},
            _result(2, [{"type": "text", "text": "one line was changed", **EPHEMERAL}]),
            _call(3, "run", '{"command": "make shot"}'),
            _result(3, [{"type": "text", "text": "done"}, after]),
            {"role": "assistant", "content": "the square is blue now.", "tool_calls": [],
             "refusal": None, "annotations": []},
            {"role": "user", "content": "and what is left of it?", "id": "m-9", "status": "done"},
        ],
    }  # fmt: skip


BROWSER_TOOLS = [
    {
        "name": "click", "description": "Clicks at a point.", **EPHEMERAL,
        "input_schema": {
            "type": "object", "required": ["x", "y"],
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        },
    },
    {
        "name": "type_text", "description": "Types.", "type": "custom",
        "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
]  # fmt: skip


def browser_agent(images: Sequence[str]) -> dict[str, Any]:
    """Every result of its tools is a screenshot; `images` are data: URLs of four."""

    def shot(url: str) -> dict[str, Any]:
        head, _, data = url.partition(",")
        kind = head.removeprefix("data:").removesuffix(";base64")
        source = {"type": "base64", "media_type": kind, "data": data}
        return {"type": "image", "source": source, "cache_control": None}

    def use(number: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        thought = {"type": "thinking", "thinking": "next field.", "signature": "c2ln"}
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": given}
        said = {"type": "text", "text": f"step {number}.", "citations": None}
        return {"role": "assistant", "content": [thought, said, {**call, "caller": None}]}

    def saw(number: int, url: str, **more: Any) -> dict[str, Any]:
        result = {
            "type": "tool_result", "tool_use_id": f"toolu_{number}", "is_error": False,
            "content": [{"type": "text", "text": "the page is loaded", **EPHEMERAL}, shot(url)],
        }  # fmt: skip
        return {"role": "user", "content": [{**result, **more}]}

    return {
        "model": "tiny-vlm", "max_tokens": 8, "temperature": 0, "tools": BROWSER_TOOLS,
        "tool_choice": {"type": "auto"}, "metadata": {"user_id": "u"}, "service_tier": "auto",
        "thinking": {"type": "disabled"}, "betas": ["computer-use"],
        "system": [{"type": "text", "text": "you use a browser.", **EPHEMERAL}],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "find the red circle"}, shot(images[0]),
            ]},
            use(1, "click", {"x": 3, "y": 40}),
            saw(1, images[1]),
            use(2, "type_text", {"text": "red"}),
            saw(2, images[2], is_error=True),
            use(3, "type_text", {"text": "circle"}),
            saw(3, images[3], **EPHEMERAL),
        ],
    }  # fmt: skip


def requests_of(conversation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each answer that the agent waited for: the history up to there."""
    messages = conversation["messages"]
    for index, message in enumerate(messages):
        if message["role"] not in ("assistant", "system"):
            yield {**conversation, "messages": messages[: index + 1]}
