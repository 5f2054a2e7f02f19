"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.grammars.reader import CallPiece
from foveal_runtime.frontend.http.answers import Tally
from foveal_runtime.frontend.http.apis.chat_translation import Event, answer, as_sent, count, plan
from foveal_runtime.frontend.http.asgi.replies import anthropic_error
from foveal_runtime.frontend.http.service import Service, scope_of
from foveal_runtime.frontend.protocol.anthropic import (
    AnthropicError,
    CountedTokens,
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    chat_fields,
    sent_paths,
)

_SIGNATURE = "unsigned"
"""Clients send it back with the block; nothing is checked by it."""
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def build_messages_router(
    service: Service, route_class: type[APIRoute], statuses: list[int | str]
) -> APIRouter:
    router = APIRouter(route_class=route_class, tags=["Anthropic"])
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicError} for status in statuses
    }

    @router.post("/v1/messages", response_model=MessagesAnswer, responses=errors)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation as Anthropic's API does."""
        scope = scope_of(service, request)
        fields = _fields(service, body)
        with as_sent(lambda: [sent_paths(body)]):
            run = await plan(service, fields, scope)
            writer = MessageWriter(scope.request_id, body.model or service.model_name)
            return await answer(request, run, writer, body.stream)

    @router.post("/v1/messages/count_tokens", response_model=CountedTokens, responses=errors)
    async def count_tokens(body: CountTokensRequest, request: Request) -> CountedTokens:
        """The tokens of a prompt, its images expanded as the model sees them."""
        fields = _fields(service, body)
        with as_sent(lambda: [sent_paths(body)]):
            return CountedTokens(input_tokens=await count(service, fields, request))

    return router


def _fields(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    fields = chat_fields(body)
    if "max_tokens" in fields:  # which clients send for models that they do not know
        fields["max_tokens"] = min(fields["max_tokens"], service.max_model_len())
    if body.thinking is not None and body.thinking.type == "enabled" and _has_budget(service):
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    return fields


def _has_budget(service: Service) -> bool:
    """The model reasons, and one token ends that. Elsewhere `thinking` means nothing."""
    think = service.template.thinking
    return think is not None and think[1] in service.tokenizer.marks(" ".join(think))


class MessageWriter:
    """One message: blocks one after the other, each with its own start and stop."""

    def __init__(self, request_id: str, model: str) -> None:
        self._content: list[Event] = []
        self._is_open = False
        self._arguments = ""
        self._message: Event = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, tally: Tally) -> list[Event]:
        return [{"type": "message_start", "message": {**self._message, "usage": _usage(tally)}}]

    def reasoning(self, text: str) -> list[Event]:
        events = self._block({"type": "thinking", "thinking": "", "signature": ""})
        self._content[-1]["thinking"] += text
        return [*events, self._delta({"type": "thinking_delta", "thinking": text})]

    def call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.id:
            events = self._close()
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            events += self._block(block)
        if piece.arguments:
            self._arguments += piece.arguments
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            events.append(self._delta(delta))
        return events

    def text(self, text: str, scores: Sequence[Any] = ()) -> list[Event]:
        events = self._block({"type": "text", "text": ""})
        self._content[-1]["text"] += text
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def end(self, delta: Delta, tally: Tally) -> list[Event]:
        at_string = delta.finish_reason == "stop" and isinstance(delta.stop_reason, str)
        reason = _REASONS.get(delta.finish_reason, "end_turn")
        stopped = {
            "stop_reason": "stop_sequence" if at_string else reason,
            "stop_sequence": delta.stop_reason if at_string else None,
        }
        self._message |= {"content": self._content, **stopped, "usage": _usage(tally)}
        return [
            *self._close(),
            {"type": "message_delta", "delta": stopped, "usage": _usage(tally)},
            {"type": "message_stop"},
        ]

    def fail(self, error: Event) -> list[Event]:
        return [anthropic_error(error)]

    def body(self) -> Event:
        return self._message

    def _block(self, block: Event) -> list[Event]:
        """Opens a block unless one of its type is open."""
        if self._is_open and self._content[-1]["type"] == block["type"]:
            return []
        events = self._close()
        is_first = not self._content
        self._is_open = True
        self._content.append(dict(block))
        index = len(self._content) - 1
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        return [*events, {"type": "ping"}] if is_first else events

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        events, block = [], self._content[-1]
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            events = [self._delta({"type": "signature_delta", "signature": _SIGNATURE})]
        elif block["type"] == "tool_use":
            block["input"], self._arguments = _object_of(self._arguments), ""
        return [*events, {"type": "content_block_stop", "index": len(self._content) - 1}]


def _object_of(arguments: str) -> Any:
    """{} where the arguments were cut off."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(arguments)
    return {}


def _usage(tally: Tally) -> Event:
    usage = tally.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
