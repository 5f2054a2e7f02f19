"""The tools of a chat request: what may be called, whether it must be, and what was called before.

Read by chat.py before anything costs something. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foveal_runtime.frontend.protocol.messages import Message
from foveal_runtime.frontend.protocol.requests import (
    AllowedTools,
    ChatCompletionRequest,
    NamedTool,
    Tool,
)
from foveal_runtime.plan.errors import InvalidRequest

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
