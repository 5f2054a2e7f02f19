"""`foveal-runtime launch --config FILE`: a local deployment that runs until Ctrl-C.

`foveal up` and `foveal-runtime serve` write the document; this runs it, shows it, and leaves the
logs behind when something failed. One loop, one thread: look at every process, show what was seen,
restart what died, act on a signal. Engines and frontends start together; frontends drain before
engines end.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from foveal_runtime.main.launcher import RUNTIME, Child, LocalDeployment
from foveal_runtime.main.local.view import (
    ProcessFigures,
    Readings,
    Screen,
    Snapshot,
    State,
    Totals,
    View,
    load_of,
    totals,
)
from foveal_runtime.main.supervise import Backoff, StopSignals
from foveal_runtime.plan.config import EngineConfig, FrontendConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import LocalDeploymentConfig

TICK_SECONDS = 1.0
MAX_DEATHS = 4
"""A process that dies so often in a row, without a steady life in between, is given up."""
STARTUP_ERROR = 2
_LOG_HEAD = re.compile(r"^\d\d:\d\d:\d\d [A-Z]+ +\S+ ")


def run(path: str, command: str = "") -> int:
    """`command`: what runs the processes; default: this Python's module. Raises StartupError."""
    try:
        config = msgspec.json.decode(Path(path).read_bytes(), type=LocalDeploymentConfig)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise StartupError(f"deployment {path}: {error}") from error
    return launch(config, tuple(shlex.split(command)) or RUNTIME)


def launch(config: LocalDeploymentConfig, command: tuple[str, ...] = RUNTIME) -> int:
    """Serves until a signal, returns 0. Raises StartupError."""
    deployment = LocalDeployment(
        config.engines,
        config.frontends,
        folder=config.folder or None,
        devices_per_engine=config.devices_per_engine,
        command=command,
    )
    console = Screen(file=sys.stdout, highlight=False)
    keep = config.keep_folder
    try:
        with View(console, config.view) as view:
            view.say(
                f"starting {len(config.engines)} engine(s) and {len(config.frontends)} "
                f"frontend(s); documents and logs: {deployment.folder}"
            )
            Supervisor(
                config.name,
                deployment,
                show=view.show,
                shows_figures=view.shows_figures,
                say=view.say,
                start_timeout_seconds=config.start_timeout_seconds,
                drain_timeout_seconds=config.drain_timeout_seconds,
            ).run()
        console.print("drained and ended")
        return 0
    except Interrupted:
        raise
    except StartupError:
        keep = keep or any(child.log_path.exists() for child in deployment.children)
        raise
    finally:
        for folder in (*config.scratch, *(() if keep else (deployment.folder,))):
            shutil.rmtree(folder, ignore_errors=True)


class ProcessDied(StartupError):
    """A process cannot be kept running. Its last lines are part of the message."""

    exit_code = 1


class TimeRanOut(StartupError):
    """What was waited for did not happen in time."""

    exit_code = 5


class Interrupted(StartupError):
    """The user would not wait."""

    exit_code = 130


