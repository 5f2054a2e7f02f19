"""A step that the device works on, and the scores of prompt tokens that it brings.

Made by the runner's `submit`, finished by the engine's loop; waits in `result` only. Apart from the
sequences, which embeddings and batches are made of: a step holds those.
"""

from __future__ import annotations

import torch

from foveal_runtime.engine.types.step import StepResult
from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.device import Device, Fetch, Stopwatch
from foveal_runtime.model.runner.batch import TokenWindow
from foveal_runtime.model.runner.pooling import StepPool
from foveal_runtime.model.runner.sequence import PENDING, SequenceState
from foveal_runtime.model.sampling.logprobs import PromptScores
from foveal_runtime.model.sampling.sampler import Draw


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
            self._replace_pending(result)
        return result

    def _replace_pending(self, result: StepResult) -> None:
        tokens = {one.request_id: one.token_id for one in result.sampled}
        for sequence, index in self.drawn:
            token = tokens.get(sequence.request_id)
            if token is not None:
                assert sequence.token_ids[index] == PENDING
                sequence.token_ids[index] = token
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
