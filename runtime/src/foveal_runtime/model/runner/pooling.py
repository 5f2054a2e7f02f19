"""Embeddings: which hidden states of a step belong to one, and what is made of them.

Used by the runner for sequences that are embedded instead of continued. An embedding is a sum over
rows, whatever the pooling; rows come in as many steps as the prompt takes, so the sum so far waits
in the sequence, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from foveal_runtime.engine.types.step import Pooled, StepResult
from foveal_runtime.model.runner.batch import TokenWindow
from foveal_runtime.model.runner.sequence import SequenceState


class PoolSpan(NamedTuple):
    """Rows [first, first + num_rows) of a step's batch, which a sequence's embedding sums up."""

    sequence: SequenceState
    first: int
    num_rows: int
    is_last: bool


def pool_spans(windows: Sequence[TokenWindow]) -> list[PoolSpan]:
    """Of all windows that are embedded; no rows where a window brings nothing to the sum."""
    spans = []
    for window in windows:
        first, num_rows = window.base, window.hi - window.lo
        kind, is_last = window.sequence.sampling.pooling, window.scheduled.sample
        if not kind:
            continue
        if kind == "last":
            first, num_rows = first + num_rows - 1, int(is_last)
        elif kind == "cls":
            num_rows = int(window.lo == 0)
        spans.append(PoolSpan(window.sequence, first, num_rows, is_last))
    return spans


class StepPool:
    """The sums of one step, f32 (n, E) on the device until their step is fetched."""

    def __init__(
        self, spans: Sequence[PoolSpan], hidden: torch.Tensor, begin: int | None = None
    ) -> None:
        """hidden: rows of the whole batch (T, E), or from row `begin` on those of the spans alone,
        which have one row at most."""
        self._spans = spans
        sums = []
        for span in spans:
            first = span.first if begin is None else begin
            sums.append(hidden[first : first + span.num_rows].sum(0, dtype=torch.float32))
            begin = None if begin is None else begin + span.num_rows
        self.sums = torch.stack(sums)

    def finish(self, sums: np.ndarray, result: StepResult) -> None:
        """Adds what was fetched; embeddings that are whole go into `result`."""
        for (sequence, _, _, is_last), part in zip(self._spans, sums, strict=True):
            sequence.pool = sequence.pool + part.astype(np.float64)
            if not is_last:
                continue
            is_mean = sequence.sampling.pooling == "mean"
            values = np.asarray(sequence.pool) / (len(sequence.token_ids) if is_mean else 1)
            if np.isfinite(values).all():
                result.pooled.append(Pooled(sequence.request_id, values.astype("<f4").tobytes()))
            else:
                result.failed[sequence.request_id] = "the model gave no finite hidden states for it"
