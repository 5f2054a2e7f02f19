"""Flattens a step plan into the tensors of one decoder call.

Used by the runner. Pure bookkeeping on numbers: what to compute was decided by the plan, what is
embedded where follows from the placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from foveal_runtime.engine.step import MMInput, ScheduledRequest
from foveal_runtime.model.attention import (
    AttentionBackend,
    ForwardContext,
    KVPool,
)
from foveal_runtime.model.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Window:
    """Positions [lo, hi) of one sequence; its first token is row `base` of the flat batch."""

    sequence: SequenceState
    scheduled: ScheduledRequest
    base: int

    @property
    def lo(self) -> int:
        return self.scheduled.num_computed_tokens

    @property
    def hi(self) -> int:
        return self.lo + self.scheduled.num_scheduled_tokens

    def embed_spans(self) -> Iterator[tuple[MMInput, int, int, int]]:
        """(item, first batch row, first row of its output, number of rows) for this window."""
        for one in self.sequence.mm_inputs:
            place = one.placeholder
            if place.end <= self.lo or place.offset >= self.hi:
                continue
            row = 0
            for start, length in place.embed_runs:
                begin, end = place.offset + start, place.offset + start + length
                first, last = max(begin, self.lo), min(end, self.hi)
                if first < last:
                    yield one, self.base + first - self.lo, row + first - begin, last - first
                row += length


def make_windows(
    scheduled: Sequence[ScheduledRequest], sequences: dict[str, SequenceState]
) -> list[Window]:
    windows, base = [], 0
    for one in scheduled:
        sequence = sequences[one.request_id]
        window = Window(sequence, one, base)
        assert one.num_scheduled_tokens > 0
        assert window.hi <= len(sequence.token_ids)
        windows.append(window)
        base += one.num_scheduled_tokens
    return windows


def make_context(
    windows: Sequence[Window],
    backend: AttentionBackend,
    pool: KVPool,
    groups: torch.Tensor | None,
    device: torch.device,
) -> ForwardContext:
    """The attention metadata of a flat batch.

    Block ids are rows of the pool as they are; id 0 is the trash block and in no table.
    """
    q_lens = [w.scheduled.num_scheduled_tokens for w in windows]
    kv_lens = [w.hi for w in windows]
    widest = max(len(w.scheduled.block_ids) for w in windows)
    table = np.zeros((len(windows), widest), dtype=np.int32)
    slots, positions = [], []
    for row, window in zip(table, windows, strict=True):
        ids = window.scheduled.block_ids
        assert len(ids) * pool.block_size >= window.hi
        row[: len(ids)] = ids
        assert row.max() < pool.num_blocks
        position = np.arange(window.lo, window.hi, dtype=np.int64)
        positions.append(position)
        slots.append(row[position // pool.block_size].astype(np.int64) * pool.block_size
                     + position % pool.block_size)  # fmt: skip
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    owner = np.repeat(np.arange(len(windows), dtype=np.int32), q_lens)

    def load(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ForwardContext(
        backend=backend,
        pool=pool,
        q_start=load(starts),
        seq_lens=load(np.array(kv_lens, dtype=np.int32)),
        block_table=load(table),
        slots=load(np.concatenate(slots)),
        seq_of_token=load(owner),
        pos_of_token=load(np.concatenate(positions).astype(np.int32)),
        q_lens=q_lens,
        kv_lens=kv_lens,
        groups=groups,
    )


def make_ids(windows: Sequence[Window]) -> torch.Tensor:
    """Token ids i64 (T); positions that take encoder outputs get 0, as their placeholder's id may
    lie outside the vocabulary."""
    ids = np.concatenate([np.array(w.sequence.token_ids[w.lo : w.hi], dtype=np.int64)
                          for w in windows])  # fmt: skip
    for window in windows:
        for _, row, _, count in window.embed_spans():
            ids[row : row + count] = 0
    return torch.from_numpy(ids)


def make_positions(windows: Sequence[Window], mrope: bool, offset: int) -> torch.Tensor:
    """Rope positions i64: (3, 1, T) with mrope, else (1, T)."""
    parts = []
    for window in windows:
        sequence = window.sequence
        plain = torch.arange(window.lo, window.hi)
        if not mrope:
            parts.append(plain + offset)
            continue
        rows = (plain + sequence.position_delta).expand(3, -1)
        if sequence.positions is not None and window.lo < sequence.num_prompt_tokens:
            known = sequence.positions[:, window.lo : window.hi]
            rows = torch.cat([known, rows[:, known.shape[1] :]], dim=1)
        parts.append(rows)
    flat = torch.cat(parts, dim=-1)
    return flat[:, None] if mrope else flat[None]


def make_groups(
    windows: Sequence[Window], rule: Literal["none", "item", "prompt"]
) -> torch.Tensor | None:
    """Bidirectional group of every token, i32 (T), -1 for causal ones; None when all are causal."""
    total = sum(w.scheduled.num_scheduled_tokens for w in windows)
    groups = np.full(total, -1, dtype=np.int32)
    number = 0
    for window in windows:
        if rule == "prompt":
            count = min(window.hi, window.sequence.num_prompt_tokens) - window.lo
            if count > 0:
                assert window.lo == 0
                groups[window.base : window.base + count] = number
                number += 1
        elif rule == "item":
            for one, row, _, count in window.embed_spans():
                run_end = row + count - window.base + window.lo - one.placeholder.offset
                assert (run_end - count, count) in one.placeholder.embed_runs, "group was cut"
                groups[row : row + count] = number
                number += 1
    return torch.from_numpy(groups) if number else None
