"""Starting Triton kernels in a third of the time that Triton takes to look up what it compiled.

A step with a prompt in it is not recorded, and starts hundreds of kernels from Python: that, not
the GPU, is what such a step of a usual model takes. Triton binds, specialises and formats every
argument each time, constants included (8 to 25 us); here a compiled kernel is found by what can
change from one launch to the next (docs/decisions/gpu-layers.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime import driver


def next_power_of_2(number: int) -> int:
    """Triton's own takes microseconds, because kernels may call it, too."""
    return 1 << (number - 1).bit_length()


def kernel(function: Any) -> Any:
    """Decorates a function that is launched, above `triton.jit`. Its arguments are given by place,
    its constants and options by name. In the interpreter it stays as it is."""
    return TritonKernel(function) if isinstance(function, triton.JITFunction) else function


class TritonKernel:
    """A Triton kernel for NVIDIA GPUs, and what has been compiled of it.

    Attributes:
        jit: Triton's own, which compiles each form when it is first launched.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._made: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        # As fine as what Triton compiles for, or finer: dtypes and whether addresses are multiples
        # of 16 bytes, whether an integer is 1, a multiple of 16, or longer than 32 bits. Each kind
        # of number is one of few, so the forms that are kept are, too.
        kinds = [
            (one.dtype, not one.data_ptr() & 15)
            if isinstance(one, torch.Tensor)
            else (one if one < 16 else 16 + one % 16 + (one >> 31 << 4))
            if isinstance(one, int)
            else float
            for one in args
        ]
        key = (driver.active.get_current_device(), *kinds, *named, *named.values())
        found = self._made.get(key)
        if found is None:
            made = self.jit[grid](*args, **named)
            constants = tuple(named[name] for name in self.jit.arg_names[len(args) :])
            self._made[key] = made, constants
            return
        made, constants = found
        made[(*grid, 1, 1)[:3]](*args, *constants)
