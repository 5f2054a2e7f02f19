"""Serves the newest page to browsers of this machine while `foveal dashboard --watch` runs.

Used by job.py. Listens on the loopback address alone and answers only to its own name, so
that a page of another site cannot read it through a name that points here.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from foveal_operator.cli.dashboard.page import POLICY

LOOPBACK = "127.0.0.1"


class PageServer:
    """`url` is where it listens. Raises OSError when the port is taken."""

    def __init__(self, port: int) -> None:
        self._page = b""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def show(self, page: str) -> None:
        """From now on this page is the answer."""
        self._page = page.encode("utf-8")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        port = self._server.server_port
        names = {f"{LOOPBACK}:{port}", f"localhost:{port}"}
        if request.headers.get("Host") not in names:
            request.send_error(421, "asked by another name")
        elif request.path.partition("?")[0] != "/":
            request.send_error(404)
        else:
            page = self._page
            request.send_response(200)
            request.send_header("Content-Type", "text/html; charset=utf-8")
            request.send_header("Content-Length", str(len(page)))
            request.send_header("Content-Security-Policy", POLICY)
            request.send_header("X-Content-Type-Options", "nosniff")
            request.send_header("Cache-Control", "no-store")
            request.end_headers()
            request.wfile.write(page)
