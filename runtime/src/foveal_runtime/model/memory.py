"""The most memory a piece of work takes while it runs, on a device or on the host.

Used by the profiler, and by engines for their metrics. On a CUDA device the allocator counts
exactly; on the host the kernel's high-water mark of resident memory is reset before and read
after; free memory that the C library still holds is given back first, or its reuse would not show.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMeter:
    """Measures on the device named at construction ("cpu", "cuda", "cuda:1")."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes by which memory in use grew at the worst moment of `work`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            before = int(torch.cuda.memory_allocated(self._device))
            work()
            torch.cuda.synchronize(self._device)
            return int(torch.cuda.max_memory_allocated(self._device)) - before
        before = _reset_peak()
        work()
        return max(0, _peak() - before)


def device_peak_bytes(device: str) -> int:
    """The most that this process ever had reserved on the device; 0 on a CPU."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_reserved(device))


def _reset_peak() -> int:
    """Sets the high-water mark to what is resident now; returns that."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries keep less
    if trim is not None:
        trim(0)
    try:
        _CLEAR.write_text("5")
    except OSError:
        return _peak()  # cannot be reset here: growth beyond the old peak is what can be seen
    return _field("VmRSS")


def _peak() -> int:
    found = _field("VmHWM")
    return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _field(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
