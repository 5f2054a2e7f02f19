"""One frontend process: media workers first, then the HTTP process that they work for.

Started by `foveal-runtime frontend --config`, which hands over to `frontend_group` when the
document asks for several processes; each of them comes back here with its index. Serves
until SIGTERM or SIGINT, then turns readiness off, lets streams finish within the drain time and
exits. Imports no torch, and what HTTP needs only once the media workers import theirs: that takes
them longest.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec
import uvloop

from foveal_runtime.frontend.http.asgi.listeners import bind_addresses
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.frontend.media.workers import (
    MediaWorkers,
    WorkerSettings,
    default_num_workers,
    item_memory_bytes,
)
from foveal_runtime.main import frontend_group
from foveal_runtime.main.frontend_group import Member
from foveal_runtime.plan.config import FrontendConfig, load
from foveal_runtime.plan.machine import look
from foveal_runtime.telemetry.allocator import give_back_large_blocks
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.telemetry.startup import StartPhases
from foveal_runtime.wire.namespace import model_namespace

log = logging.getLogger(__name__)


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


async def serve(config: FrontendConfig, member: Member | None = None) -> None:
    """Runs the process to its end. Raises StartupError."""
    # With siblings it must not take connections before it can answer: they would wait here.
    bind = functools.partial(bind_addresses, config.host, config.port, loopback=config.loopback)
    listeners = bind() if member is None else []
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
    log.info("starting media workers", extra={"workers": workers.num_workers})
    starting = asyncio.create_task(_unless(stop, workers.start()))
    try:
        # In a thread: the loop meanwhile tells each worker which model to load.
        http = await asyncio.to_thread(importlib.import_module, "foveal_runtime.main.http_process")
        phases.done("imports")
        info = await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    if info is None:
        return
    phases.done("workers")
    await http.serve(
        config,
        member,
        workers,
        info,
        namespace,
        phases,
        lambda: listeners or bind(share=True),
        stop,
    )
