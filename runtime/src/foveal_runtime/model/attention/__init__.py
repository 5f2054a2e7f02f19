"""Paged attention behind one seam: what a backend is, the registry of backends, the KV pool.

Every HF decoder calls `context.paged_attention` (registered as "foveal_paged"), which hands the
layer's flat tensors to the AttentionBackend of the current ForwardContext. A backend never
allocates blocks and never changes a context: where keys and values live was decided by the engine.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from foveal_runtime.plan.errors import StartupError

_LOG = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of FP8, which has no infinity: what is larger must be cut, or becomes NaN."""
TRASH_BLOCK = 0
"""Block 0 belongs to no sequence: padding rows of a static batch write there."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What the attention of one decoder layer looks like, as measured by `checkpoint.probe`.

    Counts are those of this rank. `sliding_window` w: a query sees itself and the w - 1 positions
    before it. `chunk_size` c: a query at p sees positions >= p // c * c only. `softcap` s: scores
    become s * tanh(score / s). `has_sinks`: one extra logit per query head takes part in the
    softmax and is then dropped. With ForwardContext.groups a token also sees the later tokens of
    its group; `groups_ignore_window` says that it sees the group's tokens before the window too,
    `ignores_groups` that this layer is causal whatever the groups are.
    `index` counts layers that have keys and values in the pool; one that `reads_only` has none of
    its own and attends to those of the layer whose `index` it has. `layer` is the
    decoder's own number, and differs where other layers have a recurrent state instead.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    chunk_size: int | None = None
    groups_ignore_window: bool = False
    ignores_groups: bool = False
    reads_only: bool = False
    layer: int = -1

    @property
    def values_per_token(self) -> int:
        """Numbers that one token takes in this layer's part of the KV pool."""
        return 0 if self.reads_only else self.num_kv_heads * (self.key_dim + self.value_dim)

    @property
    def window(self) -> int:
        """Tokens that a query sees at most, itself included; 0: all before it."""
        return self.sliding_window or self.chunk_size or 0


def windowed_layers(layers: Sequence[LayerGeometry]) -> frozenset[int]:
    """Pool indices of the layers whose keys and values are read through a window alone; empty when
    no layer, or every one, is such."""
    seen_whole = {layer.index for layer in layers if not layer.window}
    return frozenset(layer.index for layer in layers) - seen_whole if seen_whole else frozenset()


def window_of(layers: Sequence[LayerGeometry]) -> int:
    """Tokens that the layers of `windowed_layers` see at most; 0: there are none."""
    windowed = windowed_layers(layers)
    return max((layer.window for layer in layers if layer.index in windowed), default=0)


