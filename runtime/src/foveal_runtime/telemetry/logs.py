"""One-line structured logs: text on a terminal, JSON elsewhere, the request id in both; and the
termination message of a container.

Set up once by main/; every package logs through `logging`, with fields in `extra={...}`, or in
`extra={"fields": {...}}` where a name is taken by `logging` itself (name, process, args, ...).
Never logs request text, keys or media.

A process that the kernel kills can write nothing more, so its termination message is kept up to
date while it runs: first the peak of memory beside the limit, last the newest warning or error.
Kubernetes hands the file, which is in pods only, to whoever reads the pod's status.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from foveal_runtime.telemetry.memory import ContainerMemory

PATH_VARIABLE = "FOVEAL_TERMINATION_LOG"
DEFAULT_PATH = "/dev/termination-log"
MAX_LINE = 1024
GROWTH_BYTES = 16 << 20
"""A peak is written again when it has grown by so much."""
INTERVAL_SECONDS = 1.0


class LastWords(logging.Handler):
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
        text = f"memory_peak={_mebibytes(self._written_bytes)}"
        limit_bytes = self._memory.limit_bytes()
        if limit_bytes:
            text += f" memory_limit={_mebibytes(limit_bytes)}"
        with contextlib.suppress(OSError):
            self._path.write_text(f"{text}\n{line}\n" if line else f"{text}\n")

    def look(self) -> None:
        """Writes if the peak has grown."""
        if self._memory.peak_bytes() - self._written_bytes >= GROWTH_BYTES:
            self.write()

    def start(self) -> None:
        logging.getLogger().addHandler(self)
        self.write()
        threading.Thread(target=self._watch, name="last-words", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        logging.getLogger().removeHandler(self)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self.look()


def _mebibytes(size_bytes: int) -> str:
    return f"{-(-size_bytes // (1 << 20))}Mi"


def begin_last_words(memory: ContainerMemory) -> LastWords | None:
    """Starts keeping the message; None where there is no such file to write to."""
    path = Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)
    if not path.is_file() or not os.access(path, os.W_OK):
        return None
    words = LastWords(path, memory)
    words.start()
    return words


request_id_of_task: ContextVar[str] = ContextVar("request_id_of_task", default="")
"""The HTTP request that the current task works for; "" outside one."""

_CHATTY = ("httpx", "httpcore", "uvicorn.error", "PIL", "asyncio")
"""Libraries whose INFO says nothing that our own lines do not."""

_encoder = msgspec.json.Encoder(enc_hook=str)


_OWN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "fields",
    "color_message",
}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    out = {key: value for key, value in vars(record).items() if key not in _OWN}
    fields = getattr(record, "fields", None)
    if isinstance(fields, dict):
        out.update(fields)
    request_id = request_id_of_task.get()
    if request_id:
        out.setdefault("request_id", request_id)
    return out


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message", ...fields, "exception"} on one line."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = self._process
        line.update(_fields(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO  frontend.intake request status=200 seconds=0.01 request_id=...`"""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("foveal_runtime.")
        pairs = " ".join(f"{key}={_plain(value)}" for key, value in _fields(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = record.getMessage().replace("\n", "\\n")
        line = f"{clock} {record.levelname:<7} {name} {message}" + (f" {pairs}" if pairs else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain(value: Any) -> str:
    text = str(value)
    if text and text.isprintable() and not any(char in text for char in ' "='):
        return text
    return _encoder.encode(text).decode()


def configure_logging(
    log_format: Literal["auto", "text", "json"] = "auto",
    *,
    process: str = "",
    stream: TextIO | None = None,
) -> None:
    """Replaces the root logger's handlers. "auto" is text on a terminal and JSON elsewhere."""
    target = stream if stream is not None else sys.stderr
    as_text = log_format == "text" or (log_format == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler, *(old for old in root.handlers if isinstance(old, LastWords))]
    root.setLevel(logging.INFO)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # each damaged form is a warning
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = name != "uvicorn.access"  # the middleware writes the request line
