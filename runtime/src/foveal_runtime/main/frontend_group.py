"""Several HTTP processes behind one port: started, watched, restarted and stopped together.

Run by `main.frontend` when the document says `processes` > 1. Each child is the same command with
its index; the kernel spreads connections over those that listen. The parent binds the port without
listening, so that a port in use is said at once and by one process; it serves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from foveal_runtime.frontend.http.asgi.listeners import bind_addresses
from foveal_runtime.main.backoff import Backoff
from foveal_runtime.main.stop_signals import StopSignals
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.local import PARENT_VARIABLE

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


def run(path: str, config: FrontendConfig) -> int:
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
