"""Paged attention in Triton: the GPU's backend, which tests run in Triton's interpreter on CPUs.

Tokens of sequences with at most MAX_ROWS query tokens are decoded row by row, the context cut into
spans that different programs read (a second kernel joins them); longer chunks, and short ones with
bidirectional groups, go through the prefill kernel in tiles. A mixed batch does both. Nothing here
waits for the device, and a batch of single tokens needs no numbers from the host: so it can be
captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from triton import knobs

from foveal_runtime.model.attention import (
    FP8,
    FP8_MAX,
    AttentionBackend,
    BackendRequest,
    ForwardContext,
    LayerGeometry,
    register,
)
from foveal_runtime.model.attention.triton import kernels
from foveal_runtime.model.device import Device, open_device
from foveal_runtime.model.gpu.kernels import early_start
from foveal_runtime.model.gpu.launch import next_power_of_2
from foveal_runtime.plan.errors import StartupError

HOST_MULTIPROCESSORS = 4
"""What the interpreter pretends, so that small tests split contexts, too."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes, warps and pipeline depths of the kernels, in one place.

    Measured on an H200 (docs/decisions/gpu-attention.md); nothing is tuned at run time, because a
    serving process must not stop to try kernels out. The GPU bench sweeps over them.

    Attributes:
        multiprocessors: of the device.
        programs_each: decode programs that each of them runs at once.
        max_splits: of one context.
        decode_heads: query heads of one kv head that a decode program takes at most.
        decode_tile_bytes: keys of one tile; prefill_tile_bytes: the same when prefilling.
        prefill_rows: query tokens by heads of one tile, for heads of up to 512 bytes.
    """

    multiprocessors: int
    programs_each: int = 4
    max_splits: int = 32
    decode_heads: int = 32
    decode_tile_bytes: int = 16384
    decode_warps: int = 2
    decode_stages: int = 2
    prefill_rows: int = 64
    prefill_tile_bytes: int = 16384
    prefill_warps: int = 4
    prefill_stages: int = 2

    def num_splits(self, num_programs: int) -> int:
        """Spans of a context in a batch that makes `num_programs` programs without any: those that
        keep all multiprocessors busy to the end.

        Follows from the batch's size alone, so that a captured batch fits any lengths.
        """
        at_once = self.multiprocessors * self.programs_each
        return _num_splits(num_programs, at_once, self.max_splits)

    def decode_block(self, layer: LayerGeometry, dtype: torch.dtype) -> int:
        """Positions of a decode tile."""
        return _tile(self.decode_tile_bytes, layer, dtype, most=128)

    def reduce_warps(self, width: int) -> int:
        """As few as can hold the spans of a head with so many values, all loaded at once."""
        return 1 if self.max_splits * width <= 4096 else 2

    def prefill_blocks(self, layer: LayerGeometry, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """(rows, positions, warps, stages) of a prefill tile."""
        head_bytes = _head_bytes(layer, dtype)
        rows = self.prefill_rows
        while rows > 32 and rows * head_bytes > self.prefill_rows * 512:
            rows //= 2
        stages = self.prefill_stages if head_bytes <= 512 else 1
        positions = _tile(self.prefill_tile_bytes, layer, dtype, most=64)
        return rows, positions, self.prefill_warps, stages


@functools.lru_cache(maxsize=1024)
def _num_splits(num_programs: int, at_once: int, most: int) -> int:
    def tiles_read(splits: int) -> float:
        """One after the other, until the last program ends."""
        rounds = -(-num_programs * splits // at_once)
        return rounds * (_USUAL_TILES / splits + _START_TILES)

    return min(range(1, most + 1), key=tiles_read)


def _head_bytes(layer: LayerGeometry, dtype: torch.dtype) -> int:
    widest = max(layer.key_dim, layer.value_dim)
    return int(next_power_of_2(widest) * dtype.itemsize)


def _tile(size_bytes: int, layer: LayerGeometry, dtype: torch.dtype, most: int) -> int:
    """Positions whose keys take about `size_bytes`: a power of two from 16 to `most`."""
    positions = size_bytes // _head_bytes(layer, dtype)
    return int(max(16, min(most, positions)))


def tuning_for(device: torch.device) -> Tuning:
    if device.type != "cuda":
        return Tuning(HOST_MULTIPROCESSORS, programs_each=4, max_splits=4)
    return Tuning(int(torch.cuda.get_device_properties(device).multi_processor_count))


MAX_ROWS = 4
MAX_HEAD_DIM = 256
MIN_DOT = 16
"""Triton's matrix products take no side shorter than this."""
FP8_CAPABILITY = (8, 9)
_WRITE_BLOCK = 1024
VECTOR = 8
"""Values of a query that are loaded at once, where its strides allow that."""
FEW_SPLITS = 8
"""Spans that are joined in less time than the most there can be: a batch of 16 has 4 or 8."""
_USUAL_TILES = 32
"""Of a context that spans are chosen for."""
_START_TILES = 3
"""As many tiles could be read in the time a program takes to begin and to leave its sums."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Division:
    """How one batch is divided.

    Attributes:
        rows: i32 tokens that are decoded; None when every token is one, in order.
        long: (sequence, query tokens) of those that are not.
        tiles: by query tokens a tile, i32 (tiles) each: sequence and first query token. Two
            tensors: the second half of one may begin where a vector cannot be loaded, for which
            Triton would compile the kernel once more, while clients wait.
    """

    rows: torch.Tensor | None
    num_rows: int
    long: list[tuple[int, int]]
    tiles: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class TritonBackend:
    """See AttentionBackend for shapes. A ForwardContext object stands for one step's batch."""

    is_static = True

    def __init__(self, device: Device, tuning: Tuning) -> None:
        self._device = device
        self.tuning = tuning
        self._context: ForwardContext | None = None
        self._divisions: dict[bool, _Division] = {}
        self._all_rows = torch.arange(0, dtype=torch.int32, device=device.torch)
        self._outgrown: list[torch.Tensor] = []  # recordings may still read them

    def write_kv(
        self,
        layer: LayerGeometry,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
    ) -> None:
        keys, values = context.pool.keys[layer.index], context.pool.values[layer.index]
        key, value = _dense(key), _dense(value)
        key_width = layer.num_kv_heads * layer.key_dim
        value_width = layer.num_kv_heads * layer.value_dim
        block = min(_WRITE_BLOCK, next_power_of_2(max(key_width, value_width)))
        grid = (key.shape[0], -(-max(key_width, value_width) // block))
        kernels.write_kernel[grid](
            key, value, keys, values, context.slots_of(layer),
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            KEY_WIDTH=key_width, VALUE_WIDTH=value_width, DK=layer.key_dim, DV=layer.value_dim,
            BLOCK=block, LARGEST=FP8_MAX if keys.dtype == FP8 else 0.0,
        )  # fmt: skip

    def attend(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        context: ForwardContext,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = _dense(query)
        out = query.new_empty(query.shape[0], layer.num_heads, layer.value_dim)
        division = self._divided(context, context.groups_of(layer) is not None)
        if division.num_rows:
            self._decode(layer, query, context, division, out, sinks)
        if division.long:
            self._prefill(layer, query, context, division, out, sinks)
        return out

    def _divided(self, context: ForwardContext, has_groups: bool) -> _Division:
        """The division is the same for every layer of a step that honours groups, or ignores
        them."""
        if self._context is not context:
            self._context, self._divisions = context, {}
        if has_groups not in self._divisions:
            self._divisions[has_groups] = self._divide(context, has_groups)
        return self._divisions[has_groups]

    def _divide(self, context: ForwardContext, has_groups: bool) -> _Division:
        q_lens = context.q_lens
        if not has_groups and max(q_lens) == 1:
            if len(q_lens) > len(self._all_rows):
                self._outgrown.append(self._all_rows)
                # Copied: a kernel that starts early would not wait for a kernel that makes them.
                numbers = torch.arange(next_power_of_2(len(q_lens)), dtype=torch.int32)
                self._all_rows = numbers.to(self._device.torch)
            return _Division(None, len(q_lens), [])
        rows: list[int] = []
        long: list[tuple[int, int]] = []
        start = 0
        for i, q_len in enumerate(q_lens):
            # One token alone sees no later one, whatever its group; groups are not looked up here,
            # because that would wait for the device.
            if q_len == 1 or (q_len <= MAX_ROWS and not has_groups):
                rows.extend(range(start, start + q_len))
            else:
                long.append((i, q_len))
            start += q_len
        there = self._device.upload(np.array(rows, np.int32))[0] if rows else None
        return _Division(there, len(rows), long)

    def _tiles(self, division: _Division, tokens: int) -> list[torch.Tensor]:
        found = division.tiles.get(tokens)
        if found is None:
            pairs = [(i, first) for i, q_len in division.long for first in range(0, q_len, tokens)]
            pairs.reverse()  # late tiles see the most: they must not come last
            found = self._device.upload(*np.array(pairs, np.int32).T)
            division.tiles[tokens] = found
        return found

    def _decode(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        context: ForwardContext,
        division: _Division,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        tuning = self.tuning
        rows = self._all_rows if division.rows is None else division.rows
        group = layer.num_heads // layer.num_kv_heads
        heads, table = min(group, tuning.decode_heads), context.table_of(layer)
        programs = layer.num_kv_heads * -(-group // heads)
        splits = tuning.num_splits(division.num_rows * programs)
        early, wide = early_start(query.device), next_power_of_2(layer.value_dim)
        vector = math.gcd(VECTOR, query.stride(0), query.stride(1))
        part, tops, totals = out, out, out
        if splits > 1:
            shape = (division.num_rows, layer.num_heads, splits)
            part = query.new_empty((*shape, layer.value_dim), dtype=torch.float32)
            tops, totals = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
        kernels.decode_kernel[division.num_rows, programs, splits](
            query, *_pool(layer, context), part, tops, totals, out if sinks is None else sinks,
            rows, context.seq_of_token, context.pos_of_token, table,
            query.stride(0) // vector, query.stride(1) // vector, table.stride(0), layer.scaling,
            splits,
            HEADS=heads,
            BLOCK_H=max(MIN_DOT, next_power_of_2(heads)),
            BLOCK_N=tuning.decode_block(layer, query.dtype),
            HAS_SINKS=sinks is not None,
            IS_SPLIT=splits > 1,
            VECTOR=vector,
            num_warps=tuning.decode_warps, num_stages=tuning.decode_stages,
            **_constants(layer, context), **early,
        )  # fmt: skip
        if splits > 1:
            kernels.reduce_kernel[division.num_rows, layer.num_heads](
                part, tops, totals, out if sinks is None else sinks, rows, out, splits,
                NUM_HEADS=layer.num_heads, DV=layer.value_dim, FEW=FEW_SPLITS,
                BLOCK_S=next_power_of_2(tuning.max_splits), BLOCK_DV=wide,
                HAS_SINKS=sinks is not None, num_warps=tuning.reduce_warps(wide), **early,
            )  # fmt: skip

    def _prefill(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        context: ForwardContext,
        division: _Division,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        tuning = self.tuning
        group = layer.num_heads // layer.num_kv_heads
        groups, table = context.groups_of(layer), context.table_of(layer)
        block_m, block_n, warps, stages = tuning.prefill_blocks(layer, query.dtype)
        heads = min(group, block_m)
        tiles = self._tiles(division, block_m // heads)
        kernels.prefill_kernel[len(tiles[0]), layer.num_kv_heads * -(-group // heads)](
            query, *_pool(layer, context), out, out if sinks is None else sinks,
            tiles[0], tiles[1], context.q_start, context.seq_lens, table,
            context.q_start if groups is None else groups,
            query.stride(0), query.stride(1), table.stride(0), layer.scaling,
            HEADS=heads, BLOCK_M=block_m, BLOCK_N=block_n,
            HAS_SINKS=sinks is not None,
            HAS_GROUPS=groups is not None,
            GROUPS_IGNORE_WINDOW=layer.groups_ignore_window,
            num_warps=warps, num_stages=stages,
            **_constants(layer, context),
        )  # fmt: skip


def _pool(layer: LayerGeometry, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
    return context.pool.keys[layer.index], context.pool.values[layer.index]


def _constants(layer: LayerGeometry, context: ForwardContext) -> dict[str, object]:
    """What both kernels are compiled for: a model has few different layers."""
    table, pool = context.table_of(layer), context.pool
    assert table.stride(-1) == 1 or table.shape[1] == 1
    return _constants_of(layer, pool.block_size, pool.compute_dtype == torch.bfloat16)


@functools.lru_cache(maxsize=1024)
def _constants_of(layer: LayerGeometry, page: int, is_bfloat16: bool) -> dict[str, object]:
    return {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "PAGE": page,
        "DK": layer.key_dim,
        "DV": layer.value_dim,
        "BLOCK_DK": max(MIN_DOT, next_power_of_2(layer.key_dim)),
        "BLOCK_DV": max(MIN_DOT, next_power_of_2(layer.value_dim)),
        "WINDOW": layer.sliding_window or 0,
        "CHUNK": layer.chunk_size or 0,
        "SOFTCAP": layer.softcap or 0.0,
        "WIDEN": bool(knobs.runtime.interpret) and is_bfloat16,
    }


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Tokens and heads may lie anywhere; the values of one head must lie side by side."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def is_supported(layer: LayerGeometry, dtype: torch.dtype) -> bool:
    return dtype in _DTYPES and max(layer.key_dim, layer.value_dim) <= MAX_HEAD_DIM


def _create(request: BackendRequest) -> AttentionBackend:
    if request.device.type != "cuda" and not knobs.runtime.interpret:
        raise StartupError(
            f"attention backend 'triton' cannot run on {request.device.type}; use 'auto' "
            "(tests run it there with TRITON_INTERPRET=1)",
            param="attention",
        )
    slow = [g.index for g in request.layers if not is_supported(g, request.dtype)]
    if slow:
        raise StartupError(
            f"attention backend 'triton' cannot compute layers {slow}: heads wider than "
            f"{MAX_HEAD_DIM}, or dtype {request.dtype}",
            param="attention",
        )
    if request.is_fp8 and request.device.type == "cuda":
        capability = torch.cuda.get_device_capability(request.device)
        if capability < FP8_CAPABILITY:
            raise StartupError(
                f"caches.kv.dtype fp8 needs a GPU of compute capability 8.9 or higher, and this "
                f"one has {capability[0]}.{capability[1]}; use auto",
                param="kv_dtype",
            )
    return TritonBackend(open_device(request.device), tuning_for(request.device))


register("triton", _create)
