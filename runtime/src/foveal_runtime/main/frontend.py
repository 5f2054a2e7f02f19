"""One frontend process: media workers, engine client and HTTP app, put together and taken down.

Started by `foveal-runtime frontend --config`. Serves until SIGTERM or SIGINT, then turns readiness
off, lets streams finish within the drain time and exits. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Literal

import uvloop

from foveal_runtime.frontend.app import build_app
from foveal_runtime.frontend.engine_client import EngineClient
from foveal_runtime.frontend.input_processor import InputProcessor
from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
from foveal_runtime.frontend.metrics_source import media_source
from foveal_runtime.frontend.server import bind_tcp
from foveal_runtime.frontend.server import serve as serve_http
from foveal_runtime.frontend.stats import FrontendStats
from foveal_runtime.plan.config import FrontendConfig, load
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.tracing import configure_tracing
from foveal_runtime.wire.namespace import model_namespace

log = logging.getLogger(__name__)


class _Admin:
    """Cache resets over HTTP (`frontend.admin.CacheAdmin`)."""

    def __init__(self, processor: InputProcessor, client: EngineClient) -> None:
        self._processor = processor
        self._client = client

    def reset_cache(self, cache: Literal["mm", "encoder", "prefix"]) -> int:
        """Tells every engine; returns how many were told."""
        if cache == "mm":
            self._processor.reset_cache()
        return self._client.control(f"reset_{cache}")


def run(path: str) -> int:
    config = load(path, FrontendConfig)
    assert isinstance(config, FrontendConfig)
    configure_logging(config.log_format, process=config.frontend_id)
    uvloop.run(serve(config))
    return 0


async def serve(config: FrontendConfig) -> None:
    """Runs the process to its end. Raises StartupError."""
    listener = bind_tcp(config.host, config.port)
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
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return
    stats = FrontendStats()
    client = EngineClient(config, namespace, stats=stats)
    processor = InputProcessor(config, workers, starting.result(), knowledge=client, stats=stats)
    metrics = Metrics(
        "frontend",
        model_name=config.model.served_name,
        process=config.frontend_id,
        max_model_len=config.model.max_model_len,
    )
    metrics.add_source(media_source(stats, processor, client))
    app = build_app(
        config,
        processor=processor,
        info=processor.info,
        generator=client,
        metrics=metrics,
        tracing=configure_tracing("foveal-frontend", config.frontend_id),
        mirrors=client.mirrors,
        admin=_Admin(processor, client) if config.admin_key_file else None,
    )
    await client.start()
    log.info("listening", extra={"host": config.host, "port": config.port})
    try:
        await serve_http(app, [listener], stop, drain_timeout_seconds=config.drain_timeout_seconds)
    finally:
        await client.close()
        await processor.close()
