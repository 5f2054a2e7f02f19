"""Times as people write them on a command line."""

from __future__ import annotations

import argparse
import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Seconds of 90, 90s, 1m30s, 2h. Raises ArgumentTypeError."""
    if text.replace(".", "", 1).isdigit():
        return float(text)
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 10m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
