"""Errors as HTTP answers: `{"error": {message, type, param, code}}`, never a traceback.

Used by app.py's exception handlers and by streams that fail half-way. An error without a name is
a 500 that says only its request id; the log has the rest. On Anthropic's paths an
error has that API's shape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from foveal_runtime.frontend.http.asgi.json_out import encode_json
from foveal_runtime.plan.errors import FovealError, MediaTooLarge, RetryLater

_UNION_BRANCH = re.compile(r"[\[\](]")
_BRANCHES = frozenset({"str", "list", "int", "float", "constrained-str"})
_IN_TAGGED = re.compile(r"\.content\[|^input\[")
_TAGS = frozenset(
    {"text", "image_url", "video_url", "audio_url", "input_audio", "image", "tool_result"}
    | {"image_embeds"}
    | {"message", "function_call", "function_call_output", "reasoning"}
)
_MAX_MESSAGE_CHARS = 2000


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


def anthropic_error(body: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI error in Anthropic's shape."""
    error = body["error"]
    kind = _ANTHROPIC_TYPES.get(error["type"], error["type"])
    kind = "request_too_large" if error["code"] == MediaTooLarge.code else kind
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def failure(
    scope: Scope, body: dict[str, Any], status: int, headers: dict[str, str] | None = None
) -> Response:
    """An OpenAI error as the path's API has it."""
    if scope["path"] in ANTHROPIC_PATHS:
        body = anthropic_error(body)
    return json_response(body, status, headers)


def error_response(scope: Scope, error: FovealError) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, RetryLater):
        headers["retry-after"] = str(max(1, error.retry_after_seconds))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return failure(scope, error_body(error), error.status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, media_type="application/json")


def internal_error(request_id: str) -> dict[str, Any]:
    return plain_body(
        f"internal error; the server's log has it under request id {request_id}",
        "server_error",
        "internal_error",
    )


def http_exception_response(scope: Scope, error: HTTPException) -> Response:
    """Unknown paths, wrong methods and the like."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    headers = dict(error.headers) if error.headers else None
    return failure(scope, plain_body(str(error.detail), kind, code), error.status_code, headers)


def validation_response(scope: Scope, error: RequestValidationError) -> Response:
    """A body that does not parse: 400 with the path of the first field at fault."""
    param, message = describe_validation(error.errors())
    text = f"{param}: {message}" if param else message
    kind = "invalid_request_error"
    return failure(scope, plain_body(text[:_MAX_MESSAGE_CHARS], kind, kind, param or None), 400)


def describe_validation(errors: Sequence[Any]) -> tuple[str, str]:
    """(field path, message) of the most telling error: the one deepest in the document, then one
    about the value rather than its type, since a union reports each of its branches."""
    best = max(errors, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))
    return field_path(best["loc"]), str(best["msg"])


def field_path(loc: Sequence[int | str]) -> str:
    """("body", "messages", 0, "content", "list[...]", 1, "image_url", "image_url", "url") becomes
    messages[0].content[1].image_url.url."""
    path = ""
    previous: int | str = ""
    for part in list(loc)[1:] if loc and loc[0] in ("body", "query", "header", "path") else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _UNION_BRANCH.search(part) or part in _BRANCHES:
            continue
        elif isinstance(previous, int) and part in _TAGS and _IN_TAGGED.search(path):
            previous = part  # the tag of a content part, not a field
            continue
        else:
            path += f".{part}" if path else str(part)
        previous = part
    return path


def named_relaxed(response: Response, relaxed: Sequence[str]) -> Response:
    """Names what of a schema that is not strict is not enforced."""
    if relaxed:
        text = "; ".join(relaxed).encode("ascii", "replace").decode()
        response.headers["x-foveal-schema-relaxed"] = text[:1000]
    return response
