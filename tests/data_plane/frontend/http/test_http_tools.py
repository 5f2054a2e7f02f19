"""Tools and reasoning over HTTP: what is sent on, what comes back, and what is refused."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

LOOK = {
    "type": "function",
    "function": {
        "name": "look", "description": "Looks closer.", "strict": True,
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}},
                       "required": ["at"], "additionalProperties": False},
    },
}  # fmt: skip
STOP = {"type": "function", "function": {"name": "stop"}}
CALLS = '{"name": "look", "arguments": {"at": "left"}}\n{"name": "stop", "arguments": {}}'


async def test_calls_of_a_whole_answer(harness: Any) -> None:
    harness.say[0] = CALLS
    response = await harness.chat(tools=[LOOK, STOP])
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    calls = message["tool_calls"]
    assert [c["function"] for c in calls] == [
        {"name": "look", "arguments": '{"at": "left"}'}, {"name": "stop", "arguments": "{}"},
    ]  # fmt: skip
    assert len({c["id"] for c in calls}) == 2
    assert all(set(c) == {"id", "type", "function"} and c["type"] == "function" for c in calls)
    request = harness.generator.requests[-1]
    assert request.sampling.grammar
    assert "Looks closer." in bytes(t for t in request.token_ids if t < 256).decode()


async def test_calls_of_a_stream(harness: Any) -> None:
    harness.say[0] = CALLS
    events = await harness.stream(**harness.body(tools=[LOOK, STOP]))
    names, arguments = {}, {0: "", 1: ""}
    for event in events:
        for choice in event["choices"]:
            assert not choice["delta"].get("content")
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["type"] == "function"
                    names[call["index"]] = call["function"]["name"]
                arguments[call["index"]] += call["function"]["arguments"]
    assert names == {0: "look", 1: "stop"}
    assert [json.loads(one) for one in arguments.values()] == [{"at": "left"}, {}]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_text_beside_tools_is_text(harness: Any) -> None:
    for say in ("I see a dog.", '{"name": "Rex"}'):
        harness.say[0] = say
        (choice,) = (await harness.chat(tools=[LOOK])).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (say, "stop")
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(("choice", "content"), [("required", ""), ("auto", '{"name": "lo')])
async def test_what_is_cut_off_before_its_name_is_no_text_of_a_required_call(
    harness: Any, choice: str, content: str
) -> None:
    harness.say[0] = CALLS
    options = {"tools": [LOOK], "tool_choice": choice, "max_tokens": 12}
    (found,) = (await harness.chat(**options)).json()["choices"]
    assert (found["message"]["content"], found["finish_reason"]) == (content, "length")
    events = await harness.stream(**harness.body(**options))
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == content


@pytest.mark.parametrize(
    ("end", "reason", "arguments"),
    [('"le', "stop", '{"at": "le'), ("}}", "tool_calls", '{"at": "left"}')],
)
async def test_a_call_that_a_stop_token_cut_off_is_no_reason_to_call(
    harness: Any, end: str, reason: str, arguments: str
) -> None:
    """The reason was "tool_calls", with arguments that are no JSON."""
    harness.say[0] = CALLS.partition("\n")[0]
    num_before, token = CALLS.index(end) + len(end) - 1, ord(end[-1])
    options = {"tools": [LOOK], "stop_token_ids": [token], "min_tokens": num_before}
    options["include_stop_str_in_output"] = True
    (choice,) = (await harness.chat(**options)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, token)
    events = await harness.stream(**harness.body(**options))
    assert events[-1]["choices"][0]["finish_reason"] == reason


async def test_a_round_trip(harness: Any) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "look", "arguments": '{"at": "left"}'}}  # fmt: skip
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a dog"},
    ]
    response = await harness.chat(messages=history, tools=[LOOK])
    assert response.status_code == 200, response.text
    history[2]["tool_call_id"] = "call_2"
    response = await harness.chat(messages=history, tools=[LOOK])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[2].tool_call_id"
    assert "'call_2'" in error["message"]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"tools": [LOOK], "tool_choice": named("dig")}, "tool_choice", "'dig'"),
        ({"tools": [LOOK, LOOK]}, "tools[1].function.name", "'look'"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, None, "tools"),
        (
            {"tools": [STOP, {"type": "function", "function": {
                "name": "x", "strict": True, "parameters": {"properties": {"a": {
                    "type": "array", "items": {"type": "string", "pattern": "("}}}}}}]},
            "tools", "/1/function/parameters/properties/a/items",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort", "'high'"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "reason"),
    ],
)  # fmt: skip
async def test_what_is_refused(
    harness: Any, options: dict[str, Any], param: str | None, says: str
) -> None:
    response = await harness.chat(**options)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert says in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"look", "stop"}), ("auto", {"look", "stop"}), (named("stop"), {"stop"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("look")]}},
         {"look"}),
    ],
)  # fmt: skip
async def test_tool_choice_binds_to_the_tools_it_names(
    harness: Any, choice: Any, names: set[str]
) -> None:
    response = await harness.chat(tools=[LOOK, STOP], tool_choice=choice)
    assert response.status_code == 200, response.text
    grammar = harness.generator.requests[-1].sampling.grammar
    assert {name for name in ("look", "stop") if name in grammar} == names


async def test_tokenize_counts_what_chat_sends(harness: Any) -> None:
    await harness.chat(tools=[LOOK])
    sent = harness.generator.requests[-1].token_ids
    response = await harness.http.post("/tokenize", json=harness.body(tools=[LOOK]))
    assert response.json()["tokens"] == list(sent)


async def test_no_choice_is_as_without_tools(harness: Any) -> None:
    await harness.chat(tools=[LOOK], tool_choice="none")
    request = harness.generator.requests[-1]
    assert not request.sampling.grammar
    assert "Looks" not in bytes(t for t in request.token_ids if t < 256).decode()


def called(arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c", "function": {"name": "look", "arguments": arguments}}]}


@pytest.mark.parametrize(("message", "more"), [
    ({}, {"tools": [LOOK]}), ({"reasoning_content": "x" * 30_000}, {}),
    (called(json.dumps({"at": "x" * 30_000})), {}), (called({"at": "left"}), {}),
])  # fmt: skip
async def test_long_prompts_are_rendered_beside_the_loop(
    harness: Any, message: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    template, threads = harness.app.service.template, []
    render = template.render

    def recorded(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return render(*args, **options)

    monkeypatch.setattr(template, "render", recorded)
    body = harness.body(**more)
    body["messages"].append({"role": "assistant", "content": "a"} | message)
    await harness.http.post("/v1/chat/completions", json=body)
    assert threads == ["text"]


@pytest.mark.parametrize("schema", [True, {"type": "string"}, {"type": ["object", "null"]}])
async def test_parameters_are_an_object(harness: Any, schema: Any) -> None:
    """They gave calls whose arguments were no JSON."""
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    response = await harness.chat(tools=[LOOK, odd])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "tools[1].function.parameters"


async def test_half_a_surrogate_pair_in_the_history_is_text(harness: Any) -> None:
    arguments = '{"at": "\\ud800"}'
    body = harness.body()
    body["messages"].append({"role": "assistant", "content": None} | called(arguments))
    response = await harness.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


async def test_a_name_that_no_header_can_hold_is_spelt_with_question_marks(start: Any) -> None:
    """The server refused its own header, and the whole answer was lost."""
    name = "a\r\n\t\u00e9"
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": f"#/$defs/{name}"}},
        "$defs": {name: {"type": "string", "pattern": "x"}},
    }
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    async with start(tool_format="gemma") as harness:
        response = await harness.chat(tools=[odd])
    assert response.status_code == 200, response.text
    assert response.headers["x-foveal-schema-relaxed"] == "odd/$defs/a????/pattern"
