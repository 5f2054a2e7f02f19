"""What the HTTP servers that tests start have in common: stores of models, sites, an OpenAI API."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class LoopbackServer(ThreadingHTTPServer):
    """Serves `handler` at a free port of `address`."""

    daemon_threads = True

    def __init__(self, handler: type[LoopbackHandler], address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join(10)


class LoopbackHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_head(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_rest(
        self, data: bytes, start: int, headers: dict[str, str] | None = None, *, is_cut: bool
    ) -> None:
        """`data` from `start` on; the connection ends in the middle of it where `is_cut`."""
        self.send_head(206 if start else 200, len(data) - start, headers)
        end = start + (len(data) - start) // 2 if is_cut else len(data)
        self.close_connection |= is_cut
        self.wfile.write(data[start:end])
