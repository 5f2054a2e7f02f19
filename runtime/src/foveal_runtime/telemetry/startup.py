"""Version of the runtime, and durations of the phases of a start: the parts of a cold start.

Used by main/ of frontends and engines. The first phase begins with the process itself, as the
kernel counts it, so imports are in it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from foveal_runtime.telemetry.metrics import Metrics


@functools.cache
def runtime_version() -> str:
    """The installed distribution's version; "0" when run from a source tree."""
    try:
        return metadata.version("foveal-runtime")
    except metadata.PackageNotFoundError:
        return "0"


def process_age_seconds() -> float:
    """Since the kernel made this process; 0 where /proc does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        booted = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, booted - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


class StartPhases:
    """`done(name)` ends the phase that began with the last call, or with the process."""

    def __init__(
        self,
        *,
        age_seconds: Callable[[], float] = process_age_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._since = clock() - age_seconds()

    def done(self, phase: str) -> None:
        now = self._clock()
        self.seconds[phase] = now - self._since
        self._since = now

    def collect(self, metrics: Metrics) -> None:
        """A telemetry source, from the first moment on."""
        metrics.set("foveal_build_info", 1, version=runtime_version())
        for phase, seconds in list(self.seconds.items()):
            metrics.set("foveal_startup_seconds", seconds, phase=phase)
