"""Starts the runtime's processes, asks how they are, ends them in order.

Called by `foveal up`. They are subprocesses only: nothing of the runtime but plan/ is imported
here. Knows nothing of resources or caches.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from foveal_operator.cli.local.documents import url_host
from foveal_operator.common.errors import UsageError
from foveal_operator.manifests.documents import document_json
from foveal_runtime.plan.config import EngineConfig, FrontendConfig

PARENT_VARIABLE = "FOVEAL_PARENT_PID"
"""A runtime process that is told its parent ends with it, however the parent ends."""
_PROBE_SECONDS = 2.0
MAX_METRICS_BYTES = 8 << 20


def runtime_command(given: str = "") -> list[str]:
    """How `foveal-runtime` is called: as told, as this Python's module, or from PATH."""
    if given:
        found = shutil.which(given)
        if not found:
            raise UsageError(f"--runtime {given} is no program that can be run")
        return [found]
    if find_spec("foveal_runtime.main") is not None:
        return [sys.executable, "-m", "foveal_runtime.main.cli"]
    found = shutil.which("foveal-runtime")
    if not found:
        raise UsageError(
            "foveal-runtime is not installed here; pip install 'foveal-runtime[frontend,engine]'"
        )
    return [found]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, below those that outgoing connections take."""
    for _ in range(200):
        port = random.randint(12000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise UsageError(f"no free port between 12000 and 30000 on {host}")


class LocalProcess:
    """One frontend or engine: its document, its log, its addresses."""

    def __init__(
        self, config: EngineConfig | FrontendConfig, folder: Path, environment: dict[str, str]
    ) -> None:
        self.config = config
        is_engine = isinstance(config, EngineConfig)
        self.role = "engine" if is_engine else "frontend"
        self.name = config.engine_id if isinstance(config, EngineConfig) else config.frontend_id
        self.document = folder / f"{self.name}.json"
        self.log_path = folder / f"{self.name}.log"
        self.was_ready = False
        self.is_draining = False
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if isinstance(self.config, EngineConfig):
            return f"http://{self.config.http_host}:{self.config.http_port}"
        return f"http://{url_host(self.config.host)}:{self.config.port}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs or before it was started; -9 when signal 9 ended it."""
        return self._process.poll() if self._process else None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def write_document(self) -> None:
        self.document.write_text(document_json(self.config), encoding="utf-8")

    def start(self, command: Sequence[str]) -> None:
        """In a session of its own: Ctrl-C at the terminal reaches `foveal up` alone."""
        self.write_document()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, self.role, "--config", str(self.document)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    def probe(self) -> bool:
        """Whether it says that it is ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=_PROBE_SECONDS) as answer:
                ready = answer.status == 200
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (OSError, http.client.HTTPException):
            return False
        self.was_ready = self.was_ready or ready
        return bool(ready)

    def metrics(self) -> str:
        """Its own series as exposition text; "" when it cannot be asked now."""
        url = f"{self.url}/metrics" + ("?own=1" if self.role == "frontend" else "")
        try:
            with urllib.request.urlopen(url, timeout=_PROBE_SECONDS) as answer:
                data: bytes = answer.read(MAX_METRICS_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            return ""
        except (OSError, http.client.HTTPException):
            return ""
        return data.decode("utf-8", "replace")

    def drain(self) -> None:
        """Asks it to end well: readiness off, streams finish, exit."""
        self.is_draining = True
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Ends it and the workers it started, at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of its log, without anything that would steer a terminal."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - 16384))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return []
        lines = ["".join(filter(str.isprintable, line)).rstrip() for line in text.splitlines()]
        return [line for line in lines if line][-count:]

    def resident_bytes(self) -> int:
        """Memory of it and its children; 0 where /proc does not tell."""
        return sum(_resident_bytes(pid) for pid in _family(self.pid)) if self.pid else 0


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
