"""Settings of the C library's allocator: the free memory that a process keeps.

Called when an HTTP process begins, when an engine is loaded, and by main/footprint.py. What changes
glibc is of no effect with other C libraries. Never changes what a program computes.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

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


def keep_collections_short() -> None:
    """Leaves what is there by now out of all later collections. A process that serves has hundreds
    of thousands of objects from its imports, which each full collection looks at: 0.1 s during
    which its event loop stands."""
    gc.collect()
    gc.freeze()


def release_free_memory() -> None:
    """Gives back what is free already, after work that will not come again."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def taken_bytes(pid: int | str = "self") -> int:
    """What a process takes of its container's limit: anonymous memory and page tables. Pages of
    files are not counted: the kernel takes them back. 0 where the kernel does not tell."""
    fields = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    tables = _fields(Path(f"/proc/{pid}/status")).get("VmPTE", 0)
    return fields.get("Anonymous", 0) + tables if fields else 0


def reset_peak(pid: int) -> bool:
    """Sets the high-water mark of `peak_bytes` to what is resident now."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes(pid: int) -> int:
    """The most that was resident, less the pages of files that are, plus page tables."""
    found = _fields(Path(f"/proc/{pid}/status"))
    return max(0, found.get("VmHWM", 0) - found.get("RssFile", 0) + found.get("VmPTE", 0))


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
