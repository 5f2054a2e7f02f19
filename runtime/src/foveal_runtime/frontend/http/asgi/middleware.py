"""ASGI middleware: request id, log line, API key, admission, body limit and rate, last resort.

Wraps the FastAPI app (app.py builds the stack). Refusals happen before the body is read where that
is possible; bytes are charged as they arrive, and a body that brings too little in a time window
ends with 408. Whatever
goes wrong below ends here as an OpenAI error; nothing propagates to the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foveal_runtime.frontend.http.access.admin import ADMIN_PATHS, INJECTION_PATH
from foveal_runtime.frontend.http.access.admission import Gate, Ticket
from foveal_runtime.frontend.http.access.auth import KeyFile
from foveal_runtime.frontend.http.asgi.replies import (
    ANTHROPIC_PATHS,
    CLIENT_DISCONNECT,
    ClientGone,
    error_response,
    failure,
    internal_error,
    is_anthropic,
)
from foveal_runtime.frontend.items.interfaces import Generator
from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import (
    AuthenticationFailed,
    FovealError,
    InvalidRequest,
    MediaTooLarge,
    UploadTooSlow,
)
from foveal_runtime.telemetry.logs import request_id_of_task
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.tracing import NO_SPAN, Span, Tracing, span_of_task

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_QUIET = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics", "/load"})
_GENERATES = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings",
    "/v1/audio/transcriptions", "/v1/audio/translations",
})  # fmt: skip
_OPEN = _QUIET | {"/version", "/docs", "/openapi.json", "/"}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
CLIENT_CLOSED = 499
LOAD_HEADER = "endpoint-load-metrics"


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def request_id_of(scope: Scope) -> str:
    """The client's x-request-id when it is short and harmless, else a new one."""
    given = header(scope, b"x-request-id")
    if given is not None and _SANE_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)


class RequestContext:
    """Outermost: gives the request its id, writes one log line, answers what nobody caught."""

    def __init__(self, app: ASGIApp, gate: Gate, metrics: Metrics, tracing: Tracing) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._tracing = tracing
        for handler in sorted(_GENERATES):  # from zero, so that the first failure is seen as one
            metrics.inc("http_requests", 0.0, handler=handler, method="POST", status="5xx")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        scope["foveal.request_id"] = request_id
        scope["foveal.started"] = started = time.monotonic()
        token = request_id_of_task.set(request_id)
        span = self._span(scope, request_id)
        span_token = span_of_task.set(span)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if is_anthropic(scope):  # whose clients show what stands here
                    headers.append((b"request-id", request_id.encode()))
                if self._gate.draining:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            scope["foveal.error"] = CLIENT_DISCONNECT
            status = CLIENT_CLOSED
        except FovealError as error:
            scope["foveal.error"] = error.code
            if status == 0:
                await error_response(scope, error)(scope, receive, send_with_id)
        except Exception:
            logger.exception("unexpected error")
            scope["foveal.error"] = "internal_error"
            if status == 0:
                await failure(scope, internal_error(request_id), 500)(scope, receive, send_with_id)
        finally:
            span.set("http.response.status_code", status)
            span.end(_failure_of(scope, status))
            span_of_task.reset(span_token)
            self._finish(scope, status, time.monotonic() - started, span.trace_id())
            request_id_of_task.reset(token)

    def _span(self, scope: Scope, request_id: str) -> Span:
        if not self._tracing.is_on or scope["path"] not in _GENERATES:
            return NO_SPAN
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        span = self._tracing.start(f"{scope['method']} {scope['path']}", headers)
        span.set("http.request.method", scope["method"])
        span.set("url.path", scope["path"])
        span.set("foveal.request_id", request_id)
        return span

    def _finish(self, scope: Scope, status: int, seconds: float, trace_id: str) -> None:
        error = scope.get("foveal.error")
        if error == CLIENT_DISCONNECT:
            self._metrics.inc("foveal_client_disconnects")
        elif error is not None:
            self._metrics.inc("foveal_request_errors", code=error)
        # What is refused before a route is looked for belongs to its path nevertheless.
        named: str = scope["path"] if scope["path"] in ADMITTED else "unmatched"
        handler: str = getattr(scope.get("route"), "path", named)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        grouped = f"{status // 100}xx"
        self._metrics.inc("http_requests", handler=handler, method=method, status=grouped)
        self._metrics.observe(
            "http_request_duration_seconds", seconds, trace_id=trace_id,
            handler=handler, method=method,
        )  # fmt: skip
        quiet = error == CLIENT_DISCONNECT or (scope["path"] in _QUIET and status < 500)
        level = logging.DEBUG if quiet else logging.INFO
        if logger.isEnabledFor(level):
            fields = {
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(seconds, 4),
            }
            if error is not None:
                fields["error"] = error
            logger.log(level, "request", extra={"fields": fields})


def _failure_of(scope: Scope, status: int) -> str:
    """The error that a server's span tells: what clients do wrong, or stop, is none of its own."""
    error: str = scope.get("foveal.error", "")
    return "" if error == CLIENT_DISCONNECT or 400 <= status < 500 else error


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets scripts of web pages from these origins call `app` (CORS); without credentials, and
    neither administration nor injection. Preflight requests are answered before any key is asked
    for: they carry none."""
    if not origins:
        return app
    shared = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", LOAD_HEADER),
        max_age=600,
    )

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["type"] == "http" and scope["path"] in {*ADMIN_PATHS, INJECTION_PATH}
        await (app if closed else shared)(scope, receive, send)

    return choose


def without_last_slash(app: ASGIApp) -> ASGIApp:
    """Serves /v1/models/ as /v1/models. Outermost, so that each check of a path sees the same."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await app(scope, receive, send)

    return served


