"""One frontend process: media workers, engine client and HTTP app, put together and taken down.

Started by `foveal-runtime frontend --config`, which hands over to `frontend_group` when the
document asks for several processes; each of them comes back here with its index. Serves
until SIGTERM or SIGINT, then turns readiness off, lets streams finish within the drain time and
exits. Imports no torch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any, Literal, NamedTuple

import msgspec
import uvloop

from foveal_runtime.frontend.common.stats import FrontendStats, watch_loop
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.loras import order_lora
from foveal_runtime.frontend.http.access.admin import HeldRequest, LoraAction
from foveal_runtime.frontend.http.app import build_app
from foveal_runtime.frontend.http.asgi.server import bind_addresses, bind_unix
from foveal_runtime.frontend.http.asgi.server import serve as serve_http
from foveal_runtime.frontend.http.monitoring.metrics_source import media_source
from foveal_runtime.frontend.http.monitoring.siblings import Siblings, sibling_app, socket_path
from foveal_runtime.frontend.items.input_processor import MediaInput
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.frontend.media.workers import (
    MediaWorkers,
    WorkerSettings,
    default_num_workers,
    item_memory_bytes,
)
from foveal_runtime.main import frontend_group
from foveal_runtime.plan.config import FrontendConfig, load
from foveal_runtime.plan.machine import look
from foveal_runtime.telemetry.allocator import give_back_large_blocks, keep_collections_short
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.telemetry.memory import ContainerMemory
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.startup import StartPhases
from foveal_runtime.telemetry.tracing import configure_tracing
from foveal_runtime.wire.namespace import model_namespace

log = logging.getLogger(__name__)


class _Admin:
    """Caches over HTTP (`frontend.admin.CacheAdmin`)."""

    def __init__(self, processor: MediaInput, client: EngineClient, siblings: Siblings) -> None:
        self._processor = processor
        self._client = client
        self._siblings = siblings

    async def reset_cache(self, cache: Literal["mm", "encoder", "prefix", "quarantine"]) -> int:
        if cache == "quarantine":
            return self._client.clear_quarantine()
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


class Member(NamedTuple):
    """This process's place among those that share the port; `folder` holds their sockets."""

    number: int = 0
    folder: str = ""

    def siblings(self, processes: int) -> Siblings:
        others = [i for i in range(processes) if self.folder and i != self.number]
        return Siblings([socket_path(self.folder, i) for i in others])


def run(path: str, index: int | None = None, folder: str = "") -> int:
    give_back_large_blocks()
    # Beside a thread that renders or tokenises, the event loop waits this long for its turn after
    # each call into the kernel: by default 5 ms, many times for one answer.
    sys.setswitchinterval(0.001)
    config = load(path, FrontendConfig)
    assert isinstance(config, FrontendConfig)
    if index is None:
        configure_logging(config.log_format, process=config.frontend_id)
        if config.processes > 1:
            return frontend_group.run(path, config)
        uvloop.run(serve(config))
        return 0
    total = config.media_workers or default_num_workers(look(with_devices=False))
    config = msgspec.structs.replace(
        config,
        frontend_id=f"{config.frontend_id}/{index}",
        media_workers=_share(total, config, index),
    )
    configure_logging(config.log_format, process=config.frontend_id)
    uvloop.run(serve(config, Member(index, folder)))
    return 0


def _share(total: int, config: FrontendConfig, index: int) -> int:
    """One process's part of what the pod has; at least one."""
    return max(1, total // config.processes + (index < total % config.processes))


def _measured(processor: MediaInput, memory: ContainerMemory, metrics: Metrics) -> None:
    """What the budgets' parts really take, by their names in the resource's status."""
    memory.collect(metrics)
    for part, size in (
        ("processor", processor.cache.capacity_bytes),
        ("frontendPodMemory", memory.peak_bytes()),
    ):
        metrics.set("foveal_budget_bytes", size, part=part, source="measured")


async def _unless(
    stop: asyncio.Event, work: Coroutine[Any, Any, ProcessorInfo]
) -> ProcessorInfo | None:
    """What `work` returns; None when the process is told to stop before."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


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


async def serve(config: FrontendConfig, member: Member | None = None) -> None:
    """Runs the process to its end. Raises StartupError."""
    # With siblings it must not take connections before it can answer: they would wait here.
    bind = functools.partial(bind_addresses, config.host, config.port, loopback=config.loopback)
    listeners = bind() if member is None else []
    siblings = (member or Member()).siblings(config.processes)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    namespace = model_namespace(config.model.path, config.model.revision)
    here = look(with_devices=False)
    num_workers = config.media_workers or default_num_workers(here)
    caches, num = config.processes * config.processor_bytes, config.processes * num_workers
    workers = MediaWorkers(
        WorkerSettings(
            model_path=config.model.path,
            namespace=namespace,
            limits=config.modalities,
            num_workers=num_workers,
            max_memory_bytes=item_memory_bytes(here.limit_bytes, caches, num),
        )
    )
    phases = StartPhases()
    phases.done("imports")
    log.info("starting media workers", extra={"workers": workers.num_workers})
    info = await _unless(stop, workers.start())
    if info is None:
        return
    phases.done("workers")
    stats = FrontendStats()
    client = EngineClient(config, namespace, stats=stats)
    processor = MediaInput(config, workers, info, knowledge=client, stats=stats)
    metrics = _metrics(config, stats, processor, client)
    metrics.add_source(phases.collect)
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
            listeners or bind(share=True),
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
