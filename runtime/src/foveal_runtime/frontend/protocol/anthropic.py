"""Anthropic's Messages API: its requests, and their translation to a chat request.

Parsed by FastAPI, read by http/apis. Options that Anthropic's API does not have go to the chat
request as they are, so every rule of chat completions holds for them. Blocks are as lenient as
chat's parts: unknown keys (`cache_control`, `citations`) are dropped, unknown types refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from foveal_runtime.frontend.protocol.bounds import Lenient, Open, check_num_parts, check_tools
from foveal_runtime.frontend.protocol.messages import Text
from foveal_runtime.frontend.protocol.requests import (
    Float,
    FreeForm,
    Integer,
    Schema,
    StopString,
)
from foveal_runtime.plan.errors import InvalidRequest, Unsupported


class TextBlock(Lenient):
    type: Literal["text"]
    text: Text


class ImageSource(Lenient):
    type: Literal["base64", "url"]
    media_type: Annotated[str, Field(pattern=r"^[a-z]+/[a-z0-9.+-]{1,64}$")] | None = None
    data: str | None = Field(None, description="of `base64`")
    url: str | None = Field(None, description="of `url`: http(s)")


class ImageBlock(Lenient):
    type: Literal["image"]
    source: ImageSource


class DocumentSource(Lenient):
    type: Literal["base64", "url", "text", "content", "file"]
    media_type: Annotated[str, Field(max_length=128)] | None = None
    data: Text | None = Field(None, description="of `base64`: a PDF; of `text`: the text")
    url: str | None = Field(None, description="of `url`: http(s)")
    content: (
        Text
        | Annotated[
            list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
            Field(max_length=4096, fail_fast=True),
        ]
        | None
    ) = Field(None, description="of `content`")


class DocumentBlock(Lenient):
    """A PDF, whose pages become images; a text; or blocks."""

    type: Literal["document"]
    source: DocumentSource
    title: Annotated[str, Field(max_length=4096)] | None = None
    context: Text | None = Field(None, description="shown with the title, before the document")


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Lenient):
    """Another server's secret; left out."""

    type: Literal["redacted_thinking"]


class CallBlock(Lenient):
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    input: FreeForm


class ResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: (
        Text
        | Annotated[
            list[Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]],
            Field(max_length=4096, fail_fast=True),
        ]
        | None
    ) = None


Content = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedBlock
    | CallBlock
    | ResultBlock,
    Field(discriminator="type"),
]


class Turn(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Content], Field(max_length=4096, fail_fast=True)]


class ClientTool(Lenient):
    type: str | None = Field(None, description="custom; tools that a server runs are not served")
    name: str = Field("", max_length=256)
    description: str | None = Field(None, max_length=100_000)
    input_schema: Schema | None = None
    strict: bool | None = None


class AnthropicToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Annotated[str, Field(max_length=256)] = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = Field(None, ge=0, lt=2**31)


class AnthropicFormat(Lenient):
    type: Literal["json_schema"]
    body: Schema = Field(alias="schema")


class OutputConfig(Lenient):
    format: AnthropicFormat | None = Field(None, description="the schema that the text follows")


class CountTokensRequest(Open):
    model: str | None = Field(None, max_length=1024, description="the served model's name")
    messages: Annotated[
        list[Turn],
        Field(min_length=1, max_length=8192, fail_fast=True),
        BeforeValidator(check_num_parts),
    ]
    system: Text | Annotated[list[TextBlock], Field(max_length=4096, fail_fast=True)] | None = None
    tools: (
        Annotated[
            list[ClientTool], Field(max_length=1024, fail_fast=True), BeforeValidator(check_tools)
        ]
        | None
    ) = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Integer = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None = None
    temperature: Float | None = Field(None, ge=0, le=100, description="0: greedy")
    top_p: Float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, lt=2**31)
    stream: bool | None = None


class MessagesUsage(BaseModel):
    input_tokens: int = Field(description="of the prompt, without those read from the cache")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="prompt tokens found in the prefix cache")
    output_tokens: int


