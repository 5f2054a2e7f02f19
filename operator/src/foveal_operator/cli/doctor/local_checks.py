"""This machine, as a place for `foveal up` (or as the node that a pod would get). Pure but for
`runtime`, which looks for the installed packages.

Called by `foveal doctor`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from foveal_operator.cli.doctor.report import Finding, fail, ok, warn
from foveal_runtime.plan.machine import Machine
from foveal_runtime.plan.quantity import short_bytes

_GIB = 1024**3
MIN_MEMORY_BYTES = 4 * _GIB
MIN_SHM_BYTES = 64 * 1024**2
_ENGINE = ("torch", "transformers", "safetensors", "zmq")
_FRONTEND = ("fastapi", "uvicorn", "zmq", "PIL", "transformers")


def local_findings(machine: Machine) -> Iterator[Finding]:
    """Memory, CPUs, shared memory, devices."""
    yield _memory(machine)
    yield from _cgroup(machine)
    yield _cpus(machine)
    yield _flags(machine)
    yield _shared_memory(machine)
    yield _devices(machine)


def _memory(machine: Machine) -> Finding:
    area = "memory"
    if not machine.memory_bytes:
        return warn(area, "not known here", "give --node-memory to foveal plan")
    text = f"{short_bytes(machine.memory_bytes)}, {short_bytes(machine.available_bytes)} available"
    if machine.available_bytes < MIN_MEMORY_BYTES:
        return warn(area, text, "the smallest example needs 4 GiB: end other programs")
    return ok(area, text)


def _cgroup(machine: Machine) -> Iterator[Finding]:
    area = "cgroup"
    if not machine.cgroup_bytes or machine.cgroup_bytes >= machine.memory_bytes:
        yield ok(area, "no memory limit below the machine's")
    elif machine.cgroup_bytes < MIN_MEMORY_BYTES:
        yield warn(area, f"limited to {short_bytes(machine.cgroup_bytes)}",
                   "raise the container's memory limit: what goes beyond it is killed")  # fmt: skip
    else:
        yield ok(area, f"limited to {short_bytes(machine.cgroup_bytes)}; budgets keep to it")


def _cpus(machine: Machine) -> Finding:
    text = f"{machine.cpus:g} to use"
    if machine.cpus < 2:
        return warn("cpus", text, "a frontend and an engine share one CPU: answers will be slow")
    return ok("cpus", text)


def _flags(machine: Machine) -> Finding:
    area, arch = "cpu kernels", platform.machine()
    if arch not in ("x86_64", "AMD64"):
        return ok(area, f"{arch}: engines on the CPU use torch's own kernels")
    if not machine.cpu_flags:
        return warn(area, "the CPU's flags are not known", "see /proc/cpuinfo for avx2 and amx")
    flags = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
             if name in machine.cpu_flags]  # fmt: skip
    if "avx2" not in flags or "fma" not in machine.cpu_flags:
        return warn(area, "no AVX2 with FMA: engines on this CPU use torch's own kernels",
                    "use a CPU of 2013 or later for engines on CPUs")  # fmt: skip
    return ok(area, ", ".join(flags) + ("" if "amx_bf16" in flags else "; no AMX"))


def _shared_memory(machine: Machine) -> Finding:
    area = "/dev/shm"
    if not machine.shm_bytes:
        return fail(area, "is not there", "mount a tmpfs on /dev/shm: media workers need it")
    text = f"{short_bytes(machine.shm_bytes)}, {short_bytes(machine.shm_free_bytes)} free"
    if machine.shm_free_bytes < MIN_SHM_BYTES:
        return fail(area, text, "free it, or give the container a larger one (--shm-size)")
    if machine.shm_bytes <= MIN_SHM_BYTES:
        return warn(area, f"{text}: the default of containers, too small for video",
                    "give the container a larger one (--shm-size=1g)")  # fmt: skip
    return ok(area, text)


def _devices(machine: Machine) -> Finding:
    if not machine.devices:
        return ok("gpus", "none found; engines run with accelerator.type CPU, or --cpu")
    sizes = ", ".join(short_bytes(size) for size in machine.devices)
    return ok("gpus", f"{len(machine.devices)}: {sizes}")


def runtime_findings() -> Iterator[Finding]:
    """Whether this Python could run the processes."""
    area = "runtime"
    missing = {role: [name for name in names if find_spec(name) is None]
               for role, names in (("engine", _ENGINE), ("frontend", _FRONTEND))}  # fmt: skip
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    for role, names in missing.items():
        if names:
            yield warn(area, f"{python} lacks {', '.join(names)} for {role}s",
                       f"pip install 'foveal-runtime[{role}]', to use foveal up")  # fmt: skip
    if not any(missing.values()):
        yield ok(area, f"foveal-runtime {_version()} can run in this {python}")


def _version() -> str:
    try:
        return version("foveal-runtime")
    except PackageNotFoundError:
        return "(from source)"
