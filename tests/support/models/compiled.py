"""The compiled kernels of each instruction set, for tests that go through all of them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from foveal_runtime.model.cpu import kernels
from foveal_runtime.model.cpu.kernels import cpu_flags, variants

FOLDER = Path(kernels.__file__).parent
ABLE = variants(platform.machine(), cpu_flags())


def paths_of(stem: str) -> list[Path]:
    """Objects of a source that this CPU can run, best first."""
    paths = [FOLDER / f"{stem}_{name}.so" for name in ABLE]
    return [path for path in paths if path.exists()]


def params_of(stem: str) -> list:
    """Every object of a source there is, for `parametrize`; this CPU skips what it cannot run."""
    able = paths_of(stem)
    return [
        pytest.param(
            path,
            id=(name := path.stem.removeprefix(f"{stem}_")),
            marks=pytest.mark.skipif(path not in able, reason=f"this CPU cannot run {name}"),
        )
        for path in sorted(FOLDER.glob(f"{stem}_*.so"))
    ]
