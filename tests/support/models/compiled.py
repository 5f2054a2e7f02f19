"""The compiled kernels of each instruction set, for tests that go through all of them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from foveal_runtime.model.cpu import kernels
from foveal_runtime.model.cpu.kernels import cpu_flags, load_decoder_kernel, variants
from foveal_runtime.model.cpu.packing import can_pack

FOLDER = Path(kernels.__file__).parent
ABLE = variants(platform.machine(), cpu_flags())
NEEDS_PACKING = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this torch packs no linear layers"
)
NEEDS_KERNEL = pytest.mark.skipif(
    isinstance(load_decoder_kernel(), str), reason=str(load_decoder_kernel())
)


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
