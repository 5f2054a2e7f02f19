"""Flattens a step plan into the arrays of one decoder call.

Used by the runner and `graphs`. Pure bookkeeping on the host: what to compute was decided by the
plan, what is embedded where follows from the placeholders. Sends nothing to a device by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from foveal_runtime.engine.types.step import MMInput, ScheduledRequest
from foveal_runtime.model.device import Device
from foveal_runtime.model.layers.lora import Lora, LoraRows
from foveal_runtime.model.runner.sequence import PENDING, SequenceState
from foveal_runtime.plan.media import MODALITIES


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Positions [lo, hi) of one sequence; its first token is row `base` of the flat batch.

    A guess is a window, too, of the sequence as it is if the guesses up to it are right: `guess`,
    what the window before must draw for this one's token to count.
    """

    sequence: SequenceState
    scheduled: ScheduledRequest
    base: int
    guess: int | None = None

    @property
    def lo(self) -> int:
        return self.scheduled.num_computed_tokens

    @property
    def hi(self) -> int:
        return self.lo + self.scheduled.num_scheduled_tokens

    def embed_spans(self) -> Iterator[tuple[MMInput, int, int, int]]:
        """(item, first batch row, first row of its output, number of rows) for this window."""
        inputs = self.sequence.mm_inputs
        if not inputs or inputs[-1].placeholder.end <= self.lo:
            return
        for one in inputs:
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
) -> list[TokenWindow]:
    windows, base = [], 0
    for one in scheduled:
        sequence = sequences[one.request_id]
        usual = [TokenWindow(sequence, one, base)]
        for window in _with_guesses(sequence, one, base) if one.draft else usual:
            assert window.hi > window.lo
            assert window.hi <= len(window.sequence.token_ids)
            windows.append(window)
        base += one.num_scheduled_tokens
    return windows


def _with_guesses(
    sequence: SequenceState, one: ScheduledRequest, base: int
) -> Iterator[TokenWindow]:
    """A window for the last known token and one for each guess. Guesses see each other as tokens of
    earlier steps: all keys and values of a layer are written before any are read."""
    assert one.num_scheduled_tokens == 1 + len(one.draft)
    for count, guess in enumerate((None, *one.draft)):
        token_ids = sequence.token_ids + one.draft[:count]
        alone = msgspec.structs.replace(
            one, num_computed_tokens=one.num_computed_tokens + count, num_scheduled_tokens=1,
            draft=[],
        )  # fmt: skip
        guessed = sequence if guess is None else replace(sequence, token_ids=token_ids)
        yield TokenWindow(guessed, alone, base + count, guess)


def is_decode(windows: Sequence[TokenWindow]) -> bool:
    """One token each, none of an item, all of which go on; no prompt to score."""
    return all(
        w.scheduled.num_scheduled_tokens == 1
        and w.scheduled.sample
        and w.lo >= w.sequence.num_prompt_tokens
        for w in windows
    )


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A flat batch of n sequences and T tokens on the host; see ForwardContext for the meanings.

    Attributes:
        ids: i64 (T); `placeholder_id` where encoder outputs go (the placeholder's own id may lie
            outside the vocabulary), 0 where the token is not known on the host yet.
        positions: i64, or f32 where they have fractions; rope: (axes, 1, T) with mrope, else
            (1, T).
        pending: i64 (2, m): rows of `ids` that are still being drawn, and their rows in that draw.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    pending: np.ndarray
    q_start: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    seq_of_token: np.ndarray
    pos_of_token: np.ndarray
    groups: np.ndarray | None
    q_lens: list[int]
    kv_lens: list[int]
    windowed: tuple[np.ndarray, ...] = ()

    @property
    def num_sequences(self) -> int:
        return len(self.q_lens)


