"""HTTP replies: JSON, errors, and event streams that end when their client goes away.

An error is `{"error": {message, type, param, code}}` (on Anthropic's paths it has that API's
shape), never a traceback; one without a name is a 500 that says only its request id, and the log
has the rest. A closed connection cancels the work at once, which closes the engine's generator,
which aborts the request within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foveal_runtime.frontend.http.asgi.json_bodies import SSE_DONE, encode_json, sse
from foveal_runtime.frontend.protocol.bounds import Bounded
from foveal_runtime.plan.errors import FovealError, MediaTooLarge, RetryLater

_UNION_BRANCH = re.compile(r"[\[\](]")
_TAGGED = "tagged-union["
_BRANCHES = frozenset({"str", "list", "int", "float", "bool", "constrained-str"})
_SHOULD = "Input should be "
_OBJECT = re.compile("a valid dictionary( or object to extract fields from)?")
_MAX_MESSAGE_CHARS = 2000
_MAX_PATH_CHARS = 200
_ALIKE = 0.85
"""Of two paths, one of which may be the other misspelt."""
_NOT_IN_HEADERS = re.compile(r"[^ -~]")


def error_body(error: FovealError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message[:_MAX_MESSAGE_CHARS],
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def plain_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_ANTHROPIC_TYPES = {"server_error": "api_error", "media_error": "invalid_request_error"}


def is_anthropic(scope: Scope) -> bool:
    """Asked on one of that API's paths, or by one of its clients on another."""
    names = (name for name, _ in scope["headers"])
    return scope["path"] in ANTHROPIC_PATHS or b"anthropic-version" in names


def anthropic_error(body: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI error in Anthropic's shape."""
    error = body["error"]
    kind = _ANTHROPIC_TYPES.get(error["type"], error["type"])
    kind = "request_too_large" if error["code"] == MediaTooLarge.code else kind
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def failure(
    scope: Scope, body: dict[str, Any], status: int, headers: dict[str, str] | None = None
) -> Response:
    """An OpenAI error as the client's API has it."""
    if is_anthropic(scope):
        body = anthropic_error(body)
    return json_response(body, status, headers)


def error_response(scope: Scope, error: FovealError) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, RetryLater):
        headers["retry-after"] = str(max(1, error.retry_after_seconds))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 409:  # which clients of OpenAI and Anthropic send again, media and all
        headers["x-should-retry"] = "false"
    return failure(scope, error_body(error), error.status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, media_type="application/json")


def internal_error(request_id: str) -> dict[str, Any]:
    return plain_body(
        f"internal error; the server's log has it under request id {request_id}",
        "server_error",
        "internal_error",
    )


