"""Facts of this machine: memory, CPUs, devices, shared memory. Reads, never writes.

`foveal-runtime serve` and `foveal up` plan with them as the operator does with a node's, `foveal
doctor` reports them. `root` is "/" except in tests.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from foveal_runtime.plan.config import MIB

_UNLIMITED = 1 << 60


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """0 = not known, or no limit.

    Attributes:
        memory_bytes: what the machine has; cgroup_bytes: what this process's cgroup may use.
        cpus: CPUs that this process may use, as its quota says.
        shm_bytes, shm_free_bytes: size and room of /dev/shm.
        cpu_flags: of the first CPU, lower case.
        devices: memory of each GPU that CUDA_VISIBLE_DEVICES leaves, as far as it is known.
        num_listed: GPUs that the driver's tool lists, all of them.
    """

    memory_bytes: int = 0
    available_bytes: int = 0
    cgroup_bytes: int = 0
    cpus: float = 1.0
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    cpu_flags: frozenset[str] = frozenset()
    devices: tuple[int, ...] = ()
    num_listed: int = 0

    @property
    def limit_bytes(self) -> int:
        """The smaller of the two limits that apply."""
        return min(self.memory_bytes or self.cgroup_bytes, self.cgroup_bytes or self.memory_bytes)

    @property
    def usable_bytes(self) -> int:
        """Host memory that a deployment may plan with: what other programs have left."""
        sizes = [size for size in (self.available_bytes, self.limit_bytes) if size]
        return min(sizes, default=0)


def look(root: Path = Path("/"), *, with_devices: bool = True) -> Machine:
    """Facts of this machine. What cannot be read is 0."""
    info = dict(
        line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line
    )
    shm = root / "dev/shm"
    total, free = 0, 0
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        total, free = usage.total, usage.free
    sizes = _device_sizes() if with_devices else {}
    return Machine(
        memory_bytes=_kib(info.get("MemTotal", "")),
        available_bytes=_kib(info.get("MemAvailable", "")),
        cgroup_bytes=_cgroup_bytes(root),
        cpus=_cpus(root),
        shm_bytes=total,
        shm_free_bytes=free,
        cpu_flags=_cpu_flags(root),
        devices=_visible_sizes(sizes),
        num_listed=len(sizes),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _kib(text: str) -> int:
    first = text.split()[0] if text.split() else "0"
    return int(first) * 1024 if first.isdigit() else 0


def _cgroup_folder(root: Path) -> Path:
    """Where this process's limits stand (version 2); in a container that is the mount itself."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = root / "sys/fs/cgroup" / line[3:].strip().lstrip("/")
            if folder.is_dir():
                return folder
    return root / "sys/fs/cgroup"


def _cgroup_bytes(root: Path) -> int:
    """The tightest limit of the cgroup and those above it, or version 1's."""
    top, folder = root / "sys/fs/cgroup", _cgroup_folder(root)
    texts = [_read(folder / "memory.max")]
    while folder not in (top, folder.parent):
        folder = folder.parent
        texts.append(_read(folder / "memory.max"))
    texts.append(_read(top / "memory/memory.limit_in_bytes"))
    sizes = [int(text) for text in texts if text.strip().isdigit()]
    return min((size for size in sizes if 0 < size < _UNLIMITED), default=0)


def _cpus(root: Path) -> float:
    """The quota, or the CPUs that this process may run on."""
    allowed = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1.0
    quota, _, period = _read(_cgroup_folder(root) / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit() and int(period) > 0:
        return min(allowed, int(quota) / int(period))
    return allowed


def _cpu_flags(root: Path) -> frozenset[str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].lower().split())
    return frozenset()


def visible_devices() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, up to the first entry that is none, as CUDA reads it; None
    where it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def _device_sizes() -> dict[str, int]:
    """Memory of each NVIDIA device by UUID, as its driver's tool tells; 0: it does not, or programs
    get a part of it (MIG)."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return {}
    command = [
        tool,
        "--query-gpu=uuid,memory.total,mig.mode.current",
        "--format=csv,noheader,nounits",
    ]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.replace(" ", "").split(",") for line in out.stdout.splitlines()]
    return {
        row[0]: int(row[1]) * MIB if row[1].isdigit() and "Enabled" not in row[2:] else 0
        for row in rows
        if row[1:]
    }


def _visible_sizes(sizes: dict[str, int]) -> tuple[int, ...]:
    """Of those that programs may use."""
    names = visible_devices()
    found = sizes.values() if names is None else (_size_of(name, sizes) for name in names)
    return tuple(itertools.takewhile(bool, found))


def _size_of(name: str, sizes: dict[str, int]) -> int:
    """Of a device by its number or the beginning of its UUID; 0: not known. By number it is that of
    the smallest: CUDA counts the fastest first, the tool by slot."""
    if not name.isdigit():
        return next((size for uuid, size in sizes.items() if uuid.startswith(name)), 0)
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return dict(enumerate(sizes.values())).get(int(name), 0)
    return min(sizes.values()) if int(name) < len(sizes) else 0
