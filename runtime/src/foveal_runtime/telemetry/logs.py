"""One-line structured logs: text on a terminal, JSON elsewhere, the request id in both.

Set up once by main/; every package logs through `logging`, with fields in `extra={...}`, or in
`extra={"fields": {...}}` where a name is taken by `logging` itself (name, process, args, ...).
Never logs request text, keys or media.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal, TextIO

import msgspec

from foveal_runtime.telemetry.termination_message import TerminationMessage

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
        return _json(line)


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
    return _json(text)


def _json(value: Any) -> str:
    try:
        return _encoder.encode(value).decode()
    except UnicodeEncodeError:  # the name of a file that is not UTF-8
        return json.dumps(value, default=str)


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
    root.handlers[:] = [
        handler,
        *(old for old in root.handlers if isinstance(old, TerminationMessage)),
    ]
    root.setLevel(logging.INFO)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # each damaged form is a warning
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = name != "uvicorn.access"  # the middleware writes the request line
