"""Work that ends when the client goes away, and event streams built on it.

Used by the HTTP handlers: a closed connection cancels the work at once, which closes the engine's
generator, which aborts the request within a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foveal_runtime.frontend.http.asgi.errors import error_body, internal_error
from foveal_runtime.frontend.http.asgi.json_out import SSE_DONE, sse
from foveal_runtime.plan.errors import FovealError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Failed = Callable[[dict[str, Any]], bytes]


CLIENT_DISCONNECT = "client_disconnect"
"""The error code of a request whose client hung up: counted, never a failure of the server."""


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. The request body must have been read.

    Raises ClientGone, with `work` cancelled and finished, when the client disconnects first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


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
