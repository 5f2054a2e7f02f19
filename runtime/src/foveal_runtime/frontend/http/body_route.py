"""Requests with a JSON body, and the routes that read it before the framework does.

`routes` makes them; `app` puts Direct in front of FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foveal_runtime.frontend.http.asgi.json_bodies import (
    LONG_BYTES,
    WHOLE_BYTES,
    decode_body,
    decode_json,
    encode_json,
)
from foveal_runtime.frontend.http.asgi.replies import failure, plain_body, validation_response
from foveal_runtime.frontend.protocol.body_text import Body
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest

_PARSED = b"{}"
_KINDS = {list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
"""Of JSON that is no object; else it is a number."""


class JsonRequest(Request):
    """A request whose JSON is parsed by msgspec: bodies hold megabytes of base64, so their bytes
    go once they are parsed."""

    def __init__(self, scope: Scope, receive: Receive, *, leaves_media: bool = False) -> None:
        super().__init__(scope, receive)
        size = self.headers.get("content-length", "")
        fits = size.isdecimal() and len(size) < 9 and LONG_BYTES < int(size) <= WHOLE_BYTES
        self._leaves_media = leaves_media and fits
        self._media_body: Body | None = None

    async def body(self) -> bytes:
        """The bytes; after they were parsed, no more than that there were some. They are gathered
        as they come: joining those of the largest body would hold the loop for 60 ms."""
        if hasattr(self, "_parsed"):
            return _PARSED
        if not hasattr(self, "_body"):
            gathered = bytearray()
            async for piece in self.stream():
                if not self._leaves_media:
                    gathered += piece
                    continue
                self._media_body = self._media_body or Body()
                if not self._media_body.add(piece):  # more than it was to be
                    gathered += self._media_body.content() + piece
                    self._media_body, self._leaves_media = None, False
            self._body = cast(bytes, gathered)
            if self._media_body is not None and self._media_body.size:
                self._body = _PARSED  # soon
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_parsed"):
            body = await self.body()
            if self._media_body is not None:
                self._parsed, self._media_body = decode_body(self._media_body), None
            elif len(body) > WHOLE_BYTES:
                self._parsed = await asyncio.to_thread(decode_json, body)
            else:
                self._parsed = decode_json(body)
            self._body = b""
        return self._parsed


class BodyRoute(APIRoute):
    """Reads and parses the body before FastAPI does, so that limits and syntax errors keep their
    own status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            wrapped = JsonRequest(request.scope, request.receive)
            if request.method == "POST" and await wrapped.body():
                await wrapped.json()
            return await inner(wrapped)

        return handler


class Direct:
    """Requests with a JSON object for endpoints that take a body, the request and nothing else, and
    answer themselves. They do without FastAPI's layers and its search for what an endpoint may
    want; all others go there."""

    def __init__(self, api: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._api = api
        self._routes = {
            route.path: (route, model)
            for route in routes
            if isinstance(route, BodyRoute) and (model := _body_model(route.endpoint)) is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._head(scope, receive, send)
            return
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        found = self._routes.get(scope["path"]) if is_post else None
        if found is None:
            await self._api(scope, receive, send)
            return
        route, model = found
        request = JsonRequest(scope, receive, leaves_media=model is ChatCompletionRequest)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            await self._api(scope, receive, send)
            return
        value = await request.json() if await request.body() else None
        if not isinstance(value, dict):
            await self._api(scope, _again(value, receive), send)
            return
        scope["route"] = route
        try:
            response: Response = await route.endpoint(_checked(model, value), request)
        except RequestValidationError as error:
            response = refused_body(scope, error)
        await response(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As GET: the server leaves the body out. What is noted about the request stays."""
        asked = {**scope, "method": "GET"}
        try:
            await self._api(asked, receive, send)
        finally:
            scope.update({**asked, "method": "HEAD"})


def _again(value: Any, receive: Receive) -> Receive:
    """The body that was read, once more."""
    body: list[Message] = [
        {"type": "http.request", "body": b"" if value is None else encode_json(value)}
    ]

    async def again() -> Message:
        return body.pop() if body else await receive()

    return again


def refused_body(scope: Scope, error: RequestValidationError) -> Response:
    kind = scope["foveal.error"] = "invalid_request_error"
    found = [one for one in error.errors() if one["loc"] == ("body",)]
    if not found or found[0]["type"] not in ("missing", "model_attributes_type"):
        return validation_response(scope, error)
    given = Headers(scope=scope).get("content-type", "")
    if found[0]["type"] == "missing":
        says = "the body is empty; send a JSON object and the header Content-Type: application/json"
    elif "json" not in given.partition(";")[0].lower():
        says = f"the header Content-Type is {given[:100]!r}; a body of JSON needs application/json"
    else:
        given = _KINDS.get(type(found[0]["input"]), "a number")
        says = f"the body is {given}; send a JSON object"
    return failure(scope, plain_body(says, kind, kind), 400)


def _body_model(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Of an endpoint that takes a body, the request and nothing else, and answers itself."""
    hints = get_type_hints(endpoint)
    if list(hints) != ["body", "request", "return"] or hints["return"] is not Response:
        return None
    model: type[BaseModel] = hints["body"]
    return model


def _checked(model: type[BaseModel], value: dict[str, Any]) -> BaseModel:
    """Raises RequestValidationError, as FastAPI does."""
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in found]
        ) from error
