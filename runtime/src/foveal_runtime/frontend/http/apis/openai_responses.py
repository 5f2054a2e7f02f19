"""POST /v1/responses: OpenAI's Responses API, without anything kept between requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.grammars.reader import CallPiece
from foveal_runtime.frontend.http.answers import Tally
from foveal_runtime.frontend.http.apis.chat_translation import Event, answer, as_sent, count, plan
from foveal_runtime.frontend.http.service import Service, scope_of
from foveal_runtime.frontend.protocol.openai_responses import (
    InputTokens,
    ResponsesAnswer,
    ResponsesRequest,
    response_fields,
    sent_paths,
)
from foveal_runtime.plan.errors import ContextLengthExceeded, InvalidRequest

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Of items that have text: its type."""
_SHOWN = ("logprobs", "top_logprobs")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def build_responses_router(
    service: Service, route_class: type[APIRoute], errors: dict[int | str, dict[str, Any]]
) -> APIRouter:
    router = APIRouter(route_class=route_class, tags=["OpenAI"])

    @router.post("/v1/responses", response_model=ResponsesAnswer, responses=errors)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answers input items. Stateless: every request brings the whole conversation."""
        if body.input is None:
            raise InvalidRequest("input is missing; send text or items", param="input")
        scope = scope_of(service, request)
        fields = response_fields(body)
        with as_sent(_maps(body, fields)):
            if body.truncation == "auto":
                await _shorten(service, fields, request, body.max_output_tokens)
            run = await plan(service, fields, scope, _SHOWN)
            writer = ResponseWriter(scope.request_id, body.model or service.model_name, body)
            return await answer(request, run, writer, body.stream)

    @router.post("/v1/responses/input_tokens", response_model=InputTokens, responses=errors)
    async def input_tokens(body: ResponsesRequest, request: Request) -> InputTokens:
        """The tokens of a prompt, its images expanded as the model sees them."""
        fields = response_fields(body)
        with as_sent(_maps(body, fields)):
            if body.truncation == "auto":
                await _shorten(service, fields, request, body.max_output_tokens)
            return InputTokens(input_tokens=await count(service, fields, request))

    return router


def _maps(body: ResponsesRequest, fields: dict[str, Any]) -> Callable[[], list[dict[str, str]]]:
    """For `as_sent`, also once the oldest messages are gone."""
    messages = fields["messages"]

    def maps() -> list[dict[str, str]]:
        numbers = {id(message): number for number, message in enumerate(messages)}
        kept = [numbers[id(message)] for message in fields["messages"]]
        shift = {f"messages[{new}]": f"messages[{old}]" for new, old in enumerate(kept)}
        return [shift, sent_paths(body)]

    return maps


async def _shorten(
    service: Service, fields: dict[str, Any], request: Request, num_output: int | None
) -> None:
    """Takes the oldest messages from `fields`, so that the rest fits and leaves room for the
    answer. An error is about the messages that are there when it is raised."""
    limit = service.max_model_len()
    room = limit - min(num_output or 1, limit // 2)
    messages = fields["messages"]
    head = [m for m in messages if m["role"] in ("system", "developer")]
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    starts = [i for i, m in enumerate(rest) if m["role"] == "user"] or [0]

    async def fits(start: int) -> bool:
        fields["messages"] = messages if start == starts[0] else head + rest[start:]
        try:
            return await count(service, fields, request, charge=False) <= room
        except ContextLengthExceeded:
            return False

    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(starts[middle]) else (middle + 1, high)
    fields["messages"] = messages if low == 0 else head + rest[starts[low] :]


class ResponseWriter:
    """One response: items one after the other, each with its own events."""

    def __init__(self, request_id: str, model: str, request: ResponsesRequest) -> None:
        self._id = request_id
        self._number = -1
        self._text = ""
        self._scores: list[Any] = []
        self._item: Event = {}
        extra = request.model_extra or {}
        self._response: Event = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": extra.get("metadata") or {},
            "user": extra.get("user"),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {"effort": getattr(request.reasoning, "effort", None), "summary": None},
            "temperature": request.temperature,
            "text": {"format": _format_of(request)},
            "tool_choice": _plain(request.tool_choice) or "auto",
            "tools": [_plain(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": request.truncation or "disabled",
        }

    def begin(self, tally: Tally) -> list[Event]:
        return [
            self._event(kind, response=dict(self._response))
            for kind in ("response.created", "response.in_progress")
        ]

    def reasoning(self, text: str) -> list[Event]:
        return self._more("reasoning", {"summary": []}, text)

    def text(self, text: str, scores: Sequence[Any] = ()) -> list[Event]:
        return self._more("message", {"role": "assistant"}, text, scores)

    def call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.id:
            head = {"call_id": piece.id, "name": piece.name, "arguments": ""}
            events = self._open("function_call", head)
        if piece.arguments:
            self._text += piece.arguments
            events.append(self._at("response.function_call_arguments.delta", delta=piece.arguments))
        return events

    def end(self, delta: Delta, tally: Tally) -> list[Event]:
        was_cut = delta.finish_reason == "length"
        status = "incomplete" if was_cut else "completed"
        events = self._close(status)
        usage = tally.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": tally.num_reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            },
        }
        return [*events, self._event(f"response.{status}", response=self._response)]

    def fail(self, error: Event) -> list[Event]:
        told = {"code": "server_error", "message": error["error"]["message"]}
        failed = {**self._response, "status": "failed", "error": told}
        return [self._event("response.failed", response=failed)]

    def body(self) -> Event:
        return self._response

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _at(self, kind: str, **fields: Any) -> Event:
        """An event within the open item."""
        index = len(self._response["output"])
        return self._event(kind, item_id=self._item["id"], output_index=index, **fields)

    def _more(self, kind: str, head: Event, text: str, scores: Sequence[Any] = ()) -> list[Event]:
        is_open = self._item.get("type") == kind
        events = [] if is_open else self._open(kind, {**head, "content": []})
        self._text += text
        self._scores += scores
        return [*events, self._said("delta", delta=text, **self._beside(scores))]

    def _said(self, kind: str, **fields: Any) -> Event:
        """An event of the open text."""
        return self._at(f"response.{_TEXTS[self._item['type']]}.{kind}", content_index=0, **fields)

    def _beside(self, scores: Sequence[Any]) -> Event:
        """Reasoning has no place for them."""
        return {"logprobs": list(scores)} if self._item["type"] == "message" else {}

    def _part(self) -> Event:
        part: Event = {"type": _TEXTS[self._item["type"]], "text": self._text}
        if self._item["type"] == "message":
            part |= {"annotations": [], **self._beside(self._scores)}
        return part

    def _open(self, kind: str, head: Event) -> list[Event]:
        events = self._close("completed")
        index = len(self._response["output"])
        name = f"{_PREFIXES[kind]}_{self._id}_{index}"
        self._item = {"id": name, "type": kind, "status": "in_progress", **head}
        self._text, self._scores = "", []
        events.append(
            self._event("response.output_item.added", output_index=index, item=self._item)
        )
        if kind in _TEXTS:
            part = self._part()
            events.append(self._at("response.content_part.added", content_index=0, part=part))
        return events

    def _close(self, status: str) -> list[Event]:
        if not self._item:
            return []
        item = {**self._item, "status": status}
        if item["type"] in _TEXTS:
            part = self._part()
            item["content"] = [part]
            events = [
                self._said("done", text=self._text, **self._beside(self._scores)),
                self._at("response.content_part.done", content_index=0, part=part),
            ]
        else:
            item["arguments"] = self._text
            done = {"name": item["name"], "arguments": self._text}
            events = [self._at("response.function_call_arguments.done", **done)]
        index = len(self._response["output"])
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._response["output"] = [*self._response["output"], item]
        self._item = {}
        return events


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else value.model_dump()


def _format_of(request: ResponsesRequest) -> Event:
    given = request.text.format if request.text is not None else None
    if given is None:
        return {"type": "text"}
    return given.model_dump(by_alias=True, exclude_none=True)
