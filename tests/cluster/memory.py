"""Memory of running containers as the node's kernel counts it, sampled from outside.

Used by test_budgets.py. What a limit is about: anonymous and shared memory and the kernel's own.
Page cache is taken back when the others need room, so it is kept apart.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.cluster import kit

CGROUP = Path("/sys/fs/cgroup")
PERIOD_SECONDS = 0.05


def container_folder(pod: kit.Obj) -> Path:
    """The control group of a pod's one container; of version 2, or version 1's memory hierarchy."""
    name = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    root = CGROUP / "memory" if (CGROUP / "memory").is_dir() else CGROUP
    found = list(root.glob(f"foveal-e2e/kubepods/**/{name}"))
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def used_bytes(folder: Path) -> tuple[int, int]:
    """(anonymous + shared + kernel, page cache)."""
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = {key: int(value) for key, value in (line.split() for line in lines)}
    if "total_rss" in stat:
        kernel = int((folder / "memory.kmem.usage_in_bytes").read_text())
        used = stat["total_rss"] + stat["total_shmem"] + kernel
        return used, stat["total_cache"] - stat["total_shmem"]
    return stat["anon"] + stat["shmem"] + stat["kernel"], stat["file"] - stat["shmem"]


class Sampler(threading.Thread):
    """Peaks of several containers, sampled every 50 ms; `slowest_seconds` says what came true."""

    def __init__(self, pods: dict[str, kit.Obj]) -> None:
        super().__init__(daemon=True)
        self._folders = {name: container_folder(pod) for name, pod in pods.items()}
        self._stopping = threading.Event()
        self.peaks = dict.fromkeys(pods, 0)
        self.caches = dict.fromkeys(pods, 0)
        self.num_samples = 0
        self.slowest_seconds = 0.0
        self.num_late = 0

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(PERIOD_SECONDS):
            now = time.monotonic()
            self.slowest_seconds = max(self.slowest_seconds, now - last)
            self.num_late += now - last > 0.1
            last = now
            self.num_samples += 1
            for name, folder in list(self._folders.items()):
                try:
                    used, cache = used_bytes(folder)
                except OSError:  # killed and made anew under another name
                    del self._folders[name]
                    continue
                self.peaks[name] = max(self.peaks[name], used)
                self.caches[name] = max(self.caches[name], cache)

    def stop(self) -> None:
        self._stopping.set()
        self.join(10)
