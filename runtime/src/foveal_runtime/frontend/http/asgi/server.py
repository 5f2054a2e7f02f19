"""Runs one HTTP process: sockets, uvicorn, and a shutdown that loses no accepted request.

main/ calls `serve` inside its event loop and decides when to stop (SIGTERM). Installs no signal
handlers of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from foveal_runtime.frontend.http.app import HttpApp
from foveal_runtime.frontend.http.asgi.connections import guarded
from foveal_runtime.frontend.http.monitoring.metrics import own_metrics_app
from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import StartupError

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common load balancers, so that they close first."""
_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 1
"""For connections to close once the drain is over; requests still open are cancelled then."""


def bind_tcp(host: str, port: int, *, share: bool = False, listen: bool = True) -> socket.socket:
    """A listening socket; `share` lets several processes listen on the same port, and without
    `listen` the port is only kept. Raises StartupError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((host, port))
        if listen:
            found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    found.setblocking(False)
    return found


def bind_addresses(
    host: str, port: int, *, loopback: bool, share: bool = False, listen: bool = True
) -> list[socket.socket]:
    """As bind_tcp, and with `loopback` on the loopback address of the same family too, where that
    is another one."""
    hosts = [host]
    own = "::1" if ":" in host else "127.0.0.1"
    if loopback and host not in (own, "::", "0.0.0.0", "localhost"):
        hosts.append(own)
    found: list[socket.socket] = []
    try:
        for address in hosts:
            found.append(bind_tcp(address, port, share=share, listen=listen))
    except StartupError:
        for bound in found:
            bound.close()
        raise
    return found


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket, readable by this user only; a stale file of that name goes."""
    Path(path).unlink(missing_ok=True)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(path)
        os.chmod(path, 0o600)
        found.listen(64)
    except OSError as error:
        found.close()
        raise StartupError(f"cannot listen on {path}: {error.strerror}") from error
    found.setblocking(False)
    return found


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
            backlog=_BACKLOG,
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
    lame_duck_seconds: float = 0.0,
    started: asyncio.Event | None = None,
) -> None:
    """Serves until `stop`, then drains.

    Shutdown: /readyz says no; for `lame_duck_seconds` new requests are still served, while load
    balancers notice; then they get 503 with Retry-After, and open ones finish, at most for
    `drain_timeout_seconds`; then everything closes. `own_sockets` serve `own_app`
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
            await _drain(app, drain_timeout_seconds, lame_duck_seconds)
    finally:
        stopping.cancel()
        public.should_exit = private.should_exit = True
        await asyncio.gather(*tasks)


async def _drain(app: HttpApp, timeout_seconds: float, lame_duck_seconds: float) -> None:
    gate = app.gate
    logger.info("draining", extra={"fields": {"num_requests": gate.num_requests}})
    gate.leaving = True
    if lame_duck_seconds:
        await asyncio.sleep(lame_duck_seconds)
    gate.draining = True
    try:
        async with asyncio.timeout(timeout_seconds):
            while gate.num_requests:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        fields = {"num_requests": gate.num_requests, "timeout_seconds": timeout_seconds}
        logger.warning("drain timeout: open requests are cut", extra={"fields": fields})