class LoadReport:
    """Answers `endpoint-load-metrics-format: TEXT` (or JSON) with the engines' load in a header of
    the response, in ORCA's form, so that gateways can balance on it."""

    def __init__(self, app: ASGIApp, generator: Generator) -> None:
        self._app = app
        self._generator = generator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = header(scope, b"endpoint-load-metrics-format") if scope["type"] == "http" else None
        if wanted is None or wanted.upper() not in (b"TEXT", b"JSON"):
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                report = self._report(wanted.upper().decode())
                headers = [*message.get("headers", ()), (LOAD_HEADER.encode(), report.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_load)

    def _report(self, form: str) -> str:
        load = self._generator.load()
        metrics = {
            "kv_cache_usage_perc": load.kv_usage,
            "num_requests_waiting": load.num_waiting,
            "num_requests_running": load.num_running,
        }
        if form == "JSON":
            return "JSON " + json.dumps({"named_metrics": metrics})
        return "TEXT " + ", ".join(f"named_metrics.{k}={v}" for k, v in metrics.items())


class RequireKey:
    """Every path but health, metrics and documentation needs a key, when there is a key file.
    Administration needs its own key, and so does injection."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyFile | None,
        admin_keys: KeyFile | None,
        injection_keys: KeyFile | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._special = dict.fromkeys(ADMIN_PATHS, admin_keys) | {INJECTION_PATH: injection_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            keys = self._special.get(scope["path"], self._keys)
            given = header(scope, b"authorization") or b""
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer":
                key = header(scope, b"x-api-key") or b""
            if keys is not None and not keys.accepts(key.strip()):
                raise AuthenticationFailed(
                    "a valid API key is needed: Authorization: Bearer <key>, or x-api-key: <key>"
                )
        await self._app(scope, receive, send)


ADMITTED = ANTHROPIC_PATHS | {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/embeddings", "/tokenize", "/detokenize", "/v1/audio/transcriptions",
    "/v1/audio/translations",
}  # fmt: skip
"""POST requests to these hold a ticket."""


class Intake:
    """Counts requests and body bytes as they come."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = self._declared(scope)
        check_coding(header(scope, b"content-encoding") or b"")
        ticket: Ticket | None = None
        try:
            if scope["path"] in ADMITTED and scope["method"] == "POST":
                client = scope.get("client")
                ticket = self._gate.enter(client[0] if client else "", declared)
                scope["foveal.ticket"] = ticket
            body = _Body(receive, self._gate.limits, ticket)
            await self._app(scope, body.receive, send)
        finally:
            if ticket is not None:
                ticket.close()

    def _declared(self, scope: Scope) -> int:
        """Content-Length, 0 when the body is chunked."""
        text = header(scope, b"content-length") or b"0"
        size = int(text) if text.isdigit() and len(text) < 20 else 0
        check_size(size, self._gate.limits)
        return size


def check_coding(coding: bytes) -> None:
    """No body is decompressed: a small one could become any size."""
    if coding.strip().lower() not in (b"", b"identity"):
        raise InvalidRequest(
            f"the header Content-Encoding is {coding[:100].decode('latin-1')!r}; send the body "
            "without compression"
        )


def check_size(size: int, limits: Admission) -> None:
    if size > limits.max_body_bytes:
        raise MediaTooLarge(
            f"the request body is larger than {limits.max_body_bytes} bytes; send large media by "
            "URL"
        )


class _Body:
    """One request's body on its way in."""

    def __init__(self, receive: Receive, limits: Admission, ticket: Ticket | None) -> None:
        self._receive = receive
        self._limits = limits
        self._ticket = ticket
        self._is_complete = False
        self._received = 0
        self._window_ends = 0.0
        self._window_bytes = 0

    async def receive(self) -> Message:
        """The ASGI `receive` of the app. Raises ClientGone, UploadTooSlow, MediaTooLarge or
        RateLimited while the body is incomplete."""
        if self._is_complete:
            return await self._receive()
        message = await self._in_time()
        if message["type"] == "http.disconnect":
            raise ClientGone
        size = len(message.get("body", b""))
        self._received += size
        self._window_bytes += size
        check_size(self._received, self._limits)
        if self._ticket is not None and size:
            self._ticket.charge_media_bytes(size)
        if not message.get("more_body", False):
            self._is_complete = True
            if self._ticket is not None:
                self._ticket.admit()
        return message

    async def _in_time(self) -> Message:
        now = asyncio.get_running_loop().time()
        needed = self._limits.min_upload_bytes_per_second * self._limits.upload_window_seconds
        if not self._window_ends or self._window_bytes >= needed:
            self._window_ends = now + self._limits.upload_window_seconds
            self._window_bytes = 0
        try:
            async with asyncio.timeout_at(self._window_ends):
                return await self._receive()
        except TimeoutError:
            raise UploadTooSlow(
                f"the request body brought {self._window_bytes} bytes in "
                f"{self._limits.upload_window_seconds:g} s; at least {needed:.0f} are needed"
            ) from None
