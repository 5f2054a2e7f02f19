"""Memory of the container and of a process: what the kernel counts, and what glibc keeps.

ContainerMemory reads the control group's files, of version 2 or 1, as the kernel that may kill the
container counts; a process outside any limit falls back to its own high-water mark. Settings of the
C library's allocator are of no effect with other libraries than glibc, and never change what a
program computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # media workers need no library for metrics
    from foveal_runtime.telemetry.metrics import Metrics

CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 says "no limit" with a number near 2^63."""


class ContainerMemory:
    """Args: `cgroup`: where the container's own control group is mounted."""

    def __init__(self, cgroup: Path = CGROUP) -> None:
        self._cgroup = cgroup

    def peak_bytes(self) -> int:
        """The most there ever was: all processes, page cache and /dev/shm of the container. Without
        a control group, what this process alone had resident."""
        found = self._read("memory.peak")
        if not found and self._limit_v1():
            found = self._read("memory/memory.max_usage_in_bytes")
        return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def limit_bytes(self) -> int:
        """0 where there is none."""
        return self._read("memory.max") or self._limit_v1()

    def used_bytes(self) -> tuple[int, int]:
        """(anonymous + shared + kernel memory, page cache): the second is taken back when the first
        needs room. (0, 0) outside a limit."""
        if self._read("memory.max"):
            found = self._stat("memory.stat")
            anonymous, shared, cache = (found.get(key, 0) for key in ("anon", "shmem", "file"))
            kernel = found.get("kernel", 0)
        elif self._limit_v1():
            found = self._stat("memory/memory.stat")
            names = ("total_rss", "total_shmem", "total_cache")
            anonymous, shared, cache = (found.get(key, 0) for key in names)
            kernel = self._read("memory/memory.kmem.usage_in_bytes")
        else:
            return 0, 0
        return anonymous + shared + kernel, max(0, cache - shared)

    def collect(self, metrics: Metrics) -> None:
        """A telemetry source: `metrics.add_source(memory.collect)`."""
        metrics.set("foveal_memory_peak_bytes", self.peak_bytes())
        metrics.set("foveal_memory_limit_bytes", self.limit_bytes())
        used, cache = self.used_bytes()
        metrics.set("foveal_memory_used_bytes", used)
        metrics.set("foveal_memory_page_cache_bytes", cache)

    def _limit_v1(self) -> int:
        found = self._read("memory/memory.limit_in_bytes")
        return found if found < _NO_LIMIT else 0

    def _read(self, name: str) -> int:
        try:
            text = (self._cgroup / name).read_text().strip()
        except OSError:
            return 0
        return int(text) if text.isdigit() else 0

    def _stat(self, name: str) -> dict[str, int]:
        try:
            lines = (self._cgroup / name).read_text().splitlines()
        except OSError:
            return {}
        pairs = (line.partition(" ") for line in lines)
        return {key: int(value) for key, _, value in pairs if value.isdigit()}


LARGE_BYTES = 256 << 10
"""Blocks from this size on are mapped of their own and go back to the kernel when they are free."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 20
_LARGEST_THRESHOLD = 32 << 20
_STEP_BYTES = 512 << 20
_MAX_ARENAS = 2


def give_back_large_blocks() -> bool:
    """Fixes the threshold that glibc otherwise raises to 32 MiB with the first large body, and
    with it the memory that stays after a burst: 66 MB less in an HTTP process that had 34 MB of
    bodies at a time. False where the C library knows no such settings."""
    return _change(
        {_MMAP_THRESHOLD: LARGE_BYTES, _TRIM_THRESHOLD: _KEPT_BYTES, _ARENA_MAX: _MAX_ARENAS}
    )


def keep_free_blocks() -> bool:
    """For a process that takes and frees the same megabytes with every layer of every step: by
    itself glibc gives them back each time, and the kernel then maps and clears them again (53,000
    page faults for a prompt of 640 tokens). What is kept is the peak of a step, which an engine's
    memory is planned for anyway. False where the C library knows no such settings."""
    return _change({_MMAP_THRESHOLD: _LARGEST_THRESHOLD, _TRIM_THRESHOLD: _STEP_BYTES})


def _change(settings: dict[int, int]) -> bool:
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    return change is not None and all(change(name, value) == 1 for name, value in settings.items())


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For imports: what they make stays, and collections look at all of it again and again, a tenth
    of the CPU time that a process takes to start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_collections_short() -> None:
    """Leaves what is there by now out of all later collections. A process that serves has hundreds
    of thousands of objects from its imports, which each full collection looks at: 0.1 s during
    which its event loop stands."""
    gc.collect()
    gc.freeze()


def release_free_memory() -> None:
    """Gives back what is free already, after work that will not come again."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Gives back what is free, between pieces of work that leave nothing to be collected."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def taken_bytes(pid: int | str = "self") -> int:
    """What a process takes of its container's limit: anonymous memory and page tables. Pages of
    files are not counted: the kernel takes them back. 0 where the kernel does not tell."""
    fields = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    tables = status_bytes(pid).get("VmPTE", 0)
    return fields.get("Anonymous", 0) + tables if fields else 0


def reset_peak(pid: int | str) -> bool:
    """Sets the high-water mark of `peak_bytes` to what is resident now."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes(pid: int) -> int:
    """The most that was resident, less the pages of files that are, plus page tables."""
    found = status_bytes(pid)
    return max(0, found.get("VmHWM", 0) - found.get("RssFile", 0) + found.get("VmPTE", 0))


def status_bytes(pid: int | str) -> dict[str, int]:
    """The sizes in the kernel's status of a process, by the kernel's names."""
    return _fields(Path(f"/proc/{pid}/status"))


def _fields(path: Path) -> dict[str, int]:
    """The lines "Name:  1234 kB" of a file below /proc, in bytes."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdigit():
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found
