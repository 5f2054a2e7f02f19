"""Local processes from the same documents that pods get: one launcher for serve, demo and tests.

Called by `foveal-runtime serve`, examples/demo.py, `foveal up` (as a subprocess) and the
real-process tests. Starts each role as its own process, watches it, stops it; knows nothing of
requests or caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from foveal_runtime.plan.config import EngineConfig, FrontendConfig
from foveal_runtime.plan.errors import StartupError

Say = Callable[[str], None]
PARENT_VARIABLE = "FOVEAL_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """In a child of this launcher: asks the kernel for SIGTERM when the launcher dies, however it
    dies. A launcher that was killed would otherwise leave engines behind."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent.isdigit() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(parent):  # it died before the call
            sys.exit(1)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, below the range from which outgoing connections take
    theirs: one of those could otherwise sit on it before the server binds."""
    for _ in range(200):
        port = random.randint(12000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise StartupError(f"no free port between 12000 and 30000 on {host}")


class Child:
    """One process of ours: its document, its log file, its readiness URL."""

    def __init__(
        self, role: str, config: EngineConfig | FrontendConfig, folder: Path, env: dict[str, str]
    ) -> None:
        self.role = role
        self.config = config
        self.name = config.engine_id if isinstance(config, EngineConfig) else config.frontend_id
        self.document = folder / f"{self.name}.json"
        self.log_path = folder / f"{self.name}.log"
        self.env = env
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if isinstance(self.config, EngineConfig):
            return f"http://{self.config.http_host}:{self.config.http_port}"
        return f"http://{self.config.host}:{self.config.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.document.write_bytes(msgspec.json.format(msgspec.json.encode(self.config)))
        command = [sys.executable, "-m", "foveal_runtime.main.cli", self.role]
        with self.log_path.open("ab") as log:
            # A session of its own: a Ctrl-C at the terminal reaches the launcher alone, which
            # then drains the children in order.
            self.process = subprocess.Popen(
                [*command, "--config", str(self.document)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/readyz", timeout=2) as answer:
                return int(answer.status) == 200
        except urllib.error.HTTPError as error:
            error.close()  # the error is the answer, with its connection
            return False
        except (urllib.error.URLError, OSError):
            return False

    def last_lines(self, count: int = 15) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-count:])

    def signal(self, number: int) -> None:
        """Sends a signal to this process alone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL for the process and the workers it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class LocalDeployment:
    """Engines and frontends on this machine. Use as a context manager: it always tears down.

    Raises StartupError with the last log lines when a process ends before it is ready.
    """

    def __init__(
        self,
        engines: Sequence[EngineConfig],
        frontends: Sequence[FrontendConfig],
        *,
        folder: str | Path | None = None,
        env: dict[str, str] | None = None,
        say: Say = lambda line: None,
    ) -> None:
        self._is_temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="foveal-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.say = say
        self.engines = [Child("engine", c, self.folder, env or {}) for c in engines]
        self.frontends = [Child("frontend", c, self.folder, env or {}) for c in frontends]

    @property
    def children(self) -> list[Child]:
        return [*self.engines, *self.frontends]

    def start(self) -> None:
        for child in self.children:
            child.start()

    def wait_ready(
        self, timeout_seconds: float = 180.0, stop: threading.Event | None = None
    ) -> None:
        """Returns when every process is ready, or early when `stop` is set."""
        deadline = time.monotonic() + timeout_seconds
        waiting = self.children
        while waiting and not (stop and stop.is_set()):
            for child in list(waiting):
                if not child.is_alive:
                    raise StartupError(f"{child.name} ended at start:\n{child.last_lines()}")
                if child.is_ready():
                    self.say(f"{child.name} is ready ({child.url})")
                    waiting.remove(child)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(child.name for child in waiting)
                raise StartupError(
                    f"not ready after {timeout_seconds:.0f} s: {names}\n{waiting[0].last_lines()}"
                )
            time.sleep(0.1)

    def dead(self) -> list[Child]:
        return [child for child in self.children if not child.is_alive]

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """Frontends first, so that their streams can finish, then engines; then SIGKILL."""
        deadline = time.monotonic() + timeout_seconds
        for group in (self.frontends, self.engines):
            for child in group:
                if child.is_alive:
                    child.signal(signal.SIGTERM)
            for child in group:
                if child.process is None:
                    continue
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.1, deadline - time.monotonic()))
                child.kill_group()
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> LocalDeployment:
        try:
            self.start()
        except BaseException:
            self.stop(1.0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
