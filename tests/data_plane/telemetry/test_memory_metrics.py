"""A container's memory as metrics, from the files of both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foveal_runtime.telemetry.memory import ContainerMemory
from foveal_runtime.telemetry.metrics import Metrics

V2 = {
    "memory.max": "1000000\n",
    "memory.peak": "900\n",
    "memory.stat": "anon 500\nfile 300\nkernel 40\nshmem 100\nworkingset_nodes 1\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "1000000\n",
    "memory/memory.max_usage_in_bytes": "900\n",
    "memory/memory.kmem.usage_in_bytes": "40\n",
    "memory/memory.stat": "rss 1\ntotal_rss 500\ntotal_cache 300\ntotal_shmem 100\n",
}


def memory(root: Path, files: dict[str, str]) -> ContainerMemory:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return ContainerMemory(root)


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_used_is_what_the_kernel_cannot_take_back(tmp_path: Path, files: dict[str, str]) -> None:
    """Anonymous, shared and kernel memory count toward the limit; other page cache stands apart."""
    metrics = Metrics("engine", model_name="m", process="engine-0", engine="engine-0")
    metrics.add_source(memory(tmp_path, files).collect)
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if sample.name.startswith("foveal_memory_")
    }
    assert found == {
        "foveal_memory_limit_bytes": 1_000_000,
        "foveal_memory_peak_bytes": 900,
        "foveal_memory_used_bytes": 640,
        "foveal_memory_page_cache_bytes": 200,
    }


@pytest.mark.parametrize(
    "files",
    [
        {},
        {**V2, "memory.max": "max\n"},
        {**V1, "memory/memory.limit_in_bytes": "9223372036854771712\n"},
    ],
    ids=["no cgroup", "v2 without limit", "v1 without limit"],
)
def test_without_a_limit_there_is_no_use_of_it(tmp_path: Path, files: dict[str, str]) -> None:
    """On a host without containers version 1 shows the whole machine: not this process."""
    found = memory(tmp_path, files)
    assert found.limit_bytes() == 0
    assert found.used_bytes() == (0, 0)
    assert found.peak_bytes() != 900 or "memory.peak" in files
