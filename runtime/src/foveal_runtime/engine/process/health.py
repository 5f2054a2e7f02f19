"""A small HTTP server beside the engine: /livez, /readyz, /metrics, /debug/integrity. Standard
library only.

Run by `server` in its own thread, so that it answers while a step or a model load takes long.
Reads what the engine thread published; only `inspect` asks that thread, and may say that it is
busy.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from foveal_runtime.plan.errors import StartupError
from foveal_runtime.telemetry.exposition import TEXT

_LOG = logging.getLogger(__name__)
SOCKET_TIMEOUT_SECONDS = 5.0


def is_near(address: str) -> bool:
    """Whether a peer is on this machine, or in this pod: it may see the books."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


class HealthServer:
    """See the module.

    Args:
        live, ready: return why not, or "".
        metrics: returns the exposition text.
        inspect: returns /debug/integrity as JSON; None = the engine cannot say now.

    Raises StartupError when the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        live: Callable[[], str],
        ready: Callable[[], str],
        metrics: Callable[[], bytes],
        inspect: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        checks = {"/livez": live, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            timeout = SOCKET_TIMEOUT_SECONDS
            server_version = "foveal"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.split("?", 1)[0]
                if path == "/metrics":
                    try:
                        text = metrics()
                    except Exception:
                        _LOG.exception("metrics could not be rendered")
                        self._answer(500, b"see the engine's log\n", "text/plain")
                        return
                    self._answer(200, text, TEXT.content_type)
                elif path == "/debug/integrity" and is_near(self.client_address[0]):
                    found = inspect()
                    if found is None:
                        self._answer(503, b"not now: loading, ending or in a step\n", "text/plain")
                    else:
                        self._answer(200, found, "application/json")
                elif path in checks:
                    reason = checks[path]()
                    status = 503 if reason else 200
                    self._answer(status, (reason or "ok").encode() + b"\n", "text/plain")
                else:
                    self._answer(404, b"not found\n", "text/plain")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes are not worth a log line each."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: object, client_address: object) -> None:
                """A prober that hangs up early is its own business; anything else is logged."""
                if not isinstance(sys.exc_info()[1], OSError):
                    _LOG.exception("a health request failed")

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise StartupError(
                f"http_host, http_port: cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="engine-http", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
