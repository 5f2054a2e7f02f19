"""An engine process: the core's thread, the link thread, health and metrics, draining.

Used by main/ through `EngineServer.run`, which blocks until the engine is drained or stopped.
The thread that calls `run` is the core thread: it waits on its inbox when idle (no spinning) and
is the only one that touches scheduler, receiver and runner.
"""

from __future__ import annotations

import enum
import functools
import logging
import queue
import time
from collections.abc import Callable, Mapping

import msgspec

from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.engine.process.evidence import Obituary
from foveal_runtime.engine.process.health import HealthServer, IntegrityReport, integrity_report
from foveal_runtime.engine.process.link_thread import LinkThread
from foveal_runtime.mirror.messages import Death, DownMessage, SessionId, Up
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.codec import SharedOpener
from foveal_runtime.wire.transport import EngineTransport

_LOG = logging.getLogger(__name__)
IDLE_TICK_SECONDS = 1.0
MAX_INBOX = 65536
STALL_SECONDS = 60.0
GOODBYE_SECONDS = 2.0
INSPECT_SECONDS = 10.0


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class _Inbox:
    """Work for the core thread, from any thread (link_thread.CoreInbox)."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[EngineCore], None]] = queue.SimpleQueue()

    def on_message(self, fid: str, message: Up, values: Mapping[MMHash, Value] | None) -> None:
        if self._calls.qsize() > MAX_INBOX:
            # Far above what sessions' windows and admission allow: the peer breaks the rules.
            self._calls.put(lambda core: core.end_session(fid, "flood"))
            return
        self._calls.put(lambda core: core.on_message(fid, message, values))

    def on_session_lost(self, fid: str, sid: SessionId, reason: str) -> None:
        self._calls.put(lambda core: core.on_session_lost(fid, sid, reason))

    def on_silent(self, fid: str, sid: SessionId) -> None:
        def end(core: EngineCore) -> None:
            """What it was asked for and does not send holds room, and others may wait for it."""
            session = core.receiver.sessions.get(fid)
            owed = (p.asked == fid for p in core.receiver.admission.pending.values())
            if session is not None and session.sid == sid and any(owed):
                core.end_session(fid, "silent")

        self._calls.put(end)

    def on_failure(self, error: Exception) -> None:
        def fail(core: EngineCore) -> None:
            raise RuntimeError("the link thread failed") from error

        self._calls.put(fail)

    def put(self, call: Callable[[EngineCore], None]) -> None:
        self._calls.put(call)

    def work(self, core: EngineCore, timeout_seconds: float) -> None:
        """Waits for one call at most so long (0 = does not wait), then does all there are."""
        try:
            if timeout_seconds > 0:
                self._calls.get(timeout=timeout_seconds)(core)
            while True:
                self._calls.get_nowait()(core)
        except queue.Empty:
            return


class EngineServer:
    """One engine core and its links.

    Args:
        http_host, http_port: /livez, /readyz, /metrics, /debug/integrity; port 0 = any.
        engine_id: the name in /debug/integrity.
        render_metrics: the exposition text, called in the HTTP thread.
        stall_seconds: /livez fails when work waits and no step ended for so long.
        idle_check_seconds: an idle engine checks all its books this often, and ends when they do
            not agree; 0 = never.
    """

    def __init__(
        self,
        *,
        http_host: str = "127.0.0.1",
        http_port: int = 0,
        engine_id: str = "",
        drain_timeout_seconds: float = 120.0,
        stall_seconds: float = STALL_SECONDS,
        idle_check_seconds: float = 0.0,
        render_metrics: Callable[[], bytes] = lambda: b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = Phase.LOADING
        self.endpoint = ""
        self._engine_id = engine_id
        self._clock = clock
        self._drain_timeout_seconds = drain_timeout_seconds
        self._stall_seconds = stall_seconds
        self._idle_check_seconds = idle_check_seconds
        self._checked_at = clock()
        self.num_idle_checks = 0
        self._inbox = _Inbox()
        self._core: EngineCore | None = None
        self._links: LinkThread | None = None
        self._drain_at: float | None = None
        self._stop = False
        # What other threads read about progress: (finished loops, time of the last one, busy).
        self._progress: tuple[int, float, bool] = (0, clock(), False)
        self.health = HealthServer(
            http_host,
            http_port,
            live=self.liveness,
            ready=self.readiness,
            metrics=render_metrics,
            inspect=self._inspect_json,
        )

    # ---- any thread -----------------------------------------------------------------------------

    def send(self, fid: str, message: DownMessage) -> None:
        """What the core uses to answer."""
        if self._links is not None:
            self._links.send(fid, message)

    def request_drain(self) -> None:
        """Finish what is here, take nothing new, then end. Safe from a signal handler."""
        self._inbox.put(lambda core: self._begin_drain(core))

    def request_stop(self) -> None:
        """End now; unfinished requests go on elsewhere. Safe from a signal handler."""
        self._stop = True
        self._inbox.put(lambda core: None)

    def liveness(self) -> str:
        """Why the process should be restarted, or "". An engine that loads is alive; one that has
        work and does no steps is not."""
        if self.phase is Phase.FAILED:
            return "the engine failed"
        if self.phase is Phase.LOADING:
            return ""
        _, moved_at, busy = self._progress
        still = self._clock() - moved_at
        if busy and still > self._stall_seconds:
            return f"work is waiting and no step ended for {still:.0f} s"
        return ""

    def readiness(self) -> str:
        """Why no request should be sent here, or ""."""
        return "" if self.phase is Phase.READY else self.phase.value

    def inspect(self) -> IntegrityReport | None:
        """The books as they are between two steps, checked in the core thread. None when that
        thread does not serve, or a step takes longer than INSPECT_SECONDS."""
        if self.phase not in (Phase.READY, Phase.DRAINING):
            return None
        found: queue.SimpleQueue[IntegrityReport] = queue.SimpleQueue()
        self._inbox.put(lambda core: found.put(integrity_report(core, self._engine_id)))
        try:
            return found.get(timeout=INSPECT_SECONDS)
        except queue.Empty:
            return None

    def _inspect_json(self) -> bytes | None:
        found = self.inspect()
        return None if found is None else msgspec.json.encode(found)

    # ---- the core thread ------------------------------------------------------------------------

    def run(
        self,
        make_core: Callable[[], EngineCore],
        make_transport: Callable[[], EngineTransport],
        open_shared: SharedOpener | None = None,
        on_ready: Callable[[str], None] = lambda endpoint: None,
        last_death: Death | None = None,
    ) -> int:
        """Loads, serves, drains. Returns the exit code: 0, or 1 when a step failed.

        Args:
            make_core: loads the model and warms it up; may take minutes. /livez answers meanwhile.
            on_ready: called with the bound endpoint.
            last_death: how the process before this one ended; told while this one loads.
        """
        self.health.start()
        try:
            with Obituary(make_transport, last_death):
                core = self._core = make_core()
            core.on_interlude = functools.partial(self._note_progress, core)
            self._links = LinkThread(
                make_transport, self._inbox, pulse=self._pulse, clock=self._clock,
                open_shared=open_shared,
            )  # fmt: skip
            self.endpoint = self._links.start()
            self._progress = (0, self._clock(), False)
            self.phase = Phase.READY
            on_ready(self.endpoint)
            return self._serve(core)
        finally:
            if self._links is not None:
                self._links.stop()
            self.health.stop()
            if self._core is not None:
                self._core.runner.close()

    def _serve(self, core: EngineCore) -> int:
        try:
            while not self._is_over(core):
                self._inbox.work(core, self._patience(core))
                busy = core.has_work
                if busy and not self._progress[2]:
                    self._progress = (self._progress[0], self._clock(), True)
                core.step()
                self._note_progress(core)
                self._check_when_idle(core)
        except Exception as error:
            _LOG.exception("the step loop failed; frontends send their requests elsewhere")
            self.phase = Phase.FAILED
            self._say_goodbye(core.flush)
            self._say_goodbye(functools.partial(core.on_failure, error))
            return 1
        self._say_goodbye(lambda: core.close_sessions())
        try:
            core.save_warm_set()
        except Exception:
            _LOG.exception("the warm set was not saved")
        self.phase = Phase.STOPPED
        return 0

    def _note_progress(self, core: EngineCore) -> None:
        self._progress = (core.stats.num_steps, self._clock(), core.has_work)

    def _check_when_idle(self, core: EngineCore) -> None:
        """Raises AssertionError when the books do not agree: an engine that may serve one request
        another's memory must not serve on."""
        if not self._idle_check_seconds or core.has_work:
            return
        now = self._clock()
        if now - self._checked_at >= self._idle_check_seconds:
            core.check_integrity()
            self._checked_at = self._clock()
            self.num_idle_checks += 1

    def _patience(self, core: EngineCore) -> float:
        """How long to wait for messages before the next step."""
        if core.has_work:
            return 0.0
        due = core.seconds_to_note()
        return IDLE_TICK_SECONDS if due is None else min(due, IDLE_TICK_SECONDS)

    def _begin_drain(self, core: EngineCore) -> None:
        if self.phase is Phase.READY:
            _LOG.info("draining: %d requests to finish", core.num_unfinished)
            self.phase = Phase.DRAINING
            self._drain_at = self._clock() + max(self._drain_timeout_seconds - GOODBYE_SECONDS, 0)
            core.drain()

    def _is_over(self, core: EngineCore) -> bool:
        if self._stop:
            return True
        if self._drain_at is None:
            return False
        return core.num_unfinished == 0 or self._clock() >= self._drain_at

    def _say_goodbye(self, say: Callable[[], None]) -> None:
        try:
            say()
        except Exception:
            _LOG.exception("could not close all sessions")

    def _pulse(self) -> tuple[int, bool]:
        steps, _, busy = self._progress
        return steps, busy
