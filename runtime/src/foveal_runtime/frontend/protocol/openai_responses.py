"""OpenAI's Responses API: its requests, and their translation to a chat request.

Parsed by FastAPI, read by http/apis. This server keeps no conversations: what refers to one is
refused. Other options that the API does not have go to the chat request as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from foveal_runtime.frontend.protocol.bounds import Lenient, Open, check_num_parts, check_tools
from foveal_runtime.frontend.protocol.messages import ContentPart, Text
from foveal_runtime.frontend.protocol.requests import MAX_LOGPROBS, Float, Integer, Schema
from foveal_runtime.plan.errors import InvalidRequest, Unsupported

SCORES = "message.output_text.logprobs"
Parts = Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)]


class MessageItem(Lenient):
    type: Literal["message"] = "message"
    role: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    content: Text | Parts


class CallItem(Lenient):
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    arguments: Text = ""


class ResultItem(Lenient):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Text | Parts


class ReasoningText(Lenient):
    text: Text = ""


class ReasoningItem(Lenient):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=4096)] | None = None
    summary: Annotated[list[ReasoningText], Field(max_length=4096)] | None = None


def _kind(item: Any) -> Any:
    """A message needs no type."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="an item is a message, function_call, function_call_output or "
        "reasoning; this server keeps no items to refer to",
    ),
]


class FunctionTool(Lenient):
    type: str = Field(
        max_length=256, description="function; tools that a server runs are not served"
    )
    name: str = Field("", max_length=256)
    description: str | None = Field(None, max_length=100_000)
    parameters: Schema | None = None
    strict: bool | None = None


class NamedFunction(Lenient):
    type: Literal["function"]
    name: str = Field(max_length=256)


class AllowedFunctions(Lenient):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=1024, fail_fast=True)]


class TextFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    body: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Lenient):
    format: TextFormat | None = Field(None, description="JSON, by a schema or not")


class ReasoningOptions(Lenient):
    effort: str | None = Field(None, max_length=64)


class ResponsesRequest(Open):
    model: str | None = Field(None, max_length=1024, description="the served model's name")
    input: (
        Text
        | Annotated[
            list[Item],
            Field(min_length=1, max_length=8192, fail_fast=True),
            BeforeValidator(check_num_parts),
        ]
        | None
    ) = None
    instructions: Text | None = Field(None, description="a system message before the input")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: (
        Annotated[
            list[FunctionTool], Field(max_length=1024, fail_fast=True), BeforeValidator(check_tools)
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    max_output_tokens: Integer | None = Field(None, ge=1, lt=2**31)
    temperature: Float | None = Field(None, ge=0, le=100, description="0: greedy")
    top_p: Float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="auto: the oldest messages go until the rest fits"
    )
    store: bool | None = Field(None, description="accepted; nothing is stored")
    background: bool | None = Field(None, description="not served")
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = Field(
        None, description=f"{SCORES}: log probabilities of the text's tokens; others do nothing"
    )
    top_logprobs: Integer | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log probabilities of the most likely tokens, too"
    )


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesAnswer(BaseModel):
    """The whole answer, for /docs and tests."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]] = Field(description="items: message, function_call, reasoning")
    usage: ResponsesUsage
    store: Literal[False]


_REFERS = ("previous_response_id", "conversation", "prompt")
_MEANINGLESS = frozenset(
    {
        "access_programs", "client_metadata", "max_tool_calls", "prompt_cache_options",
        "stream_options",
    }
)  # fmt: skip
_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "store", "top_logprobs")


_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Fields of the chat request that have another name here."""


