"""Starts Triton kernels for an NVIDIA GPU that is not there, in both ways, and compares launches.

What is compiled is compiled for a GPU of compute capability 9.0; the driver only notes down what it
is asked to launch. Run by test_launch.py in a process of its own, because in tests the kernels are
interpreted. Prints a JSON line for each case.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import LazyDict
from triton.runtime import driver

from foveal_runtime.model.gpu.kernels import norm_kernel
from foveal_runtime.model.gpu.launch import kernel

STREAM = 77


def comparable(argument: Any) -> Any:
    if isinstance(argument, LazyDict):  # what profilers are told
        return argument.data
    return id(argument) if torch.is_tensor(argument) else argument


class Note:
    """Launches of the driver: grid, stream, loaded kernel, arguments."""

    launches: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, *_: object) -> None: ...

    def __call__(self, *launch: Any) -> None:
        self.launches.append(tuple(map(comparable, launch)))


class Driver:
    launcher_cls = Note

    def __init__(self) -> None:
        self.utils = self
        self.device = 0

    def load_binary(self, name: str, binary: bytes, *_: object) -> tuple[int, int, int, int, int]:
        return 1, hash((name, binary, self.device)), 32, 0, 1024

    def unload_module(self, module: int) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM


@kernel
@triton.jit
def scale_kernel(x, out, stride, factor, WIDTH: tl.constexpr):
    """Rows of x by a factor: grid (rows)."""
    at = tl.program_id(0) * stride + tl.arange(0, WIDTH)
    tl.store(out + at, (tl.load(x + at) * factor).to(out.dtype.element_ty))


def launches_of(*ways: Any) -> list[tuple[Any, ...]]:
    Note.launches.clear()
    for way in ways:
        way()
    return list(Note.launches)


def check(case: str, launched: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """The first launch, a later one, and Triton's own must be the same."""

    def found() -> None:
        launched[grid](*args, **named)

    found()
    later, own = launches_of(found, lambda: launched.jit[grid](*args, **named))
    print(json.dumps({"case": case, "same": later == own, "function": own[4],
                      "forms": len(launched._made)}))  # fmt: skip


def main() -> None:
    fake = Driver()
    driver.set_active(fake)
    flat = torch.zeros(4096)
    tensors = {
        "float32": (flat, flat[1024:]),
        "bfloat16": (flat.bfloat16(), flat.bfloat16()),
        "unaligned": (flat[1:], flat),
    }
    for _ in range(2):  # again, when all of them have been compiled
        for name, (x, out) in tensors.items():
            for stride in (1, 15, 16, 64, 65, 2**31, 2**31 + 1):
                check(f"{name} {stride}", scale_kernel, (3,), x, out, stride, 0.5, WIDTH=512)
        check("more warps", scale_kernel, (2, 1), flat, flat, 64, 2.0, WIDTH=512, num_warps=8)
        check("wider", scale_kernel, (2, 1, 1), flat, flat, 64, 2.0, WIDTH=1024)
        for early in ({"EARLY": False}, {"EARLY": True, "launch_pdl": True}):
            check(f"norm {early}", norm_kernel, (4,), flat, flat, flat, flat, 64, 1e-6, WIDTH=64,
                  OFFSET=0.0, HAS_RESIDUAL=True, BLOCK=64, num_warps=4, **early)  # fmt: skip
        fake.device = 1
        check("another device", scale_kernel, (3,), flat, flat, 64, 0.5, WIDTH=512)
        fake.device = 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
