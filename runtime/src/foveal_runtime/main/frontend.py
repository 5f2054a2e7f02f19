"""One frontend process: media workers first, then the HTTP process that they work for.

Started by `foveal-runtime frontend --config`, which starts several HTTP processes behind one port
when the document asks for them: watched, restarted and stopped together. Each child is the same
command with its index; the kernel spreads connections over those that listen. The parent binds the
port without listening, so that a port in use is said at once and by one process; it serves nothing.
A process serves until SIGTERM or SIGINT, then turns readiness off, lets streams finish within the
drain time and exits. Imports no torch, and what HTTP needs only once the media workers import
theirs: that takes them longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple

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
from foveal_runtime.main.supervise import Backoff, StopSignals
from foveal_runtime.plan.config import FrontendConfig, load
from foveal_runtime.plan.embedder import check_task
from foveal_runtime.plan.local import PARENT_VARIABLE
from foveal_runtime.plan.machine import look
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.telemetry.memory import give_back_large_blocks, without_collections
from foveal_runtime.telemetry.startup import StartPhases
from foveal_runtime.wire.namespace import model_namespace

log = logging.getLogger(__name__)

STARTUP_ERROR = 2
_POLL_SECONDS = 0.2
_SPARE_SECONDS = 10.0


class Member(NamedTuple):
    """A process's place among those that share the port; `folder` holds their sockets."""

    number: int = 0
    folder: str = ""


class _Slot:
    """One process and its restarts."""

    def __init__(self, index: int, command: list[str]) -> None:
        self.index = index
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = self._start_at = 0.0
        self._backoff = Backoff()

    def tend(self, now: float) -> bool:
        """Starts it when it is due. False: it says that it can never start."""
        if self._process is None:
            if now >= self._start_at:
                self._start(now)
            return True
        code = self._process.poll()
        if code is None:
            return True
        self._process = None
        if code == STARTUP_ERROR:
            return False
        pause = self._backoff.after(now - self._started_at)
        self._start_at = now + pause
        log.error("HTTP process %d ended with %d; again in %.1f s", self.index, code, pause)
        return True

    def _start(self, now: float) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
        self._started_at = now

    def terminate(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Until it has ended; SIGKILL at the deadline."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _tend(slots: list[_Slot], now: float) -> bool:
    """Every one of them, also after one that cannot start."""
    verdicts = [slot.tend(now) for slot in slots]
    return all(verdicts)


def _serve(slots: list[_Slot], stop: StopSignals, drain_seconds: float) -> bool:
    """False when a process can never start. No process is left in any case."""
    can_start = True
    try:
        while can_start and not stop.count:
            can_start = _tend(slots, time.monotonic())
            stop.wait(_POLL_SECONDS)
    finally:
        for slot in slots:
            slot.terminate()
        deadline = time.monotonic() + drain_seconds
        for slot in slots:
            slot.wait(deadline)
    return can_start


def run_group(path: str, config: FrontendConfig) -> int:
    """Serves until a stop signal, which every process gets as SIGTERM. Returns 0, or 2 when a
    process cannot start at all (it has said why). Raises StartupError when the port is taken."""
    reserved = bind_addresses(
        config.host, config.port, loopback=config.loopback, share=True, listen=False
    )
    folder = tempfile.mkdtemp(prefix="foveal-http-")
    base = [sys.executable, "-m", "foveal_runtime.main.cli", "frontend", "--config", path]
    slots = [
        _Slot(i, [*base, "--process", str(i), "--sockets", folder]) for i in range(config.processes)
    ]
    try:
        with StopSignals().listening() as stop:  # to the end: a second signal changes nothing
            can_start = _serve(slots, stop, config.drain_timeout_seconds + _SPARE_SECONDS)
    finally:
        for kept in reserved:
            kept.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if can_start else STARTUP_ERROR


def run(path: str, index: int | None = None, folder: str = "") -> int:
    give_back_large_blocks()
    # Beside a thread that renders or tokenises, the event loop waits this long for its turn after
    # each call into the kernel: by default 5 ms, many times for one answer.
    sys.setswitchinterval(0.001)
    config = load(path, FrontendConfig)
    assert isinstance(config, FrontendConfig)
    check_task(config.model.path, config.task)
    if index is None:
        configure_logging(config.log_format, process=config.frontend_id)
        if config.processes > 1:
            return run_group(path, config)
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
        with without_collections():
            http = await asyncio.to_thread(
                importlib.import_module, "foveal_runtime.main.http_process"
            )
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