def response_fields(request: ResponsesRequest) -> dict[str, Any]:
    """The chat request that asks the same, as JSON values. Raises InvalidRequest."""
    extra = request.model_extra or {}
    for name in _REFERS:
        if extra.get(name) is not None:
            raise InvalidRequest(
                f"{name} refers to what a server keeps, and this one keeps nothing: send all items "
                "of the conversation as input",
                param=name,
            )
    if request.background:
        raise Unsupported("background is not supported: nothing is stored", param="background")
    fields = {name: value for name, value in extra.items() if name not in _MEANINGLESS}
    fields |= {name: getattr(request, name) for name in _SAME}
    if SCORES in (request.include or ()) or request.top_logprobs:
        fields["logprobs"] = True
    # The last event of a stream has all log probabilities: they are held and charged until then.
    fields["stream"] = request.stream and not fields.get("logprobs")
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    fields["messages"] = _messages(request)
    given = request.text.format if request.text is not None else None
    if given is not None:
        schema = {"name": given.name, "schema": given.body, "strict": given.strict}
        named = {"json_schema": schema} if given.type == "json_schema" else {}
        fields["response_format"] = {"type": given.type, **named}
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    return fields | _tool_fields(request)


def _tool_fields(request: ResponsesRequest) -> dict[str, Any]:
    tools = []
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            raise Unsupported(
                f"tools[{index}].type is {tool.type!r}; only functions of the client are served",
                param=f"tools[{index}].type",
            )
        function = tool.model_dump(exclude_none=True, exclude={"type"})
        tools.append({"type": "function", "function": function})
    choice: Any = request.tool_choice
    if isinstance(choice, NamedFunction):
        choice = _named(choice)
    elif isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    return {"tools": tools, "tool_choice": choice}


def _named(tool: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def sent_paths(request: ResponsesRequest) -> dict[str, str]:
    """By path in `response_fields`, where what is there came from; longer paths go on alike."""
    paths = dict(_RENAMED)
    for index in range(len(request.tools or ())):
        paths[f"tools[{index}].function"] = f"tools[{index}]"
    offset = 1 if request.instructions else 0
    if offset:
        paths |= dict.fromkeys(("messages[0]", "messages[0].content"), "instructions")
    if isinstance(request.input, str):
        paths |= dict.fromkeys((f"messages[{offset}]", f"messages[{offset}].content"), "input")
        return paths
    number, role, reasoning, num_calls = offset - 1, "", "", 0
    for index, item in enumerate(request.input or ()):
        sent = f"input[{index}]"
        if isinstance(item, ReasoningItem):
            reasoning = sent
            continue
        if not isinstance(item, CallItem) or role != "assistant":  # else part of the last message
            number, num_calls = number + 1, 0
            paths[f"messages[{number}]"] = sent
        new = f"messages[{number}]"
        role = getattr(item, "role", "assistant" if isinstance(item, CallItem) else "tool")
        if role == "assistant" and reasoning:
            paths[f"{new}.reasoning_content"], reasoning = reasoning, ""
        if isinstance(item, ResultItem):
            paths |= {f"{new}.content": f"{sent}.output", f"{new}.tool_call_id": f"{sent}.call_id"}
        elif isinstance(item, CallItem):
            call = f"{new}.tool_calls[{num_calls}]"
            num_calls += 1
            paths |= {call: sent, f"{call}.function": sent, f"{call}.id": f"{sent}.call_id"}
    return paths


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Calls and reasoning are parts of the assistant's message that they belong to."""
    out: list[dict[str, Any]] = []
    if request.instructions:
        out.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*out, {"role": "user", "content": request.input}]
    reasoning = ""
    for item in request.input or ():
        if isinstance(item, ReasoningItem):
            reasoning += "".join(part.text for part in item.content or item.summary or ())
            continue
        if isinstance(item, ResultItem):
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            continue
        if isinstance(item, MessageItem):
            out.append({"role": item.role, "content": item.content})
        elif not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": None})
        if out[-1]["role"] == "assistant" and reasoning:
            out[-1]["reasoning_content"] = out[-1].get("reasoning_content", "") + reasoning
            reasoning = ""
        if isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            out[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    if not out:
        raise InvalidRequest("input has no message; send text or items", param="input")
    return out