def make_batch(
    windows: Sequence[TokenWindow],
    block_size: int,
    *,
    bidirectional: Literal["none", "item", "prompt"] = "none",
    mrope: int = 0,
    has_fractions: bool = False,
    position_offset: int = 0,
    placeholder_id: int | None = 0,
) -> HostBatch:
    """Block ids are rows of the pool as they are; id 0 is the trash block and in no table.

    `mrope`: axes of rope positions, 0 without; `has_fractions`: whether these are no whole numbers.
    `placeholder_id`: what stands where encoder outputs
    go; None leaves it as it is.
    """
    q_lens = [w.scheduled.num_scheduled_tokens for w in windows]
    kv_lens = [w.hi for w in windows]
    counts = np.array(q_lens, np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(len(windows)), counts)
    lows = np.array([w.lo for w in windows], np.int64)
    place = np.arange(starts[-1]) + (lows - starts[:-1])[owner]
    table = np.zeros((len(windows), max(len(w.scheduled.block_ids) for w in windows)), np.int32)
    for row, window in zip(table, windows, strict=True):
        known = window.sequence.block_row(window.scheduled.block_ids)
        assert len(known) * block_size >= window.hi
        row[: len(known)] = known
    slot = place % block_size
    ids, pending = _make_ids(windows, placeholder_id)
    return HostBatch(
        ids=ids,
        positions=(
            _make_mrope(windows, place, owner, mrope, np.float32 if has_fractions else np.int64)
            if mrope
            else (place + position_offset)[None]
        ),
        slots=table[owner, place // block_size].astype(np.int64) * block_size + slot,
        pending=pending,
        q_start=starts.astype(np.int32),
        seq_lens=np.array(kv_lens, np.int32),
        block_table=table,
        seq_of_token=owner.astype(np.int32),
        pos_of_token=place.astype(np.int32),
        groups=make_groups(windows, bidirectional),
        q_lens=q_lens,
        kv_lens=kv_lens,
        windowed=_windowed(windows, table.shape, (owner, place // block_size), block_size, slot),
    )


def _windowed(
    windows: Sequence[TokenWindow],
    shape: tuple[int, ...],
    blocks: tuple[np.ndarray, np.ndarray],
    block_size: int,
    offsets: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Block table and slots of layers with a sliding window, if those have blocks of their own.

    `blocks` and `offsets`: where each token is: its row and column in the table, then its place in
    the block.
    """
    if not windows[0].scheduled.window_ids:
        return ()
    table = np.zeros(shape, np.int32)
    for row, window in zip(table, windows, strict=True):
        first, ids = window.scheduled.window_first, window.scheduled.window_ids
        row[first : first + len(ids)] = ids
    taken = table[blocks].astype(np.int64)
    assert taken.all(), "a token has no block for layers with a window"
    return table, taken * block_size + offsets


def _make_ids(
    windows: Sequence[TokenWindow], placeholder_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    flat: list[int] = []
    pending: list[tuple[int, int]] = []
    for window in windows:
        sequence = window.sequence
        flat += sequence.token_ids[window.lo : window.hi]
        if flat[-1] == PENDING:
            pending.append((len(flat) - 1, sequence.pending_row))
            flat[-1] = 0
    ids = np.array(flat, np.int64)
    if placeholder_id is not None:
        for window in windows:
            for _, row, _, count in window.embed_spans():
                ids[row : row + count] = placeholder_id
    return ids, np.array(pending, np.int64).reshape(-1, 2).T


def _make_mrope(
    windows: Sequence[TokenWindow], place: np.ndarray, owner: np.ndarray, axes: int, dtype: type
) -> np.ndarray:
    deltas: np.ndarray = np.array([w.sequence.position_delta for w in windows], dtype)
    rows = np.tile((place + deltas[owner]).astype(dtype), (axes, 1))
    for window in windows:
        known = window.sequence.positions
        if known is not None and window.lo < window.sequence.num_prompt_tokens:
            part = known[:, window.lo : window.hi]
            rows[:, window.base : window.base + part.shape[1]] = part
    return rows[:, None]


def make_groups(
    windows: Sequence[TokenWindow], rule: Literal["none", "item", "prompt"]
) -> np.ndarray | None:
    """Bidirectional group of every token, i32 (T), -1 for causal ones; None when all are causal."""
    if rule == "none":
        return None
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
                if MODALITIES[one.modality] == "audio":
                    continue  # heard in order
                run_end = row + count - window.base + window.lo - one.placeholder.offset
                assert (run_end - count, count) in one.placeholder.embed_runs, "group was cut"
                groups[row : row + count] = number
                number += 1
    return groups if number else None


def rows_of_loras(windows: Sequence[TokenWindow], room: Device) -> list[LoraRows]:
    """Rows of the flat batch by adapter, on the device; those without one are in none."""
    rows: dict[Lora, list[int]] = {}
    for window in windows:
        lora = window.sequence.lora
        if lora is not None:
            end = window.base + window.scheduled.num_scheduled_tokens
            rows.setdefault(lora, []).extend(range(window.base, end))
    indices = room.upload(*(np.array(one, np.int64) for one in rows.values())) if rows else ()
    return [LoraRows(lora, index) for lora, index in zip(rows, indices, strict=True)]