class MessagesAnswer(BaseModel):
    """The whole answer, for /docs and tests."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="blocks: text, thinking, tool_use")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class CountedTokens(BaseModel):
    input_tokens: int


class AnthropicErrorInfo(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorInfo


_MEANINGLESS = frozenset(
    {
        "betas",
        "cache_control",
        "inference_geo",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_RENAMED = {
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Fields of the chat request that have another name here."""
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:.*\s*")
_BOOKS = ("from", "parts from", "calls from")
"""Keys of a message in the making: the paths of the turn, of its parts and of its calls."""


def chat_fields(request: CountTokensRequest) -> dict[str, Any]:
    """The chat request that asks the same, as JSON values. Raises InvalidRequest."""
    fields: dict[str, Any] = {
        name: value
        for name, value in (request.model_extra or {}).items()
        if name not in _MEANINGLESS
    }
    if (managed := fields.get("context_management")) is not None:
        fields["context_management"] = _without_neutral_edits(managed)
    fields |= {name: getattr(request, name) for name in _SAME if hasattr(request, name)}
    fields["messages"] = messages = _messages(request)
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        fields["continue_final_message"] = True
    if stops := getattr(request, "stop_sequences", None):
        fields["stop"] = stops
    if request.thinking is not None:
        thinks = {"enable_thinking": request.thinking.type != "disabled"}
        given = fields.get("chat_template_kwargs") or {}
        fields["chat_template_kwargs"] = thinks | given if isinstance(given, dict) else given
    if request.output_config is not None and request.output_config.format is not None:
        named = {"name": "answer", "schema": request.output_config.format.body, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields | _tool_fields(request)


def _without_neutral_edits(managed: Any) -> Any:
    """Claude Code asks for all reasoning to be kept, which it is."""
    if not isinstance(managed, dict) or not isinstance(managed.get("edits"), list):
        return managed
    kept = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
    return {**managed, "edits": [edit for edit in managed["edits"] if edit not in kept]}


def _tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    tools = []
    for index, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise Unsupported(
                f"tools[{index}].type is {tool.type!r}; only tools of the client are served",
                param=f"tools[{index}].type",
            )
        if not tool.name:
            raise InvalidRequest(f"tools[{index}].name is missing", param=f"tools[{index}].name")
        if tool.input_schema is None:
            raise InvalidRequest(
                f"tools[{index}].input_schema is missing", param=f"tools[{index}].input_schema"
            )
        function = {"name": tool.name, "parameters": tool.input_schema}
        optional = {"description": tool.description, "strict": tool.strict}
        function |= {name: value for name, value in optional.items() if value is not None}
        tools.append({"type": "function", "function": function})
    choice = request.tool_choice or AnthropicToolChoice()
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {
        "tools": tools,
        "tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type),
    }
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def sent_paths(request: CountTokensRequest) -> dict[str, str]:
    """By path in `chat_fields`, where what is there came from; longer paths go on alike."""
    paths = dict(_RENAMED)
    for index in range(len(request.tools or ())):
        paths[f"tools[{index}].function"] = f"tools[{index}]"
        paths[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    for number, message in enumerate(_merged(request)):
        new, turn = f"messages[{number}]", message["from"][0]
        content = turn if turn == "system" else f"{turn}.content"
        paths |= {new: turn, f"{new}.content": content, f"{new}.reasoning_content": content}
        paths[f"{new}.tool_call_id"] = f"{turn}.tool_use_id"
        for index, path in enumerate(message.get("calls from", ())):
            call = f"{new}.tool_calls[{index}]"
            paths |= {call: path, f"{call}.function": path}
            paths[f"{call}.function.arguments"] = f"{path}.input"
        for index, path in enumerate(message["parts from"]):
            part = f"{new}.content[{index}]"
            paths |= {part: path, f"{part}.image_url": f"{path}.source"}
            paths |= {f"{part}.file_url": f"{path}.url", f"{part}.file_data": f"{path}.data"}
            if not path.endswith("]"):
                paths[f"{part}.text"] = path
    return paths


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    out = _merged(request)
    for message in out:
        for name in _BOOKS:
            message.pop(name, None)
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return out


def _merged(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Turns of one role that follow each other are one, as Anthropic's API has it."""
    out: list[dict[str, Any]] = []
    system = _system(request.system or "")
    if system["content"]:
        out.append(system)
    for number, turn in enumerate(request.messages):
        for message in _turn(turn, f"messages[{number}]"):
            before = out[-1] if out else {}
            if message["role"] == before.get("role") != "tool":
                for name, values in message.items():
                    if name != "role":
                        before.setdefault(name, []).extend(values)
            else:
                out.append(message)
    return out


def _system(content: str | Sequence[Lenient]) -> dict[str, Any]:
    """Without the line for Anthropic's accounts with which Claude Code begins it: it differs in
    each request, and no prefix would ever be found in the cache."""
    message = _message("system", content, "system", "system")
    kept = [
        ({"type": "text", "text": text}, origin)
        for part, origin in zip(message["content"], message["parts from"], strict=True)
        if (text := _BILLING.sub("", part["text"]))
    ]
    told = {"content": [part for part, _ in kept], "parts from": [origin for _, origin in kept]}
    return message | told


def _message(role: str, content: str | Sequence[Lenient], path: str, turn: str) -> dict[str, Any]:
    """`path` of the content of `turn`. Every list is the caller's."""
    parts = _parts(content, path)
    message = {"role": role, "content": [part for part, _ in parts], "from": [turn]}
    return message | {"parts from": [origin for _, origin in parts]}


def _turn(turn: Turn, path: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the rest. Reasoning is a list of texts."""
    within = f"{path}.content"
    message = _message(turn.role, turn.content, within, path)
    blocks = () if isinstance(turn.content, str) else turn.content
    reasoning = [b.thinking for b in blocks if isinstance(b, ThinkingBlock) and b.thinking]
    calls = [
        (f"{within}[{index}]", block)
        for index, block in enumerate(blocks)
        if isinstance(block, CallBlock)
    ]
    message |= {"reasoning_content": reasoning} if reasoning else {}
    if calls:
        message["tool_calls"] = [
            {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            for _, block in calls
        ]
        message["calls from"] = [origin for origin, _ in calls]
    results = []
    for index, block in enumerate(blocks):
        if isinstance(block, ResultBlock):
            at = f"{within}[{index}]"
            result = _message("tool", block.content or "", f"{at}.content", at)
            results.append(result | {"tool_call_id": block.tool_use_id})
    return [*results, message] if message["content"] or calls or not results else results


def _parts(content: str | Sequence[Lenient], path: str) -> list[tuple[dict[str, Any], str]]:
    """Each part with the path of what it was made of."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)]
    parts: list[tuple[dict[str, Any], str]] = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        if isinstance(block, TextBlock):
            parts.append(({"type": "text", "text": block.text}, at))
        elif isinstance(block, ImageBlock):
            url = _url(block.source, f"{at}.source")
            parts.append(({"type": "image_url", "image_url": {"url": url}}, at))
        elif isinstance(block, DocumentBlock):
            parts += _document(block, at)
    return parts


def _document(block: DocumentBlock, at: str) -> list[tuple[dict[str, Any], str]]:
    source, path = block.source, f"{at}.source"
    about = ((block.title, f"{at}.title"), (block.context, f"{at}.context"))
    parts: list[tuple[dict[str, Any], str]] = [
        ({"type": "text", "text": text}, origin) for text, origin in about if text
    ]
    if source.type == "file":
        raise Unsupported(
            f"{path} names a file that a server keeps, and this one keeps none: send the document "
            "as base64",
            param=path,
        )
    if source.type == "content":
        return parts + _parts(source.content or "", f"{path}.content")
    if source.type == "url":
        url = _given(source.url, f"{path}.url")
        return [*parts, ({"type": "input_file", "file_url": url}, path)]
    data = _given(source.data, f"{path}.data")
    if source.type == "text":
        return [*parts, ({"type": "text", "text": data}, f"{path}.data")]
    url = f"data:{source.media_type or 'application/pdf'};base64,{data}"
    return [*parts, ({"type": "input_file", "file_data": url}, path)]


def _given(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequest(f"{path} is missing", param=path)
    return value


def _url(source: ImageSource, path: str) -> str:
    if source.type == "url":
        return _given(source.url, f"{path}.url")
    if source.data is None or source.media_type is None:
        raise InvalidRequest(f"{path} needs data and media_type", param=path)
    return f"data:{source.media_type};base64,{source.data}"
