"""What the processes of a server cost: CPU seconds and memory, from /proc.

Looks only at a process that the bench started and at its descendants. A process that ends between
two looks takes the CPU seconds since the first with it (servers' processes live as long as they).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import psutil

ROLES = (
    ("media worker", ("foveal_runtime", "media.worker")),
    ("engine", ("cli", "engine", "--config")),
    ("frontend", ("cli", "frontend", "--config")),
    ("launcher", ("cli", "serve")),
    ("engine core", ("EngineCore",)),
    ("worker", ("Worker",)),
    ("API server", ("APIServer",)),
    ("API server", ("vllm", "serve")),
    ("server", ("transformers", "serve")),
)


def role_of(command: list[str]) -> str:
    """A short name for a process of one of the servers, by its command line."""
    line = " ".join(command)
    if "resource_tracker" in line or "forkserver" in line:
        return "helpers"
    for role, words in ROLES:
        if all(word in line for word in words):
            return role
    return Path(command[0]).name if command and command[0] else "other"


def tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants, those that ended left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def cpu_seconds(pid: int) -> dict[tuple[int, str], float]:
    """User and system seconds so far by (pid, role)."""
    found = {}
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid, role_of(process.cmdline())] = times.user + times.system
    return found


def cpu_between(
    before: dict[tuple[int, str], float], after: dict[tuple[int, str], float]
) -> dict[str, float]:
    """CPU seconds by role, equal roles added up."""
    spent: Counter[str] = Counter()
    for key, seconds in after.items():
        spent[key[1]] += seconds - before.get(key, 0.0)
    return dict(spent)


def pss_bytes(pid: int) -> dict[str, int]:
    """Proportional set size by role: memory that processes share is divided among them."""
    held: Counter[str] = Counter()
    for process in tree(pid):
        with contextlib.suppress(psutil.Error, OSError):
            role = role_of(process.cmdline())
            held[role] += read_pss(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
    return dict(held)


def read_pss(rollup: str) -> int:
    """Bytes of the `Pss:` line of a smaps_rollup file; 0 when there is none."""
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
