"""What the runner remembers of one running request, and what the sampler may read of it.

Made by the runner at NewRequest, dropped when the plan names it finished. Token ids grow by the
tokens this runner sampled; a preempted request arrives again as a NewRequest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foveal_runtime.engine.step import MMInput
from foveal_runtime.plan.sampling import SamplingParams


@dataclass(slots=True)
class SequenceState:
    """One request on this runner.

    Attributes:
        token_ids: expanded prompt, then the output tokens.
        positions: i64 (3, num_prompt_tokens) rope positions of a model with mrope, else None.
        position_delta: rope position of an output token minus its index.
        scratch: what the sampler keeps of this sequence between steps (counts, masks).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    mm_inputs: tuple[MMInput, ...]
    sampling: SamplingParams
    positions: torch.Tensor | None = None
    position_delta: int = 0
    scratch: dict[str, object] = field(default_factory=dict)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
