"""A step that the device works on, with the scores of prompt tokens and the embeddings it brings.

Made by the runner's `submit`, finished by the engine's loop; waits in `result` only.

An embedding is a sum over hidden states of its sequence, whatever the pooling; rows come in as many
steps as the prompt takes, so the sum so far waits in the sequence, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from foveal_runtime.engine.types.step import Pooled, StepResult
from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.device import Device, Fetch, Stopwatch
from foveal_runtime.model.runner.batch import TokenWindow
from foveal_runtime.model.runner.sequence import PENDING, SequenceState
from foveal_runtime.model.sampling.logprobs import PromptScores
from foveal_runtime.model.sampling.sampler import Draw


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


class SubmittedStep:
    """What a step will give. The runner fills it, then calls `start_fetch`.

    Attributes:
        partial: the result as far as the host knows it.
        draw, drawn: tokens being drawn; whose they are and their index in token_ids, in order.
        pool: hidden states for embeddings.
    """

    def __init__(self, partial: StepResult) -> None:
        self.partial = partial
        self.draw: Draw | None = None
        self.drawn: list[tuple[SequenceState, int]] = []
        self.scores: list[PromptScores] = []
        self.pool: StepPool | None = None
        self.encoding: Stopwatch | None = None
        self.computing: Stopwatch | None = None
        self._fetch: Fetch | None = None

    def start_fetch(self, device: Device) -> None:
        """One copy for everything that must come back."""
        tensors = [t for scores in self.scores for t in scores.tensors]
        if self.pool is not None:
            tensors.append(self.pool.sums)
        if self.draw is not None:
            tensors += self.draw.tensors
        if tensors or self.encoding is not None or self.computing is not None:
            # Times are read after a wait, even when nothing else comes back.
            self._fetch = device.fetch(tensors)

    def result(self) -> StepResult:
        """Waits for the device. To be called once."""
        result = self.partial
        arrays = [] if self._fetch is None else self._fetch.wait()
        if self.encoding is not None:
            result.encode_seconds = self.encoding.seconds()
        if self.computing is not None:
            result.forward_seconds = self.computing.seconds()
        at = 0
        for scores in self.scores:
            count = len(scores.tensors)
            result.prompt_logprobs.append(scores.read(arrays[at : at + count]))
            at += count
        if self.pool is not None:
            self.pool.finish(arrays[at], result)
            at += 1
        if self.draw is not None:
            result.sampled = self.draw.finish(arrays[at:], result.failed)
            result.impossible = self.draw.impossible
            self._replace_pending(result)
        return result

    def _replace_pending(self, result: StepResult) -> None:
        tokens: dict[str, list[int]] = {}
        for one in result.sampled:
            tokens.setdefault(one.request_id, []).append(one.token_id)
        for sequence, index in self.drawn:
            drawn = tokens.get(sequence.request_id)
            if drawn is not None:
                assert sequence.token_ids[index] == PENDING
                sequence.token_ids[index : index + 1] = drawn
            elif index == len(sequence.token_ids) - 1:
                sequence.token_ids.pop()  # it failed, and no later step counts on the token


_LOGPROB_ROWS = 256
"""Rows of logits alive at once: 256 rows of 150,000 floats are 154 MB."""


def score_prompt(
    window: TokenWindow, hidden: torch.Tensor, head: Head, room: Device
) -> list[PromptScores]:
    """Of one window of a step with hidden states (T, E); empty where no prompt token follows."""
    sequence = window.sequence
    end = min(window.hi, sequence.num_prompt_tokens - 1)
    if end <= window.lo:
        return []
    next_ids = sequence.token_ids[window.lo + 1 : end + 1]
    scores = PromptScores(sequence.request_id, window.lo, next_ids)
    for lo in range(window.lo, end, _LOGPROB_ROWS):
        hi = min(lo + _LOGPROB_ROWS, end)
        rows = hidden[window.base + lo - window.lo : window.base + hi - window.lo]
        scores.add(head.logits(rows), sequence.sampling.prompt_logprobs, room)
    return [scores]
