"""Kernels that were compiled are launched as Triton launches them, on a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.support

pytest.importorskip("triton")
SCRIPT = Path(tests.support.__path__[0]) / "models" / "triton_launch.py"


def test_a_launch_is_the_same_as_tritons() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    first, again = found[: len(found) // 2], found[len(found) // 2 :]
    assert [one["case"] for one in found if not one["same"]] == []
    assert [one["function"] for one in first] == [one["function"] for one in again]
    of = {one["case"]: one["function"] for one in first}
    assert of["float32 16"] == of["float32 64"]
    different = ["float32 1", "float32 15", "float32 16", f"float32 {2**31}", "bfloat16 16",
                 "more warps", "wider", "another device"]  # fmt: skip
    assert len({of[case] for case in different}) == len(different)
    assert of["unaligned 16"] != of["float32 16"]
    assert first[-1]["forms"] == again[-1]["forms"] < len(first)
