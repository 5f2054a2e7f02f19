"""One frontend process: media workers, engine client and HTTP app, put together and taken down.

Started by `foveal-runtime frontend --config`. Serves until SIGTERM or SIGINT, then turns readiness
off, lets streams finish within the drain time and exits. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from foveal_runtime.frontend.app import HttpApp, build_app
from foveal_runtime.frontend.engine_client import EngineClient
from foveal_runtime.frontend.input_processor import InputProcessor
from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
from foveal_runtime.frontend.stats import FrontendStats
from foveal_runtime.plan.config import FrontendConfig, load
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.wire.namespace import model_namespace

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: a signal here means drain, not stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(path: str) -> int:
    config = load(path, FrontendConfig)
    assert isinstance(config, FrontendConfig)
    configure_logging(config.log_format, process=config.frontend_id)
    uvloop.run(serve(config))
    return 0


async def serve(config: FrontendConfig) -> None:
    """Runs the process to its end. Raises StartupError."""
    listener = _listen(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    namespace = model_namespace(config.model.path, config.model.revision)
    workers = MediaWorkers(
        WorkerSettings(
            model_path=config.model.path,
            namespace=namespace,
            limits=config.modalities,
            num_workers=config.media_workers,
        )
    )
    log.info("starting media workers", extra={"workers": workers.num_workers})
    starting = asyncio.create_task(workers.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return
    stats = FrontendStats()
    client = EngineClient(config, namespace, stats=stats)
    processor = InputProcessor(config, workers, starting.result(), knowledge=client, stats=stats)
    app = build_app(config, processor=processor, info=processor.info, generator=client)
    await client.start()
    server = _Server(
        uvicorn.Config(
            app.asgi,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=75,
            server_header=False,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    log.info("listening", extra={"host": config.host, "port": config.port})
    try:
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await _drain(app, config.drain_timeout_seconds)
    finally:
        server.should_exit = True
        await serving
        await client.close()
        await processor.close()


async def _drain(app: HttpApp, timeout_seconds: float) -> None:
    """Readiness goes off first; what was admitted may finish."""
    app.gate.draining = True
    log.info("draining", extra={"requests": app.gate.num_requests})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while app.gate.num_requests:
                await asyncio.sleep(0.02)


def _listen(config: FrontendConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        raise StartupError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another port"
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener
