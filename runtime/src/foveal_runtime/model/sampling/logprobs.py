"""Logprobs, ranks and most likely tokens: computed on the device, read when the step is over.

Used by the sampler (of chosen tokens) and the runner (of prompt tokens). Logprobs are those of the
raw model distribution. Never waits: `Scores.tensors` travel with everything else a step fetches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foveal_runtime.engine.types.step import PromptLogprobs
from foveal_runtime.model.device import Device

ROWS_AT_ONCE = 32
"""Bounds the float32 copies of logits."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One token: its logprob, its rank (1 = most likely), and the most likely tokens."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Scores:
    """Scores of one token for each row of logits that `add` is given, in order."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        """Four for each call of `add`: logprobs, ranks, top ids, top logprobs."""

    def add(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        num_top: int,
        named: torch.Tensor | None = None,
    ) -> None:
        """Rows (n, V), their tokens i64 (n), all inside the vocabulary; `named` i64 (n, m) are the
        tokens to score instead of the `num_top` most likely."""
        values = logits.float().log_softmax(dim=-1)
        chosen = values.gather(1, ids[:, None])
        ranks = (values > chosen).sum(dim=-1) + 1
        if named is not None:
            top_ids, top_values = named, values.gather(1, named)
        else:
            top = values.topk(min(num_top, values.shape[1]), dim=-1)
            top_ids, top_values = top.indices, top.values
        self.tensors += [chosen[:, 0], ranks, top_ids, top_values]

    def read(self, arrays: Sequence[np.ndarray]) -> Iterator[Scored]:
        """From the arrays that became of `tensors`."""
        for at in range(0, len(arrays), 4):
            logprobs, ranks, ids, values = (array.tolist() for array in arrays[at : at + 4])
            for row in zip(logprobs, ranks, ids, values, strict=True):
                yield Scored(row[0], row[1], tuple(row[2]), tuple(row[3]))


class PromptScores:
    """Logprobs of the prompt tokens that follow some positions of one request."""

    def __init__(self, request_id: str, start: int, next_ids: Sequence[int]) -> None:
        self._result = PromptLogprobs(request_id, start, (), (), (), ())
        self._next_ids = next_ids
        self._scores = Scores()
        self._num_rows = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._scores.tensors

    def add(self, logits: torch.Tensor, num_top: int, device: Device) -> None:
        """The next rows (m, V): row i speaks of the next of the ids."""
        vocab = logits.shape[1]
        ids = self._next_ids[self._num_rows : self._num_rows + len(logits)]
        self._num_rows += len(ids)
        # An item's placeholder id may lie outside the vocabulary; it has no probability.
        known = np.array([i if 0 <= i < vocab else 0 for i in ids], np.int64)
        index = device.upload(known)[0]
        for low in range(0, len(ids), ROWS_AT_ONCE):
            part = slice(low, low + ROWS_AT_ONCE)
            self._scores.add(logits[part], index[part], num_top)
        self._vocab = vocab

    def read(self, arrays: Sequence[np.ndarray]) -> PromptLogprobs:
        result = self._result
        for token, one in zip(self._next_ids, self._scores.read(arrays), strict=True):
            known = 0 <= token < self._vocab
            result.logprobs += (one.logprob if known else float("-inf"),)
            result.ranks += (one.rank if known else 0,)
            result.top_ids += (one.top_ids,)
            result.top_logprobs += (one.top_logprobs,)
        return result


def prompt_logprobs(
    request_id: str, start: int, logits: torch.Tensor, next_ids: Sequence[int], num_top: int
) -> PromptLogprobs:
    """Logprobs of the prompt tokens `next_ids`, where row i of `logits` (m, V) is the model's
    output at position start + i and so speaks of the token at start + i + 1. Waits for them."""
    assert logits.shape[0] == len(next_ids)
    scores = PromptScores(request_id, start, next_ids)
    device = Device(logits.device)
    scores.add(logits, num_top, device)
    return scores.read(device.fetch(scores.tensors).wait())
