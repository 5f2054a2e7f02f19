"""Paged attention on CPUs: a small compiled kernel for decoding, SDPA for everything longer.

Tokens of sequences with at most MAX_ROWS query tokens become rows of one kernel call per layer;
longer chunks, and layers the kernel does not know, go to the torch backend. A mixed batch does
both. Without a compiled kernel for this CPU the factory warns once and gives the torch backend.
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
from foveal_runtime.model.kernels import (
    BFLOAT16,
    FLOAT32,
    HEAD_DIMS,
    MAX_GROUP_VALUES,
    NO_MEMORY,
    UNSUPPORTED,
    Job,
    Kernel,
    load_kernel,
)
from foveal_runtime.plan.errors import StartupError

MAX_ROWS = 4
_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rows:
    """How one batch is divided: rows for the kernel, (sequence, first token) for torch."""

    token: np.ndarray
    sequence: np.ndarray
    length: np.ndarray
    long: list[tuple[int, int]]


def divide(context: ForwardContext) -> _Rows:
    """Kernel rows are causal: a short chunk with a group of several tokens goes to torch."""
    token: list[int] = []
    sequence: list[int] = []
    length: list[int] = []
    long: list[tuple[int, int]] = []
    start = 0
    for i, (q_len, kv_len) in enumerate(zip(context.q_lens, context.kv_lens, strict=True)):
        grouped = (
            context.groups is not None
            and 1 < q_len <= MAX_ROWS
            and bool((context.groups[start : start + q_len] >= 0).any())
        )
        if q_len > MAX_ROWS or grouped:
            long.append((i, start))
        else:
            token.extend(range(start, start + q_len))
            sequence.extend([i] * q_len)
            length.extend(range(kv_len - q_len + 1, kv_len + 1))
        start += q_len
    kind = np.int32
    return _Rows(np.array(token, kind), np.array(sequence, kind), np.array(length, kind), long)


class CpuBackend:
    """See AttentionBackend for shapes. A ForwardContext object stands for one step's batch."""

    is_static = False

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._torch = TorchBackend()
        self._context: ForwardContext | None = None
        self._rows: _Rows | None = None

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
        rows = self._divided(context)
        out = query.new_empty(query.shape[0], layer.num_heads, layer.value_dim)
        for i, start in rows.long:
            window = slice(start, start + context.q_lens[i])
            groups = None if context.groups is None else context.groups[window]
            out[window] = attend_sequence(
                layer,
                query[window],
                context,
                context.block_table[i],
                context.kv_lens[i],
                groups,
                sinks,
            )
        if len(rows.token):
            self._run(layer, query, context, rows, out, sinks)
        return out

    def _divided(self, context: ForwardContext) -> _Rows:
        """The division is the same for every layer of a step."""
        if self._rows is None or self._context is not context:
            self._context, self._rows = context, divide(context)
        return self._rows

    def _run(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        context: ForwardContext,
        rows: _Rows,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        if query.stride(2) != 1:
            query = query.contiguous()
        table = context.block_table
        assert table.dtype == torch.int32
        assert table.stride(1) == 1 or table.shape[1] == 1
        # `sinks` stays bound to the float32 copy while the kernel reads it.
        sinks = None if sinks is None else sinks.float().contiguous()
        pool = context.pool
        job = Job(
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
        code = self._kernel.run(job)
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
    return CpuBackend(kernel)


register("cpu", _create)
