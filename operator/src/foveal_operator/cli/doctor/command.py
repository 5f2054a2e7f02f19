"""`foveal doctor`: checks the cluster and this machine (a place for `foveal up`) for problems."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec

from foveal_operator.cli.arguments import (
    OUTPUTS,
    Commands,
    Connect,
    add_cluster_flags,
    add_command,
    connect,
    formatted,
)
from foveal_operator.cli.doctor.cluster_checks import (
    api_findings,
    clock_findings,
    definition_findings,
    device_findings,
    guarded,
    namespace_findings,
    node_findings,
    operator_findings,
    rights_findings,
    storage_findings,
    version_findings,
)
from foveal_operator.cli.doctor.report import Finding, fail, ok, report_text, warn
from foveal_operator.cli.terminal import style_of
from foveal_operator.common.errors import EXIT_NO, EXIT_OK, ClusterAnswerError
from foveal_operator.common.versions import installed_version
from foveal_operator.kube.reader import NotConfiguredError, Reader
from foveal_runtime.plan import machine
from foveal_runtime.plan.config import GIB, MIB
from foveal_runtime.plan.machine import Machine
from foveal_runtime.plan.quantity import short_bytes

_DESCRIPTION = "Checks the cluster, your rights in it, and this machine."
_EPILOG = """\
Reads only. Each line is ok, warn (degraded, or unknown) or fail (nothing runs until it
is fixed); each warning and failure names a next step.

exit codes: 0 no check fails, 1 a check fails
"""
_CHECKS = (
    ("api server", version_findings),
    ("clock", clock_findings),
    ("definition", definition_findings),
    ("operator", operator_findings),
    ("your rights", rights_findings),
    ("namespace", namespace_findings),
    ("nodes", node_findings),
    ("devices", device_findings),
    ("storage", storage_findings),
    ("apis", api_findings),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "doctor", "check the cluster and this machine for problems",
                         run, _DESCRIPTION, _EPILOG)  # fmt: skip
    parser.add_argument("-o", "--output", choices=OUTPUTS, default="table")
    parser.add_argument("--local", action="store_true", help="this machine only, no cluster")
    add_cluster_flags(parser)


def run(arguments: argparse.Namespace, open_cluster: Connect = connect) -> int:
    findings = [] if arguments.local else list(_of_cluster(arguments, open_cluster))
    if arguments.local or not findings or findings[0].area == "cluster":
        findings += [*local_findings(machine.look()), *runtime_findings()]
    if arguments.output == "table":
        sys.stdout.write(report_text(findings, style_of(sys.stdout)))
    else:
        sys.stdout.write(formatted([msgspec.to_builtins(f) for f in findings], arguments.output))
    return EXIT_NO if any(finding.level == "fail" for finding in findings) else EXIT_OK


def _of_cluster(arguments: argparse.Namespace, open_cluster: Connect) -> Iterator[Finding]:
    """Stops at the first check that gets no answer at all."""
    try:
        reader = open_cluster(arguments)
    except NotConfiguredError as error:
        if arguments.kubeconfig or arguments.context:
            yield fail("cluster", str(error), "name a file and a context that exist")
        else:
            yield warn("cluster", "none is configured; this machine was checked instead", "set "
                       "KUBECONFIG or give --kubeconfig, to check one")  # fmt: skip
        return
    except ClusterAnswerError as error:
        yield fail("cluster", str(error), "correct the file, or name another with --kubeconfig")
        return
    yield from cluster_findings(reader)


def cluster_findings(reader: Reader) -> Iterator[Finding]:
    """Every check, in order."""
    try:
        for area, check in _CHECKS:
            yield from guarded(area, check, reader)
    except ClusterAnswerError as error:
        yield fail("cluster", str(error), "check the kubeconfig's server, the network and the user")


MIN_MEMORY_BYTES = 4 * GIB
MIN_SHM_BYTES = 64 * MIB
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
        installed = installed_version("foveal-runtime", "(from source)")
        yield ok(area, f"foveal-runtime {installed} can run in this {python}")
