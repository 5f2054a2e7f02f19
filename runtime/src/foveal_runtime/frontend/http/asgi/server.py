"""One HTTP process: sockets, uvicorn, and a shutdown that loses no accepted request.

main/ calls `serve` inside its event loop and decides when to stop (SIGTERM). Installs no signal
handlers of its own. Connections are bounded below HTTP: how many, how long for headers, how long
for a slow reader; uvicorn itself waits without limit for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from foveal_runtime.frontend.http.app import HttpApp
from foveal_runtime.frontend.http.asgi.listeners import BACKLOG
from foveal_runtime.frontend.http.monitoring.metrics import own_metrics_app
from foveal_runtime.plan.config import Admission

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common load balancers, so that they close first."""
_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 1
"""For connections to close once the drain is over; requests still open are cancelled then."""


class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn without signal handlers: main/ owns signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: ASGIApp, limits: Admission) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=guarded(limits),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )


async def serve(
    app: HttpApp,
    sockets: Sequence[socket.socket],
    stop: asyncio.Event,
    *,
    own_sockets: Sequence[socket.socket] = (),
    own_app: ASGIApp | None = None,
    drain_timeout_seconds: float = 120.0,
    started: asyncio.Event | None = None,
) -> None:
    """Serves until `stop`, then drains.

    Shutdown: /readyz says no; new requests get 503 with Retry-After, and open ones finish, at most
    for `drain_timeout_seconds`; then everything closes. `own_sockets` serve `own_app`
    (default: this process's own /metrics) to its peers until the end. `started` is set
    once connections are accepted.
    """
    public = _server(app.asgi, app.gate.limits)
    private = _server(own_app or own_metrics_app(app.service.metrics), app.gate.limits)
    tasks = [asyncio.create_task(public.serve(sockets=list(sockets)))]
    if own_sockets:
        tasks.append(asyncio.create_task(private.serve(sockets=list(own_sockets))))
    stopping = asyncio.create_task(stop.wait())
    try:
        if started is not None:
            while not public.started and not tasks[0].done():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS / 10)
            started.set()
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await _drain(app, drain_timeout_seconds)
    finally:
        stopping.cancel()
        public.should_exit = private.should_exit = True
        await asyncio.gather(*tasks)


async def _drain(app: HttpApp, timeout_seconds: float) -> None:
    gate = app.gate
    logger.info("draining", extra={"fields": {"num_requests": gate.num_requests}})
    gate.draining = True
    try:
        async with asyncio.timeout(timeout_seconds):
            while gate.num_requests:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        fields = {"num_requests": gate.num_requests, "timeout_seconds": timeout_seconds}
        logger.warning("drain timeout: open requests are cut", extra={"fields": fields})


HEADER_SECONDS = 10.0
MAX_HEADER_BYTES = 64 * 1024
DRAIN_SECONDS = 30.0
"""For the rest of a body whose request is answered; at most as many bytes as a body may have."""
MAX_CONNECTIONS = 8192
_RESERVED_DESCRIPTORS = 256