class KVPool:
    """The KV memory of all layers: keys[i] (num_blocks * block_size, Hkv, Dk), values[i] (..., Dv).

    `i` is the index of a layer; those that only read add nothing. Row block * block_size + offset
    holds one token. Block 0 is TRASH_BLOCK. Made once at start-up. Not `is_touched`: on a CPU,
    memory is taken when a block is first written. Queries come and results go in `compute_dtype`,
    which differs from `dtype` only for FP8. With `num_window_blocks`, the layers `windowed` have so
    many blocks of their own, whose numbers have nothing to do with the others'.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        *,
        is_touched: bool = True,
        num_window_blocks: int = 0,
    ) -> None:
        self.windowed = windowed_layers(layers) if num_window_blocks else frozenset[int]()
        layers = [layer for layer in layers if not layer.reads_only]
        assert [layer.index for layer in layers] == list(range(len(layers)))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.compute_dtype = compute_dtype or dtype
        self.num_window_blocks = num_window_blocks
        rows = [
            (num_window_blocks if layer.index in self.windowed else num_blocks) * block_size
            for layer in layers
        ]
        self.keys = [
            _zeros((count, layer.num_kv_heads, layer.key_dim), dtype, device)
            for count, layer in zip(rows, layers, strict=True)
        ]
        self.values = [
            _zeros((count, layer.num_kv_heads, layer.value_dim), dtype, device)
            for count, layer in zip(rows, layers, strict=True)
        ]
        if is_touched and device.type == "cpu":
            for pool in (*self.keys, *self.values):
                pool.view(torch.uint8).zero_()

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return _untouched(shape, dtype)
    if dtype == FP8:  # torch fills bytes on every device
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(FP8)
    return torch.zeros(shape, dtype=dtype, device=device)


def _untouched(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory when they are first written. Huge pages where the kernel gives
    them on request: blocks lie all over the pool.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def kv_dtypes(kv_dtype: str, model: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """(what keys and values are kept as, what attention computes with) for `caches.kv_dtype`."""
    if kv_dtype == "fp8":
        return FP8, model
    kept = torch.bfloat16 if kv_dtype == "bfloat16" else model
    return kept, kept


@dataclass(slots=True)
class ForwardContext:
    """One flat batch of n sequences and T query tokens. Tensors live on the model's device.

    Attributes:
        q_start: i32 (n + 1), sequence i owns query tokens [q_start[i], q_start[i + 1]).
        seq_lens: i32 (n), KV length of each sequence including this step's tokens. The query
            tokens are its last ones.
        block_table: i32 (n, max_blocks), padded with TRASH_BLOCK.
        slots: i64 (T), pool row that each token's key and value are written to.
        windowed: block table and slots of the layers `pool.windowed`, where there are such; what no
            query sees is TRASH_BLOCK there.
        seq_of_token, pos_of_token: i32 (T), sequence and KV position (not rope) of each token.
        groups: i32 (T) or None. Tokens of one sequence with the same id >= 0 see each other in
            both directions; -1 is plain causal. A group always lies wholly inside one step, so
            no id is kept for tokens already in the pool.
        q_lens, kv_lens: the same as q_start and seq_lens as Python numbers, for host-side loops.
        state_slots: where each sequence's recurrent state is, for models that have one.
        state_slots_there: i64 (n), the same in a recorded step; below 0 is nobody's.
    """

    backend: AttentionBackend
    pool: KVPool
    q_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    seq_of_token: torch.Tensor
    pos_of_token: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    groups: torch.Tensor | None = None
    state_slots: list[int] | None = None
    state_slots_there: torch.Tensor | None = None
    windowed: tuple[torch.Tensor, ...] = ()

    def table_of(self, layer: LayerGeometry) -> torch.Tensor:
        """The block table of the pool that this layer's keys and values are in."""
        return self.windowed[0] if layer.index in self.pool.windowed else self.block_table

    def slots_of(self, layer: LayerGeometry) -> torch.Tensor:
        """Where this layer's new keys and values are written to."""
        return self.windowed[1] if layer.index in self.pool.windowed else self.slots

    def groups_of(self, layer: LayerGeometry) -> torch.Tensor | None:
        """The groups as this layer honours them."""
        return None if layer.ignores_groups else self.groups


class AttentionBackend(Protocol):
    """Writes new keys and values, then attends. `layer` says which pool tensors and which mask.

    `is_static`: a batch of single tokens is computed from the context's tensors alone, never from
    its host numbers: what the device did once can be played again with other numbers in them.
    """

    @property
    def is_static(self) -> bool: ...

    def write_kv(
        self,
        layer: LayerGeometry,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
    ) -> None:
        """key (T, Hkv, Dk) and value (T, Hkv, Dv), any strides, go to context.slots_of(layer)."""
        ...

    def attend(
        self,
        layer: LayerGeometry,
        query: torch.Tensor,
        context: ForwardContext,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query (T, H, Dk), any strides; sinks (H,) or None. Returns (T, H, Dv), query's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a factory gets. It may refuse (StartupError) what it cannot compute.

    `dtype` is what attention computes with, `kv_dtype` what the pool holds.
    """

    layers: tuple[LayerGeometry, ...]
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype is not None and self.kv_dtype == FP8


BackendFactory = Callable[[BackendRequest], AttentionBackend]

_MODULES = {
    "torch": "foveal_runtime.model.attention.torch_backend",
    "cpu": "foveal_runtime.model.attention.cpu",
    "triton": "foveal_runtime.model.attention.triton",
}
_FACTORIES: dict[str, BackendFactory] = {}


def register(name: str, factory: BackendFactory) -> None:
    """Makes a backend selectable. Backend modules call this when they are imported."""
    _FACTORIES[name] = factory


def create_backend(name: str, request: BackendRequest) -> AttentionBackend:
    """The backend called `name`. Raises StartupError when there is none or it refuses."""
    if name == "auto":
        return create_default(request)
    if name not in _FACTORIES and name in _MODULES:
        try:
            importlib.import_module(_MODULES[name])
        except ImportError as error:
            raise StartupError(
                f"attention backend {name!r} cannot be loaded: {error}", param="attention"
            ) from error
    factory = _FACTORIES.get(name)
    if factory is None:
        known = ", ".join(["auto", *sorted({*_MODULES, *_FACTORIES})])
        raise StartupError(
            f"attention backend {name!r} is not known; choose one of: {known}", param="attention"
        )
    return factory(request)


def create_default(request: BackendRequest) -> AttentionBackend:
    """The fastest backend of the device that can compute these layers; "torch" always can."""
    preferred = "triton" if request.device.type == "cuda" else "cpu"
    try:
        return create_backend(preferred, request)
    except StartupError as error:
        _LOG.warning("attention falls back to plain torch: %s", error)
        return create_backend("torch", request)
