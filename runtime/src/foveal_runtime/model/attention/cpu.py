"""Paged attention on CPUs: small compiled kernels, one for decoding and one for chunks of prompts.

Tokens of sequences with at most MAX_ROWS query tokens become rows of one call of the decode kernel
per layer, longer chunks one call of the prefill kernel. Chunks with tokens that see later ones, and
layers that the kernels do not know, go to the torch backend. Without a compiled kernel for this CPU
the factory warns once and gives the torch backend.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from foveal_runtime.model.attention import (
    AttentionBackend,
    BackendRequest,
    ForwardContext,
    LayerGeometry,
    register,
)
from foveal_runtime.model.attention.torch_backend import TorchBackend, attend_sequence
from foveal_runtime.model.cpu.kernels import (
    BFLOAT16,
    FLOAT32,
    HEAD_DIMS,
    MAX_GROUP_VALUES,
    NO_MEMORY,
    UNSUPPORTED,
    DecodeJob,
    Kernel,
    PrefillKernel,
    load_kernel,
    load_prefill_kernel,
)
from foveal_runtime.plan.errors import StartupError

MAX_ROWS = 4
_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """Query tokens of a batch, i32 (n) each: where they are, whose, and how much they see."""

    token: np.ndarray
    sequence: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, windows: list[tuple[int, int, int, int]]) -> Rows:
        """`windows`: (sequence, first token, number of tokens, length after them)."""
        kind = np.int32
        parts = [
            (
                np.arange(start, start + count, dtype=kind),
                np.full(count, sequence, kind),
                np.arange(length - count + 1, length + 1, dtype=kind),
            )
            for sequence, start, count, length in windows
        ]
        if not parts:
            return cls(*(np.zeros(0, kind) for _ in range(3)))
        return cls(*(np.concatenate(one) for one in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class _Division:
    """How one batch is divided: rows for the decode kernel, chunks for the prefill kernel, and
    (sequence, first token) for torch."""

    short: Rows
    long: Rows
    chunk_rows: np.ndarray
    other: list[tuple[int, int]]


def divide(context: ForwardContext, groups: torch.Tensor | None, has_prefill: bool) -> _Division:
    """Both kernels are causal: a chunk with a group of several tokens goes to torch."""
    short: list[tuple[int, int, int, int]] = []
    long: list[tuple[int, int, int, int]] = []
    other: list[tuple[int, int]] = []
    start = 0
    for i, (q_len, kv_len) in enumerate(zip(context.q_lens, context.kv_lens, strict=True)):
        grouped = (
            groups is not None and q_len > 1 and bool((groups[start : start + q_len] >= 0).any())
        )
        if grouped or (q_len > MAX_ROWS and not has_prefill):
            other.append((i, start))
        else:
            (long if q_len > MAX_ROWS else short).append((i, start, q_len, kv_len))
        start += q_len
    chunk_rows = np.array([count for _, _, count, _ in long], np.int32)
    return _Division(Rows.of(short), Rows.of(long), chunk_rows, other)


class CpuBackend:
    """See AttentionBackend for shapes. A ForwardContext object stands for one step's batch."""

    is_static = False

    def __init__(self, kernel: Kernel, prefill: PrefillKernel | None) -> None:
        self._kernel = kernel
        self._prefill = prefill
        self._torch = TorchBackend()
        self._context: ForwardContext | None = None
        self._divisions: dict[bool, _Division] = {}

    @property
    def variant(self) -> str:
        """Instruction set of the loaded kernel."""
        return self._kernel.variant

    def write_kv(
        self,
        layer: LayerGeometry,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
    ) -> None:
        self._torch.write_kv(layer, key, value, context)

    def attend(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        context: ForwardContext,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pool_dtype = context.pool.keys[layer.index].dtype
        if not is_supported(layer, query.dtype) or pool_dtype != query.dtype:
            return self._torch.attend(layer, query, context, sinks)
        groups = context.groups_of(layer)
        division = self._divided(context, groups)
        out = query.new_empty(query.shape[0], layer.num_heads, layer.value_dim)
        for i, start in division.other:
            window = slice(start, start + context.q_lens[i])
            out[window] = attend_sequence(
                layer,
                query[window],
                context,
                context.table_of(layer)[i],
                context.kv_lens[i],
                None if groups is None else groups[window],
                sinks,
            )
        if query.stride(2) != 1:
            query = query.contiguous()
        # Stays bound to the float32 copy while the kernels read it.
        sinks = None if sinks is None else sinks.float().contiguous()
        if len(division.short.token):
            job = _job(layer, query, context, division.short, out, sinks)
            _check(self._kernel.run(job), layer)
        if len(division.long.token):
            assert self._prefill is not None
            job = _job(layer, query, context, division.long, out, sinks)
            chunks = division.chunk_rows
            _check(self._prefill.run(job, chunks.ctypes.data, len(chunks)), layer)
        return out

    def _divided(self, context: ForwardContext, groups: torch.Tensor | None) -> _Division:
        """The division is the same for every layer of a step that honours groups, or ignores
        them."""
        if self._context is not context:
            self._context, self._divisions = context, {}
        key = groups is not None
        if key not in self._divisions:
            self._divisions[key] = divide(context, groups, self._prefill is not None)
        return self._divisions[key]


def _job(
    layer: LayerGeometry,
    query: torch.Tensor,
    context: ForwardContext,
    rows: Rows,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> DecodeJob:
    """Addresses: good while the tensors and `rows` live."""
    table = context.table_of(layer)
    assert table.dtype == torch.int32
    assert table.stride(1) == 1 or table.shape[1] == 1
    pool = context.pool
    return DecodeJob(
        dtype=_DTYPES[query.dtype],
        head_dim=layer.key_dim,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        block_size=pool.block_size,
        num_rows=len(rows.token),
        num_threads=torch.get_num_threads(),
        window=layer.sliding_window or 0,
        chunk=layer.chunk_size or 0,
        scaling=layer.scaling,
        softcap=layer.softcap or 0.0,
        query=query.data_ptr(),
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        keys=pool.keys[layer.index].data_ptr(),
        values=pool.values[layer.index].data_ptr(),
        out=out.data_ptr(),
        block_table=table.data_ptr(),
        table_stride=table.stride(0),
        row_token=rows.token.ctypes.data,
        row_sequence=rows.sequence.ctypes.data,
        row_length=rows.length.ctypes.data,
        sinks=None if sinks is None else sinks.data_ptr(),
    )


def _check(code: int, layer: LayerGeometry) -> None:
    assert code != UNSUPPORTED, layer
    if code == NO_MEMORY:
        raise MemoryError("paged attention: no memory for partial results")


def is_supported(layer: LayerGeometry, dtype: torch.dtype) -> bool:
    """Whether the kernel computes this layer; the torch backend computes the others."""
    return (
        dtype in _DTYPES
        and layer.key_dim == layer.value_dim
        and layer.key_dim in HEAD_DIMS
        and layer.num_heads // layer.num_kv_heads * layer.key_dim <= MAX_GROUP_VALUES
    )


def _create(request: BackendRequest) -> AttentionBackend:
    if request.device.type != "cpu":
        raise StartupError(
            f"attention backend 'cpu' cannot run on {request.device.type}; use 'auto'",
            param="attention",
        )
    kernel = load_kernel()
    if isinstance(kernel, str):
        _log.warning("decoding uses the slower torch attention: %s", kernel)
        return TorchBackend()
    if request.is_fp8:
        _log.warning("decoding uses the slower torch attention: the kernel reads no fp8")
        return TorchBackend()
    slow = [g.index for g in request.layers if not is_supported(g, request.dtype)]
    if slow:
        _log.info("layers %s use torch attention: head sizes or dtype have no kernel", slow)
    prefill = load_prefill_kernel()
    if isinstance(prefill, str):
        _log.warning("prompts use the slower torch attention: %s", prefill)
    return CpuBackend(kernel, None if isinstance(prefill, str) else prefill)


register("cpu", _create)
