"""The termination message of a container.

A process that the kernel kills can write nothing more, so its termination message is kept up to
date while it runs: first the peak of memory beside the limit, last the newest warning or error.
Kubernetes hands the file, which is in pods only, to whoever reads the pod's status.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from foveal_runtime.plan.quantity import mebibytes
from foveal_runtime.telemetry.memory import ContainerMemory

PATH_VARIABLE = "FOVEAL_TERMINATION_LOG"
DEFAULT_PATH = "/dev/termination-log"
MAX_LINE = 1024
GROWTH_BYTES = 16 << 20
"""A peak is written again when it has grown by so much."""
INTERVAL_SECONDS = 1.0


class TerminationMessage(logging.Handler):
    """Keeps the message at `path`; a handler of the root logger, so that it sees every warning."""

    def __init__(self, path: Path, memory: ContainerMemory) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._memory = memory
        self._written_bytes = 0
        self._stop = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                line += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        except Exception:
            self.handleError(record)
        else:
            self.say(line)

    def say(self, line: str) -> None:
        """The last line from now on."""
        self._write(" ".join(line.split())[:MAX_LINE])

    def write(self) -> None:
        """Peak and limit; the last line stays, whichever process of the container said it."""
        try:
            self._write(self._path.read_text().partition("\n")[2].strip())
        except (OSError, ValueError):
            self._write("")

    def _write(self, line: str) -> None:
        self._written_bytes = self._memory.peak_bytes()
        text = f"memory_peak={mebibytes(self._written_bytes)}"
        limit_bytes = self._memory.limit_bytes()
        if limit_bytes:
            text += f" memory_limit={mebibytes(limit_bytes)}"
        with contextlib.suppress(OSError):
            self._path.write_text(f"{text}\n{line}\n" if line else f"{text}\n")

    def look(self) -> None:
        """Writes if the peak has grown."""
        if self._memory.peak_bytes() - self._written_bytes >= GROWTH_BYTES:
            self.write()

    def start(self) -> None:
        logging.getLogger().addHandler(self)
        self.write()
        threading.Thread(target=self._watch, name="termination-message", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        logging.getLogger().removeHandler(self)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self.look()


def keep_termination_message(memory: ContainerMemory) -> TerminationMessage | None:
    """Starts keeping the message; None where there is no such file to write to."""
    path = Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)
    if not path.is_file() or not os.access(path, os.W_OK):
        return None
    message = TerminationMessage(path, memory)
    message.start()
    return message