def http_exception_response(scope: Scope, error: HTTPException, known: Collection[str]) -> Response:
    """Unknown paths, wrong methods and the like. `known` are the paths that are served."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    headers = dict(error.headers) if error.headers else {}
    message, path = str(error.detail), scope["path"][:_MAX_PATH_CHARS]
    if error.status_code == 404:
        meant = _meant(path, known)
        use = f"did you mean {meant}?" if meant else "/docs shows the paths that are"
        message = f"{path} is not served here; {use}"
    elif error.status_code == 405:
        allowed = {name.lower(): value for name, value in headers.items()}.get("allow", "another")
        message = f"{path} does not take {scope['method']}; use {allowed}"
    return failure(scope, plain_body(message, kind, code), error.status_code, headers or None)


def _meant(path: str, known: Collection[str]) -> str:
    """The path of the API that another one ends with, whatever clients put before it, or that it is
    a misspelling of; else ""."""
    asked = path.lower()
    ends = [one for one in known if asked.endswith(one.removeprefix("/v1"))]
    if ends:
        return max(ends, key=len)
    others = (one for one in known if not asked.startswith(f"{one}/"))
    return next(iter(difflib.get_close_matches(asked, others, 1, _ALIKE)), "")


def validation_response(scope: Scope, error: RequestValidationError) -> Response:
    """A body that does not parse: 400 with the path of the first field at fault."""
    param, message = describe_validation(error.errors())
    text = f"{param}: {message}" if param else message
    kind = "invalid_request_error"
    return failure(scope, plain_body(text[:_MAX_MESSAGE_CHARS], kind, kind, param or None), 400)


def describe_validation(errors: Sequence[Any]) -> tuple[str, str]:
    """(field path, message) of the most telling error: the one deepest in the document, then one
    about the value rather than its type, since a union reports each of its branches. Where all are
    about a type, the message names each that the field takes."""
    best = max(errors, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))
    path, message = field_path(best["loc"]), str(best["msg"]).removeprefix("Value error, ")
    if best["type"].endswith("_type") and message.startswith(_SHOULD):
        others = (item for item in errors if field_path(item["loc"]) == path)
        types = (str(item["msg"]) for item in others if item["type"].endswith("_type"))
        names = (_OBJECT.sub("an object", one.removeprefix(_SHOULD)) for one in types)
        message = _SHOULD + " or ".join(dict.fromkeys(names))
    elif best["type"] == "union_tag_not_found":
        message = f"the field {best['ctx']['discriminator']} is missing, which says what it is"
    return path, message


def field_path(loc: Sequence[int | str]) -> str:
    """("body", "messages", 0, "content", "list[...]", 1, "image_url", "image_url", "url") becomes
    messages[0].content[1].image_url.url."""
    path = ""
    is_tagged = False  # after the entry's number stands its tag, which is no field
    for part in list(loc)[1:] if loc and loc[0] in ("body", "query", "header", "path") else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _UNION_BRANCH.search(part):
            is_tagged = _TAGGED in part
        elif is_tagged:
            is_tagged = False
        elif part not in _BRANCHES and part not in _model_names():
            path += f".{part}" if path else str(part)
    return path


@functools.cache
def _model_names() -> frozenset[str]:
    """Of the models of requests: a union names the one of whose field it speaks."""
    models: list[type] = [Bounded]
    for model in models:
        models += model.__subclasses__()
    return frozenset(model.__name__ for model in models)


def named_relaxed(response: Response, relaxed: Sequence[str]) -> Response:
    """Names what of a schema that is not strict is not enforced."""
    if relaxed:
        text = _NOT_IN_HEADERS.sub("?", "; ".join(relaxed)[:1000])
        response.headers["x-foveal-schema-relaxed"] = text.strip()
    return response


logger = logging.getLogger(__name__)
T = TypeVar("T")
Failed = Callable[[dict[str, Any]], bytes]


CLIENT_DISCONNECT = "client_disconnect"
"""The error code of a request whose client hung up: counted, never a failure of the server."""


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. The request body must have been read.

    Raises ClientGone, with `work` cancelled and finished, when the client disconnects first. As
    with `asyncio.timeout`, the work is part of the current task: it needs none of its own.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        with contextlib.suppress(Exception):
            await _disconnected(receive)
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.cancelling() == num_cancels + 1:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
        if is_gone:
            task.uncancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ServerSentEvents(Response):
    """text/event-stream of `chunks`, whose first element exists already (so errors before it had
    their proper status). An error after that is events of its own, made by `failed` from an OpenAI
    error."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes, None], failed: Failed) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        # A stream has no length.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._first = first
        self._chunks = chunks
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._pump(scope, send))
        except ClientGone:  # the answer has begun: nothing is left to be answered
            scope["foveal.error"] = CLIENT_DISCONNECT
        finally:
            await self._chunks.aclose()

    async def _pump(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send(send, self._first)
        try:
            async for chunk in self._chunks:
                await _send(send, chunk)
        except FovealError as error:
            scope["foveal.error"] = error.code
            await _send(send, self._failed(error_body(error)))
        except Exception:
            logger.exception("a stream failed")
            scope["foveal.error"] = "internal_error"
            await _send(send, self._failed(internal_error(scope.get("foveal.request_id", ""))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _openai_failure(error: dict[str, Any]) -> bytes:
    return sse(error) + SSE_DONE


async def start_stream(
    receive: Receive, chunks: AsyncGenerator[bytes, None], failed: Failed = _openai_failure
) -> ServerSentEvents:
    """Waits for the first chunk, so that a refusal by the engine still gets its HTTP status."""
    try:
        first = await until_disconnect(receive, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return ServerSentEvents(first, chunks, failed)
