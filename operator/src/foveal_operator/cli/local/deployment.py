"""Runs local processes from start to drained end, and tells a screen about it.

Called by `foveal up`. One loop, one thread: look at every process, show what was seen, act on a
signal or a death. Engines and frontends start together; frontends drain before engines end.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

from foveal_operator.cli.local.processes import LocalProcess
from foveal_operator.cli.local.readings import Readings, Totals, totals
from foveal_operator.cli.local.view import Picture, ProcessFigures, State, load_of
from foveal_operator.common.errors import CommandError, Interrupted, TimeRanOut
from foveal_runtime.plan.config import EngineConfig

TICK_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Show = Callable[[Picture], None]
_LOG_HEAD = re.compile(r"^\d\d:\d\d:\d\d [A-Z]+ +\S+ ")


class Stop:
    """Counts the signals that ask for an end: the first drains, the second kills."""

    def __init__(self) -> None:
        self.count = 0
        self._asked = threading.Event()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._asked.set()

    def wait(self, seconds: float) -> None:
        """Returns early at the next signal."""
        self._asked.wait(seconds)
        self._asked.clear()

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        before = {number: signal.signal(number, self) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class ProcessDied(CommandError):
    """A process ended by itself. Its last lines are part of the message."""


class LocalDeployment:
    """The processes of one resource on this machine."""

    def __init__(
        self,
        name: str,
        processes: Sequence[LocalProcess],
        command: Sequence[str],
        *,
        show: Show,
        start_timeout_seconds: float,
        drain_timeout_seconds: float,
    ) -> None:
        self.name = name
        self._processes = list(processes)
        self._command = list(command)
        self._show = show
        self._start_timeout_seconds = start_timeout_seconds
        self._drain_timeout_seconds = drain_timeout_seconds
        self._began = self._looked = time.monotonic()
        self._totals = Totals()
        self._kv_bytes = sum(
            process.config.caches.kv_bytes
            for process in self._processes
            if isinstance(process.config, EngineConfig)
        )

    def run(self, stop: Stop) -> None:
        """Until a signal. Raises ProcessDied or TimeRanOut; no process is left in any case."""
        try:
            for process in self._processes:
                process.start(self._command)
            self._serve(stop)
            self._drain(stop)
        finally:
            for process in self._processes:
                process.kill()

    def _serve(self, stop: Stop) -> None:
        while not stop.count:
            self._look()
            for process in self._processes:
                if process.exit_code is not None:
                    raise ProcessDied(_obituary(process))
            late = time.monotonic() - self._began > self._start_timeout_seconds
            starting = [p for p in self._processes if not p.was_ready]
            if late and starting:
                raise TimeRanOut(_too_late(starting[0], self._start_timeout_seconds))
            stop.wait(TICK_SECONDS)

    def _drain(self, stop: Stop) -> None:
        """Frontends first, so that their streams can finish. Raises TimeRanOut."""
        deadline = time.monotonic() + self._drain_timeout_seconds
        for role in ("frontend", "engine"):
            group = [process for process in self._processes if process.role == role]
            for process in group:
                process.drain()
            while any(process.is_alive for process in group):
                self._look()
                if stop.count > 1:
                    raise Interrupted("ended at once, without waiting for streams")
                if time.monotonic() > deadline:
                    left = ", ".join(process.name for process in group if process.is_alive)
                    raise TimeRanOut(f"still running after the drain time, killed: {left}")
                stop.wait(TICK_SECONDS / 4)
        self._look()

    def _look(self) -> None:
        """Asks every process at the same time, then shows the picture."""
        with ThreadPoolExecutor(max_workers=min(8, len(self._processes))) as pool:
            seen = list(pool.map(_figures, self._processes))
        now = time.monotonic()
        readings = [found for _, found in seen]
        before, fresh = self._totals, totals(readings, self._kv_bytes)
        # A process that has ended says nothing any more; its sums are not forgotten.
        if all(readings):
            elapsed = now - self._looked
            rate = (fresh.tokens - before.tokens) / elapsed if elapsed > 0 else 0.0
            self._totals, self._looked = fresh, now
        else:
            rate = 0.0
        first = next(p for p in self._processes if p.role == "frontend")
        self._show(
            Picture(
                name=self.name,
                url=f"{first.url}/v1",
                model=first.config.model.served_name,
                seconds=now - self._began,
                processes=tuple(figures for figures, _ in seen),
                totals=self._totals,
                tokens_per_second=max(0.0, rate),
                is_draining=any(process.is_draining for process in self._processes),
            )
        )


def _figures(process: LocalProcess) -> tuple[ProcessFigures, Readings]:
    code = process.exit_code
    ready = code is None and process.probe()
    readings = Readings(process.metrics() if code is None else "")
    state = _state(process, code, ready)
    load = load_of(process.role, readings)
    if state == "starting":
        # What it last said is more telling than a row of zeros.
        load = _LOG_HEAD.sub("", next(iter(process.last_lines(1)), ""))
    figures = ProcessFigures(
        name=process.name,
        role="engine" if process.role == "engine" else "frontend",
        state=state,
        resident_bytes=process.resident_bytes() if code is None else 0,
        load=load,
        exit_code=code,
    )
    return figures, readings


def _state(process: LocalProcess, code: int | None, ready: bool) -> State:
    if code is not None:
        return "ended"
    if process.is_draining:
        return "draining"
    if ready:
        return "ready"
    return "not ready" if process.was_ready else "starting"


def _obituary(process: LocalProcess) -> str:
    code = process.exit_code
    assert code is not None
    if code < 0:
        try:
            how = f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was ended by signal {-code}"
        if code == -signal.SIGKILL:
            how += " (out of memory? see the machine's kernel log)"
    else:
        how = f"ended with exit code {code}"
    when = "while it served" if process.was_ready else "before it was ready"
    return f"{process.name} {how} {when}\n{_log_tail(process)}"


def _too_late(process: LocalProcess, seconds: float) -> str:
    return f"{process.name} is not ready after {seconds:.0f} s\n{_log_tail(process)}"


def _log_tail(process: LocalProcess) -> str:
    lines = [f"  {line}" for line in process.last_lines()] or ["  (its log is empty)"]
    return "\n".join([f"the end of {process.log_path}:", *lines])
