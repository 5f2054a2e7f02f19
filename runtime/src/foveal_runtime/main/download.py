"""A download: its progress, in the log and on /metrics, and a file that goes on where it broke.

For every source of models (fetch.py, registry.py). Progress counts what lies on disk: resumed
downloads and any library's way of downloading count alike, and the source is never asked. Needs no
torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TextIO

from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.fetch_progress import exposition, percent

log = logging.getLogger(__name__)
LOG_SECONDS = 10.0
MAX_ATTEMPTS = 6
"""In a row and without a byte more; an attempt that brought some begins the count again."""
_BACKOFF_SECONDS = 0.5
_GIB = 1 << 30


class Progress:
    """One download into `directory`. `total_bytes` is 0 until the source has told; `out` is where
    people see it, if anywhere."""

    def __init__(self, directory: Path, out: TextIO | None = None) -> None:
        self._directory, self.out = directory, out
        self.total_bytes = 0

    def fetched_bytes(self) -> int:
        """What lies there; files come and go meanwhile."""
        found = 0
        for folder, _, names in os.walk(self._directory):
            for name in names:
                with contextlib.suppress(OSError):
                    status = Path(folder, name).stat()
                    # Blocks, too: some libraries make a file as long as it will be at once.
                    found += min(status.st_size, status.st_blocks * 512)
        return found

    def text(self) -> str:
        fetched = self.fetched_bytes()
        done = percent(fetched, self.total_bytes)
        if done is None:
            return f"{fetched / _GIB:.2f} GiB fetched"
        return f"{done} % of {self.total_bytes / _GIB:.2f} GiB fetched"


@contextlib.contextmanager
def told(progress: Progress, port: int = 0) -> Iterator[None]:
    """Tells while the body runs: a log line now and then, and /metrics on `port` (0: not).

    Raises StartupError when the port is taken.
    """
    over = threading.Event()
    server = _server(progress, port) if port else None
    threads = [threading.Thread(target=_log, args=(progress, over), daemon=True)]
    if server is not None:
        threads.append(threading.Thread(target=server.serve_forever, daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if server is not None:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join(LOG_SECONDS)


def _log(progress: Progress, over: threading.Event) -> None:
    while not over.wait(LOG_SECONDS):
        log.info(progress.text())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    progress: Progress


class _DualStack(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _server(progress: Progress, port: int) -> _Server:
    """Listens on every address of the pod, of whichever family it is."""
    kind, host = (_DualStack, "::") if socket.has_dualstack_ipv6() else (_Server, "0.0.0.0")
    try:
        server = kind((host, port), _Handler)
    except OSError as error:
        raise StartupError(f"--metrics-port {port}: {error.strerror}") from error
    server.progress = progress
    return server


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        found = self.server.progress
        if self.path != "/metrics":
            self.send_error(404)
            return
        body = exposition(found.fetched_bytes(), found.total_bytes).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def fill(
    part: Path, size: int, append: Callable[[int], None], broken: tuple[type[Exception], ...]
) -> None:
    """Calls `append` with the bytes that are in `part` until it has `size`, or until it raises one
    of `broken`, which the line is to blame for, MAX_ATTEMPTS times. A full disk is not tried again.
    """
    attempts = 0
    while (start := part.stat().st_size) < size:
        try:
            append(start)
        except broken as error:
            grown = part.stat().st_size > start
            attempts = 1 if grown else attempts + 1
            if attempts >= MAX_ATTEMPTS or getattr(error, "errno", None) == errno.ENOSPC:
                raise
            log.warning("%s broke off at %d of %d bytes (%s)", part.name, part.stat().st_size,
                        size, type(error).__name__)  # fmt: skip
            time.sleep(0.0 if grown else _BACKOFF_SECONDS * 2**attempts)
