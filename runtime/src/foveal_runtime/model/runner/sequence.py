"""The state of a running request.

A sequence is made at NewRequest and dropped when the plan names it finished. Its token ids grow by
the tokens this runner sampled; a preempted request arrives again as a NewRequest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.plan.sampling import SamplingParams

if TYPE_CHECKING:
    from foveal_runtime.model.layers.lora import Lora

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
