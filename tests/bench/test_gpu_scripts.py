"""The GPU benches work as programs; what they measure without a GPU means nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", str(ROOT / "runtime/src"))])
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **env},
    )  # fmt: skip


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """An nvidia-smi that finds nothing, as on machines with a driver and no card."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    tool.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run(ROOT / "e2e/bench/gpu.sh", PATH=path, OUT=str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr == "gpu.sh: there is no NVIDIA GPU here\n"
    assert not (tmp_path / "out").exists()


def test_a_part_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """It ran nothing, and said that all parts ran."""
    done = run(ROOT / "e2e/bench/gpu.sh", "step", "atention", OUT=str(tmp_path / "out"))
    assert done.returncode == 2
    assert "there is no part 'atention'; the parts are: attention-tests " in done.stderr


def test_a_sweep_has_each_setting_once() -> None:
    from e2e.bench.gpu.attention import SWEEP, tunings
    from foveal_runtime.model.attention.triton import Tuning

    usual = Tuning(132)
    for how, count in (("one", sum(map(len, SWEEP.values())) - len(SWEEP) + 1),
                       ("all", math.prod(map(len, SWEEP.values())))):  # fmt: skip
        found = tunings(usual, how)
        assert found[0] == usual
        assert len(set(found)) == len(found) == count
    assert tunings(usual, None) == [usual]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "cases"),
    [
        ("step", {"as it is", "recording", "recorded", "recorded, ahead"}),
        ("step --hybrid", {"by modules", "as it is", "recording", "recorded", "recorded, ahead"}),
        ("attention", {"correct", "decode", "torch decode", "sweep", "prefill", "torch prefill"}),
    ],
)
def test_every_case_is_measured(module: str, cases: set[str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    module, *flags = module.split()
    flags += ["--sweep", "one"] if module == "attention" else []
    done = run(sys.executable, "-m", f"e2e.bench.gpu.{module}", "--device", "cpu", "--tiny",
               "--out", out, *flags, TRITON_INTERPRET="1")  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert {row["case"] for row in found["rows"]} == cases
    assert all(row["worked"] for row in found["rows"] if row["case"] == "recording")
    assert found["facts"]["device"] == "cpu"
    assert found["limits"]["copy_bytes_per_second"] > 0
