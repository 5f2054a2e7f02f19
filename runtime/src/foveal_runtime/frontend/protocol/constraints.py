"""The constraint on a request's output: several fields of the API, as one value, and its tools.

Called by chat and completions before anything costs something. Pure; nothing is compiled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from foveal_runtime.frontend.protocol.messages import Message
from foveal_runtime.frontend.protocol.requests import (
    AllowedTools,
    ChatCompletionRequest,
    CompletionRequest,
    NamedTool,
    Tool,
)
from foveal_runtime.plan.errors import InvalidRequest, Unsupported

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "turn"]

RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_decoding_backend": "nothing: there is one library",
    "guided_whitespace_pattern": "nothing: blanks between JSON tokens are limited",
}
"""Older names of other servers, with what to send."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A constraint as the client wrote it.

    Attributes:
        source: a JSON schema, a pattern, strings, a grammar, a structural tag, or a whole turn
            (`http.chat`).
        strict: everything is enforced or refused; else what cannot be is left out.
        param: the request's field, for errors.
    """

    kind: Kind
    source: Any
    strict: bool
    param: str


def wanted_of(request: ChatCompletionRequest | CompletionRequest) -> Wanted | None:
    """Raises InvalidRequest or Unsupported."""
    for old, new in RENAMED.items():
        if (request.model_extra or {}).get(old) is not None:
            raise Unsupported(f"{old} is not supported; send {new}", param=old)
    found = [
        one
        for one in (_of_response_format(request), _of_structured_outputs(request))
        if one is not None
    ]
    if len(found) > 1:
        raise InvalidRequest(
            "response_format and structured_outputs both constrain the output; send one",
            param="structured_outputs",
        )
    return found[0] if found else None


def _of_response_format(request: ChatCompletionRequest | CompletionRequest) -> Wanted | None:
    given = request.response_format
    if given is None or given.type == "text":
        return None
    param = "response_format"
    if given.type == "json_object":
        if given.body not in (None, {}, True):
            return Wanted("json", given.body, False, f"{param}.schema")
        return Wanted("json", {"type": "object"}, True, param)
    if given.type == "structural_tag":
        tag = given.model_dump(exclude_none=True, exclude={"body"})
        return Wanted("structural_tag", tag, True, param)
    if given.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is missing", param="response_format.json_schema"
        )
    schema = given.json_schema.body
    if schema in (None, {}, True):
        schema = {"type": "object"}
    return Wanted("json", schema, bool(given.json_schema.strict), f"{param}.json_schema.schema")


def _of_structured_outputs(request: ChatCompletionRequest | CompletionRequest) -> Wanted | None:
    given = request.structured_outputs
    if given is None:
        return None
    named: dict[str, Any] = {
        name: value
        for name in ("json", "regex", "choice", "grammar", "structural_tag")
        if (value := getattr(given, "body" if name == "json" else name)) is not None
    }
    if given.json_object:
        named["json_object"] = {"type": "object"}
    if len(named) != 1:
        raise InvalidRequest(
            "structured_outputs takes exactly one of json, json_object, regex, choice, grammar and "
            "structural_tag",
            param="structured_outputs",
        )
    name, source = next(iter(named.items()))
    param = f"structured_outputs.{name}"
    if given.whitespace_pattern is not None or given.disable_additional_properties:
        raise Unsupported(
            "structured_outputs takes neither whitespace_pattern nor disable_additional_properties",
            param="structured_outputs",
        )
    if name in ("json", "structural_tag") and isinstance(source, str):
        source = _parsed(source, param)
    kind: Kind = "json" if name == "json_object" else name  # type: ignore[assignment]
    return Wanted(kind, source, True, param)


def _parsed(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Calls:
    """What a request lets the model call.

    Attributes:
        shown: every tool, for the prompt. tools: those that may be called.
    """

    shown: Sequence[Tool]
    tools: Sequence[Tool]
    choice: Literal["auto", "required"]
    parallel: bool

    def shown_plain(self) -> list[dict[str, Any]]:
        """As chat templates read them."""
        return [one.model_dump(exclude_none=True) for one in self.shown]

    def schemas(self) -> dict[str, Any]:
        return {one.function.name: schema_of(one) for one in self.tools}


def schema_of(tool: Tool) -> Any:
    given = tool.function.parameters
    if given is None:
        return NO_ARGUMENTS
    return {"type": "object", **given} if isinstance(given, dict) else given


def calls_of(request: ChatCompletionRequest) -> Calls | None:
    """None when nothing may be called. Raises InvalidRequest."""
    check_results(request.messages)
    tools, choice = request.tools or [], request.tool_choice or "auto"
    if not tools:
        if choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, and tools is empty; send tools",
                                 param="tool_choice")  # fmt: skip
        return None
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(
                f"tools[{index}].function.name is {name!r}, as that of tools[{names.index(name)}]; "
                "names must differ",
                param=f"tools[{index}].function.name",
            )
        schema = schema_of(tools[index])
        if not isinstance(schema, dict) or schema["type"] != "object":
            where = f"tools[{index}].function.parameters"
            raise InvalidRequest(f"{where} must be the schema of an object", param=where)
    if choice == "none":
        return None
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        return Calls(tools, _chosen(tools, [choice]), "required", False)
    if isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools
        return Calls(tools, _chosen(tools, allowed.tools), allowed.mode, parallel)
    return Calls(tools, tools, choice, parallel)


def _chosen(tools: Sequence[Tool], wanted: Sequence[NamedTool]) -> list[Tool]:
    known = {tool.function.name: tool for tool in tools}
    for one in wanted:
        if one.function.name not in known:
            raise InvalidRequest(
                f"tool_choice names {one.function.name!r}, which is not among tools: "
                f"{', '.join(known)}",
                param="tool_choice",
            )
    names = {one.function.name for one in wanted}
    return [tool for name, tool in known.items() if name in names]


def check_results(messages: Sequence[Message]) -> None:
    """Every result of a tool answers a call before it; calls without an id are not told apart."""
    known: set[str | None] = set()
    for index, message in enumerate(messages):
        known |= {call.id for call in message.tool_calls or ()}
        wanted = message.tool_call_id
        if message.role != "tool" or wanted is None or wanted in known or None in known:
            continue
        raise InvalidRequest(
            f"messages[{index}].tool_call_id is {wanted!r}, which no tool call before it has; send "
            "the assistant's message with its tool_calls too",
            param=f"messages[{index}].tool_call_id",
        )
