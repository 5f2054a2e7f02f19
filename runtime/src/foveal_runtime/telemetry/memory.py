"""This container's memory as the kernel that may kill it counts it: peak and limit.

Used by telemetry.last_words and by main/ as a metrics source. Reads the control group's files; a
process outside any limit falls back to its own high-water mark.
"""

from __future__ import annotations

import resource
from pathlib import Path

from foveal_runtime.telemetry.metrics import Metrics

CGROUP = Path("/sys/fs/cgroup")


class ContainerMemory:
    """Args: `cgroup`: where the container's own control group is mounted."""

    def __init__(self, cgroup: Path = CGROUP) -> None:
        self._cgroup = cgroup

    def peak_bytes(self) -> int:
        """The most there ever was: all processes, page cache and /dev/shm of the container. Without
        a control group, what this process alone had resident."""
        found = self._read("memory.peak")
        return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def limit_bytes(self) -> int:
        """0 where there is none."""
        return self._read("memory.max")

    def _read(self, name: str) -> int:
        try:
            text = (self._cgroup / name).read_text().strip()
        except OSError:
            return 0
        return int(text) if text.isdigit() else 0

    def collect(self, metrics: Metrics) -> None:
        """A telemetry source: `metrics.add_source(memory.collect)`."""
        metrics.set("foveal_memory_peak_bytes", self.peak_bytes())
        metrics.set("foveal_memory_limit_bytes", self.limit_bytes())
