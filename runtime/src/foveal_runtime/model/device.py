"""Device transfers of a step on a CPU and a GPU: uploads, fetches, and the one place that waits.

Used by the runner, the sampler and attention backends. On a GPU a step is a queue of work that the
host must not wait for: `upload` sends all arrays of a purpose in one copy from pinned memory,
`fetch` brings all results in one copy, and only `Fetch.wait` waits. On a CPU the same calls do the
same things at once. Never computes anything.

PeakMeter, for the profiler, sees the most memory that a piece of work takes: a CUDA allocator
counts exactly; on the host free memory that the C library still holds is given back first, or its
reuse would not show.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from foveal_runtime.plan.errors import StartupError
from foveal_runtime.telemetry.memory import release_free_memory, reset_peak, status_bytes

_ALIGN_BYTES = 16


class Fetch:
    """Tensors on their way to the host. `wait` may be called once."""

    def __init__(self, tensors: Sequence[torch.Tensor], is_pinned: bool) -> None:
        self._shapes = [(tuple(t.shape), t.dtype) for t in tensors]
        # The widest types first: then every piece begins where its type may begin.
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        self._order = order
        flat = [tensors[i].contiguous().reshape(-1).view(torch.uint8) for i in order]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        self._event: Any = None
        if is_pinned:
            # Nothing to bring is still something to wait for.
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            # A sleeping wait: the processor is somebody else's while the device works.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()
        else:
            self._host = packed

    def wait(self) -> list[np.ndarray]:
        """The tensors as arrays, in the order given. The step's one wait."""
        if self._event is not None:
            self._event.synchronize()
        data = self._host.numpy()
        arrays: list[Any] = [None] * len(self._order)
        at = 0
        for i in self._order:
            shape, dtype = self._shapes[i]
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            arrays[i] = data[at : at + size].view(_NUMPY[dtype]).reshape(shape)
            at += size
        return arrays


class Stopwatch:
    """Seconds between its making and `stop`, as the device saw them."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._begin = self._mark()
        self._end: Any = None
        self._other_seconds = 0.0

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, other_seconds: float = 0.0) -> None:
        """`other_seconds` of the time were for something else."""
        self._end, self._other_seconds = self._mark(), other_seconds

    def seconds(self) -> float:
        """Only after `stop`, and on a GPU after a later `Fetch.wait`."""
        if self._is_cuda:
            return float(self._begin.elapsed_time(self._end)) / 1000 - self._other_seconds
        return float(self._end - self._begin) - self._other_seconds


class Device:
    """One torch device. Tests count through a subclass what a step sends and waits for."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_cuda = device.type == "cuda"

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """The arrays as tensors on the device, sent in one copy that nobody waits for."""
        begins, size = [], 0
        for array in arrays:
            begins.append(size)
            size += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        # torch's pinned allocator keeps the block until the copy is done.
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.is_cuda)
        data = host.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            flat = np.ascontiguousarray(array).reshape(-1)
            data[begin : begin + array.nbytes] = flat.view(np.uint8)
        there = host.to(self.torch, non_blocking=True)
        return [
            there[begin : begin + array.nbytes].view(_TORCH[array.dtype.type]).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def send(self, tensor: torch.Tensor, *, is_own: bool = False) -> torch.Tensor:
        """One large host tensor on the device; nobody waits. It is a copy, unless the tensor
        `is_own` (nobody else keeps it) and is on the device already."""
        if not self.is_cuda:
            return tensor if is_own else tensor.clone()
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.torch, non_blocking=True)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host that `send` takes back later; whole when the step is over."""
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.is_cuda)
        kept.copy_(tensor, non_blocking=True)
        return kept

    def settle(self) -> None:
        """Waits for all that the device was asked for."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Starts the one copy back of all that a step found out."""
        return Fetch(tensors, self.is_cuda)

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.is_cuda)


def present(name: str) -> str:
    """`name`. Raises StartupError where PyTorch has no such device, before a weight is read."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(
            f"device {name!r} is not known: use cpu or cuda", param="device"
        ) from None
    if device.type != "cuda":
        return name
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= found:
        raise StartupError(
            f"device {name!r} is not there: PyTorch finds {found} CUDA devices; install the GPU's "
            "driver, or use cpu",
            param="device",
        )
    return name


def open_device(device: torch.device) -> Device:
    """The device, made the current one of this thread: Triton launches there. Float32 means
    float32: convolutions would otherwise be computed with ten bits less."""
    if device.type == "cuda":
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        if device.index is not None:
            torch.cuda.set_device(device)
    return Device(device)


_NUMPY = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}
_TORCH = {there: here for here, there in _NUMPY.items()}


class PeakMeter:
    """Measures on the device named at construction ("cpu", "cuda", "cuda:1")."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes by which memory in use grew at the worst moment of `work`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            before = int(torch.cuda.memory_allocated(self._device))
            work()
            torch.cuda.synchronize(self._device)
            return int(torch.cuda.max_memory_allocated(self._device)) - before
        before = _reset_peak()
        work()
        return max(0, _peak() - before)


def device_peak_bytes(device: str) -> int:
    """The most that this process ever had reserved on the device; 0 on a CPU."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_reserved(device))


def _reset_peak() -> int:
    """Sets the high-water mark to what is resident now; returns that."""
    release_free_memory()
    # Where it cannot be reset, growth beyond the old peak is what can be seen.
    return status_bytes("self").get("VmRSS", 0) if reset_peak("self") else _peak()


def _peak() -> int:
    found = status_bytes("self").get("VmHWM", 0)
    return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
