"""Local processes from the same documents that pods get: started, asked, stopped in order.

Used by the supervisor (`foveal-runtime serve`, `launch`, and so `foveal up`), by examples/demo.py
and by the real-process tests. Each role is a process of its own; knows nothing of requests or
caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from foveal_runtime.plan.config import EngineConfig, FrontendConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import (
    COUNTS_VARIABLE,
    PARENT_VARIABLE,
    bind_error,
    free_port,
    url_host,
)
from foveal_runtime.plan.machine import visible_devices

Say = Callable[[str], None]
RUNTIME = (sys.executable, "-m", "foveal_runtime.main.cli")
MAX_METRICS_BYTES = 8 << 20
_PROBE_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # none knows our children


def end_with_parent() -> None:
    """In a child of this launcher: asks the kernel for SIGTERM when the launcher dies, however it
    dies. A launcher that was killed would otherwise leave engines behind."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent.isdigit() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(parent):  # it died before the call
            sys.exit(1)


def check_port(host: str, port: int) -> None:
    """Raises StartupError when no server could listen there now."""
    error = bind_error(host, port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise StartupError(f"cannot listen on {host}, port {port}: {error.strerror or error}")
    raise StartupError(
        f"port {port} of {host} is in use by another program: stop it, or choose another port, "
        f"for example --port {free_port(host)}"
    )


class Child:
    """One frontend or engine: its document, its log, its addresses."""

    def __init__(
        self,
        config: EngineConfig | FrontendConfig,
        folder: Path,
        env: dict[str, str],
        command: Sequence[str] = RUNTIME,
    ) -> None:
        is_engine = isinstance(config, EngineConfig)
        self.role = "engine" if is_engine else "frontend"
        self.config = config
        self.name = config.engine_id if isinstance(config, EngineConfig) else config.frontend_id
        self.document = folder / f"{self.name}.json"
        self.log_path = folder / f"{self.name}.log"
        counts = folder / f"{self.name}.counts"
        for old in folder.glob(f"{counts.name}*"):  # of an earlier deployment
            old.unlink()
        self.env = {**env, COUNTS_VARIABLE: str(counts)}
        self.process: subprocess.Popen[bytes] | None = None
        self._command = tuple(command)

    @property
    def url(self) -> str:
        if isinstance(self.config, EngineConfig):
            return f"http://{self.config.http_host}:{self.config.http_port}"
        return f"http://{url_host(self.config.host)}:{self.config.port}"

    def listens_on(self) -> list[tuple[str, int]]:
        if isinstance(self.config, EngineConfig):
            found = [(self.config.http_host, self.config.http_port)]
            for bind, count in ((self.config.bind, 1), (self.config.events_bind, 2)):
                host, _, port = bind.removeprefix("tcp://").rpartition(":")
                found += [(host, int(port) + i) for i in range(count if bind else 0)]
            return found
        return [(self.config.host, self.config.port)]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs or before it was started; -9 when signal 9 ended it."""
        return self.process.poll() if self.process else None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.document.write_bytes(msgspec.json.format(msgspec.json.encode(self.config)))
        with self.log_path.open("ab") as log:
            # A session of its own: a Ctrl-C at the terminal reaches the launcher alone, which
            # then drains the children in order.
            self.process = subprocess.Popen(
                [*self._command, self.role, "--config", str(self.document)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        return self._get("/readyz") is not None

    def metrics(self) -> str:
        """Its own series as exposition text; "" when it cannot be asked now."""
        found = self._get("/metrics" + ("?own=1" if self.role == "frontend" else ""))
        return found.decode("utf-8", "replace") if found else ""

    def _get(self, path: str) -> bytes | None:
        """The body of a 200; None for any other answer and for none."""
        try:
            with _opener.open(self.url + path, timeout=_PROBE_SECONDS) as answer:
                return bytes(answer.read(MAX_METRICS_BYTES))
        except urllib.error.HTTPError as error:
            error.close()  # the error is the answer, with its connection
        except (OSError, http.client.HTTPException):
            pass
        return None

    def last_lines(self, count: int = 15) -> str:
        """The end of its log, without anything that would steer a terminal."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - 16384))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = ["".join(filter(str.isprintable, line)).rstrip() for line in text.splitlines()]
        return "\n".join([line for line in lines if line][-count:])

    def resident_bytes(self) -> int:
        """Memory of it and its children; 0 where /proc does not tell."""
        return sum(_resident_bytes(pid) for pid in _family(self.pid)) if self.is_alive else 0

    def signal(self, number: int) -> None:
        """Sends a signal to this process alone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def send_kill(self) -> None:
        """SIGKILL for the process and the workers it started. Safe from a signal handler."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill_group(self) -> None:
        """The same, until the process has ended."""
        self.send_kill()
        if self.process is not None:
            self.process.wait()


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in found:  # grows while it is walked
        try:
            text = Path(f"/proc/{task}/task/{task}/children").read_text()
        except OSError:
            continue
        found += [int(child) for child in text.split() if int(child) not in found]
    return found


def _resident_bytes(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGESIZE")


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
        devices_per_engine: int = 0,
        command: Sequence[str] = RUNTIME,
        say: Say = lambda line: None,
    ) -> None:
        self._is_temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="foveal-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.say = say
        env = env or {}
        self.engines = [
            Child(c, self.folder, {**env, **_visible(i, devices_per_engine)}, command)
            for i, c in enumerate(engines)
        ]
        self.frontends = [Child(c, self.folder, env, command) for c in frontends]

    @property
    def children(self) -> list[Child]:
        return [*self.engines, *self.frontends]

    def check_ports(self) -> None:
        """Before anything starts. Raises StartupError for the first address that cannot be had."""
        for child in (*self.frontends, *self.engines):
            for host, port in child.listens_on():
                check_port(host, port)

    def start(self) -> None:
        """Raises StartupError when a port is taken; then nothing was started."""
        self.check_ports()
        for child in self.children:
            child.start()

    def wait_ready(self, timeout_seconds: float = 180.0) -> None:
        """Returns when every process is ready."""
        deadline = time.monotonic() + timeout_seconds
        waiting = self.children
        while waiting:
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

    def send_kill(self) -> None:
        """SIGKILL for every process. Safe from a signal handler."""
        for child in self.children:
            child.send_kill()

    def kill(self) -> None:
        """Ends every process at once."""
        for child in self.children:
            child.kill_group()

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

    def __exit__(self, *_: object) -> None:
        self.stop()


def _visible(index: int, count: int) -> dict[str, str]:
    """Each engine sees its own devices and no others, of those that this process may use."""
    names, own = visible_devices(), slice(index * count, (index + 1) * count)
    devices = [str(i) for i in range(own.stop)] if names is None else names
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[own])} if count else {}