class Connections:
    """The open connections of one process, by client address."""

    def __init__(
        self,
        limits: Admission,
        header_seconds: float = HEADER_SECONDS,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_DESCRIPTORS
        self.limit = max(16, min(MAX_CONNECTIONS, descriptors))
        self.client_limit = max(1, int(self.limit * limits.client_share))
        self.header_seconds = header_seconds
        self.drain_seconds = drain_seconds
        self.drain_bytes = limits.max_body_bytes
        self.write_seconds = limits.write_timeout_seconds
        self.num_open = 0
        self.num_refused = 0
        self.num_slow_readers = 0
        self._by_client: Counter[str] = Counter()

    def take(self, client: str) -> bool:
        """False when there are too many; then nothing is counted."""
        if self.num_open >= self.limit or self._by_client[client] >= self.client_limit:
            self.num_refused += 1
            return False
        self.num_open += 1
        self._by_client[client] += 1
        return True

    def release(self, client: str) -> None:
        self.num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


class _Parser(httptools.HttpRequestParser):
    """Reads a request that offers an upgrade (h2c, with each request of the JDK's client) as the
    HTTP/1.1 that it is; llhttp takes its body for the other protocol. The head is parsed a second
    time, without `Upgrade`, before what follows it."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        super().__init__(self._protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it

    def feed_data(self, data: Any) -> None:
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head, self._protocol.plain_head = self._protocol.plain_head, b""
                if not head:
                    raise
                self._begin()  # after `Connection: close`, too, as if nothing had been read
                super().feed_data(head)
                data = memoryview(data)[upgrade.args[0] :]


class GuardedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's protocol with deadlines, and without upgrades.

    Attributes:
        plain_head: of a request that offers an upgrade, without the offer.

    `_field_bytes` came since the last byte of a body or the end of a head or message: headers, also
    of a request behind one that is being answered, and trailers.
    """

    def __init__(self, *args: Any, connections: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self.plain_head = b""
        self.parser = _Parser(self)
        self._book = connections
        self._address: str | None = None
        self._field_bytes = 0
        self._headers_due: asyncio.TimerHandle | None = None
        self._in_body = False
        self._drained_bytes = 0
        self._drain_due: asyncio.TimerHandle | None = None
        self._read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self._book.take(address):
            transport.abort()
            return
        self._address = address
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_arrived()
        self._stop_draining()
        self._reads_again()
        if self._address is not None:
            self._book.release(self._address)
            self._address = None
        super().connection_lost(exc)
        if self.cycle is not None:  # which nothing but the collector would free otherwise
            self.cycle.transport = self.transport

    def data_received(self, data: bytes) -> None:
        self._field_bytes += len(data)
        if self._drain_due is not None:
            self._drained_bytes += len(data)
        super().data_received(data)
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._field_bytes > MAX_HEADER_BYTES or self._drained_bytes > self._book.drain_bytes:
            self.transport.abort()
        elif is_answered and not self._in_body and self.timeout_keep_alive_task is None:
            self._expect_headers()

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are left out: what a gateway does to headers it does not do to them."""
        if not self._in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._field_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._field_bytes = 0
        self._headers_arrived()
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            version = self.parser.get_http_version().encode()
            lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
            lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.plain_head = b"\r\n".join([*lines, b"", b""])
        else:
            self._in_body = True
            super().on_headers_complete()
            self.cycle.transport = _Lingering(self)
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = _UnchunkedCycle

    def on_message_complete(self) -> None:
        if self.plain_head:
            return
        self._in_body = False
        self._field_bytes = 0
        super().on_message_complete()
        if self._drain_due is not None:
            self._stop_draining()
            if self.cycle.keep_alive:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            else:
                self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._drain_due = self.loop.call_later(self._book.drain_seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self._drain_due is None:
            super().send_400_response(msg)
        else:  # its request is answered
            self.transport.abort()

    def close_after_body(self) -> None:
        """Ends the answer now and the connection once the rest of the request has arrived: one that
        is closed with bytes unread is reset, and the client loses the answer."""
        if self._in_body and self.cycle.response_complete and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_due is None:
            self._read_due = self.loop.call_later(self._book.write_seconds, self._cut_slow_reader)

    def resume_writing(self) -> None:
        self._reads_again()
        super().resume_writing()

    def _expect_headers(self) -> None:
        if self._headers_due is None and not self.transport.is_closing():
            self._headers_due = self.loop.call_later(
                self._book.header_seconds, self.transport.abort
            )

    def _headers_arrived(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _stop_draining(self) -> None:
        if self._drain_due is not None:
            self._drain_due.cancel()
            self._drained_bytes = 0
            self._drain_due = None

    def _reads_again(self) -> None:
        if self._read_due is not None:
            self._read_due.cancel()
            self._read_due = None

    def _cut_slow_reader(self) -> None:
        self._book.num_slow_readers += 1
        self.transport.abort()


class _Lingering:
    """The transport of one answer, whose `close` waits for the rest of the request."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_after_body


class _UnchunkedCycle(RequestResponseCycle):  # type: ignore[misc]
    """The answer to an HTTP/1.0 client, which would read the sizes of chunks as content: without a
    length, it ends where the connection does."""

    _has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(
                name.lower() == b"content-length" for name, _ in message["headers"]
            )
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def guarded(limits: Admission, **seconds: float) -> functools.partial[GuardedProtocol]:
    """What uvicorn takes as `http`: makes one protocol a connection, all with one book."""
    return functools.partial(GuardedProtocol, connections=Connections(limits, **seconds))
