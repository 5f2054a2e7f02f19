"""The state of a running request, and of a step that the device works on.

A sequence is made at NewRequest and dropped when the plan names it finished. Its token ids grow by
the tokens this runner sampled; a preempted request arrives again as a NewRequest. A step is made by
the runner's `submit`, finished by the engine's loop, and waits in `result` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from foveal_runtime.engine.types.step import MMInput, StepResult
from foveal_runtime.model.device import Device, Fetch, Stopwatch
from foveal_runtime.model.sampling.logprobs import PromptScores
from foveal_runtime.model.sampling.sampler import Draw
from foveal_runtime.plan.sampling import SamplingParams

if TYPE_CHECKING:
    from foveal_runtime.model.layers.lora import Lora
    from foveal_runtime.model.runner.pooling import StepPool

PENDING = -1
"""Stands in token_ids for a token that the device is drawing."""


@dataclass(slots=True)
class SequenceState:
    """One request on this runner.

    Attributes:
        token_ids: expanded prompt, then the output tokens; the last may be PENDING.
        pending_row: where in the last step's draw a PENDING token is.
        positions: i64 (3, num_prompt_tokens) rope positions of a model with mrope, else None.
        position_delta: rope position of an output token minus its index.
        scratch: what the sampler keeps of this sequence between steps (counts, masks).
        pool: f64 (E) sum of the hidden states that an embedding is made of, as far as computed.
        lora: the adapter it is computed with; it stays with this sequence when it is unloaded.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    mm_inputs: tuple[MMInput, ...]
    sampling: SamplingParams
    positions: np.ndarray | None = None
    position_delta: int = 0
    pending_row: int = 0
    scratch: dict[str, object] = field(default_factory=dict)
    pool: np.ndarray | float = 0.0
    lora: Lora | None = None
    _blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    _num_blocks: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def block_row(self, block_ids: Sequence[int]) -> np.ndarray:
        """The block table as i32, converted once: a running request's blocks are only added to."""
        known, count = self._num_blocks, len(block_ids)
        if known > count or (known and self._blocks[known - 1] != block_ids[known - 1]):
            known = 0
        if count > len(self._blocks):
            grown = np.zeros(max(16, 2 * count), np.int32)
            grown[:known] = self._blocks[:known]
            self._blocks = grown
        if count > known:
            self._blocks[known:count] = block_ids[known:]
        self._num_blocks = count
        return self._blocks[:count]


class SubmittedStep:
    """See the module. The runner fills it, then calls `start_fetch`.

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
