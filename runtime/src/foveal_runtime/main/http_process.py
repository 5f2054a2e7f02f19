"""The HTTP process of a frontend: engine client, items and HTTP app, put together and taken down.

Imported by `main.frontend` while the media workers load their processor.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from foveal_runtime.frontend.common.stats import FrontendStats, watch_loop
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.loras import order_lora
from foveal_runtime.frontend.http.access.admin import HeldRequest, LoraAction
from foveal_runtime.frontend.http.app import build_app
from foveal_runtime.frontend.http.asgi.listeners import bind_unix
from foveal_runtime.frontend.http.asgi.server import serve as serve_http
from foveal_runtime.frontend.http.monitoring.metrics import counts_file
from foveal_runtime.frontend.http.monitoring.metrics_source import media_source
from foveal_runtime.frontend.http.monitoring.siblings import Siblings, sibling_app, socket_path
from foveal_runtime.frontend.items.input_processor import MediaInput
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.frontend.media.workers import MediaWorkers
from foveal_runtime.main.frontend import Member
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.local import COUNTS_VARIABLE
from foveal_runtime.telemetry.memory import ContainerMemory, keep_collections_short
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.startup import StartPhases
from foveal_runtime.telemetry.tracing import configure_tracing

log = logging.getLogger(__name__)


class _Admin:
    """Caches over HTTP (`access.admin.CacheAdmin`)."""

    def __init__(self, processor: MediaInput, client: EngineClient, siblings: Siblings) -> None:
        self._processor = processor
        self._client = client
        self._siblings = siblings

    async def reset_cache(self, cache: Literal["mm", "encoder", "prefix", "quarantine"]) -> int:
        if cache == "quarantine":
            return await self._client.clear_quarantine()
        if cache == "mm":
            self._processor.reset_cache()
            await self._siblings.reset_processor_caches()
        return self._client.control(f"reset_{cache}")

    def held_requests(self) -> list[HeldRequest]:
        return [
            HeldRequest(key=one.key.hex(), shape=one.shape, seconds_left=one.seconds_left)
            for one in self._client.quarantine.held()
        ]

    async def resize_ipc_cache(self, size_bytes: int) -> int:
        return self._client.control("resize_ipc", size_bytes)

    async def order_lora(self, action: LoraAction, name: str, path: str) -> int:
        return await order_lora(self._client.links(), action, (name, path))


def _siblings(member: Member, processes: int) -> Siblings:
    others = [i for i in range(processes) if member.folder and i != member.number]
    return Siblings([socket_path(member.folder, i) for i in others])


def _counts_file(member: Member | None) -> Path | None:
    """Where a process that is started again in its place counts on; in a pod none is."""
    if member:
        return counts_file(socket_path(member.folder, member.number))
    named = os.environ.get(COUNTS_VARIABLE)
    return Path(named) if named else None


def _measured(processor: MediaInput, memory: ContainerMemory, metrics: Metrics) -> None:
    """What the budgets' parts really take, by their names in the resource's status."""
    memory.collect(metrics)
    for part, size in (
        ("processor", processor.cache.capacity_bytes),
        ("frontendPodMemory", memory.peak_bytes()),
    ):
        metrics.set("foveal_budget_bytes", size, part=part, source="measured")


def _metrics(
    config: FrontendConfig, stats: FrontendStats, processor: MediaInput, client: EngineClient
) -> Metrics:
    metrics = Metrics(
        "frontend",
        model_name=config.model.served_name,
        process=config.frontend_id,
        max_model_len=config.model.max_model_len,
    )
    metrics.add_source(media_source(stats, processor, client))
    metrics.add_source(functools.partial(_measured, processor, ContainerMemory()))
    return metrics


async def serve(
    config: FrontendConfig,
    member: Member | None,
    workers: MediaWorkers,
    info: ProcessorInfo,
    namespace: bytes,
    phases: StartPhases,
    listen: Callable[[], list[socket.socket]],
    stop: asyncio.Event,
) -> None:
    """Serves until `stop` is set and streams have ended. `info`: what the workers found out about
    their processor. Raises StartupError."""
    siblings = _siblings(member or Member(), config.processes)
    stats = FrontendStats()
    client = EngineClient(config, namespace, stats=stats)
    processor = MediaInput(config, workers, info, knowledge=client, stats=stats)
    metrics = _metrics(config, stats, processor, client)
    metrics.add_source(phases.collect)
    if counts := _counts_file(member):
        metrics.keep(counts)
    app = build_app(
        config,
        processor=processor,
        info=processor.info,
        generator=client,
        metrics=metrics,
        tracing=configure_tracing("foveal-frontend", config.frontend_id),
        admin=_Admin(processor, client, siblings) if config.admin_key_file else None,
        injector=processor.injector,
        siblings=siblings.metrics_peers,
        mirrors=client.mirrors,
    )
    lags = asyncio.create_task(watch_loop(stats.loop_lags), name="loop-lag")
    await client.start()
    keep_collections_short()
    log.info("listening", extra={"host": config.host, "port": config.port})
    try:
        await serve_http(
            app,
            listen(),
            stop,
            own_sockets=[bind_unix(socket_path(member.folder, member.number))] if member else [],
            own_app=sibling_app(metrics, processor.reset_cache),
            drain_timeout_seconds=config.drain_timeout_seconds,
        )
    finally:
        lags.cancel()
        app.close()
        await client.close()
        await processor.close()
