"""Scores of the prompt tokens that follow a window's positions.

Called by the runner for requests with prompt logprobs. Waits for nothing.
"""

from __future__ import annotations

import torch

from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.device import Device
from foveal_runtime.model.runner.batch import TokenWindow
from foveal_runtime.model.sampling.logprobs import PromptScores

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
