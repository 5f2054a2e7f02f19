"""Tile sizes, warps and pipeline depths of the Triton kernels: numbers to measure, in one place.

Read by the backend; the GPU bench sweeps over them. Chosen from sizes of shared memory and
registers, not from measurements: nothing is tuned at run time, because a serving process must not
stop to try kernels out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from foveal_runtime.model.attention import LayerGeometry

HOST_MULTIPROCESSORS = 4
"""What the interpreter pretends, so that small tests split contexts, too."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """See the module.

    Attributes:
        multiprocessors: of the device.
        programs_each: decode programs wanted for each of them: contexts are cut into more spans
            until there are so many.
        max_splits: of one context.
        decode_heads: query heads of one kv head that a decode program takes at most.
        decode_tile_bytes: keys of one tile; prefill_tile_bytes: the same when prefilling.
        prefill_rows: query tokens by heads of one tile, for heads of up to 256 bytes.
    """

    multiprocessors: int
    programs_each: int = 4
    max_splits: int = 32
    decode_heads: int = 32
    decode_tile_bytes: int = 16384
    decode_warps: int = 4
    decode_stages: int = 3
    prefill_rows: int = 128
    prefill_tile_bytes: int = 16384
    prefill_stages: int = 2

    def num_splits(self, num_programs: int) -> int:
        """Spans of a context in a batch that makes `num_programs` programs without any.

        Follows from the batch's size alone, so that a captured batch fits any lengths.
        """
        wanted = -(-self.multiprocessors * self.programs_each // num_programs)
        return int(triton.next_power_of_2(min(wanted, self.max_splits)))

    def decode_block(self, layer: LayerGeometry, dtype: torch.dtype) -> int:
        """Positions of a decode tile."""
        return _tile(self.decode_tile_bytes, layer, dtype, most=128)

    def prefill_blocks(self, layer: LayerGeometry, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """(rows, positions, warps, stages) of a prefill tile."""
        head_bytes = _head_bytes(layer, dtype)
        rows = self.prefill_rows
        while rows > 32 and rows * head_bytes > self.prefill_rows * 256:
            rows //= 2
        warps = 8 if rows >= 128 else 4
        stages = self.prefill_stages if head_bytes <= 512 else 1
        return rows, _tile(self.prefill_tile_bytes, layer, dtype, most=64), warps, stages


def _head_bytes(layer: LayerGeometry, dtype: torch.dtype) -> int:
    widest = max(layer.key_dim, layer.value_dim)
    return int(triton.next_power_of_2(widest) * dtype.itemsize)


def _tile(size_bytes: int, layer: LayerGeometry, dtype: torch.dtype, most: int) -> int:
    """Positions whose keys take about `size_bytes`: a power of two from 16 to `most`."""
    positions = size_bytes // _head_bytes(layer, dtype)
    return int(max(16, min(most, positions)))


def tuning_for(device: torch.device) -> Tuning:
    if device.type != "cuda":
        return Tuning(HOST_MULTIPROCESSORS, programs_each=4, max_splits=4)
    return Tuning(int(torch.cuda.get_device_properties(device).multi_processor_count))
