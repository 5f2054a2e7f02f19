"""The operator's log lines on stderr: JSON for machines, text for people."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

_QUIET = ("kopf", "aiohttp.access", "asyncio")


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class KopfsLines(logging.Filter):
    """Leaves out what kopf says of its own end, with tracebacks: the line of whoever starts the
    watches again says why they ended. A handler's own fault stays, as a line. Requests that fail
    are told one a minute, without the headers: kopf says so of each kind in each namespace, again
    and again."""

    _OWN = re.compile("will re-authenticate|OS signals are|Cleanup activity|Unresolved resources")
    _RETRY = re.compile(
        r"will retry: \w+ ([^ ?]+)\S* -> (?:API\w+\(.)?(.*?)(?:., \{.*)?$", re.DOTALL
    )
    _FAULT = " failed with an exception"
    PAUSE_SECONDS = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._told = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("kopf"):
            return True
        text = record.getMessage()
        if self._FAULT in text:
            record.exc_info = record.exc_text = None  # the line names the error
            return True
        if record.exc_info or self._OWN.search(text):
            return False
        if found := self._RETRY.search(text):
            if record.created - self._told < self.PAUSE_SECONDS:
                return False
            self._told, record.args = record.created, ()
            record.msg = f"asking again for {found[1]}: {found[2]} (told once a minute)"
        return True


def set_up_logs(log_format: str, level: str) -> None:
    """Replaces whatever handlers there are. kopf's own lines appear from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    if level != "DEBUG":
        handler.addFilter(KopfsLines())
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
