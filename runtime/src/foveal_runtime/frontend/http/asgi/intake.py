"""The intake of requests: admission, body limits, and a minimum rate for bodies.

ASGI middleware between the API key and the FastAPI app. Refuses with 429, 503 or 413 before a body
is read where that is possible, charges bytes as they arrive, and ends a body that brings too little
in a time window with 408. A client that hangs up half-way is `ClientGone`, not a failure.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foveal_runtime.frontend.http.access.admission import Gate, Ticket
from foveal_runtime.frontend.http.asgi.disconnect import ClientGone
from foveal_runtime.frontend.http.asgi.errors import ANTHROPIC_PATHS
from foveal_runtime.frontend.http.asgi.middleware import header
from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import MediaTooLarge, UploadTooSlow

ADMITTED = ANTHROPIC_PATHS | {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize",
    "/detokenize", "/v1/audio/transcriptions", "/v1/audio/translations",
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
