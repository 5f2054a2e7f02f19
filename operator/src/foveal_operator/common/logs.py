"""The operator's log lines on stderr: JSON for machines, text for people."""

from __future__ import annotations

import json
import logging
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


def set_up_logs(log_format: str, level: str) -> None:
    """Replaces whatever handlers there are. kopf's own lines appear from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    if level != "DEBUG":
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
