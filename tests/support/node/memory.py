"""Memory of running containers as the node's kernel counts it, sampled from outside.

Used by test_budgets.py. What a limit is about: anonymous and shared memory and the kernel's own.
Page cache is taken back when the others need room, so it is kept apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.support.node import commands

CGROUP = Path("/sys/fs/cgroup")
PERIOD_SECONDS = 0.05


def container_folder(pod: commands.Obj) -> Path:
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


class Sampler:
    """Peaks of several containers, sampled every 50 ms by a process of its own: threads that ask
    would hold it up. After `stop`: `peaks`, `caches` (page cache), `num_samples`, `num_late` (more
    than 100 ms after the one before), `slowest_seconds`."""

    def __init__(self, pods: dict[str, commands.Obj]) -> None:
        folders = {name: str(container_folder(pod)) for name, pod in pods.items()}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(folders)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        self.peaks: dict[str, int] = {}
        self.caches: dict[str, int] = {}
        self.num_samples = self.num_late = 0
        self.slowest_seconds = 0.0

    def stop(self) -> None:
        said, _ = self._process.communicate(timeout=30)
        found = json.loads(said)
        self.peaks, self.caches = found["peaks"], found["caches"]
        self.num_samples, self.num_late = found["num_samples"], found["num_late"]
        self.slowest_seconds = found["slowest_seconds"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{commands.REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}


def _sample(folders: dict[str, Path]) -> commands.Obj:
    """Until standard input ends."""
    peaks, caches = dict.fromkeys(folders, 0), dict.fromkeys(folders, 0)
    num_samples = num_late = 0
    slowest, last = 0.0, time.monotonic()
    while not select.select([sys.stdin], [], [], PERIOD_SECONDS)[0]:
        now = time.monotonic()
        slowest, last, late = max(slowest, now - last), now, now - last > 0.1
        num_samples, num_late = num_samples + 1, num_late + late
        for name, folder in folders.items():
            try:
                used, cache = used_bytes(folder)
            except OSError:  # killed, and made anew under another name
                continue
            peaks[name] = max(peaks[name], used)
            caches[name] = max(caches[name], cache)
    return {"peaks": peaks, "caches": caches, "num_samples": num_samples, "num_late": num_late,
            "slowest_seconds": slowest}  # fmt: skip


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):  # before what it watches, which takes every core
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    paths = {name: Path(folder) for name, folder in json.loads(sys.argv[1]).items()}
    print(json.dumps(_sample(paths)))
