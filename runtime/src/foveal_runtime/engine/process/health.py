"""A small HTTP server beside the engine: /livez, /readyz, /metrics, /debug/integrity;
and the integrity report: what is in use, and whether all bookkeeping agrees.

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
import traceback
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from blake3 import blake3

from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.media import MMHash
from foveal_runtime.telemetry.exposition import TEXT

_LOG = logging.getLogger(__name__)
SOCKET_TIMEOUT_SECONDS = 5.0


def is_near(peer: str, own: str) -> bool:
    """Whether a peer is on this machine, or in this pod: it may see the books. An engine in a pod
    listens on the pod's address alone, and who connects to that from the same pod has it, too.

    Args:
        peer, own: addresses of the connection's two ends.
    """
    found = _address(peer)
    return found.is_loopback or found == _address(own)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


class HealthServer:
    """The HTTP server of one engine process.

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
        inspect: Callable[[], bytes | None],
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
                elif path == "/debug/integrity" and is_near(
                    self.client_address[0], self.connection.getsockname()[0]
                ):
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


class IntegrityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /debug/integrity, without content: counts, bytes, and one digest of the names of
    the values that mirrors may believe in.

    Attributes:
        idle: no request is here in any state, and nothing is left to do.
        broken: the assertion that failed, "" when all books agree.
        mm_used_bytes: of `mm_capacity_bytes` (C); mm_staged_bytes: of `mm_staging_bytes` (S).
        mm_digest: see `digest_of`.
    """

    engine: str
    idle: bool
    broken: str
    num_running: int
    num_waiting: int
    num_sessions: int
    kv_blocks_in_use: int
    encoder_references: int
    encoder_used_embeds: int
    mm_pinned_bytes: int
    mm_used_bytes: int
    mm_capacity_bytes: int
    mm_staged_bytes: int
    mm_staging_bytes: int
    mm_digest: str


def digest_of(hashes: Iterable[MMHash]) -> str:
    """Hex BLAKE3 of the hashes in ascending order: equal sets have equal digests."""
    return blake3(b"".join(sorted(hashes))).hexdigest()


def integrity_report(core: EngineCore, engine_id: str) -> IntegrityReport:
    """Runs every check_integrity() there is; a failed one is reported, not raised. Called in the
    core thread, between steps. Changes nothing."""
    broken = ""
    try:
        core.check_integrity()
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        broken = f"{where.name}: {str(error) or where.line}"
    scheduler, receiver = core.scheduler, core.receiver
    store = receiver.store
    staged = sum(session.staged_bytes for session in receiver.sessions.values())
    own_pool = store.bypass_bytes - store.borrowed_bytes
    return IntegrityReport(
        engine=engine_id,
        idle=not (core.num_unfinished or scheduler.num_requests or core.has_work),
        broken=broken,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(receiver.admission.queue),
        num_sessions=len(receiver.sessions),
        kv_blocks_in_use=scheduler.pool.num_used_blocks
        + (scheduler.windows.pool.num_used_blocks if scheduler.windows else 0),
        encoder_references=scheduler.encoder.num_references,
        encoder_used_embeds=scheduler.encoder.num_used_embeds,
        mm_pinned_bytes=store.pinned_bytes + store.bypass_bytes + store.reserved_bytes,
        mm_used_bytes=store.used_bytes,
        mm_capacity_bytes=store.capacity_bytes,
        mm_staged_bytes=staged + own_pool,
        mm_staging_bytes=receiver.limits.staging_bytes,
        mm_digest=digest_of(store.announced()),
    )
