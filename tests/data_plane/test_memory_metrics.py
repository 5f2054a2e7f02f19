"""A container's memory as metrics, from the files of both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foveal_runtime.telemetry.memory import memory_source
from foveal_runtime.telemetry.metrics import Metrics

V2 = {
    "memory.max": "1000000\n",
    "memory.stat": "anon 500\nfile 300\nkernel 40\nshmem 100\nworkingset_nodes 1\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "1000000\n",
    "memory/memory.kmem.usage_in_bytes": "40\n",
    "memory/memory.stat": "rss 1\ntotal_rss 500\ntotal_cache 300\ntotal_shmem 100\n",
}


def exposed(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    metrics = Metrics("engine", model_name="m", process="engine-0", engine="engine-0")
    metrics.add_source(memory_source(root))
    return metrics.exposition().decode()


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_measured_is_what_the_kernel_cannot_take_back(tmp_path: Path, files: dict[str, str]):
    """Anonymous, shared and kernel memory count toward the limit; other page cache stands apart."""
    found = {
        (sample.labels["part"], sample.labels["source"]): sample.value
        for family in text_string_to_metric_families(exposed(tmp_path, files))
        for sample in family.samples
        if sample.name == "foveal_budget_bytes"
    }
    assert found == {
        ("pod", "planned"): 1_000_000,
        ("pod", "measured"): 640,
        ("pageCache", "measured"): 200,
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
def test_nothing_is_said_without_a_limit(tmp_path: Path, files: dict[str, str]):
    assert "part=" not in exposed(tmp_path, files)