class _Watched:
    """One process and its restarts."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.was_ready = False
        self.is_draining = False
        self.is_waiting = False
        self._backoff = Backoff()
        self._began = self._due = 0.0

    def start(self, now: float) -> None:
        self.is_waiting, self._began = False, now
        self.child.start()

    def tend(self, now: float) -> str:
        """Starts the process when that is due. Returns what happened, or "". Raises ProcessDied
        when another start would not help."""
        if self.is_waiting:
            if now >= self._due:
                self.start(now)
            return ""
        code = self.child.exit_code
        if code is None:
            return ""
        pause = self._backoff.after(now - self._began)
        if self._backoff.deaths >= MAX_DEATHS:
            raise ProcessDied(f"{self._how(code)}, {MAX_DEATHS} times in a row\n{self._log()}")
        if code == STARTUP_ERROR and not self.was_ready:
            raise ProcessDied(f"{self._how(code)} before it was ready\n{self._log()}")
        self.is_waiting, self._due = True, now + pause
        return f"{self._how(code)}; it is started again in {pause:g} s"

    def _how(self, code: int) -> str:
        if code >= 0:
            return f"{self.child.name} ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (out of memory? see the machine's kernel log)" if -code == signal.SIGKILL else ""
        return f"{self.child.name} was ended by {name}{hint}"

    def _log(self) -> str:
        lines = self.child.last_lines(12).splitlines() or ["(its log is empty)"]
        return "\n".join([f"the end of {self.child.log_path}:", *(f"  {line}" for line in lines)])

    def too_late(self, seconds: float) -> TimeRanOut:
        return TimeRanOut(f"{self.child.name} is not ready after {seconds:g} s\n{self._log()}")

    def look(self, *, has_figures: bool) -> tuple[ProcessFigures, Readings]:
        """`has_figures`: whether /metrics is read, which costs that process and this one some
        milliseconds; otherwise the readings are empty."""
        child = self.child
        code = child.exit_code
        is_ready = code is None and child.is_ready()
        self.was_ready = self.was_ready or is_ready
        readings = Readings(child.metrics() if code is None and has_figures else "")
        state = self._state(code, is_ready)
        load = load_of(child.role, readings)
        if state == "starting":
            # What it last said is more telling than a row of zeros.
            load = _LOG_HEAD.sub("", child.last_lines(1)) or "importing Python packages"
        figures = ProcessFigures(
            name=child.name,
            state=state,
            resident_bytes=child.resident_bytes(),
            load=load,
            exit_code=code,
        )
        return figures, readings

    def _state(self, code: int | None, is_ready: bool) -> State:
        if self.is_waiting:
            return "waiting"
        if code is not None:
            return "ended"
        if self.is_draining:
            return "draining"
        if is_ready:
            return "ready"
        return "not ready" if self.was_ready else "starting"


class Supervisor:
    """The processes of one deployment.

    Args:
        name: title of what is shown. show: gets a Snapshot about once a second; shows_figures:
            whether it would show what the next one, so many seconds after the start, counts. say:
            gets a line for each restart.
        start_timeout_seconds: until every process was ready once. drain_timeout_seconds: from the
            first signal to the end of the last process.
    """

    def __init__(
        self,
        name: str,
        deployment: LocalDeployment,
        *,
        show: Callable[[Snapshot], None],
        shows_figures: Callable[[float], bool],
        say: Callable[[str], None],
        start_timeout_seconds: float,
        drain_timeout_seconds: float,
    ) -> None:
        self._name = name
        self._deployment = deployment
        self._show, self._shows_figures, self._say = show, shows_figures, say
        self._start_timeout_seconds = start_timeout_seconds
        self._drain_timeout_seconds = drain_timeout_seconds
        self._engines = [_Watched(child) for child in deployment.engines]
        self._frontends = [_Watched(child) for child in deployment.frontends]
        self._all = [*self._engines, *self._frontends]
        self._began = self._looked = time.monotonic()
        self._totals, self._rate = Totals(), 0.0
        self._read: dict[str, Readings] = {}
        self._kv_bytes = sum(
            child.config.caches.kv_bytes
            for child in deployment.engines
            if isinstance(child.config, EngineConfig)
        )

    def run(self) -> None:
        """Until a signal. Raises StartupError (a port is taken), ProcessDied, TimeRanOut or
        Interrupted; no process is left in any case."""
        with StopSignals(self._deployment.send_kill).listening() as stop:
            try:
                self._deployment.check_ports()
                for one in self._all:
                    one.start(time.monotonic())
                self._serve(stop)
                self._drain(stop)
            except StartupError as error:
                # A signal that kills comes at any moment: what failed because of it is no failure.
                raise _at_once() if stop.count > 1 else error from None
            finally:
                self._deployment.kill()

    def _serve(self, stop: StopSignals) -> None:
        while not stop.count:
            self._look()
            for one in self._all:
                if line := one.tend(time.monotonic()):
                    self._say(line)
            late = time.monotonic() - self._began > self._start_timeout_seconds
            starting = [one for one in self._all if not one.was_ready]
            if late and starting:
                raise starting[0].too_late(self._start_timeout_seconds)
            stop.wait(TICK_SECONDS / 4 if starting else TICK_SECONDS)

    def _drain(self, stop: StopSignals) -> None:
        """Frontends first, so that their streams can finish."""
        deadline = time.monotonic() + self._drain_timeout_seconds
        for group in (self._frontends, self._engines):
            for one in group:
                one.is_draining, one.is_waiting = True, False
                if one.child.is_alive:
                    one.child.signal(signal.SIGTERM)
            while left := [one.child.name for one in group if one.child.is_alive]:
                self._look()
                if stop.count > 1:
                    break
                if time.monotonic() > deadline:
                    names = ", ".join(left)
                    raise TimeRanOut(f"still running after the drain time, killed: {names}")
                stop.wait(TICK_SECONDS / 4)
        if stop.count > 1:
            raise _at_once()
        self._look()

    def _look(self) -> None:
        """Asks every process at the same time, then shows the answers."""
        seconds = time.monotonic() - self._began
        look = partial(_Watched.look, has_figures=self._shows_figures(seconds))
        with ThreadPoolExecutor(max_workers=min(8, len(self._all))) as pool:
            seen = list(pool.map(look, self._all))
        now = time.monotonic()
        self._read |= {figures.name: found for figures, found in seen if found}
        alive = [figures.name for figures, _ in seen if figures.exit_code is None]
        # Who has ended, or was not asked, says nothing: its sums are not forgotten, but nothing of
        # it is under way.
        if not alive or any(found for _, found in seen):
            before, self._totals = self._totals, totals(self._read.values(), self._kv_bytes)
            now_there = totals([self._read[one] for one in alive if one in self._read], 0)
            self._totals = msgspec.structs.replace(
                self._totals, requests_inflight=now_there.requests_inflight
            )
            elapsed, self._looked = now - self._looked, now
            num_tokens = self._totals.tokens - before.tokens
            self._rate = max(0.0, num_tokens / elapsed) if elapsed > 0 else 0.0
        first = self._frontends[0].child
        self._show(
            Snapshot(
                name=self._name,
                url=f"{first.url}/v1",
                model=first.config.model.served_name,
                has_page=isinstance(first.config, FrontendConfig) and first.config.page,
                seconds=seconds,
                processes=tuple(figures for figures, _ in seen),
                totals=self._totals,
                tokens_per_second=self._rate,
                is_draining=any(one.is_draining for one in self._all),
            )
        )


def _at_once() -> Interrupted:
    return Interrupted("ended at once, without waiting for streams")
