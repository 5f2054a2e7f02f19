"""Thread counts from fake cgroup trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foveal_runtime.model.cpu.threads import configure, cpu_limit, num_threads, thread_environment


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "sys/fs/cgroup/cpu,cpuacct"
CASES = {
    "nothing readable": ({}, 8.0),
    "v2 container": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        1.5,
    ),
    "v2 unlimited": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        8.0,
    ),
    "v2 a parent limits": (
        {
            "proc/self/cgroup": "0::/kubepods/pod1/box\n",
            "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "max 100000",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000",
            "sys/fs/cgroup/kubepods/cpu.max": "700000 100000",
        },
        4.0,
    ),
    "v2 path from outside the namespace": (
        {"proc/self/cgroup": "0::/../../pod9/box\n", "sys/fs/cgroup/cpu.max": "300000 100000"},
        3.0,
    ),
    "v1": (
        {
            "proc/self/cgroup": "7:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/\n",
            f"{V1}/docker/a/cpu.cfs_quota_us": "250000",
            f"{V1}/docker/a/cpu.cfs_period_us": "100000",
        },
        2.5,
    ),
    "v1 in a container": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/kubepods/pod/box\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "600000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        6.0,
    ),
    "v1 unlimited": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n",
            f"{V1}/cpu.cfs_quota_us": "-1",
            f"{V1}/cpu.cfs_period_us": "100000",
        },
        8.0,
    ),
    "more quota than CPUs": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000"},
        8.0,
    ),
    "garbage": (
        {"proc/self/cgroup": "what\n::\n0::/\n", "sys/fs/cgroup/cpu.max": "a b"},
        8.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cpu_limit(name: str, tmp_path: Path) -> None:
    files, want = CASES[name]
    assert cpu_limit(tree(tmp_path, files), affinity=8) == pytest.approx(want)


def test_threads_are_shared_and_rounded_down() -> None:
    assert [num_threads(8, n) for n in (1, 2, 3, 100)] == [8, 4, 2, 1]
    assert [num_threads(x) for x in (0.3, 1.0, 1.9, 3.999)] == [1, 1, 1, 3]


def test_this_machine_has_at_least_one_thread() -> None:
    assert 1 <= num_threads(cpu_limit()) <= (os.cpu_count() or 1)


@pytest.mark.extended
def test_configure_reaches_torch_in_a_fresh_process() -> None:
    code = (
        "from foveal_runtime.model.cpu.threads import configure; import os, sys\n"
        "assert configure(1) == 1 and 'torch' not in sys.modules\n"
        "import torch; print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["1", "passive"], done.stderr


def test_the_users_count_wins_over_the_quota_and_the_document_over_both() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        given = {"OMP_NUM_THREADS": "5"}
        assert configure(environ=given) == 5
        assert given.items() >= thread_environment(5).items()
        assert configure(2, environ=given) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
