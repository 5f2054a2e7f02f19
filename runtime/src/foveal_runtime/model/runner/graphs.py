"""Decode steps as recorded graphs: one launch instead of hundreds, for padded batches.

Made by the runner after the KV pool, on GPUs. A batch of single tokens is padded to the next size
that was recorded; its arrays are copied into buffers that never move, and the recording is played.
Padding rows are sequences of one token that live in the trash block. What records is a seam: the
fake plays by running the same function again on the same buffers, so all of this but CUDA itself is
tested without a GPU. Never samples, and never sees a batch that has anything but decode tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from foveal_runtime.model.attention import AttentionBackend, ForwardContext, KVPool
from foveal_runtime.model.device import Device
from foveal_runtime.model.runner.batch import HostBatch

_log = logging.getLogger(__name__)
_DENSE_UP_TO = 32
Compute = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
"""(ids (T), rope positions, context) → logits (T, V)."""


class Capturer(Protocol):
    """Records work on the device. `is_frozen`: what the host computed is part of the recording."""

    @property
    def is_frozen(self) -> bool: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work` at least once without recording it; returns what does the same again, on
        the same memory."""
        ...


class CudaCapturer:
    """CUDA graphs that share one pool of memory: they are played one at a time."""

    is_frozen = True

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one: libraries keep a workspace for each

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled, libraries make their workspaces
            work()
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        play: Callable[[], None] = graph.replay
        return play


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4 ... 32, then every 32nd, up to exactly `max_num_seqs`."""
    sizes = [1 << i for i in range(_DENSE_UP_TO.bit_length()) if 1 << i < max_num_seqs]
    sizes += range(2 * _DENSE_UP_TO, max_num_seqs, _DENSE_UP_TO)
    return [*sizes, max_num_seqs]


@dataclass(slots=True)
class _Recording:
    """One size: views of the buffers, and what was recorded over them."""

    ids: torch.Tensor
    positions: torch.Tensor
    context: ForwardContext
    play: Callable[[], None] | None = None


class DecodeGraphs:
    """The recordings of one runner, by size.

    Args:
        sizes: ascending. max_blocks: widest block table of a sequence.
        mrope: rows of rope positions; 0 for one that is the same for all.
        has_fractions: whether they are no whole numbers.
        has_state: whether sequences have a recurrent state.
    """

    def __init__(
        self,
        compute: Compute,
        device: Device,
        backend: AttentionBackend,
        pool: KVPool,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        mrope: int,
        has_fractions: bool,
        has_state: bool,
    ) -> None:
        most = sizes[-1]
        self._compute = compute
        self._device = device
        self.sizes = tuple(sizes)
        self.num_played = 0
        there = device.torch
        whole = torch.zeros(most, dtype=torch.int64, device=there)
        short = torch.zeros(most, dtype=torch.int32, device=there)
        self._positions = torch.zeros(
            (mrope, 1, most) if mrope else (1, most),
            dtype=torch.float32 if has_fractions else torch.int64, device=there,
        )  # fmt: skip
        self._ids = whole
        self._context = ForwardContext(
            backend=backend,
            pool=pool,
            q_start=torch.arange(most + 1, dtype=torch.int32, device=there),
            seq_lens=torch.ones_like(short),
            block_table=torch.zeros(most, max_blocks, dtype=torch.int32, device=there),
            slots=torch.zeros_like(whole),
            seq_of_token=torch.arange(most, dtype=torch.int32, device=there),
            pos_of_token=short,
            q_lens=[1] * most,
            kv_lens=[1] * most,
            state_slots_there=torch.full_like(whole, -1) if has_state else None,
        )
        if pool.windowed:
            tables = self._context.block_table, self._context.slots
            self._context.windowed = tuple(torch.zeros_like(one) for one in tables)
        self._logits: torch.Tensor | None = None
        self._recordings: dict[int, _Recording] = {}

    def record(self, capturer: Capturer) -> None:
        """Records all sizes, the largest first: later ones fit into its memory."""
        for size in reversed(self.sizes):
            recording = self._view(size)

            def work(recording: _Recording = recording) -> None:
                found = self._compute(recording.ids, recording.positions, recording.context)
                if self._logits is None:  # the largest size comes first, and is not recorded yet
                    self._logits = torch.empty_like(found)
                self._logits[: len(found)].copy_(found)

            recording.play = capturer.capture(work)
            self._recordings[size] = recording

    def _view(self, size: int) -> _Recording:
        whole = self._context
        states = whole.state_slots_there
        context = replace(
            whole,
            q_start=whole.q_start[: size + 1],
            seq_lens=whole.seq_lens[:size],
            block_table=whole.block_table[:size],
            slots=whole.slots[:size],
            seq_of_token=whole.seq_of_token[:size],
            pos_of_token=whole.pos_of_token[:size],
            q_lens=[1] * size,
            kv_lens=[1] * size,
            windowed=tuple(one[:size] for one in whole.windowed),
            state_slots_there=None if states is None else states[:size],
        )
        return _Recording(self._ids[:size], self._positions[..., :size], context)

    def can_run(self, batch: HostBatch) -> bool:
        """Whether a recording fits: single tokens, few enough, with short enough block tables."""
        return (
            batch.num_sequences <= self.sizes[-1]
            and len(batch.ids) == batch.num_sequences
            and batch.groups is None
            and batch.block_table.shape[1] <= self._context.block_table.shape[1]
        )

    def run(
        self, batch: HostBatch, drawn: torch.Tensor | None, states: Sequence[int] | None
    ) -> torch.Tensor:
        """Logits (n, V) of the batch, valid until the next call. `drawn`: ids of the last step's
        draw, for tokens that the host does not know yet. `states`: slots of recurrent states."""
        count = batch.num_sequences
        size = next(s for s in self.sizes if s >= count)
        recording = self._recordings[size]
        context = recording.context
        places = np.array(states or (), np.int64)
        ids, positions, slots, pos, lens, table, pending, owned, *windowed = self._device.upload(
            _padded(batch.ids, size), _padded(batch.positions, size), _padded(batch.slots, size),
            _padded(batch.pos_of_token, size), _padded(batch.seq_lens, size, fill=1),
            _padded(batch.block_table.T, size).T, batch.pending,
            _padded(places, size, fill=-1),
            *(_padded(one.T, size).T for one in batch.windowed),
        )  # fmt: skip
        if batch.pending.size:
            assert drawn is not None
            ids.index_copy_(0, pending[0], drawn[pending[1]])
        recording.ids.copy_(ids)
        recording.positions.copy_(positions)
        context.slots.copy_(slots)
        context.pos_of_token.copy_(pos)
        context.seq_lens.copy_(lens)
        context.block_table[:, : table.shape[1]].copy_(table)
        if context.state_slots_there is not None:
            context.state_slots_there.copy_(owned)
        if windowed:
            context.windowed[0][:, : table.shape[1]].copy_(windowed[0])
            context.windowed[1].copy_(windowed[1])
        # Backends on the host read lengths from here, and tell steps apart by the object.
        kv_lens = batch.kv_lens + [1] * (size - count)
        recording.context = replace(context, kv_lens=kv_lens)
        assert recording.play is not None
        recording.play()
        self.num_played += 1
        assert self._logits is not None
        return self._logits[:count]


def _padded(array: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """The last dimension filled up to `size`."""
    shape = (*array.shape[:-1], size)
    whole = np.full(shape, fill, array.dtype)
    whole[..., : array.shape[-1]] = array
    return whole
