"""Limits on TCP connections below HTTP: how many, how long for headers, how long for a slow reader.

`server.py` gives uvicorn `guarded(limits)` as its protocol. uvicorn itself waits without limit for
the headers of a request and for a client that does not read its answer.
"""

from __future__ import annotations

import asyncio
import functools
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foveal_runtime.plan.config import Admission

HEADER_SECONDS = 10.0
MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 8192
_RESERVED_DESCRIPTORS = 256


class Connections:
    """The open connections of one process, by client address."""

    def __init__(self, limits: Admission, header_seconds: float = HEADER_SECONDS) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_DESCRIPTORS
        self.limit = max(16, min(MAX_CONNECTIONS, descriptors))
        self.client_limit = max(1, int(self.limit * limits.client_share))
        self.header_seconds = header_seconds
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


class GuardedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's protocol with deadlines."""

    def __init__(self, *args: Any, connections: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self._book = connections
        self._address: str | None = None
        self._header_bytes = 0
        self._headers_due: asyncio.TimerHandle | None = None
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
        self._reads_again()
        if self._address is not None:
            self._book.release(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._headers_due is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._headers_due is not None and self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()
        elif self.cycle is None or self.cycle.response_complete:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._headers_arrived()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_due is None:
            self._read_due = self.loop.call_later(self._book.write_seconds, self._cut_slow_reader)

    def resume_writing(self) -> None:
        self._reads_again()
        super().resume_writing()

    def _expect_headers(self) -> None:
        if self._headers_due is None and not self.transport.is_closing():
            self._header_bytes = 0
            self._headers_due = self.loop.call_later(
                self._book.header_seconds, self.transport.abort
            )

    def _headers_arrived(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _reads_again(self) -> None:
        if self._read_due is not None:
            self._read_due.cancel()
            self._read_due = None

    def _cut_slow_reader(self) -> None:
        self._book.num_slow_readers += 1
        self.transport.abort()


def guarded(
    limits: Admission, header_seconds: float = HEADER_SECONDS
) -> functools.partial[GuardedProtocol]:
    """What uvicorn takes as `http`: makes one protocol a connection, all with one book."""
    return functools.partial(GuardedProtocol, connections=Connections(limits, header_seconds))
